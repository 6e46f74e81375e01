"""Idea 017 against its stages' definition in fp64: each tensor it writes, with many scans and with few, at every kind
of shape and gate it claims.

Without a GPU its Gluon kernel runs as torch, the scan and its copying warp in turns and everything asynchronous early
and late; the others run in Triton's interpreter; all are launched by the idea's own host code.
"""
import re
from collections import defaultdict
from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F

from kernel_fun._common.problem import KdaProblem
from kernel_fun.kda.stages import k012_bwd_split  # before Gluon is replaced: what the idea takes from there
from loop import inflight, registry, sm90
from loop.tests import gluon_as_torch
from loop.tests.test_bwd_scan_idea import CASES as MANY
from loop.tests.test_bwd_scan_idea import HOPPER_CASES, compare, definition, on_device, poisoned, stage_inputs
from loop.tests.test_bwd_split_idea import CASES as FEW
from loop.tests.test_fwd_operands_idea import Turns, _loops

DEVICE = "cuda" if torch.cuda.is_available() and torch.cuda.get_device_capability()[0] == 9 else "cpu"
SHAPE = {"B": 1, "T": 192, "H": 1, "HV": 1, "K": 64, "V": 64}
MORE = {
    "two_tokens": SHAPE | {"T": 2},
    "fp16_k128": SHAPE | {"K": 128, "V": 128, "dtype": torch.float16, "gate": 0.01},
    "packed_fp16_empty_ends": SHAPE | {"V": 128, "cu": [0, 0, 129, 129], "dtype": torch.float16},
}
CASES = MANY | HOPPER_CASES | MORE | {f"few_{name}": case for name, case in FEW.items()}
ALL = ("two_value_tiles", "packed", "few_one_head_of_each_no_states")       # at every schedule


class Partitions(Turns):
    """Turns, with what this idea leaves out by a predicate."""

    def __init__(self, idea, clock, last_first):
        super().__init__(idea, clock, last_first)
        self.stuck = 0

    def expect(self, bar, count, pred=True):
        if pred:
            super().expect(bar, count)

    def arrive(self, bar, count=1, pred=True):
        if pred:
            super().arrive(bar, count)

    def wait(self, bar, phase, pred=True):
        if pred:
            super().wait(bar, phase)


def load(schedule, path=None):
    """The idea, on a CPU with its partitions taking turns; on a GPU things happen when they do."""
    if schedule is None:
        return registry.load("017")
    idea, clock = gluon_as_torch.load(path or registry.find("017").kernel)
    clock.products, clock.loads, clock.stores, last_first = schedule
    Partitions(idea, clock, last_first)
    return idea


def schedules(few):
    if DEVICE == "cuda":
        return [None]
    every = [(*modes, last) for modes in gluon_as_torch.schedules() for last in (False, True)]
    return [every[0], every[-1]] if few else every


def problem(case):
    """(the problem on Hopper, its tensors, its description, what the stages make of them in fp64)."""
    p, tensors, meta = stage_inputs(**case)
    wide = {name: None if x is None else torch.nan_to_num(x.double()) for name, x in tensors.items()}
    want = definition(wide, p, meta["cu_seqlens"])
    return replace(p, arch=(9, 0), l2norm=p.dtype == torch.bfloat16), tensors, meta, want


def launch(idea, p, tensors, meta, case, **kw):
    """q and k raw: where rows are normalised, by powers of two, so that the products are the stages' to the bit."""
    given = poisoned(tensors, case, p)
    for name in ("q", "k"):
        x = given.pop(name)
        rstd = 2.0 ** torch.randint(-4, 5, x.shape[:3], device=x.device) if p.l2norm else None
        given |= {f"{name}_raw": x if rstd is None else (x / rstd[..., None]).to(x.dtype), f"{name}_rstd": rstd}
    return idea.run(**given, p=p, **{name: on_device(x) for name, x in meta.items()}, **kw)


