"""Idea 007 against its stages' definition in fp64: o and the final state, at every kind of shape and gate it claims.

Without a GPU the kernel's body runs under `gluon_cpu`, launched by the idea's own host code.
"""
import importlib.util
import re
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F

from kernel_fun._common.problem import KdaProblem
from kernel_fun.kda import reference
from loop import inflight, registry, sm90
from loop.tests import gluon_cpu

DEVICE = "cuda" if torch.cuda.is_available() and torch.cuda.get_device_capability()[0] == 9 else "cpu"
# operands are rounded once each (S, r, v_new, the gated keys and queries) and o once more
TOL = {torch.bfloat16: 3.5e-3, torch.float16: 5e-4}
SHAPE = {"B": 1, "T": 128, "H": 1, "HV": 1, "K": 128, "V": 128}
CASES = {
    "dense": SHAPE | {"B": 2, "T": 192, "has_h0": False},
    "ragged_gva_two_tiles": SHAPE | {"T": 100, "HV": 2, "V": 256},
    "k64": SHAPE | {"K": 64, "T": 200},
    "v64": SHAPE | {"V": 64},
    "packed": SHAPE | {"T": 200, "HV": 2, "cu": [0, 70, 70, 71, 180]},
    "packed_empty_ends": SHAPE | {"K": 64, "T": 130, "cu": [0, 0, 130, 130]},
    "strong_gate": SHAPE | {"gate": 20.0},
    "masked": SHAPE | {"masked": 0.3},
    "fp16": SHAPE | {"dtype": torch.float16},
    "one_token": SHAPE | {"T": 1},
}


