"""Idea 014 against its stages in fp64: everything its spans write, from raw inputs, at every shape and gate.

Without a GPU the first kernel runs thread by thread in numpy and the scan as torch, as in the tests of 013.
"""

import importlib.util
from dataclasses import replace

import pytest
import torch

from kernel_fun._common.problem import KdaProblem
from loop import cases, registry, spans
from loop.tests import gluon_as_torch
from loop.tests.test_fwd_operands_idea import DEVICE, Turns, compare, launch, problem, schedules
from loop.tests.test_fwd_prep_idea import reference

pytest.importorskip("cutlass", reason="the idea's first kernel needs nvidia-cutlass-dsl (the workspace's extra `cute`)")
RAW = {"gate": "softplus", "has_A_log": True, "has_dt_bias": True, "l2norm": True, "beta_sigmoid": True,
       "g_dtype": torch.bfloat16, "beta_dtype": torch.bfloat16}
SHAPE = {"B": 1, "T": 64, "H": 1, "HV": 1, "K": 128, "V": 128}
SAFE = RAW | {"gate": "safe", "lower_bound": -5.0, "safe_gate": True, "neg_eigval": True}
CASES = {
    "everything_in_kernel": SHAPE | RAW | {"T": 128, "V": 128},
    "two_batch_rows_ragged_gva": SHAPE | RAW | {"B": 2, "T": 100, "HV": 2},
    "fp32_gate_ragged": SHAPE | RAW | {"T": 90, "g_dtype": torch.float32, "beta_dtype": torch.float16},
    "wide_values": SHAPE | {"V": 256},
    "safe_gate": SHAPE | SAFE,
    "safe_gate_without_A": SHAPE | SAFE | {"has_A_log": False, "has_dt_bias": False},
    "packed": SHAPE | RAW | {"T": 300, "cu": [0, 70, 70, 71, 135, 290]},
    "packed_empty_ends": SHAPE | {"T": 194, "cu": [0, 0, 129, 129]},
    "no_states": SHAPE | RAW | {"has_h0": False, "output_final_state": False},
    "weak": SHAPE | {"values": "weak", "T": 128},
    "strong": SHAPE | {"values": "strong", "g_dtype": torch.bfloat16},
    "masked": SHAPE | {"values": "masks", "T": 128},
    "one_token": SHAPE | RAW | {"T": 1},
    "large_raw_gates": SHAPE | RAW | {"HV": 2, "values": "raw"},
    "large_raw_safe_gates": SHAPE | SAFE | {"HV": 2, "values": "raw", "g_dtype": torch.float32},
}


def load():
    """The idea, and on a CPU what runs it there."""
    if DEVICE == "cuda":
        return registry.load("014")
    from loop.tests import cute_blocks

    scans, clock = gluon_as_torch.load(registry.find("013").kernel)
    clock.products, clock.loads, clock.stores, last_first = schedules(few=True)[-1]
    Turns(scans, clock, last_first)
    path = registry.find("014").kernel
    spec = importlib.util.spec_from_file_location("idea_014_on_a_cpu", path)
    idea = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(idea)
    threads = cute_blocks.load(path)
    idea._compile = lambda key, dtypes: cute_blocks.launcher(threads, key)
    idea.scan, idea.handover = scans.scan, scans.handover
    return idea


@pytest.mark.parametrize("case", CASES)
def test_everything_written_matches_fp64(case):
    p, x, meta, want = problem(**CASES[case])
    idea = load()
    assert idea.supports(p) == (True, "")
    compare(launch(idea, p, x, meta), want, p, CASES[case].get("cu"))


SMALL = {
    "tiny_gate": {}, "tiny_safe": {}, "tiny_neg": {}, "tiny_ragged": {}, "tiny_varlen": {}, "tiny_state": {},
    "tiny_gva": {"H": 1, "HV": 2}, "tiny_strong": {}, "tiny_mask": {}, "tiny_reset": {}, "tiny_weak": {},
    "tiny_raw": {}, "tiny_raw_safe": {},
}


@pytest.mark.skipif(DEVICE != "cpu", reason="the check itself runs on a GPU")
@pytest.mark.parametrize("front", [False, True])
@pytest.mark.parametrize("name", SMALL)
def test_everything_written_is_within_its_budget(name, front):
    idea, case = load(), replace(cases.get("kda", name), **{"K": 128, "V": 128, **SMALL[name]})
    idea.supports = lambda p: (True, "")
    if front:
        idea.spans = lambda p: {idea.FRONT: idea.run_front}
    found = spans.check_spans(idea, case)
    assert {e.tensor for e in found} >= {"gk", "Aqk", "Akk"}
    assert [str(e) for e in found if not e.ok] == []


