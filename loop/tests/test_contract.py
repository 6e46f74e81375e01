"""The contract: it agrees with the chain it describes, its spans and floors are right, its tables are complete."""

import math

import pytest
import torch

from kernel_fun._common import packed
from loop import cases, contract, inputs, tensors

TINY_KDA = [c for c in cases.select("kda", "tiny") if c.id != "tiny_persist"]


@pytest.mark.parametrize("family", cases.FAMILIES)
def test_every_tensor_of_the_chain_is_described_and_no_other(family):
    named = {n for s in contract.stages(family) for n in (*s.reads, *s.writes)}
    described = {n.partition("@")[0] for n in tensors.TABLES[family]}
    assert named == described
    stages = {s.name: s for s in contract.stages(family)}
    for key in tensors.TABLES[family]:
        name, at, stage = key.partition("@")
        assert not at or name in stages[stage].writes, key


@pytest.mark.parametrize("family", cases.FAMILIES)
def test_every_stage_has_a_reference_and_everything_written_a_budget(family):
    for stage in contract.stages(family):
        assert callable(contract.reference(family, stage.name))
    assert set(contract.BUDGETS[family]) == {n for s in contract.stages(family) for n in s.writes}
    assert set(contract.BUDGETS[family]) >= set(contract.chain(family).OUTPUTS)


@pytest.mark.parametrize("case", [*TINY_KDA, *cases.select("cconv", "tiny")], ids=lambda c: f"{c.family}-{c.id}")
def test_the_reference_chain_keeps_the_contract_at_every_stage(case):
    """Shapes, dtypes and None of every tensor that the plain-torch chain passes from stage to stage."""
    family, p, x = case.family, case.problem(), inputs.make(case, 1)
    chain = contract.chain(family)
    plan = chain.make_plan(p, base="reference", shipped=False)
    named = {tensors.OP_NAMES[family].get(n, n): t for n, t in x.items()}
    env = {n: named[n] for n in chain.INPUTS}
    meta = {"p": p, "cu_seqlens": x["cu_seqlens"], "chunk_indices": None, "chunk_offsets": None}
    if x["cu_seqlens"] is not None:
        tables = packed.describe(x["cu_seqlens"])
        meta |= {"chunk_indices": tables.chunk_indices, "chunk_offsets": tables.chunk_offsets}
    for step in plan.forward + plan.backward:
        if step is plan.backward[0]:
            env |= {n: named[n] for n in chain.BWD_INPUTS}
        for name in step.reads:
            contract_holds(family, name, step.span[0], False, env[name], p)
        env |= step(env, meta)
        for name in step.writes:
            contract_holds(family, name, step.span[-1], True, env[name], p)


def contract_holds(family, name, stage, written, found, p):
    t = contract.tensor(family, name, stage, written)
    at = f"{name} {'after' if written else 'before'} {stage}"
    assert (found is not None) == contract.present(t, p), at
    if found is not None:
        assert tuple(found.shape) == contract.shape(t, p), at
        assert found.dtype == contract.dtype(t, p), at


def test_a_tensor_changes_with_the_stages_it_passes():
    before = contract.tensor("kda", "dq", "bwd.gva")
    after = contract.tensor("kda", "dq", "bwd.gva", written=True)
    assert before.shape == ("B", "T", "HV", "K")
    assert after.shape == ("B", "T", "H", "K")
    assert contract.tensor("kda", "dq") == contract.tensor("kda", "dq", "bwd.norm", written=True)
    with pytest.raises(ValueError, match="tensor 'nope' is unknown in kda"):
        contract.tensor("kda", "nope")


def test_outputs_have_their_inputs_dtypes_and_are_absent_where_the_input_is():
    p = cases.get("kda", "tiny_varlen").problem()
    found = contract.outputs("kda", p)
    assert found["dg"].dtype == torch.bfloat16
    assert found["dbeta"].dtype == torch.float32
    assert found["dh0"].shape == (4, 1, 64, 64)
    assert found["dh0"].present
    assert found["dA_log"].present
    bare = contract.outputs("kda", cases.get("kda", "tiny").problem())
    assert not any(bare[n].present for n in ("ht", "dh0", "dA_log", "ddt_bias"))


@pytest.mark.parametrize(
    ("text", "stages"),
    [
        ("bwd.intra", ("bwd.intra",)),
        ("bwd.intra..bwd.cumsum", ("bwd.intra", "bwd.gva", "bwd.cumsum")),
        ("fwd.norm..fwd.out", tuple(s.name for s in contract.stages("kda") if s.name.startswith("fwd"))),
    ],
)
def test_spans(text, stages):
    assert contract.parse_span("kda", text) == stages


