"""Deliberately wrong candidates: if the gate lets one of these through, the gate is broken.

Each module is one mistake that has been made in a real kernel. Most replace a stage of the plain-torch chain, exactly
as an idea does (FAMILY, SPANS); those about whole calls wrap the op (`op`). EXPECTED is the status that must reject
it, CASE the case that shows it, GPU whether it takes one to show it."""

import hashlib
import importlib
import os
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType

from kernel_fun._common import packed

from ..inputs import LEAVES

NAMES = (
    "absorbs_nan", "bf16_state", "final_state_bf16", "gate_order", "input_modified", "kept_by_address", "leaks_across",
    "other_stream", "race", "reads_past_end", "reused_result", "static_output", "two_sided", "unwritten_tail",
    "writes_past_end",
)  # fmt: skip


@dataclass(frozen=True)
class ControlArm:
    """An arm as `loop.check` takes it: the plain-torch chain with at most one mistake in it."""

    name: str
    family: str
    source_sha: str
    module: ModuleType | None

    def supports(self, case) -> tuple[bool, str]:
        return True, ""

    def op(self, inputs, grad: bool = True):
        spliced = (self.module,) if hasattr(self.module, "SPANS") else ()
        whole = getattr(self.module, "op", None)
        return whole(inputs, chain_op) if whole else chain_op(inputs, spliced)


def chain_op(inputs, ideas=()):
    """(result, ht) of the plain-torch chain with `ideas` spliced in."""
    family, p, cu = inputs.case.family, inputs.case.problem(), inputs["cu_seqlens"]
    plan = importlib.import_module(f"kernel_fun.{family}.chain").make_plan(
        p, ideas=ideas, base="reference", shipped=False
    )
    apply = importlib.import_module(f"kernel_fun.{family}.autograd").apply
    chunks = {}
    if cu is not None:
        tables = packed.describe(cu)
        chunks = {"chunk_indices": tables.chunk_indices, "chunk_offsets": tables.chunk_offsets}
    return apply(plan, p, *(inputs[n] for n in LEAVES[family]), cu_seqlens=cu, **chunks)


def load(name: str) -> ModuleType:
    """The control's module. ValueError names the controls."""
    if name not in NAMES:
        raise ValueError(f"control {name!r} is unknown; known: {', '.join(NAMES)}")
    if os.environ.get("TRITON_INTERPRET") == "1":
        from .. import interpreter

        interpreter.install()
    return importlib.import_module(f"{__name__}.{name}")


def arm(name: str) -> ControlArm:
    """The candidate to be rejected."""
    module = load(name)
    sha = hashlib.sha256(Path(module.__file__).read_bytes()).hexdigest()
    return ControlArm(f"control:{name}", module.FAMILY, sha, module)


def honest(family: str) -> ControlArm:
    """The same chain without a mistake: the gate must pass it."""
    return ControlArm("control:honest", family, hashlib.sha256(b"honest").hexdigest(), None)
