"""torch.compile (fullgraph off): no more graph breaks than fla, changing shapes, autocast and checkpointing inside."""
import importlib

import pytest
import torch
from small_inputs import conv, kda
from torch.utils.checkpoint import checkpoint

import kernel_fun.fla
from kernel_fun import probes
from kernel_fun.cconv import causal_conv1d
from kernel_fun.kda import chunk_kda

OPERATORS = {"kda": (chunk_kda, kda), "cconv": (causal_conv1d, conv)}


@pytest.fixture(autouse=True)
def fresh_compiler():
    torch._dynamo.reset()


@pytest.fixture
def fla_on_a_cpu(monkeypatch):
    """fla's own entry points, as compiled code meets them; below them run stand-ins for kernels that need a GPU."""
    pytest.importorskip("fla.backends", reason="fla before 0.6 breaks elsewhere")

    class Function:
        @staticmethod
        def apply(q, k, v, *rest):
            return v * 1.0, None

    monkeypatch.setattr(importlib.import_module("fla.ops.kda.chunk"), "ChunkKDAFunction", Function)
    kernel_fun.fla.register()
    kernel_fun.fla._registry(importlib.import_module("fla.ops.kda").chunk_kda)._backends.pop("kernel_fun")
    yield
    kernel_fun.fla.unregister()


@pytest.mark.parametrize("family", OPERATORS)
def test_no_more_graph_breaks_than_fla(fla_on_a_cpu, family):
    """Nor more graphs, after each of three lengths."""
    theirs = probes.compiled(family, "fla", "cpu")
    torch._dynamo.reset()
    ours = probes.compiled(family, "ours", "cpu")
    assert theirs["breaks"] >= 1  # the stand-ins are where fla's kernels are: outside the graph
    assert ours["breaks"] <= theirs["breaks"]
    assert all(a <= b for a, b in zip(ours["graphs"], theirs["graphs"], strict=True))


@pytest.mark.parametrize("family", OPERATORS)
def test_dynamic_shapes(family):
    operator, make = OPERATORS[family]
    graphs = []

    def count(graph, example_inputs):
        graphs.append(graph)
        return graph.forward

    def block(*inputs):
        inputs = [t * 1.0 for t in inputs]
        return operator(*inputs)[0] * 2.0

    compiled = torch.compile(block, dynamic=True, backend=count)
    for B, T in ((3, 70), (5, 20), (7, 130)):  # no size equal to another of the call: the compiler would tie the two
        tensors, _ = make(B=B, T=T)
        got, want = compiled(*tensors.values()), block(*tensors.values())
        assert torch.equal(got, want)
        leaves = list(tensors.values())
        a, b = (torch.autograd.grad(out.square().sum(), leaves) for out in (got, want))
        assert all(torch.equal(x, y) for x, y in zip(a, b, strict=True))
    assert len(graphs) == 2  # before and after the operator, once for all shapes


@pytest.mark.parametrize("family", OPERATORS)
def test_autocast_and_checkpointing_inside(family):
    operator, make = OPERATORS[family]
    tensors, _ = make(dtype=torch.float32)

    def layer(*inputs):
        return operator(*inputs)[0]

    def block(*inputs):
        with torch.autocast("cpu", dtype=torch.bfloat16):
            inputs = [t * 1.0 for t in inputs]
            return checkpoint(layer, *inputs, use_reentrant=False) * 2.0

    want = layer(*tensors.values()) * 2.0
    got = torch.compile(block, backend="eager")(*tensors.values())
    assert torch.equal(got, want)
    leaves = list(tensors.values())
    a, b = (torch.autograd.grad(out.sum(), leaves) for out in (got, want))
    assert all(torch.equal(x, y) for x, y in zip(a, b, strict=True))
