"""Idea 019 against its stages in fp64, on the CPU: its value side as torch, its key side thread by thread in numpy."""

import sys
from dataclasses import replace
from pathlib import Path
from unittest import mock

import pytest
import torch
import torch.nn.functional as F

from loop import registry, sm90, spans
from loop.tests import cute_cpu, gluon_as_torch
from loop.tests.test_bwd_grads_gluon_idea import tile
from loop.tests.test_bwd_keys_idea import SMALL as PARENTS
from loop.tests.test_bwd_keys_idea import STEPS, case_of, pairs_in_fp64

pytest.importorskip("cutlass", reason="the idea's key side needs nvidia-cutlass-dsl (the workspace's extra `cute`)")
pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="the kernels themselves are tested there")
PATH, PARENT = registry.find("019").kernel, "kernel_fun.kda.stages.k015_bwd_keys"


def value_side():
    values, clock = gluon_as_torch.load(PATH)
    values._tiles = lambda x, rows, columns: gluon_as_torch.Descriptor(x, [rows, columns])
    return values, clock


class Both:
    """An idea's module and 015's, of which it takes functions: what is set in the one is set in the other."""

    def __init__(self, path=PATH):
        from kernel_fun.kda.stages import k015_bwd_keys

        parent = cute_cpu.load(Path(k015_bwd_keys.__file__))
        with mock.patch.dict(sys.modules, {PARENT: parent}):
            self.__dict__["modules"] = cute_cpu.load(path), parent

    def __getattr__(self, name):
        return getattr(self.modules[0], name)

    def __setattr__(self, name, value):
        for module in self.modules:
            setattr(module, name, value)


SMALL = PARENTS | {
    "log_normed": case_of("tiny", T=70, B=1, l2norm=True),
    "gate_alone": case_of("tiny_gate", T=70, H=1, l2norm=False),
    "gva": case_of("tiny_gva", T=96, H=2, HV=4),
    "gva_gate_alone": case_of("tiny_gva", T=64, H=1, HV=2, l2norm=False),
    "gva_of_three": case_of("tiny_gva", T=64, H=1, HV=3),
    "gva_log": case_of("tiny", T=64, B=1, H=1, HV=2),
    "gva_varlen": case_of("tiny_varlen", H=1, HV=2),
}


@pytest.mark.parametrize("name", SMALL)
def test_every_gradient_is_within_its_budget(name, monkeypatch):
    """The emulation raises on overflow and on NaNs, so that neither can hide in a row nobody stores."""
    if name == "raw_safe":
        cute_cpu.far_out(monkeypatch)
    idea, keys = registry.load("019"), Both()
    values, _ = value_side()
    for attr, fake in {
        "value_kernel": values.value_kernel, "_tiles": values._tiles, "supports": lambda p: (True, ""),
        "_compile": lambda cfg, dtypes: cute_cpu.launcher(keys, keys._Config(*cfg)),
    }.items():
        monkeypatch.setattr(idea, attr, fake)
    found = spans.check_spans(idea, SMALL[name])
    assert {e.tensor for e in found} >= {"dq", "dk", "dv", "dg", "dbeta"}
    assert [str(e) for e in found if not e.ok] == []


@pytest.mark.parametrize(("products", "loads", "stores"), gluon_as_torch.schedules())
def test_the_value_side_waits_for_what_it_reads(products, loads, stores):
    values, clock = value_side()
    outputs = []
    for clock.products, clock.loads, clock.stores in (("late",) * 3, (products, loads, stores)):
        case = case_of("tiny_varlen")
        p = case.problem()
        env, meta = spans.operands(case, p, "bwd.wy", 0, torch.device("cpu"))
        given = {n: env[n] for n in ("v", "v_new", "gk", "beta", "Akk", "h", "do", "dh", "dv")}
        meta = {n: meta[n] for n in ("cu_seqlens", "chunk_indices")}
        with mock.patch.object(torch.Tensor, "new_empty", torch.Tensor.new_zeros):  # not all is written
            states, dv = values.value_side(**given, **meta, p=p)
        outputs.append([*states, dv])
    assert all(torch.equal(a, b) for a, b in zip(*outputs, strict=True))


