"""Arms on a CPU: names, sources, and that every way of splicing computes what the baseline computes."""

import os
import types

import pytest
import torch

from loop import arms, bench, cases, check, env, inputs, peers
from loop.environ import environment
from loop.tests.conftest import GOOD_KERNEL

CASE = cases.get("kda", "tiny_gva")


def outputs(arm, case=CASE):
    return inputs.run(arm.op, inputs.make(case, 3, "cpu"))


def test_the_baseline_on_a_cpu_says_what_it_is():
    arm = arms.make("kda", "000")
    assert "fla cannot run on a CPU" in arm.what
    assert arm.stages(CASE) == ("reference",)
    assert arm.supports(CASE) == (True, "")


@pytest.mark.parametrize("name", ["005", "005@000", "005+006"])
def test_a_spliced_idea_runs_in_the_chain(add_idea, name):
    add_idea()
    add_idea("006", "same-cumsum", SECOND)
    arm = arms.make("kda", name)
    want, got = outputs(arms.make("kda", "000")), outputs(arm)
    assert all(torch.equal(got[n], want[n]) for n in want if want[n] is not None)
    assert sum(s.startswith("idea_") for s in arm.stages(CASE)) == name.count("+") + 1
    assert arm.supports(CASE)[0]


SECOND = (
    GOOD_KERNEL[: GOOD_KERNEL.index("def run")]
    + """
def run(*, beta_raw, beta, db, p):
    if not p.beta_sigmoid:
        return {"dbeta": db}
    return {"dbeta": db * beta * (1 - beta / p.beta_scale)}


SPANS = {"bwd.beta": run}
"""
)


def test_gradients_only_when_asked(add_idea):
    add_idea()
    given = inputs.make(CASE, 0, "cpu")
    given["q"].requires_grad_()
    arm = arms.make("kda", "005")
    assert arm.op(given, grad=True)[0].requires_grad
    assert not arm.op(given, grad=False)[0].requires_grad


def test_the_sha_is_the_loaded_source_and_the_current_one_follows_the_disk(add_idea):
    folder = add_idea()
    arm = arms.make("kda", "005")
    assert arm.source_sha == arm.current_sha()
    (folder / "kernel.py").write_text(GOOD_KERNEL + "# edited\n")
    assert arm.source_sha != arm.current_sha()
    assert arms.make("kda", "005").source_sha == arm.current_sha()


def test_a_combination_has_a_sha_of_its_own(add_idea):
    add_idea()
    add_idea("006", "same-cumsum", SECOND)
    shas = {arms.make("kda", name).source_sha for name in ("005", "006", "005+006")}
    assert len(shas) == 3


def test_a_case_that_an_idea_refuses(add_idea):
    add_idea(source=GOOD_KERNEL.replace("p.K <= 256", "p.K <= 32"))
    assert arms.make("kda", "005").supports(CASE) == (False, "005: needs K <= 256, got 64")


@pytest.mark.parametrize(
    ("family", "name", "message"),
    [
        ("kda", "004", r"no arm '004' in kda \(did you mean 00"),
        ("kda", "shipp", r"no arm 'shipp' in kda \(did you mean ship\?\)"),
        ("kda", "005@006", "the base after @ is ship or 000"),
        ("kda", "005+999", r"no arm '005\+999'"),
        ("kda", "000+005", "no arm"),
        ("cconv", "005", "idea 005 belongs to kda, not to cconv"),
        ("kda", "fla-gluon", "no arm 'fla-gluon' in kda"),
        ("gdn", "000", "family 'gdn' is unknown"),
    ],
)
def test_bad_names_get_one_line(add_idea, family, name, message):
    add_idea()
    with pytest.raises(arms.ArmError, match=message) as caught:
        arms.make(family, name)
    assert "\n" not in str(caught.value)


def test_an_idea_that_does_not_import_is_named(add_idea):
    add_idea(source="import torch\nboom\n")
    with pytest.raises(arms.ArmError, match=r"005-sum-heads does not import: kernel.py:2: NameError"):
        arms.make("kda", "005")


def test_peers_that_are_not_here_are_listed_apart(add_idea, monkeypatch, tmp_path):
    add_idea()
    monkeypatch.setenv("PEER_KERNEL_FUN", str(tmp_path))
    with pytest.raises(arms.ArmError, match=r"arms are .*005@000; not installed here: kernel_fun-0\.2\.0"):
        arms.make("kda", "999")
    (tmp_path / "kernel_fun").mkdir()
    (tmp_path / "kernel_fun" / "__init__.py").touch()
    with pytest.raises(arms.ArmError, match=r"arms are 000, ship, fla-gluon, kernel_fun-0\.2\.0, and [^;]*$"):
        arms.make("cconv", "999")


