"""What the `check`, `bench` and `firstcall` commands do between reading their arguments and printing tables."""

import importlib
import types
from collections.abc import Sequence
from pathlib import Path

from loop import arms, cases, env, registry, rows

TAGS = ("tiny", "smoke", "primary", "full")


def split(text: str) -> list[str]:
    """Names separated by commas, each once. ValueError when there is none."""
    names = list(dict.fromkeys(name.strip() for name in text.split(",") if name.strip()))
    if not names:
        raise ValueError(f"{text!r}: give at least one name")
    return names


def family(name: str) -> str:
    """The family's name. ValueError names the closest ones."""
    if name not in registry.FAMILIES:
        known = registry.FAMILIES
        raise ValueError(f"family {name!r} is unknown{registry.closest(name, known)}; known: {', '.join(known)}")
    return name


def modes_of(text: str, known: Sequence[str] = rows.MODES) -> list[str]:
    """Modes separated by commas, of those `known`. ValueError names the closest ones."""
    for mode in split(text):
        if mode not in known:
            raise ValueError(f"mode {mode!r} is unknown{registry.closest(mode, known)}; known: {', '.join(known)}")
    return split(text)


def cases_of(name: str, text: str) -> list:
    """Cases by id or tag, for this machine: a tag leaves out what needs a GPU where there is none; an id does not."""
    device = "cuda" if arms.on_gpu() else "cpu"
    found = {}
    for item in split(text):
        if item in TAGS and item not in cases.family_cases(family(name)):
            machine = "gpu" if device == "cuda" and item != "tiny" else "tiny"
            listed = list(cases.select(name, item, machine))
        else:
            listed = [cases.get(family(name), item)]
            cases.require_device(listed[0], device)
        found.update({case.id: case for case in listed})
    return list(found.values())


def writer(name: str, label: str, out: Path | None) -> rows.Writer:
    """A writer into `out`, or the default folder of the family. ValueError in one line when it cannot be written."""
    folder = out or rows.default_folder(family(name), env.device_name())
    try:
        return rows.Writer(folder, label)
    except OSError as err:
        raise ValueError(
            f"cannot write rows to {folder}: {err.strerror or err}; give another folder with --out"
        ) from None


def check(name: str, impls: list[str], listed: list, seeds: int, into: rows.Writer, progress) -> list[rows.Row]:
    """Check every arm on every case; rows are written as they come. An idea that does not import is a row of its own.

    ValueError, before anything is checked, for an arm that does not exist.
    """
    from loop import check as work
    from loop import results

    found = []
    for impl in impls:
        _make(name, impl)
    for number, case in enumerate(listed):
        for impl in impls:
            progress(f"check {impl} on {case.id}", number, len(listed))
            arm, cmd = _make(name, impl), f"./ladder check {name} --impl {impl} --case {case.id}"
            if isinstance(arm, arms.BrokenIdea):
                row = _broken_row(name, impl, case, arm, kind="check", cmd=cmd, run_id=into.run_id)
            else:
                row = results.check_row(arm, case, work.check(arm, case, seeds), cmd, into.run_id)
            found.append(into.write(row))
    return found


def _make(name: str, impl: str) -> arms.Arm | arms.BrokenIdea:
    """The arm, or what is wrong with its idea. ArmError for one that does not exist."""
    try:
        return arms.make(name, impl)
    except arms.BrokenIdea as err:
        return err


def _broken_row(name: str, impl: str, case, why: arms.BrokenIdea, **facts) -> rows.Row:
    """The row of an arm that could not be built."""
    from loop import results, sources

    try:
        sha = sources.arm(name, impl)
    except registry.IdeaError:  # no kernel.py
        sha = ""
    unbuilt = types.SimpleNamespace(family=name, name=impl, source_sha=sha, chain_sha=None)
    return results.row(unbuilt, case, status="IMPORT_ERROR", reason=str(why), **facts)


