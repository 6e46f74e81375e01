"""Idea 018 against its stages in fp64: what its scan makes of ready operands, however sequences are cut and decay, and
the whole span from raw inputs.

Without a GPU the preparation runs thread by thread in numpy, or its operands come from their definition; the scan runs
as torch, its partitions taking turns, everything asynchronous early and late; the kernels beside it in Triton's
interpreter; all launched by the idea's own host code.
"""

import importlib.util
import re
from dataclasses import replace

import pytest
import torch

from kernel_fun._common.problem import KdaProblem
from loop import cases, inflight, registry, sm90, spans
from loop.tests import gluon_as_torch
from loop.tests.test_bwd_scan_one_idea import PACKED_LENGTHS, kinds_of_calls
from loop.tests.test_fwd_operands_idea import DEVICE, Turns, _loops, compare, problem, schedules

pytest.importorskip("cutlass", reason="the preparation needs nvidia-cutlass-dsl (the workspace's extra `cute`)")
SHAPE = {"B": 1, "T": 1024, "H": 1, "HV": 1, "K": 128, "V": 128, "g_dtype": torch.bfloat16}
RAW = {"gate": "softplus", "has_A_log": True, "has_dt_bias": True, "l2norm": True, "beta_sigmoid": True,
       "beta_dtype": torch.bfloat16}
SAFE = RAW | {"gate": "safe", "lower_bound": -5.0, "safe_gate": True, "neg_eigval": True}
# strengths of a log gate: WEAK leaves half of a state after four chunks, FAIR forgets 48 bits in two
WEAK, FAIR, STRONG = 0.003, 0.7, 4.0
CASES = {  # segments are 4 chunks; a log gate of 1 forgets 48 bits in a chunk
    "needs_every_map": SHAPE | {"strength": [WEAK]},
    "forgets_in_a_chunk": SHAPE | {"strength": [STRONG]},
    "one_head_of_each_no_h0": SHAPE | {"HV": 2, "strength": [WEAK, FAIR], "has_h0": False},
    "in_between": SHAPE | {"HV": 2, "strength": [0.1, 0.35]},
    "softplus": SHAPE | RAW | {"T": 1065, "HV": 2},
    "safe": SHAPE | SAFE,
    "ragged_end_no_final_state": SHAPE | {"T": 1030, "strength": [FAIR], "output_final_state": False},
    "two_batch_rows_two_tiles_gva": SHAPE | {"B": 2, "V": 256, "HV": 2, "strength": [WEAK, STRONG]},
    "packed": SHAPE | {"T": 3550, "HV": 2, "strength": [WEAK, FAIR], "cu": [0, 900, 3100, 3500]},
    "packed_empty_and_short": SHAPE | {"T": 4200, "strength": [WEAK], "cu": [0, 0, 4133, 4134]},
    "masked": SHAPE | {"values": "masks"},
    "fp32_gate_and_no_states": SHAPE | {"g_dtype": torch.float32, "has_h0": False, "output_final_state": False},
}


def made(case, keys=1.0):
    """The problem, its raw inputs, what the span must write; a log gate scaled head by head, keys made longer."""
    case, strength = dict(case), case.get("strength")
    case.pop("strength", None)
    if strength is None and keys == 1.0:
        return problem(**case)
    from loop.tests import test_fwd_operands_idea as module

    real = module.inputs

    def scaled(p, **kw):
        x = real(p, **kw)
        if strength:
            x["g_raw"] = (x["g_raw"].float() * torch.tensor(strength)[:, None]).to(p.g_dtype)
        x["k_raw"] = (x["k_raw"].float() * keys).to(p.dtype)
        return x

    module.inputs = scaled
    try:
        return problem(**case)
    finally:
        module.inputs = real


