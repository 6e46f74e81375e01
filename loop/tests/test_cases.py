"""Cases: ids, problems, tags, errors; and inputs: seeds, distributions, layouts, the way gradients are taken."""

import dataclasses
import math

import pytest
import torch

from loop import cases, inputs

hypothesis = pytest.importorskip("hypothesis")
given, settings, st = hypothesis.given, hypothesis.settings, hypothesis.strategies

ALL = [case for family in cases.FAMILIES for case in cases.family_cases(family).values()]
TINY = [case for case in ALL if "tiny" in case.tags]


def test_the_named_cases_are_there():
    wanted = """
        prod8192_gate prod8192 prod8192_gate_b8 kimi8192_softplus kimi8192_safe long64k_softplus small gva varlen8192
        ragged strong strong_mask tiny tiny_gate tiny_safe tiny_ragged tiny_varlen tiny_gva tiny_state tiny_strong
        tiny_mask
    """
    assert set(wanted.split()) <= set(cases.family_cases("kda"))
    wanted = """
        prod8192_qk prod8192_v t2048 b1t65536 w2 w3 fp16 fp32 sliced transposed packed packed_short varlen8192
    """
    assert set(wanted.split()) <= set(cases.family_cases("cconv"))


def test_prod8192_gate_is_the_training_call():
    p = cases.get("kda", "prod8192_gate").problem((9, 0))
    assert (p.B, p.T, p.H, p.HV, p.K, p.V) == (16, 8192, 16, 16, 128, 256)
    assert (p.gate, p.l2norm, p.beta_dtype, p.beta_sigmoid, p.arch) == ("softplus", True, torch.float32, False, (9, 0))
    assert p.NT == 16 * 128
    assert p.scale == 128**-0.5


def test_chunks_of_packed_sequences_are_counted_per_sequence():
    p = cases.get("kda", "tiny_varlen").problem()
    assert cases.get("kda", "tiny_varlen").lengths == (70, 0, 1, 100)
    assert (p.N, p.NT, p.varlen, p.chunks_per_row) == (4, 2 + 0 + 1 + 2, True, 5)


@pytest.mark.parametrize("case", ALL, ids=lambda c: f"{c.family}-{c.id}")
def test_every_case_is_for_one_kind_of_machine_and_says_why(case):
    assert len(case.tags & {"tiny", "gpu"}) == 1
    assert case.tags <= {"tiny", "gpu", "smoke", "primary", "full"}
    assert case.why
    assert case.describe()
    assert hash(case.problem()) == hash(case.problem())


def test_identities_are_unique_and_ignore_the_words():
    shas = [case.sha for case in ALL]
    assert len(set(shas)) == len(shas)
    case = cases.get("kda", "tiny")
    assert cases.KdaCase(**{**_fields(case), "why": "other words"}).sha == case.sha
    assert cases.KdaCase(**{**_fields(case), "T": 256}).sha != case.sha


@pytest.mark.parametrize(("name", "sha"), [
    ("tiny", "4e72ff01af57c210"), ("tiny_mask", "b36939de29d2577d"), ("tiny_reset", "76dd1e6ce8abffa1"),
    ("prod8192_gate", "4288d232a629a9c0"), ("kimi8192_softplus", "1f1fee8f2cd9ff2e"),
    ("strong_mask", "ae0c6979d23708e5"),
])
def test_what_draws_learn_later_leaves_older_identities_alone(name, sha):
    """Rows that were measured long ago name them."""
    assert cases.get("kda", name).sha == sha
    assert "raw" not in repr(cases.get("kda", name).dist)
    assert "raw=(20.0, 60.0, 200.0)" in repr(cases.get("kda", "tiny_raw").dist)


def _fields(case):
    return {name: getattr(case, name) for name in case.__dataclass_fields__}


def test_packed_lengths_must_agree_with_T():
    with pytest.raises(ValueError, match="lengths sum to 7"):
        cases.KdaCase(id="x", T=8, H=1, K=64, V=64, why="", tags=frozenset(), lengths=(3, 4))


def test_unknown_names_give_one_line_with_the_closest():
    with pytest.raises(ValueError, match=r"^case 'prod8192gate' is unknown in kda; closest: prod8192_gate, [^\n]*$"):
        cases.get("kda", "prod8192gate")
    with pytest.raises(ValueError, match="family 'kdda' is unknown; known: kda, cconv"):
        cases.get("kdda", "tiny")


def test_a_gpu_case_on_a_cpu_is_refused_with_the_ones_that_run():
    with pytest.raises(ValueError, match=r"needs a GPU.*tiny_gate"):
        cases.require_device(cases.get("kda", "prod8192"), "cpu")
    cases.require_device(cases.get("kda", "tiny"), "cpu")