def bench(
    name: str,
    impls: list[str],
    listed: list,
    modes: list[str],
    baselines: list[str],
    blocks: int | None,
    into: rows.Writer,
    progress,
) -> list[rows.Row]:
    """Check once per case, then time each mode; rows are written after each mode. An idea that does not import is a
    row of its own.

    ValueError, before anything is measured, for an arm that does not exist, or a baseline that does not import.
    """
    from loop import results

    work = importlib.import_module("loop.bench")
    for impl in baselines:
        arms.make(name, impl)
    wanted = list(dict.fromkeys([*baselines, *impls]))
    for impl in impls:
        _make(name, impl)
    found = []
    for case in listed:
        checks, made = {}, {impl: _make(name, impl) for impl in wanted}
        built = [arm for arm in made.values() if isinstance(arm, arms.Arm)]
        for mode in modes:

            def say(what, done, total, where=f"{case.id} {mode}"):
                progress(f"{where}: {what}", done, total)

            found += work.bench(
                name, built, case, mode, checks=checks, baselines=baselines, blocks=blocks, writer=into, progress=say
            )
            cmd = results.command(name, wanted, case.id, mode, baselines, blocks)
            facts = {"kind": "bench", "mode": mode, "baseline": baselines[0], "cmd": cmd, "run_id": into.run_id}
            found += [
                into.write(_broken_row(name, impl, case, arm, **facts))
                for impl, arm in made.items()
                if isinstance(arm, arms.BrokenIdea)
            ]
    return found


# --------------------------------------------------------------------------------------------------------------- tables
def bench_table(found: list[rows.Row]):
    """A rich table of a bench's rows."""
    from rich.table import Table

    table = Table(
        "case", "mode", "arm", "vs", "ratio", "interval", "verdict", "ms", "vs ms", "of floor", "peak GiB", "timer"
    )
    for r in found:
        if p := r.perf:
            share = "" if p.floor_share is None else f"{100 * p.floor_share:.0f} %"
            peak = "" if p.peak_bytes is None else f"{p.peak_bytes / 2**30:.2f}"
            table.add_row(
                r.case,
                r.mode,
                r.arm,
                r.baseline,
                f"{p.ratio:.3f}",
                f"{p.ci_low:.3f} to {p.ci_high:.3f}",
                p.verdict,
                f"{p.ms:.3f}",
                f"{p.baseline_ms:.3f}",
                share,
                peak,
                p.timer,
            )
        else:
            table.add_row(r.case, r.mode, r.arm, r.baseline, "", r.reason, r.status)
    return table


def check_table(found: list[rows.Row]):
    """A rich table of checks: the largest error as a share of its limit, or the reason."""
    from rich.table import Table

    table = Table("case", "arm", "status", "closest to its limit", "reason")
    for r in found:
        shares = (
            [(e.error / e.limit, n, e) for n, e in r.check.errors.items() if e.error is not None and e.limit]
            if r.check
            else []
        )
        _, name, worst = max(shares, default=(0, "", None), key=lambda s: s[0])
        table.add_row(
            r.case, r.arm, r.status, f"{name} {worst.error:.2e} of {worst.limit:.2e}" if worst else "", r.reason
        )
    return table


def firstcall_table(found: list[rows.Row]):
    """A rich table of first calls, forward / forward and backward in seconds."""
    from rich.table import Table

    table = Table("case", "arm", "empty caches s", "filled caches s", "again s", "status")
    for r in found:
        f, times = r.firstcall, ("", "", "")
        if f:
            cached = "" if f.cached_fwd_s is None else f"{f.cached_fwd_s:.2f} / {f.cached_fwdbwd_s:.2f}"
            times = (f"{f.fwd_s:.2f} / {f.fwdbwd_s:.2f}", cached, f"{f.second_fwdbwd_s:.4f}")
        table.add_row(r.case, r.arm, *times, r.status + (f": {r.reason}" if r.reason else ""))
    return table
