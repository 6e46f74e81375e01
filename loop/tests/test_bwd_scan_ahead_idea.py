"""Idea 020 against its stages' definition in fp64: each tensor it writes, with many scans and with few, at every kind
of shape and gate it claims.

Without a GPU its scans run as torch, with the parent's preparation, the scan and its copying warp in turns and
everything asynchronous early and late; reach and join run in Triton's interpreter; all by the idea's own host code.
"""
import re
from dataclasses import replace

import pytest
import torch

from kernel_fun._common.problem import KdaProblem
from kernel_fun.kda.stages import k012_bwd_split
from kernel_fun.kda.stages import k017_bwd_scan_one as before_gluon_is_replaced  # noqa: F401  (what the idea builds on)
from loop import inflight, registry, sm90
from loop.tests import gluon_as_torch
from loop.tests.test_bwd_scan_idea import compare, definition, stage_inputs
from loop.tests.test_bwd_scan_one_idea import CASES as PARENTS
from loop.tests.test_bwd_scan_one_idea import (
    DEVICE,
    MORE,
    PACKED_LENGTHS,
    SHAPE,
    Partitions,
    kinds_of_calls,
    launch,
    problem,
    schedules,
)
from loop.tests.test_fwd_operands_idea import _loops

PARENTS_HELPERS = ("_mask", "_minus_beta", "_norms", "_prepare", "_put_last")
CASES = PARENTS | {
    "five_chunks_wide_values": SHAPE | {"T": 320, "V": 128},              # each buffer again
    "k128_narrow_values": SHAPE | {"T": 256, "K": 128, "dht": False},     # states are half of a gate tile
    "packed_k128": SHAPE | {"T": 520, "K": 128, "V": 128, "cu": [0, 257, 258, 440], "masked": 0.3},
}
EVERY = ("two_value_tiles", "packed_k128")            # at every schedule, which few scans share with 017


class Handing(Partitions):
    """Partitions that hand their turn on when they have told another something, not only where they must wait."""

    def arrive(self, bar, count=1, pred=True):
        super().arrive(bar, count, pred)
        self.stuck = 0
        self._pass_on(blocked=True)


def every_schedule(few):
    if schedules(few) == [None]:
        return [None]
    kinds = [Partitions] if few else [Partitions, Handing]
    return [(*schedule, kind) for schedule in schedules(few) for kind in kinds]


def load(schedule, path=None):
    """The idea, on a CPU with its partitions taking turns; on a GPU things happen when they do."""
    if schedule is None:
        return registry.load("020")
    parent, _ = gluon_as_torch.load(registry.find("017").kernel)
    idea, clock = gluon_as_torch.load(path or registry.find("020").kernel)
    clock.products, clock.loads, clock.stores, last_first, turns = schedule
    turns(idea, clock, last_first)
    for name in PARENTS_HELPERS:
        setattr(idea, name, getattr(parent, name))
    return idea


@pytest.mark.parametrize("name", CASES)
def test_every_output_matches_fp64(name):
    p, tensors, meta, want = problem(CASES[name])
    for schedule in every_schedule(few=name not in EVERY):
        idea = load(schedule)
        assert idea.supports(p) == (True, "")
        assert idea.cut(p) == name.startswith("few_")
        compare(launch(idea, p, tensors, meta, CASES[name]), want, CASES[name], p)


@pytest.mark.skipif(DEVICE != "cpu", reason="on a GPU the parent is what fits the shape")
@pytest.mark.parametrize("name", ["two_value_tiles", "packed", "packed_fp16_empty_ends", "few_k128_ragged_end"])
def test_the_bits_are_the_parents(name):
    p, tensors, meta, _ = problem(CASES[name])
    schedule = every_schedule(few=True)[-1]
    parent, clock = gluon_as_torch.load(registry.find("017").kernel)
    clock.products, clock.loads, clock.stores, last_first, turns = schedule
    turns(parent, clock, last_first)
    got, want = (launch(idea, p, tensors, meta, CASES[name]) for idea in (load(schedule), parent))
    assert all(torch.equal(got[n], x) if x is not None else got[n] is None for n, x in want.items())


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("scale", [-0.3, 0.0])
def test_any_scale(scale, dtype):
    case = SHAPE | {"dtype": dtype, "gate": 0.1, "T": 64, "K": 128}
    p, tensors, meta = stage_inputs(**case)
    tensors["Aqk"] = torch.nan_to_num((tensors["Aqk"] * (scale / p.scale)).to(dtype))
    p = replace(p, scale=scale, arch=(9, 0))
    want = definition({name: x.double() for name, x in tensors.items()}, p, None)
    got = launch(load(every_schedule(few=True)[-1]), p, tensors, meta, case)
    if scale == 0:
        want["dAqk"] = got["dAqk"] = torch.ones(1)            # 012's, and nothing
    compare(got, want, case, p)


def test_writes_what_is_wanted_and_the_same_bits_twice():
    case = MORE["packed_fp16_empty_ends"]
    p, tensors, meta, _ = problem(case)
    idea = load(every_schedule(few=True)[0])
    first, second = (launch(idea, p, tensors, meta, case, wanted=frozenset(names)) for names in (("dAqk",), ()))
    assert set(first) - set(second) == {"dAqk"}
    assert all(torch.equal(x, first[name]) for name, x in second.items())