def pairs_alone(step, q=None, k=None, D=None, E=None, seed=0, path=PATH):
    """One chunk without states or pairs of a row with itself: dq, dk, dg [64,K], db [64]; and the same from fp64. D and
    E, [64,64], are handed over as the value side does, with NaNs where nobody may look."""
    draw = torch.Generator().manual_seed(seed)
    drawn = [F.normalize(torch.randn(64, 128, generator=draw), dim=-1).bfloat16() for _ in range(2)]
    q, k = (x if given is None else given for x, given in zip(drawn, (q, k), strict=True))
    drawn = [torch.randn(64, 64, generator=draw).tril(-1) for _ in range(2)]
    D, E = (x if given is None else given for x, given in zip(drawn, (D, E), strict=True))
    beta, gk = 2 * torch.rand(64, generator=draw), step.cumsum(0)
    row = torch.arange(64)
    near, above = (row[:, None] // 8 == row // 8), (row[:, None] // 16 < row // 16)
    hi = [x.bfloat16() for x in (D, E)]
    rest = torch.stack([(x - y)[near].view(64, 8).bfloat16() for x, y in zip((D, E), hi, strict=True)], 1)
    D, E = (torch.where(near, y.float() + (x - y).bfloat16(), y) for x, y in zip((D, E), hi, strict=True))
    hi = [x.masked_fill(above, float("nan")) for x in hi]
    keys = Both(path)
    cfg = keys._Config(False, "log", False, False, False, False, 4, 1, 1)
    none, far = torch.zeros(64 * 128).bfloat16(), torch.zeros(128)
    out = [torch.zeros(64 * 128).bfloat16(), torch.zeros(64 * 128).bfloat16(), torch.zeros(64 * 128), torch.zeros(64)]
    rows, table = torch.zeros(128), torch.zeros(4, dtype=torch.int64)
    given = [q, k, gk, beta, none, none, none, *hi, rest, rows, far, far, far, far, far, far, *out]
    given += [far, far, table, table]
    cute_cpu.launcher(keys, cfg)(*(x.reshape(-1) for x in given), 64, 0.0, 1.0, 1, 1)
    want = pairs_in_fp64(q, k, D, E, beta, step)
    return [x.double().view(y.shape) for x, y in zip(out, want, strict=True)], want


@pytest.mark.parametrize("name", STEPS)
def test_pairs_of_rows_at_any_gate(name):
    got, want = pairs_alone(STEPS[name])
    for x, y, limit in zip(got, want, (4e-3, 4e-3, 5e-3, 3e-3), strict=True):
        scale = max(y.norm().item(), 1e-6)
        assert (x - y).norm() <= limit * scale, (name, float((x - y).norm() / scale))


@pytest.mark.parametrize("step", [-5.0, -16.0, -24.0])
def test_pairs_close_by_are_exact_to_sixteen_bits(step):
    """At strong gates neighbours are all there is; of them only those of different 16 rows are rounded, 3 of 63."""
    (_, _, dg, _), (_, _, want, _) = pairs_alone(torch.full((64, 128), step))
    row = torch.arange(64)
    for rows, limit in ((row % 16 != 0, 3e-5), ((row % 16 == 0) & (row > 0), 5e-3)):
        assert (dg - want)[rows].norm() <= limit * want[rows].norm()


@pytest.mark.parametrize("name", ["none", "typical", "beyond", "masks"])
def test_every_pair_leaves_dg_as_it_entered(name):
    """The same operands on both sides, or 16 bits of them: the sum over a chunk is 0 up to 2^-16 of what it leaves."""
    (_, _, dg, _), _ = pairs_alone(STEPS[name])
    assert dg[0].abs().max() <= 2.0**-16 * dg.abs().sum(0).max()


def test_equal_keys_leave_no_gradient_where_nothing_passes():
    """Unit keys, all the same, at g = -5: what the pairs leave behind is below 2^-17 of them."""
    one = F.normalize(torch.ones(64, 128), dim=-1).bfloat16()
    step = torch.full((64, 128), -5 / 0.6931471805599453)
    (_, _, dg, _), (_, _, want, _) = pairs_alone(step, q=one, k=one)
    assert (dg - want)[0].abs().max() <= 2.0**-17 * want.abs().sum(0).max()


@pytest.mark.parametrize(("norm", "packed"), [(True, False), (False, False), (True, True)])
def test_a_groups_partials_are_summed_and_then_normed(norm, packed):
    idea, T, H, G = registry.load("019"), 37, 2, 3
    draw = torch.Generator().manual_seed(0)
    partials = [torch.randn(T * H * G, 128, generator=draw).bfloat16() for _ in range(2)]
    x = [torch.randn(T * H, 128, generator=draw).bfloat16() for _ in range(2)]
    rstd, out = [1 / y.float().norm(dim=-1) for y in x], [torch.empty_like(y) for y in x]
    bounds = torch.tensor([0, 20, 30]) if packed else None
    rows = T * H
    if packed:
        for y in (*partials, *x, *rstd):
            y.view(T, -1)[30:] = float("nan")
    idea.group_kernel[(-(-rows // idea.GROUP_ROWS), 2)](
        *partials, *x, *rstd, *out, bounds, 2, rows, H=H, G=G, K=128, NORM=norm, IS_VARLEN=packed, BR=idea.GROUP_ROWS,
    )
    for d, y, r, got in zip(partials, x, rstd, out, strict=True):
        want, y = d.double().view(rows, G, 128).sum(1), y.double() * r.double()[:, None]
        if norm:
            want = r.double()[:, None] * (want - y * (y * want).sum(1, keepdim=True))
        if packed:
            want[30 * H :] = 0
        assert (got.double() - want).norm() <= 2.5e-3 * want.norm()


@pytest.mark.parametrize(("V", "packed"), [(256, False), (128, True)])
def test_the_value_side_compiles_for_hopper(V, packed):
    """As 011's: what it spills is read once a chunk, and ptxas adds no waits between its products."""
    signature = {name: tile(64) for name in ("d_do", "d_dv", "d_vn", "d_v", "d_A")}
    signature |= {"d_h": tile(128), "d_dh": tile(128), "d_g": tile(64, 128, "fp32", 32)}
    signature |= {"scale": "fp32", "T": "i32", "total": "i32", "programs": "i32"}
    signature |= dict.fromkeys(("gk", "beta", "rows", "tail"), "*fp32")
    signature |= dict.fromkeys(("xq", "xu", "xd", "D", "E", "rest", "dv_out"), "*bf16")
    constants, tables = {"HV": 16, "K": 128, "V": V, "IS_VARLEN": packed, "STAGES": 3}, ("cu_seqlens", "chunk_indices")
    if packed:
        signature |= dict.fromkeys(tables, "*i64")
    else:
        constants |= dict.fromkeys(tables)
    built = sm90.compile_one(registry.load("019").value_kernel, signature, constants, 8)
    assert built.regs <= 255
    assert built.spills <= 80
    assert built.smem <= 227 * 1024
    assert built.sass.count("WARPGROUP.DEPBAR") == 2


def test_refuses_what_it_cannot_do():
    idea = registry.load("019")
    p = replace(SMALL["gate"].problem(), arch=(9, 0))
    assert idea.supports(p) == (True, "")
    assert idea.supports(replace(p, K=64)) == (False, "needs K=128, got 64")
    assert not idea.supports(replace(p, B=2**16))[0]
