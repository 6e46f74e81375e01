"""Idea 022 against its stages in fp64, on the CPU: its kernel thread by thread."""

import re
import sys
from dataclasses import replace
from pathlib import Path
from typing import ClassVar
from unittest import mock

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from loop import registry, spans
from loop.tests import cute_banks, cute_cpu, cute_races
from loop.tests.test_bwd_keys_exact_idea import SMALL as PARENTS
from loop.tests.test_bwd_keys_idea import STEPS, pairs_in_fp64

pytest.importorskip("cutlass", reason="the idea needs nvidia-cutlass-dsl (the workspace's extra `cute`)")
pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="the kernels themselves are tested there")
PATH, STAGES = registry.find("022").kernel, "kernel_fun.kda.stages."
SMALL = {name: replace(case, V=128) for name, case in PARENTS.items()} | {
    "ragged": replace(PARENTS["ragged"], V=128, H=2, HV=2),
}


class Chain:
    """The idea's module and those of 021 and 015 of which it takes functions: what is set in one is set in all."""

    def __init__(self, path=PATH):
        from kernel_fun.kda.stages import k015_bwd_keys, k021_bwd_keys_turned

        modules, loaded = [], {}
        for module in (k015_bwd_keys, k021_bwd_keys_turned, None):
            with mock.patch.dict(sys.modules, loaded):
                modules.insert(0, cute_cpu.load(Path(module.__file__) if module else path))
            if module:
                loaded[module.__name__] = modules[0]
        self.__dict__["modules"] = modules

    def __getattr__(self, name):
        return getattr(next((m for m in self.modules if hasattr(m, name)), self.modules[0]), name)

    def __setattr__(self, name, value):
        for module in self.modules:
            setattr(module, name, value)


def emulated(monkeypatch, source=PATH, **constants):
    """The idea with its kernel on the CPU."""
    idea, chain = registry.load("022"), Chain(source)
    for name, value in constants.items():
        setattr(chain, name, value)
    monkeypatch.setattr(idea, "supports", lambda p: (True, ""))
    monkeypatch.setattr(idea, "_compile", lambda cfg, dtypes: cute_cpu.launcher(chain, chain._Config(*cfg)))
    return idea


@pytest.mark.parametrize("name", SMALL)
def test_every_gradient_is_within_its_budget(name, monkeypatch):
    """The emulation raises on overflow and on NaNs, so that neither can hide in a row nobody stores."""
    if name == "raw_safe":
        cute_cpu.far_out(monkeypatch)
    found = spans.check_spans(emulated(monkeypatch), SMALL[name])
    assert {e.tensor for e in found} >= {"dq", "dk", "dv", "dg", "dbeta"}
    assert [str(e) for e in found if not e.ok] == []


def races(monkeypatch, name, source=PATH):
    class Ptx(cute_races.Ptx):
        found: ClassVar = []

    monkeypatch.setattr(cute_cpu, "Ptx", Ptx)
    spans.check_spans(emulated(monkeypatch, source), SMALL[name])
    return Ptx.found


@pytest.mark.parametrize("name", ["gate", "fp32_gate", "log_normed", "gva", "ragged"])
def test_no_thread_reads_or_overwrites_too_early(name, monkeypatch):
    assert races(monkeypatch, name) == []


BARRIERS = [m.span() for m in re.finditer(r"ptx\.sync_(warp|cta)\(\)", PATH.read_text())]


@pytest.mark.parametrize("span", BARRIERS, ids=str)
def test_every_barrier_is_needed(span, monkeypatch, tmp_path):
    text, copy = PATH.read_text(), tmp_path / "kernel.py"
    copy.write_text(text[: span[0]] + "None" + text[span[1] :])
    assert races(monkeypatch, "gate", copy) != []


