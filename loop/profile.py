"""Where an arm's time goes: its spans against fla's stages and the ceilings, the kernels of one forward and backward,
and what the compiler gave each of an idea's kernels.

Writes a markdown file and a plot under profiles/, with an empty "Reading" for the person who looks at it: a promotion
wants to know what bounds the kernel and what that explains.
"""

import math
import types
from pathlib import Path

from loop import arms, calls, cases, contract, env, inputs, ncu, plots, registry, rows, steps
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
    idea, module = registry.find(idea_id), registry.load(idea_id)  # the second says what is wrong with a kernel
    case = cases.get(idea.family, case_id)
    if not arms.on_gpu():
        raise ValueError("a profile needs a GPU, and torch finds none here")
    arm = arms.make(idea.family, idea.id)
    ok, reason = arm.supports(case)
    if not ok:
        raise ValueError(f"idea {idea.id} does not take case {case_id}: {reason}")
    given = inputs.make(case, 0, "cuda")
    tables = {
        name: kernel_times(a, given, mode) for name, a in ((idea.name, arm), ("000", arms.make(idea.family, "000")))
    }
    reached = spans(case, module, steps.times(idea.family, case, given, ideas=(module,)),
                    steps.times(idea.family, case, given))  # fmt: skip
    launched = as_launched(calls.launches(calls.make(arm, given, mode)))
    counters = ncu.read(idea.id, case.id, mode)
    path = (out or root() / "profiles") / f"{idea.name}-{case.id}.md"
    kept = path.read_text(encoding="utf-8") if path.exists() else ""
    picture = plots.kernels(tables, f"{idea.name} on {case.id}, {mode}")
    replace(path.with_suffix(".svg"), picture.svg.encode())
    shown = f"![{picture.alt}]({path.stem}.svg)"
    written = text(idea, case, mode, tables, resources(module), kept, reached, counters, shown, launched)
    replace(path, written.encode())
    return path


def spans(case, module: types.ModuleType, mine: list[dict], fla: list[dict]) -> list[dict]:
    """Each span of the idea: its time and that of fla's stages, its least bytes and its products, and which share of
    the ceilings it reaches with them."""
    p, found = case.problem(arms.arch()), []
    for span in module.SPANS:
        names = contract.parse_span(case.family, span)
        floor = contract.span_floor(case.family, names, p)
        for who, listed in ((f"{module.__name__[5:8]} {span}", mine), (f"fla {span}", fla)):
            ms = sum(s["ms"] for s in listed if set(contract.parse_span(case.family, s["span"])) <= set(names))
            if ms:
                hbm = floor.bytes / ms / 1e-3 / contract.HBM_BYTES_PER_S
                tensor = floor.flops / ms / 1e-3 / contract.TENSOR_FLOPS_PER_S
                found.append(
                    {"span": who, "ms": f"{ms:.3f}",
                     "GB": f"{floor.bytes / 1e9:.3f}", "of the copy rate": _percent(hbm),
                     "Tflop": f"{floor.flops / 1e12:.3f}", "of the tensor rate": _percent(tensor),
                     "floor ms": f"{floor.ms:.3f}", "share of floor": _percent(floor.ms / ms)}
                )  # fmt: skip
    return found


def _percent(x: float) -> str:
    return f"{100 * x:.0f} %"


def kernel_times(arm, given, mode: str) -> dict[str, tuple[float, int]]:
    """Kernel name -> (ms per call of the arm, launches per call), slowest first."""
    call = calls.make(arm, given, mode)
    for _ in range(2):
        call()
    return calls.kernels(call, CALLS)


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
                            "occupancy": _percent(
                                occupancy(kernel.n_regs, kernel.metadata.num_warps, kernel.metadata.shared)
                            ),
                        }
                    )
    return found


def as_launched(launches: list[dict]) -> list[dict]:
    """A table's lines of what `calls.launches` gives, with the share of a multiprocessor's warps that fit at once."""
    return [
        {
            "kernel": _short(one["kernel"]),
            "registers": one["registers"],
            "shared bytes": one["shared"],
            "grid": " x ".join(map(str, one["grid"])),
            "threads": math.prod(one["block"]),
            "occupancy": _percent(occupancy(one["registers"], -(-math.prod(one["block"]) // 32), one["shared"])),
        }
        for one in launches
    ]


def occupancy(registers: int, warps: int, shared: int) -> float:
    """Warps that fit on a multiprocessor of sm_90 at once, as a share of its 64.

    64 Ki registers, handed out to a warp in steps of 256; 227 KB of shared memory, of which a block takes 1 KB more
    than it asks for; 32 blocks.
    """
    by_registers = 65536 // (-(-registers * 32 // 256) * 256 * warps) if registers else 32
    by_shared = (228 << 10) // (shared + 1024)
    return min(by_registers, by_shared, 32, 64 // warps) * warps / 64


def text(
    idea, case, mode: str, tables: dict, compiled: list[dict], before: str = "", reached=(), counters=(), picture="",
    launched=(),
) -> str:  # fmt: skip
    """The markdown; a reading already written in `before` is kept. `counters` is a list, or the reason for none."""
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
    lines += [picture, ""] if picture else []
    lines += _table("Spans against the ceilings", reached)
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
    lines += _table("As launched", launched)
    lines += _table("What the compiler gave Triton's kernels", compiled)
    lines += ["## Counters", "", counters, ""] if isinstance(counters, str) else _table("Counters", counters)
    return "\n".join(lines)


def _table(title: str, listed) -> list[str]:
    """A section with a markdown table of like dicts; nothing when there are none."""
    if not listed:
        return []
    heads = list(listed[0])
    lines = [f"## {title}", "", f"| {' | '.join(heads)} |", "|---" * len(heads) + "|"]
    return [*lines, *(f"| {' | '.join(str(row[h]) for h in heads)} |" for row in listed), ""]


def _short(name: str) -> str:
    return name.replace("|", "\\|")[:100]