@pytest.mark.parametrize(("wanted", "made"), [
    ((), ()),
    (("o", "ht", "q", "k", "q_rstd", "k_rstd", "beta", "Aqk", "Akk"), ("q", "k", "q_rstd", "k_rstd", "beta")),
    (("gk",), ("gk",)),
    (("o", "ht", "q_rstd", "k_rstd", "beta", "Aqk", "Akk"), ("q_rstd", "k_rstd", "beta")),
    (("gk", "q_rstd", "k_rstd"), ("gk", "q_rstd", "k_rstd")),
    (("q", "k"), ("q", "k")),
])
@pytest.mark.parametrize("HV", [1, 2])
def test_writes_what_is_wanted(wanted, made, HV):
    p, x, meta, want = problem(**SHAPE | RAW | {"T": 100, "HV": HV})
    idea = load()
    idea.cutecall.absent.cache_clear()
    got = launch(idea, p, x, meta, wanted=frozenset(wanted))
    assert set(got) == {"o", "ht", "Aqk", "Akk", *made}
    compare(got, {n: want[n] for n in got}, p, None)
    # what stands in for the others is as it was made
    assert not idea.cutecall.absent(torch.zeros(0, device=DEVICE).device, torch.float32).any()


@pytest.mark.parametrize("wanted", [("q", "k", "beta"), ("q_rstd", "k_rstd"), ("q", "k", "q_rstd", "beta")])
def test_nothing_normalised_or_squashed_is_handed_on_as_it_came(wanted):
    p, x, meta, _ = problem(**SHAPE | {"HV": 2})
    got = launch(load(), p, x, meta, wanted=frozenset(wanted))
    assert all(torch.equal(got[n], x[f"{n}_raw"]) for n in ("q", "k", "beta"))
    assert got["q_rstd"] is got["k_rstd"] is None


# --------------------------------------------------------------------------------------------------- the first kernel
def front(p, x, **kw):
    x = {n: t.to(DEVICE) if torch.is_tensor(t) else t for n, t in x.items() if n not in ("v", "h0")}
    got = load().run_front(**x, p=p, cu_seqlens=None, chunk_indices=None, **kw)
    return {n: t.cpu() if torch.is_tensor(t) else t for n, t in got.items()}


def test_alone_it_writes_what_comes_before_the_scan():
    p, x, _, want = problem(**SHAPE | RAW | {"T": 100, "HV": 2})
    compare(front(p, x), {n: t for n, t in want.items() if n not in ("o", "ht")}, p, None)


def close(got, want, limit):
    error = (got.double() - want).norm() / want.norm()
    assert error < limit, float(error)


@pytest.mark.parametrize("size", [1.0, 200.0])
def test_eight_steps_at_the_floor(size):
    """The longest decays a group can have, and keys of any size if nothing normalises them."""
    p, x, _, _ = problem(**SHAPE | {"g_dtype": torch.bfloat16})
    x["g_raw"][:, 17:35] = -1000.0
    x["g_raw"][:, 40:48, :, ::2] = float("-inf")
    x["k_raw"], x["beta_raw"] = x["k_raw"] * size, x["beta_raw"] / size**2
    want = reference(p, x, [(0, 0, 64)])
    for made in (front(p, x), front(p, x, wanted=frozenset())):  # with gk the floor is another
        for name in ("Aqk", "Akk"):
            close(made[name], want[name], 4e-3)
            assert not made[name][0, :, 0].triu(1).any()


@pytest.mark.parametrize("l2norm", [True, False])
def test_repeated_keys_and_beta_of_two(l2norm):
    """The inverse stays at a few units where its power series would reach 2^60."""
    p, x, _, _ = problem(**SHAPE | {"l2norm": l2norm, "values": "weak"})
    x["k_raw"][:] = torch.nn.functional.normalize(x["k_raw"][:, :1].float(), dim=-1).bfloat16()
    x["beta_raw"][:] = 2.0
    want = reference(p, x, [(0, 0, 64)])
    close(front(p, x)["Akk"], want["Akk"], 2e-2)


def test_same_bits_twice():
    p, x, meta, _ = problem(**SHAPE | RAW | {"T": 200})
    first, second = (launch(load(), p, x, meta) for _ in range(2))
    assert all(torch.equal(t, second[n]) for n, t in first.items())


def test_serves_the_front_alone_where_010_cuts_sequences():
    idea = registry.load("014")
    p = KdaProblem(4, 8192, 32, 32, 128, 128, 4, 512, arch=(9, 0))
    assert list(idea.spans(p)) == ["fwd.norm..fwd.out"]
    few = replace(p, B=1, N=1, NT=128)
    assert list(idea.spans(few)) == ["fwd.norm..fwd.intra"]
    assert registry.load("010").supports(few)[0]
    assert not registry.load("010").supports(p)[0]


def test_refuses_what_is_not_for_it():
    idea = registry.load("014")
    p = KdaProblem(4, 8192, 32, 32, 128, 128, 4, 512, arch=(9, 0))
    assert idea.supports(p) == (True, "")
    assert idea.supports(replace(p, K=64)) == (False, "needs K=128, got 64")
    assert idea.supports(replace(p, V=96)) == (False, "needs V a multiple of 128, got 96")
    assert idea.supports(replace(p, dtype=torch.float16)) == (False, "needs bf16 q, k, v, got torch.float16")
    assert idea.supports(replace(p, arch=(10, 0))) == (False, "needs compute capability 9.x, got 10.0")
    assert idea.supports(replace(p, T=0, NT=0)) == (False, "needs a token")
    assert not idea.supports(replace(p, T=2**29, NT=2**25))[0]
    assert not idea.supports(replace(p, T=2**23, NT=2**19, HV=1, H=1))[0]