def load(schedule, path=None):
    """The idea, on a CPU with 013's helpers and its own kernels as torch, partitions taking turns."""
    if schedule is None:
        return registry.load("018")
    parent, _ = gluon_as_torch.load(registry.find("013").kernel)
    idea, clock = gluon_as_torch.load(path or registry.find("018").kernel)
    clock.products, clock.loads, clock.stores, last_first = schedule
    Turns(idea, clock, last_first)
    parent.gl = idea.gl
    idea._vector, idea._tiles, idea._barrier = parent._vector, parent._tiles, lambda: None
    return idea


def operands_of(p, x, want, meta):
    """What the preparation hands over, by its definition: [chunks, heads, (kb, kg, qg), 64, K] and vectors."""
    rep = p.HV // p.H
    q, k = (want[n].repeat_interleave(rep, 2) for n in ("q", "k"))
    tiles = torch.zeros(p.NT, p.HV, 3, 64, p.K, dtype=torch.float64)
    vec = torch.zeros(p.NT, p.HV, p.K + 64, dtype=torch.float64)
    ends = meta["cu_seqlens"].tolist() if p.varlen else [p.T * b for b in range(p.B + 1)]
    q, k, gk, beta = (t.reshape(p.B * p.T, p.HV, -1) for t in (q, k, want["gk"], want["beta"]))
    chunk = 0
    for a, b in zip(ends, ends[1:], strict=False):
        for t in range(a, b, 64):
            rows, n = slice(t, min(t + 64, b)), min(64, b - t)
            G = gk[rows.stop - 1]
            tiles[chunk, :, 0, :n] = (k[rows] * gk[rows].exp2()).transpose(0, 1)
            tiles[chunk, :, 1, :n] = (k[rows] * (G - gk[rows]).exp2()).transpose(0, 1)
            tiles[chunk, :, 2, :n] = (q[rows] * gk[rows].exp2() * p.scale).transpose(0, 1)
            vec[chunk, :, : p.K] = G.exp2()
            vec[chunk, :, p.K : p.K + n] = beta[rows, :, 0].T
            chunk += 1
    assert chunk == p.NT
    return tiles.to(p.dtype).view(-1, p.K), vec.float().view(-1, p.K + 64)


def prepared(p, x, want, meta):
    """Arguments of the idea's `scan`."""
    tiles, vec = operands_of(p, x, want, meta)
    scores = {n: want[n].to(p.dtype) for n in ("Akk", "Aqk")}
    if p.varlen:
        for t in scores.values():
            t[:, meta["cu_seqlens"][-1] :] = float("nan")
    given = {n: x[n] for n in ("k_raw", "g_raw", "A_log", "dt_bias", "v", "h0")}
    tables = {n: meta[n] for n in ("cu_seqlens", "chunk_offsets")}
    return given | scores | tables | {"operands": tiles, "vec": vec}


def scanned(idea, p, given):
    o, ht = idea.scan(**{n: t.to(DEVICE) if torch.is_tensor(t) else t for n, t in given.items()}, p=p)
    return {"o": o.cpu(), "ht": ht if ht is None else ht.cpu()}


def compare_heads(got, want, p, case):
    """Head by head: one that forgets says little beside one that does not, and nothing else tells where it starts."""
    for hv, strength in zip(range(p.HV), case.get("strength", [1.0] * p.HV), strict=True):
        one = [
            {n: t if t is None else t[:, :, hv : hv + 1] if n == "o" else t[:, hv : hv + 1] for n, t in x.items()}
            for x in (got, want)
        ]
        compare(*one, p, case.get("cu"), 1.6 if strength == WEAK else 1.2)  # a rounding of the state lasts where WEAK


@pytest.mark.parametrize("case", CASES)
def test_output_and_final_state_match_fp64(case):
    p, x, meta, want = made(CASES[case])
    given = prepared(p, x, want, meta)
    want = {n: want[n] for n in ("o", "ht")}
    for schedule in schedules(few=case != "one_head_of_each_no_h0"):
        idea = load(schedule)
        assert idea.supports(p) == (True, "")
        assert idea.segment_plan(p)[2] > p.N
        compare_heads(scanned(idea, p, given), want, p, CASES[case])