@pytest.mark.parametrize(("family", "name"), [(f, n) for f in peers.PEERS for n in peers.names(f)])
def test_peers_say_why_they_cannot_run_here(family, name):
    if torch.cuda.is_available():
        pytest.skip("this machine has a GPU")
    case = cases.get(family, "tiny")
    assert arms.make(family, name).supports(case) == (False, "needs a GPU")


def test_the_gluon_switch_is_on_in_both_passes_and_then_as_before(monkeypatch):
    """The backward runs later, outside the call that made the graph."""
    from fla.modules.causal_conv1d import ops

    seen = []

    class Recorder(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            seen.append(os.environ.get("FLA_CONV_GLUON"))
            return x * 2

        @staticmethod
        def backward(ctx, g):
            seen.append(os.environ.get("FLA_CONV_GLUON"))
            return g * 2

    monkeypatch.setattr(ops, "CausalConv1dFunction", Recorder)
    monkeypatch.setenv("FLA_CONV_GLUON", "0")
    peers._gluon_function.cache_clear()
    x = torch.ones(2, requires_grad=True)
    try:
        peers._gluon_function().apply(x).sum().backward()
    finally:
        peers._gluon_function.cache_clear()
    assert seen == ["1", "1"]
    assert os.environ["FLA_CONV_GLUON"] == "0"


def test_the_earlier_package_is_loaded_under_a_name_of_its_own(tmp_path, monkeypatch):
    package = tmp_path / "kernel_fun"
    (package / "cconv").mkdir(parents=True)
    (package / "__init__.py").write_text("__version__ = '0.2.0'\n")
    (package / "_common.py").write_text("WHO = 'peer'\n")
    (package / "cconv" / "__init__.py").write_text("from .._common import WHO\n")
    monkeypatch.setenv("PEER_KERNEL_FUN", str(tmp_path))
    peers._kernel_fun_package.cache_clear()
    try:
        assert peers._kernel_fun_op("cconv").WHO == "peer"
    finally:
        peers._kernel_fun_package.cache_clear()
    import kernel_fun

    assert kernel_fun.__version__ != "0.2.0"


def test_environment_variables_are_put_back(monkeypatch):
    monkeypatch.delenv("FLA_X", raising=False)
    monkeypatch.setenv("FLA_Y", "old")
    with environment(FLA_X="1", FLA_Y="2"):
        assert (os.environ["FLA_X"], os.environ["FLA_Y"]) == ("1", "2")
    assert "FLA_X" not in os.environ
    assert os.environ["FLA_Y"] == "old"


def test_rows_can_say_where_the_tree_stands_without_git(ladder_root, monkeypatch):
    assert env.git_state() == {"git_commit": None, "git_dirty": None, "git_source": "unknown"}
    monkeypatch.setenv("LOOP_GIT_COMMIT", "ab" * 20)
    assert env.git_state() == {"git_commit": "ab" * 20, "git_dirty": True, "git_source": "environment"}
    monkeypatch.setenv("LOOP_GIT_DIRTY", "0")
    assert env.git_state()["git_dirty"] is False


def test_the_configurations_of_fla_are_recorded_by_content(tmp_path, monkeypatch):
    folder = tmp_path / "NVIDIA_H200"
    folder.mkdir()
    (folder / "a.json").write_text("{}")
    monkeypatch.setenv("FLA_CONFIG_DIR", str(folder))
    env._config_dir.cache_clear()
    first = env.switches()["FLA_CONFIG_DIR"]
    assert first.startswith("NVIDIA_H200: 1 files, sha256 ")
    (folder / "a.json").write_text("{ }")
    env._config_dir.cache_clear()
    assert env.switches()["FLA_CONFIG_DIR"] != first


@pytest.mark.gpu
def test_on_a_gpu_the_baseline_launches_fla_and_nothing_of_ours():
    case = cases.get("cconv", "t2048")
    launched = arms.make("cconv", "000").launches(inputs.make(case, 0, "cuda"))
    assert any("causal_conv1d" in name for name in launched), launched


def test_launches_are_empty_on_a_cpu():
    if torch.cuda.is_available():
        pytest.skip("this machine has a GPU")
    assert arms.witness(types.SimpleNamespace(), None, "fwd") == {}


NORM = (
    GOOD_KERNEL[: GOOD_KERNEL.index("def run")]
    + """
ASKED = []


def run(*, q_raw, k_raw, p, wanted=frozenset()):
    ASKED.append(wanted)
    rstd = [(x.float().square().sum(-1) + 1e-6).rsqrt() if p.l2norm else None for x in (q_raw, k_raw)]
    made = [x if r is None else (x * r[..., None]).to(x.dtype) for x, r in zip((q_raw, k_raw), rstd)]
    return dict(zip(("q", "k", "q_rstd", "k_rstd"), made + rstd))


SPANS = {"fwd.norm": run}
"""
)


def test_a_forward_without_gradients_asks_for_less(add_idea):
    """As the package's own op: what the arm's chain would keep for a backward, no step is asked for."""
    add_idea(source=NORM)
    arm, given = arms.make("kda", "005"), inputs.make(CASE, 0, "cpu")
    for op in (arm.op, arm.held_op):
        given["q"].requires_grad_()
        op(given, True)
        op(given, False)
    asked = arm.modules[0].ASKED
    assert asked == 2 * [{"q", "k", "q_rstd", "k_rstd"}, {"q", "k"}]


GATE = (
    GOOD_KERNEL[: GOOD_KERNEL.index("def run")]
    + """
def run(*, g_raw, p):
    gk = g_raw.float().view(p.B, p.T // 64, 64, p.HV, p.K).cumsum(2) * (1.4426950408889634 * FACTOR)
    return {"gk": gk.view(g_raw.shape)}


SPANS = {"fwd.gate": run}
"""
)


@pytest.mark.parametrize(("factor", "status"), [("1.0", "PASSED"), ("1.003", "WRONG_VALUE")])
def test_a_stage_that_is_wrong_by_less_than_the_outputs_show_is_named(add_idea, factor, status):
    """0.3 % of the gate leave every output within its budget, so only the stage's own comparison finds it."""
    add_idea(source=GATE.replace("FACTOR", factor))
    result = check.check(arms.make("kda", "005"), cases.get("kda", "tiny"), grad=False)
    assert str(result.status) == status, result.message
    assert all(e.ok for e in result.errors.values())
    if status == "PASSED":
        assert result.proofs["spans"].startswith("1 tensors")
    else:
        assert result.message.startswith("005-sum-heads: fwd.gate: gk is 3.00e-03 from its stages in fp64")


@pytest.mark.parametrize(
    ("old", "new", "status", "message"),
    [
        ('{"dq": dq', '{} and {"dq": dq', "WRONG_DTYPE",
         "005-sum-heads: bwd.gva did not return dq, but an empty dict; expected a dict of dq, dk"),
        ('dq.reshape(group).sum(3), ', 'dq.reshape(group).sum(3).half(), ', "WRONG_DTYPE",
         "005-sum-heads: bwd.gva: dq is float16 [1, 96, 2, 64]; expected float32 or bfloat16 [1, 96, 2, 64]"),
        ("group = (p.B", "group = (p.nope", "ERROR", "005-sum-heads/kernel.py:18: AttributeError: 'KdaProblem'"),
        ('(True, "") if', "True if", "ERROR",
         "ideas/005-sum-heads/kernel.py: supports(p) returned True; expected (True, '') or (False, reason)"),
        ("if p.K <=", "if p.nope <=", "ERROR", "supports(p) raised kernel.py:14: AttributeError: 'KdaProblem'"),
    ],
)  # fmt: skip
def test_a_slip_of_an_idea_is_named_by_idea_span_and_tensor(add_idea, old, new, status, message):
    assert old in GOOD_KERNEL
    add_idea(source=GOOD_KERNEL.replace(old, new))
    arm = arms.make("kda", "005")
    result = check.check(arm, CASE)
    assert (str(result.status), message in result.message) == (status, True), result.message
    (_, row) = bench.bench("kda", ["005"], CASE, "fwd", blocks=1)
    assert (row.status, message in row.reason) == (status, True), row.reason


def test_a_package_that_changed_under_a_running_process_is_not_timed_as_what_it_is_now(ladder_root):
    stage = ladder_root / "package/src/kernel_fun/kda/stages/k001.py"
    stage.parent.mkdir(parents=True)
    stage.write_text("ONE = 1\n")
    first = arms.make("kda", "ship")
    assert arms.make("kda", "ship").source_sha == first.source_sha == first.current_sha()
    stage.write_text("ONE = 2\n")
    assert first.current_sha() != first.source_sha
    with pytest.raises(ValueError, match="restart the notebook's kernel"):
        arms.make("kda", "ship")
    stage.write_text("ONE = 1\n")
    assert arms.make("kda", "ship").source_sha == first.source_sha
