"""Turns a run into rows: ratios, verdicts, floors, and everything a number must carry with it."""

import math
import statistics
from collections.abc import Sequence

from loop import arms, calls, contract, env, rows, stats

IMPLAUSIBLE = 0.9  # a time below this share of the least bytes' time means that the timing or the floor is wrong
CACHE_MULTIPLE = 4  # that test needs tensors well beyond the L2


def default_baselines(impls: Sequence[str]) -> list[str]:
    """What the arms are compared with unless told otherwise: fla, and the package where it is one of them."""
    return ["000", *(name for name in impls if name == "ship")]


def command(
    family: str, impls: Sequence[str], case: str, mode: str, baselines: Sequence[str], blocks: int | None
) -> str:
    """The command line that repeats a bench; the switches of fla it ran under are in the row's env."""
    line = f"./ladder bench {family} --impl {','.join(impls)} --case {case} --mode {mode}"
    line += "" if list(baselines) == default_baselines(impls) else f" --baseline {','.join(baselines)}"
    return line if blocks is None else f"{line} --blocks {blocks}"


def check_part(result) -> rows.Check:
    """A CheckResult as it stands in a row."""
    errors = {
        name: rows.OutputError(
            error=_finite(e.rel_rms), limit=_finite(e.limit), budget=e.budget, baseline_error=_finite(e.fla_rel_rms)
        )
        for name, e in result.errors.items()
    }
    return rows.Check(
        ok=result.ok,
        seeds=result.seeds,
        errors=errors,
        findings=result.findings,
        proofs=result.proofs,
        protocol=result.protocol,
    )


def _finite(x: float | None) -> float | None:
    return x if x is not None and math.isfinite(x) else None


def row(arm, case, **fields) -> rows.Row:
    """A row of an arm on a case with the fields every row has."""
    base = {
        "run_id": rows.new_run_id(),
        "utc": rows.utc_now(),
        "family": arm.family,
        "arm": arm.name,
        "case": case.id,
        "device": env.device_name(),
        "code_sha": arm.source_sha,
        "chain_sha": arm.chain_sha,
        "axes": axes(case),
        "env": env.collect(),
    }
    return rows.Row(**{**base, **fields})


def axes(case) -> dict:
    """What the case is: its description, the hash of its meaning, and its problem's fields."""
    problem = {
        k: v if isinstance(v, (int, float, bool, type(None))) else str(v)
        for k, v in vars(case.problem(arms.arch())).items()
    }
    return {"description": case.describe(), "sha": case.sha, **problem}


def check_row(arm, case, result, cmd: str, run_id: str) -> rows.Row:
    """The row of a check by itself."""
    return row(
        arm,
        case,
        run_id=run_id,
        kind="check",
        status=str(result.status),
        reason=result.message,
        check=check_part(result),
        cmd=cmd,
    )


def rows_of(run, lanes, baselines, case, mode, checks, cmd, seed, writer) -> list[rows.Row]:
    """One row per arm and baseline, failures included; written when there is a writer.

    The first baseline's own row is its A/A: the same arm twice in each block. An arm is not compared with itself again.
    """
    base = next(lane for lane in lanes if lane.arm.name == baselines[0])
    aa = stats.interval(stats.ratios(base.samples, run.aa_samples)) if run.aa_samples else None
    found = []
    for lane in lanes:
        check = checks.get(lane.arm.name)
        common = {
            "run_id": writer.run_id if writer else rows.new_run_id(),
            "kind": "bench",
            "mode": mode,
            "cmd": cmd,
            "stages": _stages(lane, case),
            "launches": lane.launches,
            "check": check_part(check) if check else None,
            "notes": f"input seed {seed}",
        }
        if failure := _failure(lane, base, run, case, mode):
            found.append(row(lane.arm, case, baseline=baselines[0], status=failure[0], reason=failure[1], **common))
            continue
        for name in baselines:
            other = next(other for other in lanes if other.arm.name == name)
            if (lane is other and lane is not base) or (lane is base and other is not base) or not other.samples:
                continue
            perf = _perf(run, lane, other, aa, case, mode)
            found.append(
                row(
                    lane.arm,
                    case,
                    baseline=name,
                    baseline_sha=other.arm.source_sha,
                    status="PASSED",
                    perf=perf,
                    **common,
                )
            )
    return [writer.write(r) for r in found] if writer else [rows.seal(r) for r in found]


