"""Idea 008 against its stages' definition in fp64: each tensor it writes, at every kind of shape and gate it claims."""
from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F

from kernel_fun._common.problem import KdaProblem
from kernel_fun.kda import reference
from loop import registry, sm90
from loop.tests import gluon_as_torch

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
ARCH = torch.cuda.get_device_capability() if DEVICE == "cuda" else (0, 0)
TOL = {torch.bfloat16: 7e-3, torch.float16: 9e-4}    # operands and stored states are rounded: 2e-3 each in bf16
CASES = {
    "k128_two_value_tiles": {"B": 2, "T": 128, "H": 1, "HV": 1, "K": 128, "V": 256},
    "ragged_gva_no_states": {"B": 1, "T": 100, "H": 1, "HV": 2, "K": 64, "V": 128, "h0": False, "dht": False},
    "odd_value_tiles": {"B": 1, "T": 130, "H": 1, "HV": 1, "K": 64, "V": 192, "dht": False},
    "packed": {"B": 1, "T": 200, "H": 1, "HV": 1, "K": 64, "V": 64, "cu": [0, 70, 70, 71, 180]},
    "packed_no_h0": {"B": 1, "T": 70, "H": 1, "HV": 1, "K": 64, "V": 64, "cu": [0, 1, 70], "h0": False},
    "strong_gate": {"B": 1, "T": 128, "H": 1, "HV": 1, "K": 64, "V": 64, "gate": 20.0},
    "weak_gate": {"B": 1, "T": 128, "H": 1, "HV": 1, "K": 64, "V": 64, "gate": 0.01},
    "masked": {"B": 1, "T": 128, "H": 1, "HV": 1, "K": 64, "V": 64, "masked": 0.3},
    "fp16": {"B": 1, "T": 128, "H": 1, "HV": 1, "K": 64, "V": 64, "dtype": torch.float16},
}
HOPPER_CASES = {
    "two_value_tiles": {"B": 1, "T": 192, "H": 1, "HV": 1, "K": 128, "V": 256},
    "ragged_gva": {"B": 1, "T": 100, "H": 1, "HV": 2, "K": 64, "V": 64, "h0": False},
    "packed": {"B": 1, "T": 330, "H": 1, "HV": 1, "K": 64, "V": 128, "cu": [0, 70, 70, 71, 310], "masked": 0.3},
}


