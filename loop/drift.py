"""Drift: what no longer agrees with a promotion: the shipped copy, the idea, its rows, the kernels it serves beside."""

import hashlib

from loop import env, registry, rows
from loop.registry import root
from loop.sources import package_family, shipped


def drift(found: list[rows.Row] | None = None) -> list[dict]:
    """One dict per promoted kernel: family, idea, module and `moved`, the list of what no longer agrees."""
    found = rows.read() if found is None else found
    known, here = {r.row_id: r for r in found}, env.versions()
    report = []
    for family in registry.FAMILIES:
        entries = shipped(family)
        there = {s.module for s in entries}
        for s in entries:
            moved = _moved(family, s, known, here, there)
            report.append({"family": family, "idea": s.idea, "module": s.module, "moved": moved})
        listed, folder = {f"{s.module}.py" for s in entries} | {"__init__.py"}, package_family(family)
        odd = [p for p in sorted((folder / "stages").glob("*.py")) if p.name not in listed]
        left = sorted([*folder.glob(".*.py.*"), *(folder / "stages").glob(".*.py.*")])
        for path, why in (
            *((p, "is in stages/, but _provenance.py does not list it") for p in odd),
            *((p, "was left by a promotion that was killed; remove it") for p in left),
        ):
            report.append({"family": family, "idea": "", "module": path.name.removesuffix(".py"), "moved": [why]})
    return report


def _moved(family: str, s, known: dict[str, rows.Row], here: dict, listed: set[str]) -> list[str]:
    moved = [f"serves only beside {name}, which is not promoted" for name in s.beside if name not in listed]
    for what, path in (
        ("the shipped copy", package_family(family) / "stages" / f"{s.module}.py"),
        ("the idea's kernel.py", root() / s.source),
    ):
        sha = hashlib.sha256(path.read_bytes()).hexdigest() if path.exists() else None
        if sha != s.sha256:
            moved.append(f"{what} is gone" if sha is None else f"{what} is {sha[:12]}, promoted was {s.sha256[:12]}")
    for row_id in s.rows:
        row = known.get(row_id)
        if row is None:
            moved.append(f"row {row_id} is not in bench_logs")
        elif row.env.get("versions", {}).get("fla") != here["fla"]:
            moved.append(f"row {row_id} was measured with fla {row.env['versions'].get('fla')}, here is {here['fla']}")
    return moved