def _stages(lane, case) -> tuple[str, ...]:
    return () if lane.failure else lane.arm.stages(case)


def _failure(lane, base, run, case, mode: str) -> tuple[str, str] | None:
    """(status, reason) when the lane has no time to report."""
    if lane.failure:
        return lane.failure
    if not lane.samples:
        why = f"{base.failure[0]}: {base.failure[1]}" if base.failure else "it was not timed"
        return "NO_BASELINE", f"no time without the baseline {base.arm.name}: {why}"
    now = lane.arm.current_sha()
    if now != lane.arm.source_sha:
        return "SOURCE_CHANGED", f"the source of {lane.arm.name} changed while it was measured; run again"
    floor, ms = _floor(lane.arm.family, case, mode), statistics.median(lane.samples)
    if floor and run.set_bytes > CACHE_MULTIPLE * (env.machine().get("l2_bytes") or 0):
        moving = 1e3 * floor.bytes / contract.HBM_BYTES_PER_S
        if ms < IMPLAUSIBLE * moving:
            return (
                "IMPLAUSIBLE",
                f"{ms:.4f} ms is under the {moving:.4f} ms that moving its inputs and outputs once takes",
            )
    return None


def _floor(family: str, case, mode: str):
    """The contract's floor; None where its ceilings do not hold (they are an H200's)."""
    if not arms.on_gpu():
        return None
    return contract.floor(family, calls.pass_of(mode), case.problem(arms.arch()))


def _perf(run, lane, other, aa: stats.Interval, case, mode: str) -> rows.Perf:
    # the baseline's own row compares its second run in each block with its first
    baseline_samples, samples = (lane.samples, run.aa_samples) if lane is other else (other.samples, lane.samples)
    ratio = stats.interval(stats.ratios(baseline_samples, samples))
    ms, baseline_ms = statistics.median(samples), statistics.median(baseline_samples)
    cycles = _cycles_ratio(ratio.median, other.mhz, lane.mhz)
    floor = _floor(lane.arm.family, case, mode)
    band = stats.band(aa)
    return rows.Perf(
        verdict=stats.verdict(ratio, band, cycles), ratio=ratio.median, ci_low=ratio.low, ci_high=ratio.high,
        coverage=ratio.coverage, dead_band=band, aa_ratio=aa.median, aa_low=aa.low, aa_high=aa.high,
        cycles_ratio=cycles, ms=ms, baseline_ms=baseline_ms, caller_ms=lane.caller_ms,
        baseline_caller_ms=other.caller_ms, floor_ms=floor and floor.ms, floor_share=floor and floor.ms / ms,
        floor_bound=floor and floor.bound, peak_bytes=lane.peak_bytes, baseline_peak_bytes=other.peak_bytes,
        saved_bytes=lane.saved_bytes, baseline_saved_bytes=other.saved_bytes, block_ms=tuple(samples),
        baseline_block_ms=tuple(baseline_samples), aa_block_ms=tuple(run.aa_samples),
        calls_per_sample=lane.reps * run.sets, input_sets=run.sets, input_bytes=run.sets * run.set_bytes,
        timer=run.timer, timer_note=run.timer_note, sm_mhz=tuple(lane.mhz), baseline_sm_mhz=tuple(other.mhz),
        throttle=tuple(sorted(run.throttle)),
    )  # fmt: skip


def _cycles_ratio(ratio: float, baseline_mhz: list[int], arm_mhz: list[int]) -> float | None:
    """The ratio in SM cycles: time times clock on both sides."""
    if not baseline_mhz or not arm_mhz:
        return None
    return ratio * statistics.median(baseline_mhz) / statistics.median(arm_mhz)
