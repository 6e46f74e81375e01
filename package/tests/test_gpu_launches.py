"""On the GPU, a witness of launches: where a call of chunk_kda runs here, none of fla's kernels that are replaced is
launched; where it goes to fla, none of ours is.
"""
import pytest
import torch
from gpu_calls import flas_names, kda_call, launched, need_kernels, of_module, ours_among, plan_of, untuned

from kernel_fun import kda as ours
from kernel_fun._common import promoted

pytestmark = pytest.mark.gpu

_CUMSUM, _WY = "chunk_local_cumsum_vector_kernel", "recompute_w_u_fwd_kda_kernel"
_SCAN = "chunk_gated_delta_rule_fwd_kernel_h_blockdim64"
_INTRA = {
    "chunk_kda_fwd_kernel_intra_sub_chunk", "chunk_kda_fwd_kernel_intra_token_parallel",
    "chunk_kda_fwd_kernel_inter_solve_fused", _WY,
}  # fmt: skip
# stage, or span of fla's where it makes one call of several -> fla's kernels in it
FLAS = {
    "fwd.norm": {"l2norm_fwd_kernel", "l2norm_fwd_kernel_row"},
    "fwd.beta": {"fused_beta_sigmoid_fwd_kernel"},
    "fwd.gate": {_CUMSUM, "kda_gate_chunk_cumsum_vector_kernel"},
    "fwd.intra": _INTRA,
    "fwd.intra..fwd.wy": _INTRA,
    "fwd.wy": {_WY},
    "fwd.scan": {_SCAN},
    "fwd.out": {"chunk_gla_fwd_kernel_o"},
    "bwd.regate": {"kda_gate_chunk_cumsum_vector_kernel"},
    "bwd.recompute": {_WY},
    "bwd.rescan": {_SCAN},
    "bwd.dAv": {"chunk_kda_bwd_kernel_dAv"},
    "bwd.dhu": {"chunk_gated_delta_rule_bwd_kernel_dhu_blockdim64"},
    "bwd.wy": {"chunk_kda_bwd_kernel_wy_dqkg_fused"},
    "bwd.intra": {"chunk_kda_bwd_kernel_intra"},
    "bwd.gva": set(),
    "bwd.cumsum": {_CUMSUM},
    "bwd.gate": {"kda_gate_bwd_kernel"},
    "bwd.norm": {"l2norm_bwd_kernel", "l2norm_bwd_kernel_row"},
    "bwd.beta": {"fused_beta_sigmoid_bwd_kernel"},
}
NORM, SIGMOID = {"use_qk_l2norm_in_kernel": True}, {"use_beta_sigmoid_in_kernel": True}
HALF = torch.float16
CALLS = {  # arguments of small_inputs.kda and flags of the call
    "production": ({"B": 4, "H": 16, "V": 256, "gate": "softplus"}, NORM),
    "production_log": ({"B": 4, "H": 16, "V": 256}, {}),
    "kimi": ({"B": 4, "H": 32, "gate": "softplus"}, NORM | SIGMOID),
    "kimi_safe": ({"B": 4, "H": 32, "gate": "safe"}, NORM | SIGMOID | {"allow_neg_eigval": True}),
    "many_chunks": ({"B": 4, "T": 4160, "H": 32, "gate": "softplus"}, NORM),  # the gate made again is left to fla
    "small": ({"B": 1, "T": 1024, "H": 16, "gate": "softplus"}, NORM),
    "one_chunk": ({"T": 37}, {}),
    "grouped": ({"H": 2, "HV": 8, "gate": "softplus"}, NORM),
    "packed": ({"sequences": (130, 1, 64, 0, 200), "T": 420, "gate": "softplus"}, NORM),
    "packed_long": ({"sequences": (1300, 1, 1900), "T": 3210, "h0": True}, {}),
    "states": ({"h0": True, "gate": "safe"}, {"output_final_state": True, "state_v_first": True}),
    "wide": ({"V": 512, "gate": "softplus"}, NORM),
    "v64": ({"V": 64}, {}),
    "k64": ({"K": 64, "V": 64, "gate": "softplus"}, NORM | SIGMOID),
    "k64_packed": ({"K": 64, "sequences": (70, 0, 1, 300), "h0": True}, {}),
    "fp16": ({"dtype": HALF, "gate": "softplus"}, NORM),
    "fp16_k64": ({"dtype": HALF, "K": 64, "V": 64}, {}),
}
DECLINED = {
    "chunk_size": ({}, {"chunk_size": 32}),
    "disable_recompute": ({"gate": "softplus"}, NORM | {"disable_recompute": True}),
    "K=96": ({"K": 96, "gate": "safe"}, NORM | SIGMOID),
    "switch": ({"gate": "softplus"}, NORM),
}


@pytest.fixture(autouse=True)
def first_configurations(monkeypatch):
    need_kernels("kda")
    untuned(monkeypatch)


def step(operator, tensors, flags):
    """A forward without gradients, or a training step: with a gradient of the final state where there is one."""
    out = [t for t in operator(**tensors, **flags) if t is not None]
    if torch.is_grad_enabled():
        torch.autograd.grad([t.sum() for t in out], tuple(tensors.values()))


@pytest.mark.parametrize("grad", [True, False], ids=["training", "inference"])
@pytest.mark.parametrize("name", CALLS)
def test_of_flas_kernels_only_those_of_stages_left_to_it(name, grad):
    tensors, flags = kda_call(name, CALLS)
    with torch.set_grad_enabled(grad):
        plan = plan_of(tensors, flags)
        found = launched(lambda: step(ours.chunk_kda, tensors, flags))
    left = {source.removeprefix("fla:") for source in plan.sources() if source.startswith("fla:")}
    assert found & flas_names() <= set().union(*(FLAS[stage] for stage in left))
    modules = {name: module for name, module, _ in promoted.modules("kernel_fun.kda")}
    mine = [source for source in plan.sources() if source in modules]
    assert len(mine) + sum(source.startswith("fla:") for source in plan.sources()) == len(plan.sources())
    assert mine
    assert [source for source in mine if not of_module(found, modules[source])] == []
    if tensors["k"].dtype == torch.bfloat16 and tensors["k"].shape[-1] == 128 and tensors["v"].shape[-1] >= 128:
        assert left <= {"bwd.regate"}


@pytest.mark.parametrize("name", DECLINED)
def test_a_call_that_goes_to_fla_launches_what_fla_does(name, monkeypatch):
    from fla.ops.kda import chunk_kda as fla

    tensors, flags = kda_call(name, DECLINED)
    if name == "switch":
        monkeypatch.setenv("KERNEL_FUN_DISABLE", "1")
    ok, why = ours.is_supported(**tensors, **flags)
    assert not ok, why
    for grad in (True, False):
        with torch.set_grad_enabled(grad):
            theirs, found = (launched(lambda op=op: step(op, tensors, flags)) for op in (fla, ours.chunk_kda))
        assert found == theirs
        assert found & flas_names()
        assert not ours_among(found)