# ------------------------------------------------------------------------------------------------- the emulation itself
ENDS = """        if EMIT and not FULL:  # noqa: SIM102
            if i == 0:
                _put_last(p_dv, out, row, i_hv * V + i_v, n_t, HV * V, BV, FULL, NW)
                barrier()                                    # g is fetched over it
"""
TOLD = "        mbarrier.arrive(half.index(s), count=1)\n"
FAULTS = {
    "the arrival of what is prepared": ("mbarrier.wait(ready.index(n), ((i + 1) >> 1) & 1, pred=more)\n"
                                        "        k_n, q_n", "k_n, q_n"),
    "the same, forwards": ("mbarrier.wait(ready.index(n), ((i + 1) >> 1) & 1, pred=more)\n"
                           "        _prepare(k_n", "_prepare(k_n"),
    "the arrival of do and Akk": ("mbarrier.wait(late.index(s), (i >> 1) & 1)            # do", "pass  # do"),
    "of v and Akk": ("mbarrier.wait(late.index(s), (i >> 1) & 1)            # v", "pass  # v"),
    "of do and Akk before they are masked": ("mbarrier.wait(late.index(0), 0, pred=NT > 0)", "pass"),
    "the state's staging": ("mbarrier.wait(staged.index(s), phase)", "pass"),
    "dv's staging": ("if BACK:\n                mbarrier.wait(half.index(s), phase)", "if BACK:\n                pass"),
    "v and Akk's release": ("elif EMIT:\n            mbarrier.wait(half.index(s), phase)",
                            "elif EMIT:\n            pass"),
    "q, do and Akk's release": ("mbarrier.wait(whole.index(s), phase)", "pass"),
    "dh's departure": ("mbarrier.wait(left, i & 1)                       # the state's", "pass  # the state's"),
    "the last v_new's": ("mbarrier.wait(left, (i & 1) ^ 1)                 # the last v_new", "pass  #"),
    "what leaves, before its tile is filled": ("tma.store_wait(0)                            # g is", "pass  # g is"),
    "dv, before the gate comes": ("tma.store_wait(0)                        # g is free of dv", "pass  # g is"),
    "the rows of an unfull chunk, before the gate comes": (ENDS + TOLD, TOLD + ENDS),
    "the third tile of keys": ("k.index(i % 3), pred=on)", "k.index((i + 1) % 3), pred=on)"),
}


@pytest.mark.skipif(DEVICE != "cpu", reason="the emulation stands in for a GPU")
@pytest.mark.parametrize("fault", FAULTS)
def test_the_emulation_notices_what_is_missing(fault, tmp_path):
    right, wrong = FAULTS[fault]
    text = registry.find("020").kernel.read_text()
    assert text.count(right) == 1
    path = tmp_path / "broken_scan" / "kernel.py"
    path.parent.mkdir()
    path.write_text(text.replace(right, wrong))
    case = CASES["packed_k128"]
    p, tensors, meta, want = problem(case)
    for schedule in every_schedule(few=False):
        try:
            compare(launch(load(schedule, path), p, tensors, meta, case), want, case, p)
        except AssertionError:
            return
    pytest.fail("right at every schedule")


def test_compiles_for_hopper():
    idea = registry.load("020")
    for job, built in zip(idea.COMPILE, sm90.compile_each(idea.COMPILE), strict=True):
        assert ".target sm_90" in built.ptx
        assert built.smem <= 227 * 1024
        assert built.spills <= 400              # start and end states, and what finds them
        assert inflight.overwritten(built.ttgir) == []
        waits = len(re.findall(r"wgmma\.wait_group", built.ptx))
        assert built.sass.count("WARPGROUP.DEPBAR") == waits == 6, job[2]      # ptxas adds no wait
        local = 6 if (job[2]["K"], job[2]["BV"]) == (128, 64) else 0           # four warps carry 128 keys
        assert len(re.findall(r"\b(LDL|STL)\b", _loops(built.sass))) <= local, job[2]


def test_packed_batches_of_any_length_compile_once(monkeypatch):
    idea = registry.load("020")
    seen = kinds_of_calls(monkeypatch, idea)
    monkeypatch.setattr(k012_bwd_split, "zero_tail", lambda x, cu_seqlens: x)
    for N, T in PACKED_LENGTHS:
        p = KdaProblem(1, T, 1, 4, 64, 64, N, -(-T // 64), scale=0.125, varlen=True, arch=(9, 0))
        shapes = {"q_raw": (1, 64), "k_raw": (1, 64), "v": (4, 64), "do": (4, 64), "Akk": (4, 64), "Aqk": (4, 64)}
        tokens = {name: torch.empty(1, T, *shape, dtype=p.dtype) for name, shape in shapes.items()}
        tokens |= {"gk": torch.empty(1, T, 4, 64), "beta": torch.empty(1, T, 4), "q_rstd": None, "k_rstd": None}
        states = {name: torch.empty(N, 4, 64, 64) for name in ("h0", "dht")}
        tables = dict.fromkeys(("cu_seqlens", "chunk_indices", "chunk_offsets"), torch.empty(N + 1, dtype=torch.int64))
        idea.run(**tokens, **states, **tables, p=p, wanted=frozenset())
    assert {n: len(kinds) for n, kinds in seen.items()} == {"reach_kernel": 1, "scan_kernel": 2, "join_kernel": 1}


def test_serves_what_its_parent_serves():
    idea = registry.load("020")
    p = KdaProblem(4, 8192, 32, 32, 128, 128, 4, 512, arch=(9, 0))
    assert idea.supports(p) == (True, "")
    assert idea.supports(replace(p, K=96)) == (False, "needs K=64 or 128, got 96")
    assert idea.supports(replace(p, T=0, NT=0)) == (False, "needs a token")