@pytest.mark.parametrize("text", ["bwd.intr", "bwd.cumsum..bwd.intra", "fwd.out..bwd.regate", "", "fwd"])
def test_bad_spans_say_so_in_one_line(text):
    with pytest.raises(ValueError, match="span") as info:
        contract.parse_span("kda", text)
    assert "\n" not in str(info.value)


def test_a_span_reads_what_comes_from_outside_and_writes_what_is_wanted_there():
    span = "bwd.intra..bwd.cumsum"
    assert set(contract.span_reads("kda", span)) == {"q", "k", "gk", "beta", "dAqk", "dAkk", "dq", "dk", "db", "dg"}
    assert contract.span_writes("kda", span) == ("dq", "dk", "db", "dg")
    assert contract.span_writes("kda", "fwd.scan..fwd.out") == ("ht", "o")


@pytest.mark.parametrize(
    ("family", "case", "mode", "ms", "bound"),
    [
        ("kda", "kimi8192_softplus", "fwd", 0.32, "hbm"),
        ("kda", "kimi8192_softplus", "bwd", 0.71, "tensor"),
        ("kda", "prod8192_gate", "fwd", 0.94, "tensor"),
        ("kda", "prod8192_gate", "bwd", 2.45, "tensor"),
        ("cconv", "prod8192_qk", "fwd", 0.256, "hbm"),
        ("cconv", "prod8192_qk", "bwd", 0.384, "hbm"),
        ("cconv", "prod8192_v", "fwd", 0.511, "hbm"),
        ("cconv", "prod8192_v", "bwd", 0.767, "hbm"),
    ],
)
def test_floors_of_the_production_cases(family, case, mode, ms, bound):
    floor = contract.floor(family, mode, cases.get(family, case).problem())
    assert math.isclose(floor.ms, ms, rel_tol=0.01)
    assert floor.bound == bound


def test_fwdbwd_is_the_sum_and_bad_modes_are_named():
    p = cases.get("kda", "tiny_gate").problem()
    fwd, bwd, both = (contract.floor_ms("kda", m, p) for m in contract.MODES)
    assert math.isclose(both, fwd + bwd)
    with pytest.raises(ValueError, match="mode 'back' is unknown; known: fwd, bwd, fwdbwd"):
        contract.floor("kda", "back", p)


def test_bytes_by_hand():
    p = cases.get("kda", "tiny").problem()  # B2 T128 H1 K64 V64, bf16, fp32 gate and beta
    rows = 2 * 128
    given = rows * (64 * 2 * 3 + 64 * 4 + 4)  # q k v, g, beta
    assert contract.floor("kda", "fwd", p).bytes == given + rows * 64 * 2
    assert contract.floor("kda", "bwd", p).bytes == given + rows * 64 * 2 + given
    # gk in and out are fp32: reverse cumsum reads dg and writes dg
    assert contract.stage_bytes("kda", "bwd.cumsum", p) == 2 * rows * 64 * 4


def test_a_fused_span_moves_no_more_than_its_stages():
    p = cases.get("kda", "prod8192_gate").problem()
    span = "bwd.intra..bwd.cumsum"
    fused = contract.span_floor("kda", span, p)
    apart = sum(contract.stage_bytes("kda", s, p) for s in contract.parse_span("kda", span))
    assert fused.bytes < apart
    assert fused.flops == contract.stage_flops("kda", "bwd.intra", p) == 4 * 2 * 64 * 64 * 128 * 2048 * 16


@pytest.mark.parametrize("family", cases.FAMILIES)
def test_documentation_rows_are_complete(family):
    rows = contract.table(family)
    for stage in contract.stages(family):
        mine = [r for r in rows if r["stage"] == stage.name]
        assert [r["tensor"] for r in mine] == [*stage.reads, *stage.writes]
        assert all(r["meaning"] and r["unit"] and r["shape"].startswith("[") for r in mine)


def test_budgets_by_dtype():
    coarse, fine = (cases.get("cconv", n).problem() for n in ("tiny", "tiny_fp16"))
    assert contract.budget("cconv", "y", coarse) == 5e-3
    assert contract.budget("cconv", "y", fine) == 1e-3
    assert contract.budget("kda", "dg", cases.get("kda", "tiny").problem()) == 2e-2
