"""What runs for which problem, with and without the CuTe DSL: each plan is whole, keeps no more than fla's, and leaves
to fla only what no kernel serves."""
import itertools

import pytest
import torch

from kernel_fun._common import promoted
from kernel_fun._common.problem import KdaProblem
from kernel_fun.kda import chain

PACKAGE = "kernel_fun.kda"
SHAPES = {  # B, T, H, HV, lengths of packed sequences
    "many scans": (16, 8192, 16, 16, None),
    "few": (1, 4096, 16, 16, None),
    "few forwards, many backwards": (4, 8192, 16, 16, None),
    "grouped": (4, 8192, 16, 32, None),
    "ragged": (4, 4001, 16, 16, None),
    "shorter than a chunk": (2, 37, 2, 2, None),
    "packed": (1, 8192, 32, 32, (1300, 547, 2048, 963, 271, 3063)),
    "packed, one sequence": (1, 8192, 4, 4, (8192,)),
    "packed, some empty": (1, 300, 2, 4, (100, 0, 1, 199)),
}
WIDTHS = ((128, 128), (128, 256), (128, 64), (128, 192), (64, 128), (64, 64), (64, 512))
KEPT = {"A_log", "dt_bias", "g_raw", "gk", "q", "q_rstd", "k", "k_rstd", "v", "beta_raw", "beta", "Aqk", "Akk", "h0"}
RAW = {"q_raw", "k_raw"}  # the caller's own tensors


def problems(shape):
    B, T, H, HV, lengths = SHAPES[shape]
    N = B if lengths is None else len(lengths)
    NT = B * -(-T // 64) if lengths is None else sum(-(-n // 64) for n in lengths)
    for (K, V), dtype, gate, more in itertools.product(
        WIDTHS, (torch.bfloat16, torch.float16), ("log", "softplus", "safe"), (False, True)
    ):
        raw = gate != "log"
        yield KdaProblem(
            B, T, H, HV, K, V, N, NT, dtype=dtype, g_dtype=dtype if raw else torch.float32, gate=gate,
            lower_bound=-5.0 if gate == "safe" else None, l2norm=more, beta_sigmoid=more, has_h0=more,
            output_final_state=more, has_A_log=raw, has_dt_bias=raw and more, varlen=lengths is not None, arch=(9, 0),
        )  # fmt: skip


@pytest.fixture(params=["with the CuTe DSL", "without"])
def in_cute(request, monkeypatch):
    """The kernels written in the CuTe DSL; without it none of them can be used."""
    modules = promoted.modules(PACKAGE)
    lost = {name: why for name, module, why in modules if module is None}
    if lost:
        pytest.skip(f"not all kernels import here: {lost}")
    names = {name for name, _, _ in modules if promoted._in_cute(f"{PACKAGE}.stages.{name}")}
    if request.param == "without":
        rest = tuple((name, None, "no DSL") if name in names else (name, module, "") for name, module, _ in modules)
        monkeypatch.setattr(promoted, "modules", lambda package: rest)
    return names, request.param != "without"


@pytest.mark.parametrize("shape", SHAPES)
def test_every_plan_is_whole_and_keeps_no_more_than_flas(shape, in_cute):
    names, usable = in_cute
    for p in problems(shape):
        plan = chain.make_plan(p)
        ours = [s for s in plan.sources() if not s.startswith("fla:")]
        assert usable or not names.intersection(ours)
        assert set(plan.saved) <= (KEPT - {"q", "k"} | RAW if RAW.intersection(plan.saved) else KEPT), p
        assert not {"g_raw", "gk"} <= {*plan.saved}  # the raw gate or its sum
        left = {s.span[0] for s in (*plan.forward, *plan.backward) if s.source.startswith("fla:")}
        if p.dtype == torch.bfloat16 and p.K == 128 and usable:
            assert left <= {"bwd.regate"}, (p, left)
        assert not any(stage.startswith("fwd") for stage in left), (p, left)
        assert not left & {"bwd.recompute", "bwd.rescan", "bwd.dAv", "bwd.dhu"}, (p, left)
        for steps, kept in ((plan.forward, {*chain.FWD_OUTPUTS, *plan.saved}), (plan.backward, {*chain.BWD_OUTPUTS})):
            for i, step in enumerate(steps):
                later = kept.union(*(s.reads for s in steps[i + 1 :]))
                assert later.intersection(step.writes), (p, step.source)


@pytest.mark.parametrize("arch", [(9, 0), (10, 0), (12, 0)])
def test_the_gate_made_again_is_never_all_that_runs(arch):
    """One of fla's stages less is no reason to leave fla's operator."""
    for K, V, dtype, gate in itertools.product(
        (64, 96, 128, 192, 256), (64, 80), (torch.bfloat16, torch.float16, torch.float32), ("softplus", "safe")
    ):
        p = KdaProblem(1, 256, 4, 4, K, V, 1, 4, dtype=dtype, g_dtype=dtype, gate=gate, has_A_log=True, arch=arch,
                       lower_bound=-5.0 if gate == "safe" else None)  # fmt: skip
        ours = {s for s in chain.make_plan(p).sources() if not s.startswith("fla:")}
        assert ours != {"k016_bwd_regate"}, p
        assert bool(ours) is (K in (64, 128) and dtype != torch.float32), p
