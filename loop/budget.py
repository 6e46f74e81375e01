"""The stage budget: what each stage of a pass takes in fla's chain and in the shipped one, against its floor; and what
each kernel takes of the installed peers, so that what one needs besides its own kernels (gate, norm, casts) shows.

`measure` keeps what the profiler says (`loop.steps`) in profiles/ as JSON, apart from the rows. `plots` lays
them out as stacked bars for the page.
"""

import json
from collections.abc import Callable, Iterable
from pathlib import Path

from loop import arms, calls, cases, contract, env, inputs, peers, registry, rows, steps
from loop.promote import replace

CHAINS = {"000": False, "ship": True}  # arm -> with the shipped kernels
H200 = (9, 0)


def measure(family: str, case_id: str, out: Path | None = None, progress: Callable = lambda *step: None) -> Path:
    """Profile the forward and backward of fla's stages and of the shipped chain; the file written.

    On a CPU the plain-torch chain stands for fla's, tiny cases only, and the file goes to out/. ValueError, in one
    line, for an unknown family or case, or a case that this machine cannot run.
    """
    device = "cuda" if arms.on_gpu() else "cpu"
    case = cases.get(family, case_id)
    cases.require_device(case, device)
    given = inputs.make(case, 0, device)
    facts = {"family": family, "case": case.id, "device": env.device_name(), "utc": rows.utc_now()}
    measured = {}
    for done, (name, shipped) in enumerate(CHAINS.items()):
        progress(f"stages of {name} on {case.id}", done, len(CHAINS))
        measured[name] = steps.times(family, case, given, shipped=shipped)
    found = facts | {"versions": env.versions(), "arms": measured, "peers": _peers(family, case, given, progress)}
    folder = out or registry.root() / ("profiles" if device == "cuda" else "out/profiles")
    path = folder / f"stages-{family}-{case.id}.json"
    replace(path, (json.dumps(found, indent=1) + "\n").encode())
    return path


def _peers(family: str, case, given, progress: Callable) -> dict[str, list[dict]]:
    """Of each peer that is here and takes the case: `kernel` and `ms` of a forward and backward, slowest first."""
    found = {}
    for name in filter(peers.installed, peers.names(family)):
        arm = arms.make(family, name)
        if not arm.supports(case)[0]:
            continue
        progress(f"kernels of {name} on {case.id}", 0, 1)
        call = calls.make(arm, given, "fwdbwd")
        for _ in range(2):
            call()
        listed = calls.kernels(call, steps.CALLS)
        found[name] = [{"kernel": _short(kernel), "ms": ms} for kernel, (ms, _) in listed.items()]
    return found


def _short(kernel: str) -> str:
    """A C++ kernel without what follows its name, PyTorch's own said to be so."""
    name = kernel.removeprefix("void ").split("(")[0]
    plain = name.split("<")[0].split("::")[-1]
    return plain if "at::native" not in name else f"torch's {plain}"


# ---------------------------------------------------------------------------------------------------------------- plots
def readings() -> list[dict]:
    """The recorded stage times, those of GPUs first. A file that is not one is left out."""
    found = []
    for folder in ("profiles", "out/profiles"):
        for path in sorted((registry.root() / folder).glob("stages-*.json")):
            try:
                facts = json.loads(path.read_text(encoding="utf-8"))
                cases.get(facts["family"], facts["case"])
                peer = {name: [(k["kernel"], k["ms"]) for k in x] for name, x in facts.get("peers", {}).items()}
                found.append(facts | {"arms": {name: list(facts["arms"][name]) for name in CHAINS}, "peers": peer})
            except (ValueError, KeyError, TypeError, LookupError):
                continue
    return found


def plots() -> list[dict]:
    """One set of stacked bars for each recorded case, and the floors alone for a family that has none."""
    found = [_plot(facts) for facts in readings()]
    known = {plot["family"] for plot in found if not plot["cpu"]}
    for family in registry.FAMILIES:
        if family not in known:
            case = next(iter(cases.select(family, "primary", "gpu")))
            found.append(_plot({"family": family, "case": case.id, "device": "H200", "utc": "", "arms": {}}))
    return found


def _plot(facts: dict) -> dict:
    family, cpu = facts["family"], facts["device"] == "cpu"
    p = cases.get(family, facts["case"]).problem(H200)
    stages = contract.cost_table(family, p)
    floors = [(s["stage"], s["floor_ms"]) for s in stages]
    whole = [(f"all of {mode}", contract.floor(family, mode, p).ms) for mode in ("fwd", "bwd")]
    names = {"000": "plain torch" if cpu else "fla", "ship": "shipped"}
    bars = [
        _bar(names[arm], [(f"{s['span']} by {s['source']}", s["ms"]) for s in facts["arms"][arm]])
        for arm in CHAINS
        if arm in facts["arms"]
    ]
    bars += [_bar(name, listed) for name, listed in facts.get("peers", {}).items()]
    if not cpu:  # the floors are an H200's
        bars += [_bar("floor, stage by stage", floors), _bar("floor, one kernel a pass", whole)]
    longest = max(bar["ms"] for bar in bars) or 1.0
    for bar in bars:
        at = 0.0
        for part in bar["parts"]:
            part |= {"x": 100 * at / longest, "width": 100 * part["ms"] / longest}
            at += part["ms"]
    said = "; ".join(f"{bar['label']} {bar['ms']:.3g} ms" for bar in bars)
    title = f"{family} · {facts['case']} · {facts['device']}"
    return {
        "title": title, "family": family, "cpu": cpu, "utc": facts["utc"], "bars": bars,
        "measured": bool(facts["arms"]), "alt": f"Stage budget of {title}: {said}.",
        "table": _table(facts["arms"], floors), "peers": list(facts.get("peers", {}).items()),
    }  # fmt: skip


def _bar(label: str, parts: Iterable[tuple[str, float]]) -> dict:
    listed = [{"name": name, "ms": ms} for name, ms in parts]
    return {"label": label, "parts": listed, "ms": sum(part["ms"] for part in listed)}


def _table(measured: dict, floors: list[tuple[str, float]]) -> list[dict]:
    """One line a stage: its floor, and in each chain its time, or the span that has it."""
    columns: dict[str, dict[str, str]] = {}
    order = [name for name, _ in floors]
    for arm, listed in measured.items():
        columns[arm] = {}
        for step in listed:
            first, _, last = step["span"].partition("..")
            covered = order[order.index(first) : order.index(last or first) + 1]
            columns[arm] |= dict.fromkeys(covered, f"in {step['span']}") | {first: f"{step['ms']:.3f}"}
    return [
        {"stage": name, "floor": f"{ms:.3f}", "cells": [columns[arm].get(name, "left out") for arm in measured]}
        for name, ms in floors
    ]
