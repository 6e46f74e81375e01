"""Idea 010 against its stages' definition in fp64: o and the final state, however sequences are cut and decay.

Without a GPU the scan's body runs as torch, with everything asynchronous early and late, the kernels beside it in
Triton's interpreter, all launched by the idea's own host code.
"""
import re
from dataclasses import replace

import pytest
import torch

from kernel_fun._common.problem import KdaProblem
from loop import inflight, registry, sm90
from loop.tests import gluon_as_torch
from loop.tests.test_fwd_scan_idea import DEVICE, TOL, expected, stage_inputs

SHAPE = {"B": 1, "T": 1024, "H": 1, "HV": 1, "K": 64, "V": 64}
WEAK, MIXED = 0.003, torch.tensor([[0.003], [4.0]])           # WEAK: four chunks leave half of a state
CASES = {  # a gate of 1 forgets 48 bits in about 5 chunks, one of 4 in 2; segments are 4 chunks
    "needs_every_map": SHAPE | {"gate": WEAK},
    "forgets_in_two_chunks": SHAPE | {"gate": 4.0},
    "one_head_of_each_no_h0": SHAPE | {"HV": 2, "gate": MIXED, "has_h0": False},
    "k128_ragged_end": SHAPE | {"K": 128, "V": 128, "T": 1065, "gate": WEAK},
    "k128_v64": SHAPE | {"K": 128, "T": 1030, "gate": 2.0},
    "two_batch_rows_two_tiles_gva": SHAPE | {"B": 2, "V": 128, "HV": 2, "gate": MIXED},
    "packed": SHAPE | {"T": 3550, "HV": 2, "gate": MIXED, "cu": [0, 900, 3100, 3500]},
    "packed_empty_and_short": SHAPE | {"T": 4200, "gate": WEAK, "cu": [0, 0, 4133, 4134]},
    "masked": SHAPE | {"masked": 0.3, "gate": WEAK},
    "fp16": SHAPE | {"dtype": torch.float16, "gate": WEAK},
    "beta_bf16": SHAPE | {"beta_dtype": torch.bfloat16},
}


SCHEDULES = gluon_as_torch.schedules()


def load():
    """The idea and what says when asynchronous operations happen; on a GPU they happen when they do."""
    if DEVICE == "cuda":
        return registry.load("010"), gluon_as_torch.Clock()
    return gluon_as_torch.load(registry.find("010").kernel)


