"""Demotion takes a kernel out of the package again: one that later kernels have superseded wherever it served.

The idea stays, with its rows and its place in the history; its status becomes `kept`.
"""

import importlib
from pathlib import Path

from loop import cases, promote, registry, rules, sources
from loop.promote import Refused
from loop.registry import root

STATUS = "kept"  # right, but not the fastest


def demote(idea_id: str) -> Path:
    """Remove the idea's kernel from the package; returns the path that is gone.

    Refused, in one line, for an idea that is not promoted, whose kernel another one imports, or which still serves a
    case. `_provenance.py` is replaced first: an interruption leaves a file that nothing lists, which a second call
    removes.
    """
    idea = registry.glance(idea_id)  # whether or not its kernel still imports
    folder, name = sources.package_family(idea.family or ""), promote.module_name(idea)
    copy, listed = folder / "stages" / f"{name}.py", sources.shipped(idea.family or "")
    if idea.name not in {s.idea for s in listed} and not copy.exists():
        raise Refused(f"{idea.name} is not promoted: there is nothing to demote")
    users = _users(name, {copy, idea.kernel})
    if users:
        raise Refused(f"{idea.name} is not demoted: {name} is imported by {', '.join(users)}")
    beside = [s.module for s in listed if name in s.beside and s.idea != idea.name]
    if beside:
        raise Refused(f"{idea.name} is not demoted: {', '.join(beside)} would not serve without {name}")
    needed = _serves(idea.family, name)
    if needed:
        raise Refused(f"{idea.name} is not demoted: nothing newer serves {', '.join(needed)}")
    rest = [s._asdict() for s in listed if s.idea != idea.name]
    promote.replace(folder / "_provenance.py", promote.provenance(rest).encode())
    copy.unlink(missing_ok=True)
    promote.set_status(idea, STATUS)
    return copy


def _serves(family: str, name: str) -> list[str]:
    """The cases in whose plan on a Hopper GPU module `name` still is, with gradients or without."""
    chain = importlib.import_module(f"kernel_fun.{family}.chain")
    found = []
    for case in cases.family_cases(family).values():
        p = case.problem((9, 0))
        if any(name in chain.make_plan(p, grad=grad).sources() for grad in (True, False)):
            found.append(case.id)
    return found


def _users(name: str, own: set[Path]) -> list[str]:
    """The package's kernels and the ideas that import module `name`: without it they would not import."""
    found = []
    for pattern in ("package/src/kernel_fun/*/stages/*.py", "ideas/*/kernel.py"):
        for path in sorted({*root().glob(pattern)} - own):
            try:
                imported = rules.builds_on(path.read_bytes())
            except SyntaxError:  # it imports nothing as it is
                continue
            if name in imported:
                found.append(path.parent.name if path.name == "kernel.py" else path.stem)
    return found