def asked_and_read(monkeypatch, case, ahead):
    """Of each CTA: 64-byte pieces it asks L2 for, those of them that are states, and those it reads."""
    runs = []

    class Ptx(cute_cpu.Ptx):
        def __init__(self, *given):
            super().__init__(*given)
            self.read = set()
            runs.append(self)

        def copy(self, to, address, n, l2="", live=True):
            super().copy(to, address, n, l2, live)
            self.read |= {int(x) // 64 for x in cute_cpu.threads(address, np.int64)[cute_cpu.threads(live, bool)]}

        def load_state(self, address, off):
            self.read |= {int(x + off) // 64 for x in cute_cpu.threads(address, np.int64)}
            return super().load_state(address, off)

    monkeypatch.setattr(cute_cpu, "Ptx", Ptx)
    spans.check_spans(emulated(monkeypatch, AHEAD=ahead), case)
    asked = [[{x // 64 for at, n in run.asked if n > least for x in range(at, at + n, 64)} for least in (0, 1)]
             for run in runs]
    return [(*x, run.read) for x, run in zip(asked, runs, strict=True)]


def test_asks_for_what_a_later_cta_reads(monkeypatch):
    """One chunk further on, where there is one: all it reads but dt_bias, and of Akk what is above the diagonal."""
    found = asked_and_read(monkeypatch, replace(SMALL["gate"], B=1, H=2, HV=2, T=192), 2)
    assert [len(x) > 0 for x, _, _ in found] == [True] * 4 + [False] * 2
    for (now, _, _), (_, _, later) in zip(found, found[2:], strict=False):
        assert len(later - now) <= 128 * 4 // 64
        assert len(now - later) <= 64


def test_asks_for_no_state_that_is_not_there(monkeypatch):
    found = asked_and_read(monkeypatch, SMALL["varlen"], 1)
    _, states, read = (set().union(*x) for x in zip(*found, strict=True))
    assert states
    assert states <= read


def pairs_alone(step, q=None, k=None, do=None, dv=None, v_new=None, seed=0):
    """One chunk without states, v or pairs of a row with itself in E: dq, dk, dg [64,K], db [64]; and the same from
    fp64. Akk is one, so that y is dv."""
    draw = torch.Generator().manual_seed(seed)
    drawn = [F.normalize(torch.randn(64, 128, generator=draw), dim=-1).bfloat16() for _ in range(2)]
    q, k = (x if given is None else given for x, given in zip(drawn, (q, k), strict=True))
    drawn = [torch.randn(64, 128, generator=draw).bfloat16() for _ in range(3)]
    do, dv, v_new = (x if given is None else given for x, given in zip(drawn, (do, dv, v_new), strict=True))
    beta, gk, scale = 2 * torch.rand(64, generator=draw), step.cumsum(0), 128.0**-0.5
    chain = Chain()
    cfg = chain._Config(False, "log", False, False, False, False, 4, 1, 1)
    out = [torch.zeros(64 * 128).bfloat16() for _ in range(3)] + [torch.zeros(64 * 128), torch.zeros(64)]
    none, table, state = torch.zeros(128), torch.zeros(4, dtype=torch.int64), torch.zeros(128 * 128).bfloat16()
    given = [q, k, gk, beta, torch.zeros_like(do), v_new, do, dv, torch.eye(64).bfloat16(), state, state]
    given += [none] * 5 + [*out, none, none, table, table]
    cute_cpu.launcher(chain, cfg)(*(x.reshape(-1) for x in given), 64, scale, 0.0, 1.0, 1, 1)
    D, E = scale * (do.double() @ v_new.double().T), -(dv.double() @ v_new.double().T)
    want = pairs_in_fp64(q, k, D, E, beta, step)
    diag = D.diagonal()[:, None]
    want[0].add_(diag * k.double())
    want[1].add_(diag * q.double())
    assert (out[0].view(64, 128).double() - beta[:, None].double() * dv.double()).norm() <= 2.5e-3 * dv.double().norm()
    return [x.double().view(y.shape) for x, y in zip(out[1:], want, strict=True)], want


@pytest.mark.parametrize("name", STEPS)
def test_pairs_of_rows_at_any_gate(name):
    got, want = pairs_alone(STEPS[name])
    for x, y, limit in zip(got, want, (4e-3, 4e-3, 5e-3, 3e-3), strict=True):
        scale = max(y.norm().item(), 1e-6)
        assert (x - y).norm() <= limit * scale, (name, float((x - y).norm() / scale))


@pytest.mark.parametrize("step", [-5.0, -16.0, -24.0])
def test_pairs_close_by_are_exact_to_sixteen_bits(step):
    """At strong gates neighbours are all there is; of them only those of different 8 rows are rounded, 7 of 63; at -5
    also what the next but one leave, a thirtieth of it."""
    (_, _, dg, _), (_, _, want, _) = pairs_alone(torch.full((64, 128), step))
    row = torch.arange(64)
    for rows, limit in ((row % 8 != 0, 1e-4), ((row % 8 == 0) & (row > 0), 5e-3)):
        assert (dg - want)[rows].norm() <= limit * want[rows].norm()


@pytest.mark.parametrize("name", ["none", "typical", "beyond", "masks"])
def test_every_pair_leaves_dg_as_it_entered(name):
    """The same operands on both sides, or 16 bits of them: the sum over a chunk is 0 up to 2^-16 of what it leaves."""
    (_, _, dg, _), _ = pairs_alone(STEPS[name])
    assert dg[0].abs().max() <= 2.0**-16 * dg.abs().sum(0).max()


def test_no_access_to_shared_memory_meets_a_bank_twice():
    """A warp's reads, what it turns and stores 16 bytes wide, take no more passes over the 32 banks than there are 128
    bytes; nor do copies."""
    names = ("lds", "sts_frag", "copy", "ldmatrix_n", "put_turned", "put_rows")
    met = cute_banks.most(lambda: pairs_alone(STEPS["typical"]), names)
    assert met
    assert max(met) == 1


def test_refuses_what_it_cannot_do():
    idea = registry.load("022")
    p = replace(SMALL["gate"].problem(), arch=(9, 0))
    assert idea.supports(p) == (True, "")
    assert idea.supports(replace(p, K=64)) == (False, "needs K=128, got 64")
    assert idea.supports(replace(p, V=256)) == (False, "needs V=128, got 256")
    assert not idea.supports(replace(p, B=2**16))[0]