@pytest.mark.parametrize("name", CASES)
def test_every_output_matches_fp64(name):
    p, tensors, meta, want = problem(CASES[name])
    for schedule in schedules(few=name not in ALL):
        idea = load(schedule)
        assert idea.supports(p) == (True, "")
        assert idea.cut(p) == name.startswith("few_")
        compare(launch(idea, p, tensors, meta, CASES[name]), want, CASES[name], p)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("scale", [1.0, -0.3, 3e-20, 0.0])
def test_any_scale(scale, dtype):
    case = SHAPE | {"dtype": dtype, "gate": 0.1, "T": 64, "K": 128}      # with 64 keys half of a state stays
    p, tensors, meta = stage_inputs(**case)
    tensors["Aqk"] = torch.nan_to_num((tensors["Aqk"] * (scale / p.scale)).to(dtype))
    p = replace(p, scale=scale, arch=(9, 0))
    wide = {name: x.double() for name, x in tensors.items()}
    want = definition(wide, p, None)
    got = launch(load(schedules(few=True)[-1]), p, tensors, meta, case)
    if abs(scale) < 1e-9:
        want["dAqk"] = got["dAqk"] = torch.ones(1)            # 012's, and nothing
    compare(got, want, case, p)


def test_writes_what_is_wanted_and_the_same_bits_twice():
    case = MORE["packed_fp16_empty_ends"]
    p, tensors, meta, _ = problem(case)
    idea = load(schedules(few=True)[0])
    first, second = (launch(idea, p, tensors, meta, case, wanted=frozenset(names)) for names in (("dAqk",), ()))
    assert set(first) - set(second) == {"dAqk"}
    assert all(torch.equal(x, first[name]) for name, x in second.items())


# ------------------------------------------------------------------------------------------------------------ rounding
def rounded(x):
    return x.to(torch.bfloat16).float()


def fla_errors(x, p, want):
    """Relative errors of dh, dv, dh0 where each operand and each stored tensor of fla's stages is rounded to bf16 and
    sums are fp32."""
    C, n = 64, p.T // 64
    q, k, gk = (x[name].view(n, C, p.K).float() for name in ("q", "k", "gk"))
    do, beta = x["do"].view(n, C, p.V).float(), x["beta"].view(n, C, 1)
    A, Aq = (x[name].view(n, C, C).float() for name in ("Akk", "Aqk"))
    kg, qg = rounded(k * (gk[:, -1:] - gk).exp2()), rounded(q * gk.exp2())
    w, local = rounded(A @ rounded(k * gk.exp2() * beta)), rounded(Aq.mT @ do)
    S, dh, dv = x["dht"][0, 0], torch.empty(n, p.K, p.V), torch.empty(n, C, p.V)
    for i in reversed(range(n)):
        dh[i] = rounded(S)
        dv[i] = rounded(kg[i] @ dh[i] + local[i])
        S = S * gk[i, -1].exp2()[:, None] + p.scale * (qg[i].T @ do[i]) - w[i].T @ dv[i]
    return errors({"dh": dh, "dv": dv, "dh0": S}, want, x, p)


def errors(got, want, x, p):
    """Of dv where it leaves the chain, as the gradient of v: beta Akk^T dv."""
    out = {}
    A, beta = x["Akk"].view(-1, 64, 64).double(), x["beta"].view(-1, 64, 1).double()
    for name in ("dh", "dv", "dh0"):
        a, b = (t[name].cpu().double().reshape(want[name].shape) for t in (got, want))
        if name == "dv":
            a, b = (beta * (A.mT @ t.view(-1, 64, p.V)) for t in (a, b))
        out[name] = float((a - b).norm() / b.norm())
    return out