def inputs(**case):
    p, tensors, cu_seqlens = stage_inputs(**case)
    offsets = None
    if cu_seqlens is not None:
        offsets = torch.cat([torch.zeros(1, dtype=torch.int64), ((cu_seqlens.diff() + 63) // 64).cumsum(0)])
    return p, tensors, cu_seqlens, offsets


def launch(idea, p, tensors, cu_seqlens, offsets):
    """The idea's `run`, on the GPU or as torch."""
    def put(x):
        return x if x is None else x.to(DEVICE)

    given = {name: put(x) for name, x in tensors.items()}
    out = idea.run(**given, p=p, cu_seqlens=put(cu_seqlens), chunk_offsets=put(offsets))
    return {name: x if x is None else x.cpu() for name, x in out.items()}


@pytest.mark.parametrize("case", CASES)
def test_output_and_final_state_match_fp64(case):
    idea, clock = load()
    p, tensors, cu_seqlens, offsets = inputs(**CASES[case])
    assert idea.supports(p) == (True, "")
    assert idea.segment_plan(p)[2] > p.N
    want = expected(p, tensors, cu_seqlens)
    few = 8 if DEVICE == "cuda" else 1 if case == "k128_ragged_end" else 7      # 7: everything early, everything late
    for clock.products, clock.loads, clock.stores in SCHEDULES[::few]:
        compare(launch(idea, p, tensors, cu_seqlens, offsets), want, p, cu_seqlens)


def compare(got, want, p, cu_seqlens):
    assert (got["ht"] is None) == (not p.has_h0)
    for name, x in got.items():
        if x is not None:
            assert x.shape == want[name].shape
            bounds = cu_seqlens.tolist() if p.varlen and name == "o" else [0, x.shape[1]]
            for a, b in zip(bounds, bounds[1:], strict=False):
                error = (x[:, a:b].double() - want[name][:, a:b]).norm() / want[name][:, a:b].norm().clamp_min(1e-30)
                limit = 1.6 * TOL[p.dtype]               # at the weak gate 007's own error is 4.7e-3 in bf16
                assert error < limit, (name, a, float(error))
    end = cu_seqlens[-1] if p.varlen else p.T
    assert not got["o"][:, end:].any()


def starts(idea, p, tensors):
    """What `reach` decides for a dense problem: [segments, heads]."""
    L, P, slots = idea.segment_plan(p)
    start = torch.full((slots, p.HV), -9, dtype=torch.int32, device=DEVICE)
    idea.reach_kernel[(slots * p.HV,)](
        *(tensors[n].to(DEVICE) for n in ("k", "gk", "beta")), None, None,
        torch.empty(slots, 4, dtype=torch.int64, device=DEVICE), start, p.T, p.N, H=p.H, HV=p.HV, K=p.K, L=L, P=P,
        VARLEN=False, ERASED=idea.ERASED, WALK=idea.WALK, num_warps=8,
    )
    return start.cpu()


def test_a_segment_is_cut_short_only_where_its_map_is_below_the_bound():
    """The map in fp64, of the steps themselves: from the start that reach chose it is below 2^-48, one chunk later not
    provably so; and -1 stands exactly where the whole segment's bound is not met."""
    idea, _ = load()
    p, tensors, *_ = inputs(**SHAPE | {"HV": 2, "gate": torch.tensor([[0.5], [3.0]])})
    L = idea.segment_plan(p)[0]
    found = starts(idea, p, tensors)
    assert (found[0, 0], found[0, 1]) == (0, found[1, 1])                # the first segment starts from what is known
    assert found[1:3, 0].eq(-1).all()
    assert found[:3, 1].gt(0).all()
    x = {n: tensors[n][0].double() for n in ("k", "gk", "beta")}
    for s, hv in ((1, 0), (1, 1), (2, 1)):
        m, bits = torch.eye(p.K, dtype=torch.float64), []
        for t in range(s * L * 64 + max(int(found[s, hv]), 0) * 64, (s + 1) * L * 64):
            g = x["gk"][t, hv] - (x["gk"][t - 1, hv] if t % 64 else 0)
            k, b = x["k"][t, 0], x["beta"][t, hv]
            m = m * torch.exp2(g)[:, None]
            m = m - b * torch.outer(k, k @ m)
            bits.append(-g.max() - torch.log2((1 - b * k @ k).abs().clamp_min(1)))
        bits = torch.stack(bits)
        assert torch.linalg.matrix_norm(m, 2).log2() <= -bits.sum() + 1e-6
        assert (bits.sum() >= 48) == (found[s, hv] >= 0)
        assert bits[64:].sum() < 48


def test_keys_and_betas_of_any_size_are_counted():
    """Steps with |1 - beta |k|^2| > 1 stretch the state, so a decay that would do alone does not."""
    idea, _ = load()
    p, tensors, *_ = inputs(**SHAPE | {"gate": 4.0})
    assert starts(idea, p, tensors)[1] > 0
    tensors["k"] = 40 * tensors["k"]
    assert starts(idea, p, tensors)[1] == -1


@pytest.mark.parametrize(("H", "T", "plan"), [(16, 4096, (8, 8, 8)), (32, 65536, (256, 4, 4)), (1, 1024, (4, 4, 4))])
def test_plan_of_dense_shapes(H, T, plan):
    p = KdaProblem(1, T, H, H, 128, 128, 1, T // 64, arch=(9, 0))
    assert registry.load("010").segment_plan(p) == plan


def test_compiles_for_hopper():
    idea = registry.load("010")
    for job, built in zip(idea.COMPILE, sm90.compile_each(idea.COMPILE), strict=True):
        assert built.smem <= 227 * 1024
        assert built.spills <= 400
        if job[0] is idea.scan_kernel:          # the products run beside the code: ptxas adds no wait
            waits = len(re.findall(r"wgmma\.wait_group", built.ptx))
            assert built.sass.count("WARPGROUP.DEPBAR") == waits == 3
            assert inflight.overwritten(built.ttgir) == []


def test_refuses_what_is_not_for_it():
    idea = registry.load("010")
    p = KdaProblem(1, 4096, 16, 16, 128, 128, 1, 64, arch=(9, 0))
    assert idea.supports(p) == (True, "")
    assert idea.supports(replace(p, K=96)) == (False, "needs K=64 or 128, got 96")
    assert idea.supports(replace(p, V=96)) == (False, "needs V a multiple of 64, got 96")
    assert idea.supports(replace(p, dtype=torch.float32))[0] is False
    assert idea.supports(replace(p, arch=(10, 0))) == (False, "needs compute capability 9.x, got 10.0")
    assert idea.supports(replace(p, B=8, N=8, NT=512)) == (
        False, "needs at most 66 scans (sequences x heads x V tiles), got 128")
    assert idea.supports(replace(p, T=512, NT=8)) == (False, "needs 16 chunks of 64 tokens a sequence, got 8 in 1")
    assert idea.supports(replace(p, T=0, NT=0))[0] is False
    assert not idea.supports(replace(p, H=1, HV=1, T=2**31, NT=2**25))[0]
