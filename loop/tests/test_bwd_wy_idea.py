"""Idea 005 against the stage's definition in fp64: each tensor it writes, at every kind of shape and gate it claims."""

import re
from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
import triton.language as tl

from kernel_fun._common.problem import KdaProblem
from kernel_fun.kda import reference
from loop import inflight, registry, sm90

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
ARCH = torch.cuda.get_device_capability() if DEVICE == "cuda" else (0, 0)
# v_new is rounded on the way in and y before its products: up to 3e-3 each in bf16; fp16 problems use tf32.
TOL = {torch.bfloat16: 5e-3, torch.float16: 7e-4}
CASES = {
    "k128_dense": {"B": 2, "T": 128, "H": 1, "HV": 1, "K": 128, "V": 64},
    "v128_ragged_gva": {"B": 1, "T": 100, "H": 1, "HV": 2, "K": 64, "V": 128},
    "packed": {"B": 1, "T": 200, "H": 1, "HV": 1, "K": 64, "V": 64, "cu": [0, 70, 70, 71, 180]},
    "strong_gate": {"B": 1, "T": 64, "H": 1, "HV": 1, "K": 64, "V": 64, "gate": 20.0},
    "masked": {"B": 1, "T": 64, "H": 1, "HV": 1, "K": 64, "V": 64, "masked": 0.3},
    "fp16": {"B": 1, "T": 64, "H": 1, "HV": 1, "K": 64, "V": 64, "dtype": torch.float16},
}


def stage_inputs(B, T, H, HV, K, V, *, cu=None, gate=1.0, masked=0.0, dtype=torch.bfloat16):
    """A problem and what the stage reads: random, or from the forward's definition where it depends on the rest."""
    torch.manual_seed(0)
    bounds = cu or [T * b for b in range(B + 1)]
    lengths = [b - a for a, b in zip(bounds, bounds[1:], strict=False)]
    chunks = [-(-n // 64) for n in lengths]
    p = KdaProblem(
        B, T, H, HV, K, V, len(lengths), sum(chunks), dtype=dtype, scale=K**-0.5, varlen=cu is not None, arch=ARCH,
    )
    meta = {"cu_seqlens": None, "chunk_indices": None}
    if cu:
        table = [(n, c) for n, count in enumerate(chunks) for c in range(count)]
        meta = {"cu_seqlens": torch.tensor(cu), "chunk_indices": torch.tensor(table)}
    q, k = (F.normalize(torch.randn(B, T, H, K), dim=-1).to(dtype) for _ in range(2))
    beta = 2 * torch.sigmoid(torch.randn(B, T, HV))
    beta[:, ::5] = 0
    g = gate * F.logsigmoid(torch.randn(B, T, HV, K))
    g[torch.rand(g.shape) < masked] = -1000.0
    cu_seqlens = meta["cu_seqlens"]
    gk = reference.gate(g_raw=g, A_log=None, dt_bias=None, p=p, cu_seqlens=cu_seqlens)["gk"]
    Akk = reference.intra(q=q, k=k, gk=gk, beta=beta, p=p, cu_seqlens=cu_seqlens)["Akk"]
    v, do, dv = (torch.randn(B, T, HV, V).to(dtype) for _ in range(3))
    parts = reference.wy(k=k, v=v, beta=beta, Akk=Akk, gk=gk, p=p, cu_seqlens=cu_seqlens)
    scanned = reference.scan(**parts, gk=gk, h0=torch.randn(p.N, HV, K, V), p=p, cu_seqlens=cu_seqlens)
    tokens = {"v": v, "do": do, "dv": dv, "v_new": scanned["v_new"], "gk": gk, "beta": beta, "Akk": Akk}
    if cu:                                   # what no sequence owns must be neither read nor left unwritten
        for x in tokens.values():
            x[:, cu[-1]:] = float("nan")
    h = scanned["h"]
    tensors = {"q": q, "k": k, **tokens, "h": h, "dh": torch.randn(h.shape).to(dtype)}
    on_device = {name: x if x is None else x.to(DEVICE) for name, x in (tensors | meta).items()}
    return p, {name: on_device[name] for name in tensors}, {name: on_device[name] for name in meta}


@pytest.mark.parametrize("case", CASES)
def test_every_gradient_matches_fp64(case):
    idea = registry.load("005")
    p, tensors, meta = stage_inputs(**CASES[case])
    assert idea.supports(p) == (True, "")
    wide = {name: torch.nan_to_num(x.double()) for name, x in tensors.items()}
    want = reference.bwd_wy(**wide, p=replace(p, dtype=torch.float64), cu_seqlens=meta["cu_seqlens"])
    got = idea.run(**tensors, p=p, **meta)
    assert got.keys() == want.keys()
    for name, ref in want.items():
        assert got[name].shape == ref.shape
        error = (got[name].double() - ref).norm() / ref.norm()
        assert error < TOL[p.dtype], (name, float(error))
    assert not got["dAkk"][want["dAkk"] == 0].any()                # the upper triangle is written, as zeros
    end = meta["cu_seqlens"][-1] if p.varlen else p.T
    assert all(not x[:, end:].any() for x in got.values())


def test_refuses_what_it_cannot_do():
    idea = registry.load("005")
    p = KdaProblem(1, 64, 1, 1, 128, 64, 1, 1)
    assert idea.supports(replace(p, K=96)) == (False, "needs K=64 or 128, got 96")
    assert idea.supports(replace(p, V=96)) == (False, "needs V a multiple of 64, got 96")
    assert not idea.supports(replace(p, dtype=torch.float32))[0]


def in_fp16(job):
    kernel, types, constants, *launch = job
    return (kernel, {n: t.replace("bf16", "fp16") for n, t in types.items()}, constants | {"Y": tl.float32}, *launch)


def test_no_copy_overtakes_a_product():
    """In every loop, between the last product of a step and the next copies into shared memory: a wait for the own
    warps' products, then a barrier for those of the others."""
    jobs = registry.load("005").COMPILE
    for built in sm90.compile_each([*jobs, *map(in_fp16, jobs)]):
        assert inflight.overwritten(built.ttgir) == []
        state, copies = "barrier", 0
        for line in built.ptx.splitlines():
            if "wgmma.mma_async" in line:
                state = "product"
            elif re.search(r"wgmma\.wait_group\.sync\.aligned\s+0;", line) and state == "product":
                state = "wait"
            elif re.search(r"bar(rier)?\.sync", line) and state == "wait":
                state = "barrier"
            elif "cp.async.c" in line and "shared" in line:
                copies += 1
                assert state == "barrier", line
        assert copies > 8
