"""The convolution's chain: one stage a pass, and which function runs it for a given problem.

Tensors: x [B,T,D] in any strides, weight [D,W], bias [D] or None, residual [B,T,D] or None, h0 and ht [N,D,W] or
None, y [B,T,D]. For every problem the plan takes, newest first, the promoted kernels in `stages/` that support it; a
pass without one is fla's. On CPU tensors both passes are the plain torch in `reference.py`.
"""
from .._common import promoted
from .._common.plan import Plan, Stage, build, cover
from .._common.problem import ConvProblem

STAGES = (
    Stage("fwd", ("x", "weight", "bias", "residual", "h0"), ("y", "ht")),
    Stage("bwd", ("x", "weight", "bias", "residual", "h0", "dy", "dht"), ("dx", "dw", "db", "dresidual", "dh0")),
)
INPUTS = ("x", "weight", "bias", "residual", "h0")
FWD_OUTPUTS = ("y", "ht")
BWD_INPUTS = ("dy", "dht")
BWD_OUTPUTS = ("dx", "dw", "db", "dresidual", "dh0")
OUTPUTS = FWD_OUTPUTS + BWD_OUTPUTS


def module_steps(module, p: ConvProblem, source: str) -> list:
    """The steps a kernel module offers for `p`."""
    return promoted.module_steps(module, p, source, STAGES, OUTPUTS)


def shipped_for(p: ConvProblem) -> tuple[list, list[str]]:
    """The steps of the promoted kernels that serve `p`, and for the others the reason each gives."""
    return promoted.steps_for(__package__, p, STAGES, OUTPUTS)


def base_steps(p: ConvProblem, base: str) -> list:
    """One function per pass, from fla or from the plain-torch reference."""
    return promoted.base_steps(__package__, base, p, STAGES, OUTPUTS)


def make_plan(p: ConvProblem, ideas=(), base: str = "fla", shipped: bool = True, grad: bool = True) -> Plan:
    """Cover both passes for `p`: the `ideas` modules first, then the promoted kernels, then `base`.

    `ideas` are kernel modules (FAMILY, SPANS, supports); one that does not support `p` raises NotImplementedError with
    its reason. Without `grad` the plan is the forward's alone: nothing is kept for a backward, nor asked of a step.
    """
    preferred = promoted.required_steps(ideas, p, STAGES, OUTPUTS)
    if shipped:
        preferred += shipped_for(p)[0]
    steps = cover(STAGES, preferred, base_steps(p, base))
    return build(steps, INPUTS, FWD_OUTPUTS, BWD_INPUTS if grad else (), BWD_OUTPUTS if grad else ())
