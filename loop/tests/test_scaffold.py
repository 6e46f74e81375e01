"""`./ladder new`: what it writes works at once, and bad input writes nothing."""

import pytest
import torch

import loop.tests.notebook_tools  # noqa: F401
from kernel_fun.kda import autograd, chain
from loop import arms, cases, inputs, notebooks, registry, scaffold


def new(number="031", slug="fuse-gate", family="kda", spans=("fwd.gate",), parent=None):
    return scaffold.new(number, slug, family=family, spans=spans, parent=parent)


def outputs(p, x, ideas=()):
    plan = chain.make_plan(p, ideas=ideas, base="reference", shipped=False)
    leaves = [None if x[n] is None else x[n].clone().requires_grad_() for n in inputs.LEAVES["kda"]]
    o, _ = autograd.apply(plan, p, *leaves)
    grads = torch.autograd.grad([o], [t for t in leaves if t is not None], [x["do"]])
    return plan, (o, *grads)


@pytest.mark.parametrize("spans", [
    ["fwd.gate"], ["bwd.intra..bwd.cumsum"], ["bwd.gate"], ["fwd.scan..fwd.out", "bwd.rescan..bwd.dhu"],
    ["fwd.norm..fwd.out", "bwd.regate..bwd.beta"],
], ids=" ".join)  # fmt: skip
@pytest.mark.parametrize("case", ["tiny", "tiny_gate"])
def test_the_starting_kernel_equals_the_reference_chain_to_the_bit(ladder_root, spans, case):
    folder = new(spans=spans)
    module = registry.load("031")
    case = cases.get("kda", case)
    p, x = case.problem(), inputs.make(case, 3)
    plan, got = outputs(p, x, [module])
    assert sum(step.source == module.__name__ for step in plan.forward + plan.backward) == len(spans)
    _, wanted = outputs(p, x)
    assert all(torch.equal(a, b) for a, b in zip(got, wanted, strict=True))
    assert registry.lint("031") == []
    assert sorted(f.name for f in folder.iterdir()) == ["IDEA.md", "bench.ipynb", "kernel.py"]


def test_the_convolution_has_a_starting_kernel_too(ladder_root):
    new("032", "strip", family="cconv", spans=["fwd", "bwd"])
    case = cases.get("cconv", "tiny")
    x = inputs.make(case, 3)
    ours, theirs = (inputs.run(arms.make("cconv", name).op, x) for name in ("032", "000"))
    assert all(a is b or torch.equal(a, b) for a, b in zip(ours.values(), theirs.values(), strict=True))


def test_documents_name_the_idea_and_its_contract(ladder_root):
    new("7", "sum-heads", spans=["bwd.gva"])
    folder = new("8", "next", spans=["bwd.gva..bwd.cumsum"], parent="007")
    facts = registry.front_matter(folder)
    assert list(facts) == ["id", "slug", "family", "spans", "parent", "status"]
    assert list(facts.values()) == ["008", "next", "kda", "[bwd.gva..bwd.cumsum]", "007", "proposed"]
    assert "`bwd.gva..bwd.cumsum` reads dq, dk, dg and writes dq, dk, dg." in (folder / "IDEA.md").read_text()
    assert notebooks.problems(folder / "bench.ipynb") == []


@pytest.mark.parametrize(("change", "says"), [
    ({"number": "000"}, "1 to 999"), ({"number": "x1"}, "1 to 999"), ({"number": "1234"}, "1 to 999"),
    ({"number": "005"}, "taken by 005-sum-heads; the next free one is 006"), ({"number": "5"}, "taken"),
    ({"slug": "Fuse"}, "lower-case"), ({"slug": "a_b"}, "lower-case"), ({"slug": ""}, "lower-case"),
    ({"slug": "../x"}, "lower-case"),
    ({"family": "gdn"}, "one of kda, cconv"),
    ({"spans": ["fwd.gatee"]}, "no stage 'fwd.gatee'"), ({"spans": ["fwd.out..fwd.gate"]}, "comes before"),
    ({"spans": ["fwd.out..bwd.wy"]}, "one span per pass"), ({"spans": []}, "at least one"),
    ({"spans": ["fwd.gate", "fwd.out"]}, "one span per pass"),
    ({"parent": "027"}, "no idea '027'"),
    ({"parent": "005", "family": "cconv", "spans": ["fwd"]}, "of family kda, not cconv"),
])  # fmt: skip
def test_bad_input_is_one_line_and_writes_nothing(ladder_root, add_idea, change, says):
    add_idea("005")
    before = sorted(ladder_root.rglob("*"))
    with pytest.raises(ValueError, match=r".") as error:
        new(**change)
    assert says in str(error.value)
    assert "\n" not in str(error.value)
    assert sorted(ladder_root.rglob("*")) == before


def test_an_interrupted_scaffold_leaves_nothing(ladder_root, monkeypatch):
    def interrupt(*args, **kwargs):
        raise KeyboardInterrupt

    monkeypatch.setattr(notebooks, "write", interrupt)
    with pytest.raises(KeyboardInterrupt):
        new()
    assert list((ladder_root / "ideas").iterdir()) == []