WHOLE = {
    "softplus": SHAPE | RAW,
    "ragged_gva": SHAPE | SAFE | {"T": 1000, "HV": 2},
    "packed": SHAPE | RAW | {"T": 1100, "cu": [0, 1060]},
    "large_raw_gates": SHAPE | RAW | {"HV": 2, "values": "raw"},
    "large_raw_safe_gates": SHAPE | SAFE | {"HV": 2, "values": "raw"},
}


@pytest.mark.parametrize("case", WHOLE)
def test_everything_written_matches_fp64(case):
    p, x, meta, want = made(WHOLE[case])
    compare(whole(p, x, meta), want, p, WHOLE[case].get("cu"))


@pytest.mark.parametrize("wanted", [(), ("q_rstd", "k_rstd"), ("q", "k")])
def test_writes_what_is_wanted(wanted):
    p, x, meta, want = made(SHAPE | RAW)
    got = whole(p, x, meta, wanted=frozenset(wanted))
    assert set(got) == {"o", "ht", "Aqk", "Akk", *wanted}
    compare(got, {n: want[n] for n in got}, p, None)


def load_all():
    """The idea with its preparation, on a CPU too."""
    idea = load(schedules(few=True)[-1])
    if DEVICE == "cpu":
        from loop.tests import cute_blocks

        path = registry.find("014").kernel
        spec = importlib.util.spec_from_file_location("preparation_on_a_cpu", path)
        prep = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(prep)
        threads = cute_blocks.load(path)
        prep._compile = lambda key, dtypes: cute_blocks.launcher(threads, key)
        idea._prepare = prep._prepare
    return idea


def whole(p, x, meta, **kw):
    """The idea's `run`."""
    put = {n: t.to(DEVICE) if torch.is_tensor(t) else t for n, t in (x | meta).items()}
    got = load_all().run(**put, p=p, **kw)
    return {n: t.cpu() if torch.is_tensor(t) else t for n, t in got.items()}


LONGER = {
    "tiny_gate": {"T": 1024}, "tiny_safe": {"T": 1030}, "tiny_neg": {"T": 1024}, "tiny_state": {"T": 1024},
    "tiny_varlen": {"T": 2200, "lengths": (1100, 0, 1, 1099)}, "tiny_gva": {"H": 1, "HV": 2, "T": 1024},
    "tiny_strong": {"T": 1024}, "tiny_mask": {"T": 1024}, "tiny_reset": {"T": 1024}, "tiny_weak": {"T": 1024},
}


@pytest.mark.skipif(DEVICE != "cpu", reason="the check itself runs on a GPU")
@pytest.mark.parametrize("name", LONGER)
def test_everything_written_is_within_its_budget(name):
    """And nothing is read that was not written, nor written out of bounds."""
    idea = load_all()
    case = replace(cases.get("kda", name), **{"K": 128, "V": 128, **LONGER[name]})
    idea.supports = lambda p: (True, "")
    found = spans.check_spans(idea, case, grad=False)
    assert {e.tensor for e in found} >= {"gk", "Aqk", "Akk", "o"}
    assert [str(e) for e in found if not e.ok] == []


def test_same_bits_twice():
    p, x, meta, want = made(CASES["one_head_of_each_no_h0"])
    given = prepared(p, x, want, meta)
    first, second = (scanned(load(schedules(few=True)[-1]), p, given) for _ in range(2))
    assert all(t is None or torch.equal(t, second[n]) for n, t in first.items())