@pytest.mark.parametrize(("T", "keys", "beta_max", "strength"), [
    (4096, "randn", 0.04, 2e-5),             # nothing decays, and little is written
    (2048, "rand", 2.0, 1e-3),               # decay of a thousandth a step, keys alike, beta near 2
])
def test_at_weak_gates_errors_are_not_above_flas(T, keys, beta_max, strength):
    case = SHAPE | {"T": T, "K": 128, "V": 128, "gate": strength}
    torch.manual_seed(5)
    draw = torch.rand if keys == "rand" else torch.randn
    given = [F.normalize(draw(1, T, 1, 128), dim=-1).bfloat16() for _ in range(2)]
    beta = beta_max * torch.sigmoid(torch.randn(1, T, 1))
    p, x, meta = weak_inputs(case, *given, beta)
    want = definition({name: t.double() for name, t in x.items()}, p, None)
    idea = load(schedules(few=True)[0])
    if DEVICE == "cpu":
        idea.cut = lambda p: False           # the same loops as in segments, and half of the work
    got = errors(launch(idea, p, x, meta, case), want, x, p)
    fla = fla_errors({name: t.cpu() for name, t in x.items()}, p, want)
    print(got, fla)
    assert all(got[name] <= 1.02 * fla[name] for name in got), (got, fla)


def weak_inputs(case, q, k, beta):
    """`stage_inputs` with these q, k and beta, and what depends on them."""
    p, x, meta = stage_inputs(**case)
    p = replace(p, arch=(9, 0))
    n = p.T // 64
    gk, qd, kd = x["gk"].view(n, 64, -1).double(), q.view(n, 64, -1).double(), k.view(n, 64, -1).double()
    up, down = kd * gk.exp2(), kd * (-gk).exp2()              # at a weak gate only
    L = torch.eye(64).double() + beta.view(n, 64, 1).double() * torch.tril(up @ down.mT, -1)
    Aqk = p.scale * torch.tril((qd * gk.exp2()) @ down.mT)
    Aqk, Akk = (t.to(p.dtype).reshape(1, p.T, 1, 64) for t in (Aqk, torch.linalg.inv(L)))
    return p, x | {"q": q, "k": k, "beta": beta, "Aqk": Aqk, "Akk": Akk}, meta


# ------------------------------------------------------------------------------------------------- the emulation itself
FAULTS = {
    "the tiles' arrival": ("mbarrier.wait(ready.index(n), ((i + 1) >> 1) & 1, pred=more)\n"
                           "        _prepare(k.index(n), q", "_prepare(k.index(n), q"),
    "half of the tiles' release": ("mbarrier.wait(half.index(s), phase)", "pass"),
    "the other tiles' release": ("mbarrier.wait(whole.index(s), phase)", "pass"),
    "the last dvn's departure": ("mbarrier.wait(left, (i & 1) ^ 1)                 # the last dvn", "pass  #"),
    "what leaves, before its tile is filled": ("tma.store_wait(0)                            # g can", "pass  # g can"),
    "the state's staging": ("mbarrier.wait(staged.index(s), phase)", "pass"),
}


@pytest.mark.skipif(DEVICE != "cpu", reason="the emulation stands in for a GPU")
@pytest.mark.parametrize("fault", FAULTS)
def test_the_emulation_notices_what_is_missing(fault, tmp_path):
    right, wrong = FAULTS[fault]
    text = registry.find("017").kernel.read_text()
    assert text.count(right) == 1
    path = tmp_path / "broken_scan" / "kernel.py"
    path.parent.mkdir()
    path.write_text(text.replace(right, wrong))
    p, tensors, meta, want = problem(CASES["packed"])
    noticed = 0
    for schedule in schedules(few=False):
        try:
            compare(launch(load(schedule, path), p, tensors, meta, CASES["packed"]), want, CASES["packed"], p)
        except AssertionError:
            noticed += 1
    assert noticed


def test_compiles_for_hopper():
    idea = registry.load("017")
    for job, built in zip(idea.COMPILE, sm90.compile_each(idea.COMPILE), strict=True):
        assert ".target sm_90" in built.ptx
        assert built.smem <= 227 * 1024
        if job[0] is not idea.scan_kernel:
            assert built.spills == 0
            continue
        assert built.spills <= 400              # start and end states, and what finds them
        assert inflight.overwritten(built.ttgir) == []
        waits = len(re.findall(r"wgmma\.wait_group", built.ptx))
        assert built.sass.count("WARPGROUP.DEPBAR") == waits == 6, job[2]      # ptxas adds no wait
        assert not re.findall(r"\b(LDL|STL)\b", _loops(built.sass)), job[2]