def stage_inputs(
    B, T, H, HV, K, V, *, cu=None, gate=1.0, masked=0.0, dtype=torch.bfloat16, has_h0=True, beta_dtype=torch.float32,
):
    """A problem and what the span reads; NaN wherever it must not look."""
    torch.manual_seed(0)
    bounds = cu or [T * b for b in range(B + 1)]
    lengths = [b - a for a, b in zip(bounds, bounds[1:], strict=False)]
    p = KdaProblem(
        B, T, H, HV, K, V, len(lengths), sum(-(-n // 64) for n in lengths), dtype=dtype, beta_dtype=beta_dtype,
        scale=K**-0.5, varlen=cu is not None, has_h0=has_h0, output_final_state=has_h0, arch=(9, 0),
    )
    cu_seqlens = torch.tensor(cu) if cu else None
    q, k = (F.normalize(torch.randn(B, T, H, K), dim=-1).to(dtype) for _ in range(2))
    v = torch.randn(B, T, HV, V).to(dtype)
    beta = 2 * torch.sigmoid(torch.randn(B, T, HV))
    beta[:, ::5] = 0
    beta = beta.to(beta_dtype)
    g = gate * F.logsigmoid(torch.randn(B, T, HV, K))
    g[torch.rand(g.shape) < masked] = -1000.0
    gk = reference.gate(g_raw=g, A_log=None, dt_bias=None, p=p, cu_seqlens=cu_seqlens)["gk"]
    scores = reference.intra(q=q, k=k, gk=gk, beta=beta, p=p, cu_seqlens=cu_seqlens)
    tensors = {"q": q, "k": k, "gk": gk, "v": v, "beta": beta, **scores}
    column = torch.cat([torch.arange(n) % 64 for n in lengths] + [torch.zeros(B * T - bounds[-1])]).view(B, T, 1, 1)
    tensors["Aqk"].masked_fill_(torch.arange(64) > column, float("nan"))       # its strict upper part is not defined
    if cu:
        for x in tensors.values():                                             # nor is what no sequence owns
            x[:, cu[-1]:] = float("nan")
    tensors["h0"] = torch.randn(p.N, HV, K, V) if has_h0 else None
    return p, tensors, cu_seqlens


def expected(p, tensors, cu_seqlens):
    x = {name: x if x is None else torch.nan_to_num(x.double()) for name, x in tensors.items()}
    p = replace(p, dtype=torch.float64)
    common = {"gk": x["gk"], "p": p, "cu_seqlens": cu_seqlens}
    parts = reference.wy(k=x["k"], v=x["v"], beta=x["beta"], Akk=x["Akk"], **common)
    states = reference.scan(**parts, h0=x["h0"], **common)
    out = reference.out(q=x["q"], v_new=states["v_new"], Aqk=x["Aqk"], h=states["h"], **common)
    return {"o": out["o"], "ht": states["ht"]}


def launch(idea, p, tensors, cu_seqlens):
    """The idea's `run`, on the GPU or with its kernel emulated."""
    def put(x):
        return x if x is None else x.to(DEVICE)

    if DEVICE == "cpu":
        def emulated(grid):
            def call(*args, num_warps, **constexprs):
                gluon_cpu.run(kernel, grid[0], *args, **constexprs)
            return call

        kernel = idea.fwd_scan_kernel
        idea.fwd_scan_kernel = type("Emulated", (), {"__getitem__": lambda self, grid: emulated(grid)})()
    try:
        out = idea.run(**{name: put(x) for name, x in tensors.items()}, p=p, cu_seqlens=put(cu_seqlens))
    finally:
        if DEVICE == "cpu":
            idea.fwd_scan_kernel = kernel
    return {name: x if x is None else x.cpu() for name, x in out.items()}


@pytest.mark.parametrize("case", CASES)
def test_output_and_final_state_match_fp64(case):
    idea = registry.load("007")
    p, tensors, cu_seqlens = stage_inputs(**CASES[case])
    assert idea.supports(p) == (True, "")
    want = expected(p, tensors, cu_seqlens)
    got = launch(idea, p, tensors, cu_seqlens)
    assert got.keys() == want.keys()
    assert (got["ht"] is None) == (not p.has_h0)
    for name, x in got.items():
        if x is not None:
            assert x.shape == want[name].shape
            error = (x.double() - want[name]).norm() / want[name].norm()
            assert error < TOL[p.dtype], (name, float(error))
    end = cu_seqlens[-1] if p.varlen else p.T
    assert not got["o"][:, end:].any()


def test_beta_in_the_inputs_type():
    idea = registry.load("007")
    p, tensors, cu_seqlens = stage_inputs(**SHAPE, beta_dtype=torch.bfloat16)
    want, got = expected(p, tensors, cu_seqlens)["o"], launch(idea, p, tensors, cu_seqlens)["o"]
    assert (got.double() - want).norm() / want.norm() < TOL[torch.bfloat16]


FAULTS = {
    "a copy's wait": ("wait_group(1)", "wait_group(2)"),
    "a product's wait": ("x = warpgroup_mma_wait(0", "x = warpgroup_mma_wait(2"),
    "the end of the sequence": ("live - 64, HV", "64, HV"),
}


@pytest.mark.skipif(DEVICE != "cpu", reason="the emulation stands in for a GPU")
@pytest.mark.parametrize("fault", FAULTS)
def test_the_emulation_notices_what_is_missing(fault, tmp_path):
    right, wrong = FAULTS[fault]
    text = Path(registry.load("007").__file__).read_text()
    assert right in text
    path = tmp_path / "kernel.py"
    path.write_text(text.replace(right, wrong))
    spec = importlib.util.spec_from_file_location("broken_scan", path)
    broken = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(broken)
    p, tensors, cu_seqlens = stage_inputs(**SHAPE | {"T": 300})
    try:
        finite = torch.isfinite(launch(broken, p, tensors, cu_seqlens)["o"]).all()
    except (AssertionError, IndexError):
        finite = False
    assert not finite


def test_compiles_for_hopper():
    """Two K halves, one, and the narrow tile: fits an SM, and the products run beside the code (ptxas adds no wait)."""
    idea = registry.load("007")
    for built in sm90.compile_each(idea.COMPILE):
        assert built.smem <= 227 * 1024
        assert built.spills <= 400
        waits = len(re.findall(r"wgmma\.wait_group", built.ptx))
        assert built.sass.count("WARPGROUP.DEPBAR") == waits == 3
        assert inflight.overwritten(built.ttgir) == []


def test_refuses_what_it_cannot_do():
    idea = registry.load("007")
    p = KdaProblem(1, 64, 1, 1, 128, 64, 1, 1, arch=(9, 0))
    assert idea.supports(replace(p, K=96)) == (False, "needs K=64 or 128, got 96")
    assert idea.supports(replace(p, V=96)) == (False, "needs V a multiple of 64, got 96")
    assert idea.supports(replace(p, dtype=torch.float32))[0] is False
    assert idea.supports(replace(p, arch=(10, 0))) == (False, "needs compute capability 9.x, got 10.0")
