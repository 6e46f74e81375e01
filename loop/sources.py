"""What an arm's results depend on, as a hash of its source on disk: rows carry it, and a change makes them stale."""

import functools
import hashlib
import importlib.metadata
from pathlib import Path

from loop import registry


def parse(name: str) -> tuple[list[str], str]:
    """`"005+007@000"` -> (["005", "007"], "000"); the base is "ship" when not given."""
    ideas, _, base = name.partition("@")
    return ideas.split("+"), base or "ship"


def arm(family: str, name: str) -> str:
    """Hash of an arm's source: the idea's kernel.py, the package's family and common code, or fla's version."""
    from loop import peers

    if name == registry.BASELINE:
        return text(f"fla {fla_version()}")
    if name == "ship":
        return ship(family)
    if name in peers.names(family):
        return text(f"{name} with fla {fla_version()}")
    return combined([registry.source_sha(idea) for idea in parse(name)[0]])


def combined(shas: list[str]) -> str:
    """One idea's hash as it is; a hash of the hashes for several."""
    return shas[0] if len(shas) == 1 else text("+".join(shas))


def package_family(family: str) -> Path:
    return registry.root() / "package" / "src" / "kernel_fun" / family


def shipped(family: str) -> tuple:
    """The family's SHIPPED list as it is on disk."""
    path = package_family(family) / "_provenance.py"
    return listed(path.read_text(encoding="utf-8") if path.exists() else "")


def listed(provenance: str) -> tuple:
    """The SHIPPED list of a `_provenance.py`, from its text; empty where there is none."""
    space = {"__name__": "_provenance"}
    exec(provenance or "SHIPPED = ()", space)
    return tuple(space["SHIPPED"])


# Of the package, what decides a result or its time: the kernels, and what chooses, orders and launches them.
_COMMON = (
    "blocks", "compat", "cute", "cutecall", "dispatch", "launch", "once", "packed", "passes", "plan", "problem",
    "promoted", "ptx", "support", "tails", "tiles",
)  # fmt: skip
_FAMILY = ("autograd.py", "chain.py", "checks.py", "fla_stages.py", "ops.py", "stage.py", "stages/*.py")


def ship_files(family: str) -> list[Path]:
    """What `ship` hashes, sorted."""
    folder = package_family(family)
    found = [folder.parent / "_common" / f"{name}.py" for name in _COMMON]
    found += [path for pattern in _FAMILY for path in folder.glob(pattern)]
    return sorted(path for path in found if path.exists())


def ship(family: str) -> str:
    """Hash of the package's source files that a family's op computes with, and of which kernel it prefers to which."""
    package = package_family(family).parent
    digest = hashlib.sha256()
    for path in ship_files(family):
        digest.update(str(path.relative_to(package)).encode() + b"\0" + path.read_bytes() + b"\0")
    for entry in shipped(family):  # newest first; what its evidence says changes nothing
        digest.update(" ".join((entry.module, *getattr(entry, "beside", ()))).encode() + b"\0")
    return digest.hexdigest()


_first_asked: dict[tuple, str] = {}


def loaded(family: str) -> str:
    """`ship`, for rows: of the source that this process runs. ValueError once a file has changed since it first asked:
    the package is imported once, so a long-lived notebook would time the code of before under the hash of now.
    """
    now = ship(family)
    if _first_asked.setdefault((registry.root(), family), now) != now:
        raise ValueError("the package's source has changed since this process loaded it: restart the notebook's kernel")
    return now


def text(value: str) -> str:
    return hashlib.sha256(value.encode()).hexdigest()


@functools.cache
def fla_version() -> str:
    return importlib.metadata.version("fla-core")
