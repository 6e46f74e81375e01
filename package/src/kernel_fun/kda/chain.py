"""The KDA chain: its stages in order, and which function runs each one for a given problem.

This table is the contract. Stage and tensor names are fla's own; shapes, units and formulas are in ALGORITHM.md. For
every problem the plan takes, newest first, the promoted kernels in `stages/` that support it and do not overlap; all
other stages are fla's, called one by one. On CPU tensors the same table runs on the plain-torch stages in
`reference.py`.
"""

from .._common import promoted
from .._common.plan import Plan, Stage, build, cover
from .._common.problem import KdaProblem

STAGES = (
    # forward
    Stage("fwd.norm", ("q_raw", "k_raw"), ("q", "k", "q_rstd", "k_rstd")),
    Stage("fwd.beta", ("beta_raw",), ("beta",)),
    Stage("fwd.gate", ("g_raw", "A_log", "dt_bias"), ("gk",)),
    Stage("fwd.intra", ("q", "k", "gk", "beta"), ("Aqk", "Akk")),
    Stage("fwd.wy", ("k", "v", "beta", "Akk", "gk"), ("w", "u", "kg")),
    Stage("fwd.scan", ("kg", "w", "u", "gk", "h0"), ("h", "v_new", "ht")),
    Stage("fwd.out", ("q", "v_new", "gk", "Aqk", "h"), ("o",)),
    # backward
    Stage("bwd.regate", ("g_raw", "A_log", "dt_bias"), ("gk",)),
    Stage("bwd.recompute", ("q", "k", "v", "beta", "Akk", "gk"), ("w", "u", "qg", "kg")),
    Stage("bwd.rescan", ("kg", "w", "u", "gk", "h0"), ("h", "v_new")),
    Stage("bwd.dAv", ("v_new", "do", "Aqk"), ("dAqk", "dv")),
    Stage("bwd.dhu", ("qg", "kg", "w", "gk", "h0", "dht", "do", "dv"), ("dh", "dh0", "dv")),
    Stage(
        "bwd.wy",
        ("q", "k", "v", "v_new", "gk", "beta", "Akk", "h", "do", "dh", "dv"),
        ("dq", "dk", "dv", "db", "dg", "dAkk"),
    ),
    Stage("bwd.intra", ("q", "k", "gk", "beta", "dAqk", "dAkk", "dq", "dk", "db", "dg"), ("dq", "dk", "db", "dg")),
    Stage("bwd.gva", ("dq", "dk"), ("dq", "dk")),
    Stage("bwd.cumsum", ("dg",), ("dg",)),
    Stage("bwd.gate", ("g_raw", "A_log", "dt_bias", "dg"), ("dg", "dA_log", "ddt_bias")),
    Stage("bwd.norm", ("q", "q_rstd", "k", "k_rstd", "dq", "dk"), ("dq", "dk")),
    Stage("bwd.beta", ("beta_raw", "beta", "db"), ("dbeta",)),
)
INPUTS = ("q_raw", "k_raw", "v", "g_raw", "beta_raw", "A_log", "dt_bias", "h0")
FWD_OUTPUTS = ("o", "ht")
BWD_INPUTS = ("do", "dht")
BWD_OUTPUTS = ("dq", "dk", "dv", "dg", "dbeta", "dA_log", "ddt_bias", "dh0")
OUTPUTS = FWD_OUTPUTS + BWD_OUTPUTS


def module_steps(module, p: KdaProblem, source: str) -> list:
    """The steps a kernel module offers for `p`."""
    return promoted.module_steps(module, p, source, STAGES, OUTPUTS)


def shipped_for(p: KdaProblem) -> tuple[list, list[str]]:
    """The steps of the promoted kernels that serve `p`, and for the others the reason each gives."""
    return promoted.steps_for(__package__, p, STAGES, OUTPUTS)


def base_steps(p: KdaProblem, base: str) -> list:
    """One function per stage, from fla or from the plain-torch reference."""
    return promoted.base_steps(__package__, base, p, STAGES, OUTPUTS)


def make_plan(p: KdaProblem, ideas=(), base: str = "fla", shipped: bool = True, grad: bool = True) -> Plan:
    """Cover the chain for `p`: the `ideas` modules first, then the promoted kernels, then `base`'s stages.

    `ideas` are kernel modules (FAMILY, SPANS, supports); one that does not support `p` raises NotImplementedError with
    its reason. Without `grad` the plan is the forward's alone: nothing is kept for a backward, nor asked of a step.
    """
    preferred = promoted.required_steps(ideas, p, STAGES, OUTPUTS)
    if shipped:
        preferred += shipped_for(p)[0]
    steps = cover(STAGES, preferred, base_steps(p, base))
    return build(steps, INPUTS, FWD_OUTPUTS, BWD_INPUTS if grad else (), BWD_OUTPUTS if grad else ())
