"""Idea 012 against its stages' definition in fp64: each tensor it writes, however sequences are cut and decay.

Without a GPU its Gluon kernel runs as torch, with everything asynchronous early and late, the others in Triton's
interpreter, all launched by the idea's own host code.
"""
import re
from dataclasses import replace

import pytest
import torch

from kernel_fun._common.problem import KdaProblem
from loop import inflight, registry, sm90
from loop.tests import gluon_as_torch
from loop.tests.test_bwd_scan_idea import compare, definition, on_device, poisoned, stage_inputs

DEVICE = "cuda" if torch.cuda.is_available() and torch.cuda.get_device_capability()[0] == 9 else "cpu"
SHAPE = {"B": 1, "T": 1024, "H": 1, "HV": 1, "K": 64, "V": 64}
WEAK, MIXED = 0.003, torch.tensor([[0.003], [4.0]])           # WEAK: four chunks leave half of a state
CASES = {  # a gate of 4 forgets 48 bits in 2 chunks, one of 1 in about 5; segments are 4 chunks
    "needs_every_map": SHAPE | {"gate": WEAK},
    "forgets_in_two_chunks": SHAPE | {"gate": 4.0},
    "one_head_of_each_no_states": SHAPE | {"HV": 2, "gate": MIXED, "h0": False, "dht": False},
    "k128_ragged_end": SHAPE | {"K": 128, "V": 128, "T": 1065, "gate": WEAK},
    "two_batch_rows_two_tiles_gva": SHAPE | {"B": 2, "V": 128, "HV": 2, "gate": MIXED},
    "packed": SHAPE | {"T": 3550, "HV": 2, "gate": MIXED, "cu": [0, 900, 3100, 3500]},
    "packed_empty_and_short": SHAPE | {"T": 4200, "gate": WEAK, "cu": [0, 0, 4133, 4134]},
    "masked": SHAPE | {"masked": 0.3, "gate": WEAK},
    "fp16": SHAPE | {"dtype": torch.float16, "gate": 1.0},
}


def load():
    """The idea and what says when asynchronous operations happen; on a GPU they happen when they do."""
    if DEVICE == "cuda":
        return registry.load("012"), gluon_as_torch.Clock()
    return gluon_as_torch.load(registry.find("012").kernel)


@pytest.mark.parametrize("case", CASES)
def test_every_output_matches_fp64(case):
    idea, clock = load()
    p, tensors, meta = stage_inputs(**CASES[case])
    p = replace(p, arch=(9, 0))
    assert idea.supports(p) == (True, "")
    assert idea.segment_plan(p)[2] > p.N
    wide = {name: None if x is None else torch.nan_to_num(x.double()) for name, x in tensors.items()}
    want = definition(wide, p, meta["cu_seqlens"])
    few = 8 if DEVICE == "cuda" else 1 if case == "k128_ragged_end" else 7      # 7: everything early, everything late
    for clock.products, clock.loads, clock.stores in gluon_as_torch.schedules()[::few]:
        given = poisoned(tensors, CASES[case], p)
        got = idea.run(**given, p=p, **{name: on_device(x) for name, x in meta.items()})
        compare(got, want, CASES[case], p)


def reached(idea, p, tensors):
    """What `reach` decides for one dense sequence and head: [backwards, segment]."""
    L, P, slots = idea.segment_plan(p)
    assert (L, P) == (4, 4)
    reach = torch.full((2, slots, 1), -9, dtype=torch.int32, device=DEVICE)
    idea.reach_kernel[(2 * slots,)](
        *(tensors[n].to(DEVICE) for n in ("k", "gk", "beta")), None, None,
        torch.empty(slots, 5, dtype=torch.int64, device=DEVICE), reach, p.T, p.N, slots, H=1, HV=1, K=p.K, L=L, P=P,
        VARLEN=False, ERASED=idea.ERASED, WALK=idea.WALK, num_warps=8,
    )
    return reach[:, :, 0].cpu()


def test_each_end_is_walked_by_itself():
    """A segment that forgets only in its first or only in its last chunk is cut short in one direction alone."""
    idea, _ = load()
    p, tensors, _ = stage_inputs(**SHAPE | {"gate": WEAK})
    gk = tensors["gk"].view(1, -1, 64, 1, p.K)
    gk[:, 4, :] -= 70.0 * torch.arange(1, 65)[:, None, None]                    # segment 1, first chunk
    gk[:, 10, :] -= 70.0 * torch.arange(1, 65)[:, None, None]                   # segment 2, last but one
    reach = reached(idea, p, tensors)
    assert reach[:, 1].tolist() == [0, 1]
    assert reach[:, 2].tolist() == [2, 3]
    assert reach[0, 0] == 0                                                      # from h0
    assert reach[1, 3] == 4                                                      # from dht


def test_what_is_dropped_is_below_two_to_the_minus_48():
    """A segment whose four chunks erase 47.6 bits needs its map both ways, one of 48.4 in neither."""
    idea, _ = load()
    p, tensors, _ = stage_inputs(**SHAPE | {"gate": WEAK})
    tensors["beta"] = tensors["beta"].clamp(0, 1)      # with |k| = 1 no step stretches a state
    gk = tensors["gk"].view(1, -1, 64, 1, p.K)
    gk[:, 4:8] = -47.6 / 4 / 64 * torch.arange(1, 65)[:, None, None]
    gk[:, 8:12] = -48.4 / 4 / 64 * torch.arange(1, 65)[:, None, None]
    reach = reached(idea, p, tensors)
    assert reach[:, 1].tolist() == [-1, -1]
    assert reach[:, 2].tolist() == [0, 4]


def test_compiles_for_hopper():
    work = registry.load("012").COMPILE
    for job, built in zip(work, sm90.compile_each(work), strict=True):
        assert built.smem <= 227 * 1024
        assert built.spills <= 400              # none in a loop: start states, and what finds the parts afterwards
        if "EMIT" in job[2]:                    # the products run beside the code: ptxas adds no wait
            waits = len(re.findall(r"wgmma\.wait_group", built.ptx))
            assert built.sass.count("WARPGROUP.DEPBAR") == waits == 6
            assert inflight.overwritten(built.ttgir) == []


def test_refuses_what_is_not_for_it():
    idea = registry.load("012")
    p = KdaProblem(1, 4096, 16, 16, 128, 128, 1, 64, arch=(9, 0))
    assert idea.supports(p) == (True, "")
    assert idea.supports(replace(p, K=96)) == (False, "needs K=64 or 128, got 96")
    assert idea.supports(replace(p, V=96)) == (False, "needs V a multiple of 64, got 96")
    assert not idea.supports(replace(p, dtype=torch.float32))[0]
    assert idea.supports(replace(p, arch=(10, 0))) == (False, "needs compute capability 9.0, got 10.0")
    assert idea.supports(replace(p, H=34, HV=34)) == (
        False, "needs at most 33 scans (sequences x heads x V tiles), got 34")
    assert idea.supports(replace(p, T=512, NT=8)) == (False, "needs 16 chunks of 64 tokens a sequence, got 8 in 1")
    assert not idea.supports(replace(p, T=0, NT=0))[0]
    assert not idea.supports(replace(p, T=2**26, NT=2**20))[0]
