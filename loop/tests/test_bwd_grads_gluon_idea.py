"""Idea 011's value side against its definition in fp64: each tensor it hands on, at every schedule of its copies and
products; its key side is 009's and is tested in the whole chain on a GPU."""

from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from kernel_fun.kda import reference
from loop import registry, sm90
from loop.tests import cute_cpu, gluon_as_torch
from loop.tests.test_bwd_wy_idea import stage_inputs

pytest.importorskip("cutlass", reason="the idea's key side needs nvidia-cutlass-dsl (the workspace's extra `cute`)")
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
TOL = 4e-3  # y and every result are rounded to bf16: 2e-3 each
CASES = {
    "two_slabs": {"B": 2, "T": 128, "H": 1, "HV": 1, "K": 128, "V": 128},
    "more_slabs_than_stages": {"B": 1, "T": 192, "H": 1, "HV": 1, "K": 128, "V": 256},
    "one_slab_ragged_gva": {"B": 2, "T": 100, "H": 1, "HV": 2, "K": 128, "V": 64},
    "three_slabs_packed": {"B": 1, "T": 200, "H": 1, "HV": 1, "K": 128, "V": 192, "cu": [0, 70, 70, 71, 180]},
    "one_token": {"B": 1, "T": 1, "H": 1, "HV": 1, "K": 128, "V": 64},
    "strong_gate": {"B": 1, "T": 64, "H": 1, "HV": 1, "K": 128, "V": 64, "gate": 20.0},
    "masked": {"B": 1, "T": 64, "H": 1, "HV": 1, "K": 128, "V": 64, "masked": 0.3},
}
SCHEDULES = [s for s in gluon_as_torch.schedules() if s[2] == "late"]  # it has no asynchronous stores


def definition(x, p, cu_seqlens):
    """The hand-over, from the fp64 stages and, where these only have sums of it, from their formulas."""
    stages = reference.bwd_wy(**x, p=p, cu_seqlens=cu_seqlens)
    local = reference.dAv(v_new=x["v_new"], do=x["do"], Aqk=x["Akk"], p=p, cu_seqlens=cu_seqlens)["dAqk"]
    names = ("v", "v_new", "Akk", "dv", "gk")
    v, vn, A, dv, gk = (reference.pack(x[name], p, cu_seqlens) for name in names)
    h, dh = (x[name].reshape(p.NT, p.HV, p.K, p.V) for name in ("h", "dh"))
    y, rows = A.mT @ dv, (reference.pack(torch.ones_like(x["gk"]), p, cu_seqlens) > 0).sum(-2)
    last = torch.gather(gk, -2, rows[..., None, :] - 1)
    down = torch.exp2(torch.minimum(last - gk, torch.zeros(()))) * (vn @ dh.mT)
    parts = {"xu": -torch.exp2(gk) * (y @ h.mT), "xd": down, "yv": (y * v).sum(-1, keepdim=True)}
    parts["diag"] = torch.diagonal(reference.pack(local, p, cu_seqlens), dim1=-2, dim2=-1)[..., None]
    parts["D"] = reference.pack(local, p, cu_seqlens).tril(-1)
    parts = {name: reference.unpack(part, p, cu_seqlens) for name, part in parts.items()}
    parts |= {"yv": parts["yv"][..., 0], "diag": parts["diag"][..., 0]}
    tail = torch.exp2(last[..., 0, :]) * (h * dh).sum(-1)
    assert torch.allclose(x["beta"][..., None] * parts["xu"] + parts["xd"], stages["dk"])
    return {"xq": stages["dq"], **parts, "E": stages["dAkk"], "tail": tail, "dv": stages["dv"]}


def wide(tensors):
    return {name: torch.nan_to_num(x.cpu().double()) for name, x in tensors.items()}


def hand_over(idea, p, tensors, meta):
    given = {name: x for name, x in tensors.items() if name not in ("q", "k")}
    states, dv = idea.value_side(**given, p=p, **meta)
    return dict(zip(("xq", "xu", "xd", "D", "E", "diag", "tail", "yv"), states, strict=True)) | {"dv": dv}


def compare(got, want, p, case):
    end = case["cu"][-1] if p.varlen else p.T
    for name, ref in want.items():
        x = got[name].cpu().double()
        assert x.shape == ref.shape, name
        if name != "tail":
            x, ref = x[:, :end], ref[:, :end]
        assert (x - ref).norm() <= TOL * ref.norm(), (name, float((x - ref).norm() / ref.norm()))
        if name in ("D", "E"):
            assert not x[ref == 0].any()  # the upper triangle is written, as zeros


@pytest.mark.skipif(DEVICE == "cuda", reason="the kernel itself is tested there")
@pytest.mark.parametrize("case", CASES)
def test_value_side_at_every_schedule(case):
    idea, clock = gluon_as_torch.load(registry.find("011").kernel)
    p, tensors, meta = stage_inputs(**CASES[case])
    p = replace(p, arch=(9, 0))
    assert idea.supports(p) == (True, "")
    want = definition(wide(tensors), replace(p, dtype=torch.float64), meta["cu_seqlens"])
    for programs in (1, 2, 99):
        idea._multiprocessors = lambda device, n=programs: n
        for clock.products, clock.loads, clock.stores in SCHEDULES:
            compare(hand_over(idea, p, tensors, meta), want, p, CASES[case])