def kinds_of_calls(monkeypatch, idea):
    """Kernel -> the kinds of calls that compile apart, of all that `idea` launches from now on; nothing runs."""
    seen = defaultdict(set)

    def launch(kernel, grid, *args, **constants):
        free = getattr(kernel, "kwargs", vars(kernel))["do_not_specialize"]          # interpreted, or to be compiled
        numbers = [(n, x) for n, x in zip(kernel.arg_names, args, strict=False) if type(x) is int and n not in free]
        seen[kernel.__name__].add((*constants.items(), *((n, x == 1, x % 16 == 0) for n, x in numbers)))

    monkeypatch.setattr(idea, "launch", launch)
    return seen


# (sequences, tokens) with 4 heads: segments of 4, 5, 6, 16, 17, 21 and more chunks; of one, 16 of 16
PACKED_LENGTHS = ((1, 1024), (1, 4200), (1, 5000), (1, 15360), (2, 15360), (1, 20000), (3, 20000))


def test_packed_batches_of_any_length_compile_once(monkeypatch):
    idea = registry.load("017")
    seen = kinds_of_calls(monkeypatch, idea)
    monkeypatch.setattr(k012_bwd_split, "zero_tail", lambda x, cu_seqlens: x)
    plans = []
    for N, T in PACKED_LENGTHS:
        p = KdaProblem(1, T, 1, 4, 64, 64, N, -(-T // 64), scale=0.125, varlen=True, arch=(9, 0))
        assert idea.cut(p)
        plans.append(idea.segment_plan(p))
        shapes = {"q_raw": (1, 64), "k_raw": (1, 64), "v": (4, 64), "do": (4, 64), "Akk": (4, 64), "Aqk": (4, 64)}
        tokens = {name: torch.empty(1, T, *shape, dtype=p.dtype) for name, shape in shapes.items()}
        tokens |= {"gk": torch.empty(1, T, 4, 64), "beta": torch.empty(1, T, 4), "q_rstd": None, "k_rstd": None}
        states = {name: torch.empty(N, 4, 64, 64) for name in ("h0", "dht")}
        tables = dict.fromkeys(("cu_seqlens", "chunk_indices", "chunk_offsets"), torch.empty(N + 1, dtype=torch.int64))
        idea.run(**tokens, **states, **tables, p=p, wanted=frozenset())
    assert len(set(plans)) == len({L for L, _, _ in plans}) == len(plans)
    assert {n: len(kinds) for n, kinds in seen.items()} == {"reach_kernel": 1, "scan_kernel": 2, "join_kernel": 1}
    assert len({dict(kind)["EMIT"] for kind in seen["scan_kernel"]}) == 2                # build and emit


def test_refuses_what_is_not_for_it():
    idea = registry.load("017")
    p = KdaProblem(4, 8192, 32, 32, 128, 128, 4, 512, arch=(9, 0))
    assert idea.supports(p) == (True, "")
    assert not idea.cut(p)
    assert idea.cut(replace(p, B=1, N=1, NT=128))
    assert not idea.cut(replace(p, B=1, N=1, T=512, NT=8))
    assert idea.supports(replace(p, K=96)) == (False, "needs K=64 or 128, got 96")
    assert idea.supports(replace(p, V=96)) == (False, "needs V a multiple of 64, got 96")
    assert not idea.supports(replace(p, dtype=torch.float32))[0]
    assert idea.supports(replace(p, arch=(10, 0))) == (False, "needs compute capability 9.0, got 10.0")
    assert idea.supports(replace(p, T=0, NT=0)) == (False, "needs a token")
    assert not idea.supports(replace(p, T=2**26, NT=2**22))[0]
