"""What a notebook's pass depends on, as four hashes: code, contract, protocol, environment. Equal: no new run."""

import functools
import hashlib
from pathlib import Path

from loop import env, registry, sources

HERE = Path(__file__).parent
CONTRACT = ("contract", "costs", "tensors", "cases", "casetypes")
PROTOCOL = (
    "arms", "bench", "calls", "check", "compare", "environ", "held", "inputs", "interpreter", "lanes", "measure",
    "oracle", "peers", "poison", "results", "session", "spans", "stats", "verdict",
)  # fmt: skip


def of(idea: registry.Idea) -> dict[str, str]:
    """The four hashes of an idea as its files and this machine are now; empty when it cannot be read."""
    try:
        own = [path.read_bytes() for path in (idea.kernel, idea.folder / "bench.ipynb") if path.exists()]
        families = registry.FAMILIES if idea.family is None else [f for f in registry.FAMILIES if f in idea.family]
        chain = [sources.ship(family) for family in families]
    except OSError:
        return {}
    return {
        "code": _hash(*own, *chain, sources.fla_version()),
        "contract": _modules(CONTRACT),
        "protocol": _modules(PROTOCOL),
        "environment": _hash(repr((env.machine(), env.versions(), env.switches()))),
    }


def differs(now: dict[str, str], then: dict[str, str]) -> list[str]:
    """Which of the four moved; all of them when one side is not known."""
    names = ("code", "contract", "protocol", "environment")
    return [name for name in names if name not in now or now[name] != then.get(name)]


@functools.cache
def _modules(names: tuple[str, ...]) -> str:
    return _hash(*((HERE / f"{name}.py").read_bytes() for name in names))


def _hash(*parts: bytes | str) -> str:
    digest = hashlib.sha256()
    for part in parts:
        digest.update((part.encode() if isinstance(part, str) else part) + b"\0")
    return digest.hexdigest()[:16]