# ----------------------------------------------------------------------------------------------- where segments start
def starts(p, given):
    """What `reach` decides for a dense problem, and its segments: [slots, heads], [slots, 4]."""
    idea = registry.load("018")
    L, P, slots = idea.segment_plan(p)
    start = torch.full((slots, p.HV), -9, dtype=torch.int32, device=DEVICE)
    segments = torch.full((slots, 4), -9, dtype=torch.int64, device=DEVICE)
    names = ("k_raw", "g_raw", "A_log", "dt_bias", "operands", "vec", "Akk", "cu_seqlens", "chunk_offsets")
    idea.reach_kernel[(slots * p.HV,)](
        *(given[n].to(DEVICE) if torch.is_tensor(given[n]) else given[n] for n in names), segments, start,
        p.lower_bound or 0.0, p.T, p.N, L, P, H=p.H, HV=p.HV, K=p.K, VARLEN=p.varlen, GATE=p.gate,
        HAS_A=p.has_A_log, HAS_BIAS=p.has_dt_bias, L2NORM=p.l2norm, FAST=DEVICE == "cuda", ERASED=idea.ERASED,
        WALK=idea.WALK, num_warps=8,
    )
    return start.cpu(), segments.cpu()


def maps(p, want, s, hv, first):
    """The segment's map from its chunk `first` on, by its steps in fp64; and 010's bound of each chunk, in bits."""
    L = registry.load("018").segment_plan(p)[0]
    m, bits = torch.eye(p.K, dtype=torch.float64), []
    for t in range((s * L + first) * 64, (s + 1) * L * 64):
        g = want["gk"][0, t, hv] - (want["gk"][0, t - 1, hv] if t % 64 else 0)
        k, b = want["k"][0, t, hv * p.H // p.HV], want["beta"][0, t, hv]
        m = m * torch.exp2(g)[:, None]
        m = m - b * torch.outer(k, k @ m)
        bits.append(-g.max() - torch.log2((1 - b * k @ k).abs().clamp_min(1)))
    return m, torch.stack(bits).view(-1, 64).sum(1)


@pytest.mark.parametrize("case", [
    SHAPE | {"HV": 2, "strength": [0.5, 0.2]}, SHAPE | {"HV": 2, "strength": [0.03, 4.0]}, SHAPE | RAW | {"HV": 2},
    SHAPE | RAW | {"HV": 2, "values": "raw"}, SHAPE | SAFE | {"HV": 2, "values": "raw"},
])
def test_a_segment_is_cut_short_only_where_its_map_is_below_the_bound(case):
    p, x, meta, want = made(case)
    found, _ = starts(p, prepared(p, x, want, meta))
    L = registry.load("018").segment_plan(p)[0]
    assert found[0].ge(0).all()  # the first segment starts from what is known
    assert found[-1].eq(L).all()  # and nothing follows the last
    for s in range(1, found.shape[0] - 1):
        for hv in range(p.HV):
            first = max(int(found[s, hv]), 0)
            m, bits = maps(p, want, s, hv, first)
            if found[s, hv] >= 0:
                assert torch.linalg.matrix_norm(m, 2).log2() <= -47.9
            else:
                assert bits.sum() < 48


def test_scattered_gates_are_erased_in_a_chunk_and_weak_ones_not():
    """Where gates scatter from step to step the map as a whole says more than its steps; where they do not, less."""
    p, x, meta, want = made(SHAPE | {"HV": 2, "strength": [1.0, WEAK]})
    found, _ = starts(p, prepared(p, x, want, meta))
    L = registry.load("018").segment_plan(p)[0]
    assert found[1:-1, 0].eq(L - 1).all()
    assert maps(p, want, 1, 0, L - 1)[1].sum() < 48
    assert found[1:-1, 1].eq(-1).all()
    p, x, meta, want = made(SHAPE)
    x["g_raw"] = torch.full_like(x["g_raw"], -0.35)  # 32 bits a chunk: the steps' bound needs two
    want["gk"] = -0.35 * 1.4427 * (torch.arange(p.T) % 64 + 1.0)[None, :, None, None].expand_as(want["gk"]).double()
    found, _ = starts(p, prepared(p, x, want, meta))
    assert found[1:-1].eq(L - 2).all()


@pytest.mark.parametrize("keys", [4.0, 40.0])
def test_keys_and_betas_of_any_size_are_counted(keys):
    """Steps with |1 - beta |k|^2| > 1 stretch the state, so a decay that would do alone does not."""
    case = SHAPE | {"strength": [0.3]}
    found = []
    for size in (1.0, keys):
        p, x, meta, want = made(case, size)
        found.append(starts(p, prepared(p, x, want, meta))[0])
    assert (found[0][1:3] > found[1][1:3]).all()
    for s in (1, 2):
        first = int(found[1][s, 0])
        assert first < 0 or torch.linalg.matrix_norm(maps(p, want, s, 0, first)[0], 2).log2() <= -47.9


def test_nothing_is_cut_off_behind_a_nan():
    p, x, meta, want = made(SHAPE | {"strength": [STRONG]})
    given = prepared(p, x, want, meta)
    given["operands"][(7 * 3 + 1) * 64] = float("nan")  # the second segment's last chunk
    assert starts(p, given)[0][:, 0].tolist() == [3, -1, 3, 4]


def test_segments_name_their_tokens_and_chunks():
    p, x, meta, want = made(CASES["packed"])
    given = prepared(p, x, want, meta)
    _, found = starts(p, given)
    L = registry.load("018").segment_plan(p)[0]
    cu, offsets = meta["cu_seqlens"].tolist(), meta["chunk_offsets"].tolist()
    expected = []
    for n in range(p.N):
        pieces = range(0, cu[n + 1] - cu[n], L * 64)
        for at in pieces:
            flags = (at == 0) + 2 * (at == pieces[-1])
            expected.append([cu[n] + at, min(L * 64, cu[n + 1] - cu[n] - at), offsets[n] + at // 64, 4 * n + flags])
    assert [row for row in found.tolist() if row[1]] == expected


# ------------------------------------------------------------------------------------------------------------ the rest
FAULTS = {
    "a buffer's release": ("mbarrier.wait(early_free.index(s), phase)", "pass"),
    "a copy's wait": ("mbarrier.wait(late.index(s), phase)", "pass"),
    "a product's wait": ("warpgroup_mma_wait(1 if EMIT else 0, [x])", "warpgroup_mma_wait(2 if EMIT else 1, [x])"),
    "the end of the sequence": ("< n_t - i * 64\n", "< 64\n"),
    "the last o's departure": ("tma.store_wait(0)                                   #", "pass  #"),
    "zeros for v where M is built": ("c_v = gl.where(values, c_v, HV * V)", "pass"),
    "the chunk that B starts from": ("tile = tile + c_0 * HV", "pass"),
    "the identity": ("b_S = gl.where(o_m + diag == o_d, b_S + 1.0, b_S)", "pass"),
}


@pytest.mark.skipif(DEVICE != "cpu", reason="the emulation stands in for a GPU")
@pytest.mark.parametrize("fault", FAULTS)
def test_the_emulation_notices_what_is_missing(fault, tmp_path):
    right, wrong = FAULTS[fault]
    text = registry.find("018").kernel.read_text()
    assert text.count(right) == 1
    path = tmp_path / "broken_split_operands" / "kernel.py"
    path.parent.mkdir()
    path.write_text(text.replace(right, wrong))
    p, x, meta, want = made(CASES["packed"])
    given, want = prepared(p, x, want, meta), {n: want[n] for n in ("o", "ht")}
    for schedule in reversed(schedules(few=False)):
        try:
            compare_heads(scanned(load(schedule, path), p, given), want, p, CASES["packed"])
        except AssertionError:
            return
    pytest.fail("nothing noticed")


def test_compiles_for_hopper():
    idea = registry.load("018")
    for job, built in zip(idea.COMPILE, sm90.compile_each(idea.COMPILE), strict=True):
        assert built.smem <= 227 * 1024
        assert inflight.overwritten(built.ttgir) == []
        if job[0] is idea.scan_kernel:  # the products run beside the code: ptxas adds no wait
            waits = len(re.findall(r"wgmma\.wait_group", built.ptx))
            assert built.sass.count("WARPGROUP.DEPBAR") == waits == (8 if job[2]["EMIT"] else 6)
            assert len(re.findall(r"\b(LDL|STL)\b", _loops(built.sass))) <= 2  # Triton 3.6 leaves a load a warpgroup
            assert built.spills <= 400  # addresses of the start and end states
        else:
            assert built.spills <= 8  # join, as 010's for packed batches


def test_packed_batches_of_any_length_compile_once(monkeypatch):
    idea = registry.load("018")
    seen = kinds_of_calls(monkeypatch, idea)
    plans = []
    for N, T in PACKED_LENGTHS:
        p = KdaProblem(1, T, 1, 8, 128, 128, N, -(-T // 64), varlen=True, output_final_state=True, arch=(9, 0))
        assert idea.supports(p) == (True, "")
        plans.append(idea.segment_plan(p))
        shapes = {"k_raw": (1, T, 1, 128), "operands": (p.NT * 8 * 192, 128)}
        shapes |= dict.fromkeys(("g_raw", "v"), (1, T, 8, 128)) | dict.fromkeys(("Akk", "Aqk"), (1, T, 8, 64))
        given = {name: torch.empty(shape, dtype=p.dtype) for name, shape in shapes.items()}
        given |= {"vec": torch.empty(p.NT * 8, 192), "h0": torch.empty(N, 8, 128, 128), "A_log": None, "dt_bias": None}
        given |= dict.fromkeys(("cu_seqlens", "chunk_offsets"), torch.empty(N + 1, dtype=torch.int64))
        idea.scan(**given, p=p)
    assert len(set(plans)) == len({L for L, _, _ in plans}) == len(plans)
    assert {n: len(kinds) for n, kinds in seen.items()} == {"reach_kernel": 1, "scan_kernel": 2, "join_kernel": 1}
    assert len({dict(kind)["EMIT"] for kind in seen["scan_kernel"]}) == 2  # build and emit


def test_refuses_what_is_not_for_it():
    idea = registry.load("018")
    p = KdaProblem(1, 4096, 16, 16, 128, 128, 1, 64, arch=(9, 0))
    assert idea.supports(p) == (True, "")
    assert idea.supports(replace(p, K=64)) == (False, "needs K=128, got 64")
    assert idea.supports(replace(p, V=192)) == (False, "needs V a multiple of 128, got 192")
    assert idea.supports(replace(p, dtype=torch.float16)) == (False, "needs bf16 q, k, v, got torch.float16")
    assert idea.supports(replace(p, arch=(10, 0))) == (False, "needs compute capability 9.x, got 10.0")
    assert idea.supports(replace(p, B=8, N=8, NT=512)) == (
        False, "needs at most 66 scans (sequences x heads x V tiles), got 128")
    assert idea.supports(replace(p, T=512, NT=8)) == (False, "needs 16 chunks of 64 tokens a sequence, got 8 in 1")
    assert idea.supports(replace(p, T=0, NT=0)) == (False, "needs a token")


def test_serves_exactly_where_014_serves_the_front_alone():
    idea, front = registry.load("018"), registry.load("014")
    shapes = ((1, 4096, 16), (1, 65536, 32), (4, 8192, 32), (2, 4096, 33), (2, 4096, 34), (1, 1023, 4), (1, 960, 4))
    for B, T, HV in shapes:
        p = KdaProblem(B, T, HV, HV, 128, 128, B, B * -(-T // 64), arch=(9, 0))
        assert idea.supports(p)[0] == (front.FRONT in front.spans(p))