@pytest.mark.skipif(DEVICE == "cpu", reason="needs a GPU")
@pytest.mark.parametrize("case", CASES)
def test_value_side_on_the_gpu(case):
    p, tensors, meta = stage_inputs(**CASES[case])
    cu_seqlens = None if meta["cu_seqlens"] is None else meta["cu_seqlens"].cpu()
    want = definition(wide(tensors), replace(p, dtype=torch.float64), cu_seqlens)
    idea = registry.load("011")
    first, again = (hand_over(idea, p, tensors, meta) for _ in range(2))
    compare(first, want, p, CASES[case])
    end = CASES[case]["cu"][-1] if p.varlen else p.T
    for name, x in first.items():
        x, y = (x, again[name]) if name == "tail" else (x[:, :end], again[name][:, :end])
        assert torch.equal(x, y), name


@pytest.mark.parametrize("tail", [0, 1, 37])
def test_tokens_after_the_last_sequence_get_zeros(tail):
    idea = registry.load("011")
    T, HV, K, V = 70, 2, 128, 192
    shapes = ((K, torch.bfloat16), (K, torch.float32), (V, torch.bfloat16), (K, torch.bfloat16))
    outputs = [torch.ones(1, T, HV, n, dtype=dtype, device=DEVICE) for n, dtype in shapes]
    outputs.append(torch.ones(1, T, HV, device=DEVICE))
    cu_seqlens = torch.tensor([0, 20, T - tail], device=DEVICE)
    idea.zero_tail_kernel[(idea.ZERO_PROGRAMS.value,)](*outputs, cu_seqlens, 2, T, HV=HV, K=K, V=V)
    for x in outputs:
        assert (x[:, : T - tail] == 1).all()
        assert not x[:, T - tail :].any()


def test_refuses_what_a_descriptor_cannot_address():
    idea = registry.load("011")
    p = replace(stage_inputs(**CASES["one_token"])[0], arch=(9, 0))
    assert idea.supports(p)[0]
    assert idea.supports(replace(p, T=2**31)) == (False, f"needs token and state rows below 2^31, got {2**31}")
    assert not idea.supports(replace(p, NT=2**24))[0]
    assert idea.supports(replace(p, NT=0)) == (False, "needs a token, got none")


@pytest.mark.parametrize("gate", ["softplus", "safe"])
@pytest.mark.parametrize("rate", [16.0, 1 / 16])
def test_the_gates_gradient_of_large_raw_gates(gate, rate):
    """A thread's part of the key side, with the instructions in numpy."""
    idea, number = cute_cpu.load(registry.find("011").kernel), np.float32
    idea.Float32, idea.Int32 = number, lambda x: np.asarray(x, np.int32)
    idea.ptx = SimpleNamespace(
        ex2=np.exp2, lg2=np.log2, rcp=lambda x: number(1) / x, pick=lambda c, a, b: np.where(c != 0, a, b),
        decay_exponent=lambda x: -np.abs(x) * number(1.4426950408889634),
    )  # fmt: skip
    x = torch.tensor([20.0, 60, 200, -20, -60, -200, 0.5, -3], dtype=torch.float64)
    x, dy = x.requires_grad_(), torch.tensor([1.0, -2, 3, -4, 5, -6, 7, -8], dtype=torch.float64)
    A_log = torch.tensor(rate, dtype=torch.float64).log().requires_grad_()
    y = -A_log.exp() * F.softplus(x, threshold=1e3) if gate == "softplus" else -5 * torch.sigmoid(A_log.exp() * x)
    want, want_A = torch.autograd.grad(y, (x, A_log), dy)
    given = [t.detach().numpy().astype(number) for t in (x, dy)]
    with np.errstate(over="ignore"):
        got, got_A = idea._gate_bwd(SimpleNamespace(gate=gate), *given, number(rate), number(-5))
    assert torch.allclose(torch.tensor(np.array(got)).double(), want, rtol=1e-3, atol=1e-6)  # of 1 - sigmoid
    assert float(got_A) == pytest.approx(float(want_A), rel=1e-3)


def tile(rows, columns=64, dtype="bf16", bits=16):
    layout = f"NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth={bits}, rank=2)"
    return f"tensordesc<{dtype}[{rows}, {columns}],{layout}>"


@pytest.mark.parametrize(("V", "packed"), [(256, False), (128, True)])
def test_compiles_for_hopper(V, packed):
    """Two warpgroups of 255 registers; what they spill is read once a chunk. Its products are not serialised."""
    signature = {name: tile(64) for name in ("d_do", "d_dv", "d_vn", "d_v", "d_A")}
    signature |= {"d_h": tile(128), "d_dh": tile(128), "d_g": tile(64, 128, "fp32", 32)}
    signature |= {"scale": "fp32", "T": "i32", "total": "i32", "programs": "i32"}
    signature |= dict.fromkeys(("gk", "beta", "diag", "tail", "yv"), "*fp32")
    signature |= dict.fromkeys(("xq", "xu", "xd", "D", "E", "dv_out"), "*bf16")
    constants = {"HV": 16, "K": 128, "V": V, "IS_VARLEN": packed, "STAGES": 3}
    tables = ("cu_seqlens", "chunk_indices")
    if packed:
        signature |= dict.fromkeys(tables, "*i64")
    else:
        constants |= dict.fromkeys(tables)
    built = sm90.compile_one(registry.load("011").value_kernel, signature, constants, 8)
    assert built.regs <= 255
    assert built.spills <= 80
    assert built.smem <= 227 * 1024
    waits = [line for line in built.sass.splitlines() if "WARPGROUP.DEPBAR" in line]
    assert len(waits) == 2, waits  # one for y, one for all: ptxas added none