# ----------------------------------------------------------------------------------------------------------- inputs
@pytest.mark.parametrize("case", TINY, ids=lambda c: f"{c.family}-{c.id}")
def test_same_seed_same_bits_other_seed_other_values(case):
    a, b, c = inputs.make(case, 5), inputs.make(case, 5), inputs.make(case, 6)
    for name, t in a.items():
        if t is None:
            assert b[name] is None
            assert c[name] is None
            continue
        assert torch.equal(t, b[name])
        assert torch.isfinite(t).all() or (name == "g" and case.dist.mask_value == -torch.inf)
        if name != "cu_seqlens":
            assert not torch.equal(t, c[name]), name


def test_distributions_are_the_training_calls():
    x = inputs.make(cases.get("kda", "tiny_gate"), 0)
    assert x["g"].dtype == torch.bfloat16
    assert 0.9 < x["g"].float().std() < 1.1
    assert x["A_log"].min() >= 0
    assert x["A_log"].max() <= math.log(16)
    assert 0.4 < x["dt_bias"].std() < 0.6
    assert x["beta"].dtype == torch.float32
    assert x["beta"].max() > 1
    assert x["beta"].min() > 0
    assert x["beta"].max() < 2
    assert x["q"].min() >= 0
    assert x["initial_state"] is None
    assert x["dht"] is None


def test_keys_have_unit_length_unless_the_kernel_normalises():
    given, raw = (inputs.make(cases.get("kda", n), 0)["k"].float().norm(dim=-1) for n in ("tiny", "tiny_gate"))
    assert (given - 1).abs().max() < 1e-2
    assert raw.min() > 2


def test_masks_and_strengths():
    g = inputs.make(cases.get("kda", "tiny_mask"), 0)["g"]
    assert 0.05 < (g == -1000).float().mean() < 0.15
    mild, strong = (inputs.make(cases.get("kda", n), 0)["g"].mean() for n in ("tiny", "tiny_strong"))
    assert 12 < strong / mild < 20
    logits = inputs.make(cases.get("kda", "tiny_safe"), 0)["beta"]
    assert logits.min() < 0, "beta is raw where the kernel applies the sigmoid"


def test_raw_gates_reach_both_ends():
    x = inputs.make(cases.get("kda", "tiny_raw"), 0)
    assert x["A_log"].tolist() == pytest.approx([math.log(15.5), -math.log(15.5)], abs=0.04)
    large = x["g"][x["g"].abs() > 10].float()
    assert set(large.tolist()) == {-200, -60, -20, 20, 60, 200}
    assert 0.2 < large.numel() / x["g"].numel() < 0.3


@pytest.mark.parametrize(("name", "least", "most"), [("equal_keys", 0.98, 1.0), ("equal_keys_beta2", 1.96, 2.0)])
def test_equal_keys_are_one_and_beta_is_near_its_most(name, least, most):
    case = dataclasses.replace(cases.get("kda", name), T=70)
    x = inputs.make(case, 0)
    assert torch.equal(x["k"], x["k"][:, :1].expand_as(x["k"]))
    assert x["k"].is_contiguous()
    assert not torch.equal(x["q"][:, 0], x["q"][:, 1])
    assert least <= x["beta"].min() <= x["beta"].max() <= most


def test_layouts_of_x_are_what_their_names_say():
    sliced, turned = (inputs.make(cases.get("cconv", n), 0)["x"] for n in ("tiny_sliced", "tiny_transposed"))
    assert sliced.shape == turned.shape == (2, 70, 48)
    assert sliced.stride() == (70 * 144, 144, 1)
    assert sliced.storage_offset() == 48
    assert turned.stride() == (48 * 70, 1, 70)


def test_numpy_draws_do_not_depend_on_torch():
    x = inputs.NumpySampler(0, "cpu")
    assert torch.allclose(x.randn(3, dtype=torch.float64), torch.tensor([1.76405235, 0.40015721, 0.97873798]).double())


def test_run_returns_every_name_and_accumulates_nothing():
    case = cases.get("kda", "tiny_gate")
    x = inputs.make(case, 0)
    found = inputs.run(lambda y, grad: (y["v"] * y["beta"][..., None].to(y["v"].dtype), None), x)
    assert tuple(found) == (*inputs.RESULTS["kda"], *inputs.GRADIENTS["kda"])
    assert found["dv"].dtype == x["v"].dtype
    assert found["dq"] is None
    assert found["ht"] is None
    assert all(t is None or t.grad is None for t in x.values())
    assert tuple(inputs.run(lambda y, grad: (y["v"], None), x, grad=False)) == ("o", "ht")


@settings(max_examples=20, deadline=None)
@given(st.lists(st.integers(0, 200), min_size=1, max_size=6))
def test_any_packing_counts_its_chunks(lengths):
    case = cases.KdaCase(id="x", T=sum(lengths), H=1, K=8, V=8, why="", tags=frozenset(), lengths=tuple(lengths))
    p = case.problem()
    assert len(lengths) == p.N
    assert sum(math.ceil(n / 64) for n in lengths) == p.NT
    assert inputs.make(case, 0)["cu_seqlens"].diff().tolist() == lengths
