"""Where an arm's time goes: the kernels of one forward and backward, and what the compiler gave each of an idea's
kernels.

Writes a markdown file under profiles/ with an empty "Reading" for the person who looks at it: a promotion wants to
know what bounds the kernel and what that explains.
"""

import types
from pathlib import Path

import torch

from loop import arms, calls, cases, env, inputs, registry, rows
from loop.promote import replace
from loop.registry import root

CALLS = 5
TO_WRITE = (
    "<!-- What bounds the kernel (bytes, tensor cores, special functions, latency), with numbers, and what that\n"
    "explains of its time against the prediction. -->"
)


def profile(idea_id: str, case_id: str, mode: str = "fwdbwd", out: Path | None = None) -> Path:
    """Profile the idea and 000 on a case; the file written. ValueError without a GPU, for an unknown case or a
    refused one.
    """
    if not arms.on_gpu():
        raise ValueError("a profile needs a GPU, and torch finds none here")
    idea = registry.find(idea_id)
    if idea.error:
        raise registry.IdeaError(idea.error)
    case, arm = cases.get(idea.family, case_id), arms.make(idea.family, idea.id)
    ok, reason = arm.supports(case)
    if not ok:
        raise ValueError(f"idea {idea.id} does not take case {case_id}: {reason}")
    given = inputs.make(case, 0, "cuda")
    tables = {
        name: kernel_times(a, given, mode) for name, a in ((idea.name, arm), ("000", arms.make(idea.family, "000")))
    }
    path = (out or root() / "profiles") / f"{idea.name}-{case.id}.md"
    kept = path.read_text(encoding="utf-8") if path.exists() else ""
    replace(path, text(idea, case, mode, tables, resources(registry.load(idea.id)), kept).encode())
    return path


def kernel_times(arm, given, mode: str) -> dict[str, tuple[float, int]]:
    """Kernel name -> (ms per call of the arm, launches per call), slowest first."""
    call = calls.make(arm, given, mode)
    for _ in range(2):
        call()
    torch.cuda.synchronize()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA], acc_events=True) as prof:
        for _ in range(CALLS):
            call()
        torch.cuda.synchronize()
    found: dict[str, tuple[float, int]] = {}
    for event in prof.events():
        if event.device_type == torch.autograd.DeviceType.CUDA:
            ms, count = found.get(event.name, (0.0, 0))
            found[event.name] = (ms + event.time_range.elapsed_us() / 1e3, count + 1)
    per_call = {name: (ms / CALLS, round(count / CALLS)) for name, (ms, count) in found.items()}
    return dict(sorted(per_call.items(), key=lambda item: -item[1][0]))


def resources(module: types.ModuleType) -> list[dict]:
    """Registers, spills, shared memory and warps of the module's compiled Triton kernels, as the driver says."""
    found = []
    for name, fn in vars(module).items():
        while not hasattr(fn, "device_caches") and hasattr(fn, "fn"):  # triton.heuristics wraps the kernel
            fn = fn.fn
        for per_device in getattr(fn, "device_caches", {}).values():
            compiled = per_device[0] if isinstance(per_device, tuple) else per_device
            for kernel in compiled.values():
                if getattr(kernel, "n_regs", None) is not None:
                    found.append(
                        {
                            "kernel": name,
                            "registers": kernel.n_regs,
                            "spills": kernel.n_spills,
                            "shared bytes": kernel.metadata.shared,
                            "warps": kernel.metadata.num_warps,
                        }
                    )
    return found


def text(idea, case, mode: str, tables: dict, compiled: list[dict], before: str = "") -> str:
    """The markdown; a reading already written in `before` is kept."""
    from loop.promote import section

    facts, versions = env.collect(), env.versions()
    when = f"{mode}, {facts['device']}, {rows.utc_now()}, kernel.py {registry.source_sha(idea.id)[:12]}"
    built = f"torch {versions['torch']}, triton {versions['triton']}, fla {versions['fla']}"
    reading = section(before, "Reading") or TO_WRITE
    lines = [
        f"# {idea.name} on {case.id}",
        "",
        f"{case.describe()}, {when}, {built}.",
        "",
        "## Reading",
        "",
        reading,
        "",
    ]
    for name, kernels in tables.items():
        total = sum(ms for ms, _ in kernels.values())
        lines += [
            f"## Kernels of {name}: {total:.3f} ms a call",
            "",
            "| kernel | ms | share | launches |",
            "|---|---|---|---|",
        ]
        lines += [
            f"| {_short(k)} | {ms:.3f} | {100 * ms / total:.1f} % | {count} |" for k, (ms, count) in kernels.items()
        ]
        lines.append("")
    if compiled:
        heads = list(compiled[0])
        lines += ["## What the compiler gave", "", f"| {' | '.join(heads)} |", "|---" * len(heads) + "|"]
        lines += [f"| {' | '.join(str(k[h]) for h in heads)} |" for k in compiled] + [""]
    return "\n".join(lines)


def _short(name: str) -> str:
    return name.replace("|", "\\|")[:100]