def stage_inputs(B, T, H, HV, K, V, *, cu=None, gate=1.0, masked=0.0, dtype=torch.bfloat16, h0=True, dht=True):
    """A problem and what the stages read: random, or from the forward's definition where it depends on the rest."""
    torch.manual_seed(0)
    bounds = cu or [T * b for b in range(B + 1)]
    lengths = [b - a for a, b in zip(bounds, bounds[1:], strict=False)]
    chunks = [-(-n // 64) for n in lengths]
    p = KdaProblem(
        B, T, H, HV, K, V, len(lengths), sum(chunks), dtype=dtype, scale=K**-0.5, varlen=cu is not None, arch=ARCH,
    )
    meta = {"cu_seqlens": None, "chunk_indices": None, "chunk_offsets": None}
    if cu:
        table = [(n, c) for n, count in enumerate(chunks) for c in range(count)]
        offsets = [sum(chunks[:n]) for n in range(len(cu))]
        meta = {name: torch.tensor(x) for name, x in zip(meta, (cu, table, offsets), strict=True)}
    q, k = (F.normalize(torch.randn(B, T, H, K), dim=-1).to(dtype) for _ in range(2))
    beta = 2 * torch.sigmoid(torch.randn(B, T, HV))
    beta[:, ::5] = 0
    g = gate * F.logsigmoid(torch.randn(B, T, HV, K))
    g[torch.rand(g.shape) < masked] = -1000.0
    cu_seqlens = meta["cu_seqlens"]
    gk = reference.gate(g_raw=g, A_log=None, dt_bias=None, p=p, cu_seqlens=cu_seqlens)["gk"]
    scores = reference.intra(q=q, k=k, gk=gk, beta=beta, p=p, cu_seqlens=cu_seqlens)
    v, do = (torch.randn(B, T, HV, V).to(dtype) for _ in range(2))
    tokens = {"v": v, "do": do, "gk": gk, "beta": beta, **scores}
    if cu:                                   # what no sequence owns must be neither read nor left unwritten
        for x in (q, k, *tokens.values()):
            x[:, cu[-1]:] = float("nan")
    states = {"h0": torch.randn(p.N, HV, K, V) if h0 else None, "dht": torch.randn(p.N, HV, K, V) if dht else None}
    return p, {"q": q, "k": k, **tokens, **states}, meta


def undefined_above(Aqk, p, bounds):
    """Aqk as a forward may leave it: NaN above the diagonal of each chunk."""
    out = Aqk.clone()
    for start, end in zip(bounds, bounds[1:], strict=False):
        row = torch.arange(end - start) % 64
        out.view(p.B * p.T, p.HV, 64)[start:end].masked_fill_((torch.arange(64) > row[:, None])[:, None], float("nan"))
    return out


def definition(x, p, cu_seqlens):
    """The four stages one after another, in fp64."""
    same = {"p": replace(p, dtype=torch.float64), "cu_seqlens": cu_seqlens}
    parts = reference.recompute(**{name: x[name] for name in ("q", "k", "v", "beta", "Akk", "gk")}, **same)
    qg = parts.pop("qg")
    states = reference.rescan(**parts, gk=x["gk"], h0=x["h0"], **same)
    local = reference.dAv(v_new=states["v_new"], do=x["do"], Aqk=x["Aqk"], **same)
    given = {name: x[name] for name in ("gk", "h0", "dht", "do")}
    back = reference.dhu(qg=qg, kg=parts["kg"], w=parts["w"], dv=local["dv"], **given, **same)
    return {**states, "dAqk": local["dAqk"], **back}


def on_device(x):
    return None if x is None else x.to(DEVICE)


def poisoned(tensors, case, p):
    """What the idea is given: nothing that the stages leave undefined is a number."""
    bounds = case.get("cu") or [p.T * b for b in range(p.B + 1)]
    given = tensors | {"Aqk": undefined_above(tensors["Aqk"], p, bounds)}
    return {name: on_device(x) for name, x in given.items()}


def compare(got, want, case, p):
    assert got.keys() == want.keys()
    for name, ref in want.items():
        if ref is None:
            assert got[name] is None
            continue
        assert got[name].shape == ref.shape
        error = (got[name].cpu().double() - ref).norm() / ref.norm()
        assert error < TOL[p.dtype], (name, float(error))
    assert not got["dAqk"].cpu()[want["dAqk"] == 0].any()          # the upper triangle is written, as zeros
    if p.varlen:
        assert all(not got[name][:, case["cu"][-1]:].any() for name in ("v_new", "dv", "dAqk"))


@pytest.mark.parametrize("case", CASES)
def test_every_output_matches_fp64(case):
    idea = registry.load("008")
    p, tensors, meta = stage_inputs(**CASES[case])
    assert idea.supports(p) == (True, "")
    wide = {name: None if x is None else torch.nan_to_num(x.double()) for name, x in tensors.items()}
    want = definition(wide, p, meta["cu_seqlens"])
    got = idea.run(**poisoned(tensors, CASES[case], p), p=p, **{name: on_device(x) for name, x in meta.items()})
    compare(got, want, CASES[case], p)


@pytest.mark.skipif(DEVICE == "cuda", reason="the kernels themselves are tested there")
@pytest.mark.parametrize("case", HOPPER_CASES)
def test_hopper_scans_at_every_schedule(case):
    idea, clock = gluon_as_torch.load(registry.find("008").kernel)
    p, tensors, meta = stage_inputs(**HOPPER_CASES[case])
    wide = {name: None if x is None else torch.nan_to_num(x.double()) for name, x in tensors.items()}
    want = definition(wide, p, meta["cu_seqlens"])
    for clock.products, clock.loads, clock.stores in gluon_as_torch.schedules():
        got = idea.run(**poisoned(tensors, HOPPER_CASES[case], p), p=replace(p, arch=(9, 0)), **meta)
        compare(got, want, HOPPER_CASES[case], p)


def test_refuses_what_it_cannot_do():
    idea = registry.load("008")
    p = KdaProblem(1, 64, 1, 1, 128, 64, 1, 1)
    assert idea.supports(replace(p, K=96)) == (False, "needs K=64 or 128, got 96")
    assert idea.supports(replace(p, V=96)) == (False, "needs V a multiple of 64, got 96")
    assert not idea.supports(replace(p, dtype=torch.float32))[0]


def descriptor(dtype, rows, columns):
    bits = 32 if dtype == "fp32" else 16
    layout = f"NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth={bits}, rank=2)"
    return f"tensordesc<{dtype}[{rows}, {columns}],{layout}>"


@pytest.mark.parametrize(("K", "V", "full"), [(128, 256, True), (128, 128, False), (64, 128, True)])
def test_compiles_for_hopper(K, V, full):
    """Its tiles come by descriptors, whose types COMPILE's entries of other ideas do not need."""
    BV = 128
    tiles = {"d_q": K, "d_k": K, "d_v": BV, "d_Aq": 64, "d_A": 64, "d_do": BV, "d_vn": BV, "d_dv": BV}
    signature = {name: descriptor("bf16", 64, columns) for name, columns in tiles.items()}
    signature |= {"d_g": descriptor("fp32", 64, K), "d_h": descriptor("bf16", K, BV), "d_dh": descriptor("bf16", K, BV)}
    signature |= {"v_new": "*bf16", "dv": "*bf16", "scale": "fp32", "T": "i32", "N": "i32"}
    signature |= dict.fromkeys(("gk", "beta", "h0", "dht", "dh0"), "*fp32")
    constants = {"H": 16, "HV": 16, "K": K, "V": V, "BV": BV, "HAS_H0": True, "HAS_DHT": True}
    constants |= {"IS_VARLEN": not full, "FULL": full}
    packed = dict.fromkeys(("cu_seqlens", "chunk_offsets"), "*i64")
    signature, constants = (signature, constants | dict.fromkeys(packed)) if full else (signature | packed, constants)
    built = sm90.compile_one(registry.load("008").bwd_scan_hopper_kernel, signature, constants, BV // 16)
    assert ".target sm_90" in built.ptx
    assert built.regs <= 255
    assert built.spills <= 64
    assert built.smem <= 232_448

