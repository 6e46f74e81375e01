"""fla's contract: signatures, every argument handled or declined with a reason, errors, None and dtype patterns."""
import inspect
import math
from types import SimpleNamespace

import numpy
import pytest
import torch
from small_inputs import conv, gradients, kda

from kernel_fun import cconv
from kernel_fun import kda as ours
from kernel_fun._common import dispatch
from kernel_fun.kda import autograd, chunk_kda, is_supported


def fla_function(family):
    if family == "kda":
        from fla.ops.kda import chunk_kda as fla
    else:
        from fla.modules.convolution import causal_conv1d as fla
    return fla


MINE = {"kda": (ours.chunk_kda, ours.is_supported), "cconv": (cconv.causal_conv1d, cconv.is_supported)}


# ---------------------------------------------------------------------------------------------------------- arguments
@pytest.mark.parametrize("family", MINE)
def test_signature_is_flas(family):
    """Same names, order, kinds and defaults; on an older fla, ours may only have more at the end."""
    theirs = list(inspect.signature(fla_function(family)).parameters.values())
    for mine in MINE[family]:
        got = list(inspect.signature(mine).parameters.values())
        assert theirs[-1].kind is got[-1].kind is inspect.Parameter.VAR_KEYWORD
        facts = [(p.name, p.kind, p.default) for p in got]
        assert facts[: len(theirs) - 1] == [(p.name, p.kind, p.default) for p in theirs[:-1]]


def test_is_supported_takes_what_the_operator_takes():
    for operator, question in MINE.values():
        assert inspect.signature(operator).parameters == inspect.signature(question).parameters


# Every argument of chunk_kda beside the five tensors: a value unlike its default, and what it means on a CPU.
KDA_ARGUMENTS = {
    "scale": (0.5, True),
    "initial_state": (torch.zeros(2, 2, 16, 8, dtype=torch.float64), True),
    "output_final_state": (True, True),
    "use_qk_l2norm_in_kernel": (True, True),
    "use_gate_in_kernel": (True, "A_log"),
    "use_beta_sigmoid_in_kernel": (True, True),
    "allow_neg_eigval": (True, "use_beta_sigmoid_in_kernel"),
    "safe_gate": (True, True),
    "lower_bound": (-3.0, True),
    "disable_recompute": (True, True),
    "return_intermediate_states": (True, "return_intermediate_states=True"),
    "state_v_first": (True, True),
    "cu_seqlens": (torch.tensor([0, 2]), "B=2"),
    "cu_seqlens_cpu": (torch.tensor([0, 2]), True),
    "cp_context": (object(), "cp_context=object"),
    "use_graph": (True, "use_graph=True"),
    "max_num_seqs": (4, True),
    "kwargs": ({"surprise": 1}, "'surprise' is not known here"),
}
CONV_ARGUMENTS = {
    "weight": (None, "weight must be [D, W]"),
    "bias": (torch.zeros(6, dtype=torch.float64), True),
    "residual": (torch.zeros(2, 20, 6, dtype=torch.float64), True),
    "initial_state": (torch.zeros(2, 6, 4, dtype=torch.float64), True),
    "output_final_state": (True, True),
    "activation": ("silu", True),
    "backend": ("cuda", "backend='cuda'"),
    "cu_seqlens": (torch.tensor([0, 2]), "B=2"),
    "cu_seqlens_cpu": (torch.tensor([0, 2]), True),
    "chunk_indices": (torch.tensor([[0, 0]]), True),
    "cp_context": (object(), "cp_context=object"),
    "kwargs": ({"seq_idx": torch.zeros(1)}, "'seq_idx' is not known here"),
}


@pytest.mark.parametrize(("family", "arguments"), [("kda", KDA_ARGUMENTS), ("cconv", CONV_ARGUMENTS)])
def test_every_argument_is_handled_or_declined_with_a_reason(family, arguments):
    tensors, _ = kda(grad=False) if family == "kda" else conv()
    operator, question = MINE[family]
    names = [n for n in inspect.signature(operator).parameters if n not in ("q", "k", "v", "g", "beta", "x")]
    assert names == list(arguments)
    for name, (value, outcome) in arguments.items():
        call = {**tensors, **(value if name == "kwargs" else {name: value})}
        ok, reason = question(**call)
        assert ok is (outcome is True), (name, reason)
        if not ok:
            assert outcome in reason, name


def test_gpu_only_declines_are_about_fla_features():
    """On a GPU two more arguments mean fla: they choose how it computes."""
    tensors, _ = kda(grad=False)
    from kernel_fun.kda import ops

    call = {**dict.fromkeys(ops._DEFAULTS), **ops._DEFAULTS, **tensors, "kwargs": {}}
    assert ops._fla_features(call, on_cpu=False) == ""
    assert ops._fla_features({**call, "disable_recompute": True}, on_cpu=False) == "disable_recompute=True"
    assert ops._fla_features({**call, "kwargs": {"chunk_size": 32}}, on_cpu=False) == "chunk_size=32"


# ------------------------------------------------------------------------------------------------------------- errors
def bad_kda(name):
    tensors, flags = kda(h0=True, gate="softplus", dtype=torch.float32)
    packed, packed_flags = kda(sequences=(5, 7), T=12, h0=True, dtype=torch.float32)
    two = torch.zeros(2, 2, 16, 8)
    cases = {
        # fla's own table
        "old_and_new_name": (tensors, {**flags, "state_v_first": True, "transpose_state_layout": True}, ValueError),
        "packed_batch": ({**tensors}, {**flags, "cu_seqlens": torch.tensor([0, 70])}, ValueError),
        "packed_states": ({**packed, "initial_state": torch.zeros(3, 2, 16, 8)}, packed_flags, ValueError),
        "state_dtype": ({**tensors, "initial_state": two.bfloat16()}, flags, AssertionError),
        "no_A_log": ({**tensors, "A_log": None}, flags, ValueError),
        "chunk_size": (tensors, {**flags, "chunk_size": 16}, ValueError),
        "safe_without_bound": (tensors, {**flags, "safe_gate": True}, ValueError),
        "safe_bound_low": (tensors, {**flags, "safe_gate": True, "lower_bound": -6.0}, ValueError),
        "safe_bound_zero": (tensors, {**flags, "safe_gate": True, "lower_bound": 0.0}, ValueError),
        "neg_eigval": (tensors, {**flags, "allow_neg_eigval": True}, ValueError),
        "k_shape": ({**tensors, "k": tensors["k"][:, :-1]}, flags, AssertionError),
        "heads": ({**tensors, "v": torch.zeros(2, 70, 3, 8)}, flags, AssertionError),
        "g_shape": ({**tensors, "g": tensors["g"][..., :-1]}, flags, AssertionError),
        "beta_shape": ({**tensors, "beta": tensors["beta"][..., :-1]}, flags, AssertionError),
        "q_dims": ({**tensors, "q": tensors["q"][0]}, flags, ValueError),
        "k_dims": ({**tensors, "k": tensors["k"][0]}, flags, AssertionError),
        "g_dims": ({**tensors, "g": tensors["g"][0]}, flags, AssertionError),
        "beta_dims": ({**tensors, "beta": tensors["beta"][0]}, flags, AssertionError),
        # beyond it
        "v_dims": ({**tensors, "v": tensors["v"][..., 0]}, flags, ValueError),
        "state_dims": ({**tensors, "initial_state": torch.zeros(())}, flags, ValueError),
        "no_heads": ({**tensors, "q": tensors["q"][:, :, :0], "k": tensors["k"][:, :, :0]}, flags, AssertionError),
        "no_K": ({**tensors, "q": tensors["q"][..., :0], "k": tensors["k"][..., :0]}, flags, AssertionError),
        "no_value_heads": ({**tensors, "v": tensors["v"][:, :, :0]}, flags, ValueError),
        "no_V": ({**tensors, "v": tensors["v"][..., :0]}, flags, ValueError),
        "v_shape": ({**tensors, "v": tensors["v"][:1]}, flags, AssertionError),
        "state_shape": ({**tensors, "initial_state": torch.zeros(2, 2, 8, 16)}, flags, ValueError),
        "states": ({**tensors, "initial_state": torch.zeros(3, 2, 16, 8)}, flags, ValueError),
        "mixed_dtypes": ({**tensors, "v": tensors["v"].half()}, flags, ValueError),
        "integer": ({name: t.long() if name in "qkv" else t for name, t in tensors.items()}, flags, ValueError),
        "integer_beta": ({**tensors, "beta": tensors["beta"].long()}, flags, ValueError),
        "mixed_devices": ({**tensors, "beta": torch.zeros(2, 70, 2, device="meta")}, flags, ValueError),
        "bound_positive": (tensors, {**flags, "lower_bound": 1.0}, ValueError),
        "bound_infinite": (tensors, {**flags, "lower_bound": -math.inf}, ValueError),
        "A_log_size": ({**tensors, "A_log": torch.zeros(3)}, flags, ValueError),
        "dt_bias_size": ({**tensors, "dt_bias": torch.zeros(3)}, flags, ValueError),
        "packed_too_long": (packed, {"cu_seqlens": torch.tensor([0, 5, 13])}, ValueError),
        "packed_decreasing": (packed, {"cu_seqlens": torch.tensor([0, 8, 7])}, ValueError),
        "packed_float": (packed, {"cu_seqlens": torch.tensor([0.0, 5.0, 12.0])}, ValueError),
    }
    return cases if name is None else cases[name]


# what each message must name: the argument, and the value or what is accepted
KDA_MESSAGES = {
    "old_and_new_name": "state_v_first",
    "packed_batch": "q has B=2",
    "packed_states": "holds 3 states",
    "state_dtype": "torch.bfloat16: must be torch.float32",
    "no_A_log": "A_log=None",
    "chunk_size": "chunk_size=16: accepted are 32 and 64",
    "safe_without_bound": "lower_bound=None",
    "safe_bound_low": "lower_bound=-6.0",
    "safe_bound_zero": "lower_bound=0.0",
    "neg_eigval": "use_beta_sigmoid_in_kernel=True",
    "k_shape": "k=[2, 69, 2, 16]",
    "heads": "HV=3",
    "g_shape": "got [2, 70, 2, 15]",
    "beta_shape": "got [2, 70, 1]",
    "q_dims": "q must be [B, T, H, K], got [70, 2, 16]",
    "k_dims": "k=[70, 2, 16]",
    "g_dims": "got [70, 2, 16]",
    "beta_dims": "got [70, 2]",
    "v_dims": "v must be [B, T, HV, V], got [2, 70, 2]",
    "state_dims": "got []",
    "no_heads": "the H=0 heads",
    "no_K": "K=0: 1 to 256 are accepted",
    "no_value_heads": "v must have heads and channels, got [2, 70, 0, 8]",
    "no_V": "v must have heads and channels, got [2, 70, 2, 0]",
    "v_shape": "got [1, 70, 2, 8]",
    "state_shape": "must be [2, 2, 16, 8]",
    "states": "holds 3 states",
    "mixed_dtypes": "torch.float32, torch.float32, torch.float16",
    "integer": "floating dtype",
    "integer_beta": "g and beta must be floating point, got torch.float32, torch.int64",
    "mixed_devices": "beta is on meta",
    "bound_positive": "lower_bound=1.0",
    "bound_infinite": "lower_bound=-inf",
    "A_log_size": "A_log must hold 2 values",
    "dt_bias_size": "dt_bias must hold 32 values",
    "packed_too_long": "ends at 13, but q has T=12",
    "packed_decreasing": "[0, 8, 7]",
    "packed_float": "torch.float32",
}
FLAS = list(KDA_MESSAGES)[:18]


@pytest.mark.parametrize("name", KDA_MESSAGES)
def test_kda_errors(name):
    tensors, flags, error = bad_kda(name)
    with pytest.raises(error) as raised:
        chunk_kda(**tensors, **flags)
    assert KDA_MESSAGES[name] in str(raised.value)
    assert "\n" not in str(raised.value)
    ok, reason = is_supported(**tensors, **flags)
    assert not ok
    assert KDA_MESSAGES[name] in reason


@pytest.mark.parametrize("name", FLAS)
def test_kda_errors_have_flas_types(name):
    tensors, flags, error = bad_kda(name)
    if name == "no_A_log" and "use_graph" not in inspect.signature(fla_function("kda")).parameters:
        pytest.skip("fla before 0.6 takes A_log=None as far as its kernels")
    with pytest.raises(error):
        fla_function("kda")(**tensors, **flags)


@pytest.mark.parametrize("wrong", ["initial_state", "output_final_state", "cu_seqlens"])
def test_errors_of_what_goes_to_fla_are_flas(wrong):
    """Context parallelism takes no states and needs packed sequences: fla's own word for it comes through."""
    tensors, _ = kda(h0=wrong == "initial_state", dtype=torch.float32)
    context = SimpleNamespace(cu_seqlens=None, cu_seqlens_cpu=None)
    for function in (chunk_kda, fla_function("kda")):
        with pytest.raises(AssertionError, match="for CP"):
            function(**tensors, cp_context=context, output_final_state=wrong == "output_final_state")


@pytest.mark.parametrize("name", ["scale", "lower_bound"])
@pytest.mark.parametrize(("value", "said"), [("0.5", "'0.5'"), (torch.zeros(2), "tensor([0., 0.])"), ([], "[]")])
def test_what_is_no_number_is_named(name, value, said):
    tensors, flags = kda(gate="softplus", grad=False)
    with pytest.raises(TypeError) as raised:
        chunk_kda(**tensors, **flags, **{name: value})
    assert str(raised.value) == f"{name}={said}: must be a number or None"
    assert is_supported(**tensors, **flags, **{name: value}) == (False, f"TypeError: {raised.value}")


def test_a_number_in_a_tensor_is_the_number(monkeypatch):
    """A problem is remembered: a tensor in it would be a new one at every call, and be kept alive."""
    monkeypatch.setattr(dispatch, "_routes", {})
    tensors, flags = kda(gate="softplus", grad=False)
    want = chunk_kda(**tensors, **flags, scale=0.5, lower_bound=-3.0)[0]
    for _ in range(3):
        got = chunk_kda(**tensors, **flags, scale=torch.tensor(0.5), lower_bound=torch.tensor(-3.0))[0]
        assert torch.equal(got, want)
    assert len(dispatch._routes) == 1


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_gate_parameters_reach_the_kernels_in_fp32(monkeypatch, dtype):
    """Whatever they are kept in; their gradients come in that."""
    tensors, flags = kda(gate="softplus", dtype=torch.float32)
    for name in ("A_log", "dt_bias"):
        tensors[name] = tensors[name].detach().to(dtype).requires_grad_()
    met, apply = [], autograd.apply
    monkeypatch.setattr(autograd, "apply", lambda *args: met.append(args[7:9]) or apply(*args))
    o, _ = chunk_kda(**tensors, **flags)
    o.sum().backward()
    assert [x.dtype for x in met[0]] == [torch.float32] * 2
    assert [tensors[name].grad.dtype for name in ("A_log", "dt_bias")] == [dtype] * 2


def test_large_K_is_refused_as_fla_does():
    tensors, flags = kda(T=1, K=257, grad=False)
    for function in (chunk_kda, fla_function("kda")):
        with pytest.raises(AssertionError, match="257"):
            function(**tensors, **flags)


def test_every_bad_case_is_tested():
    assert list(bad_kda(None)) == list(KDA_MESSAGES)


CONV_ERRORS = {
    "weight": ({"weight": None}, "weight must be [D, W], got None"),
    "weight_dims": ({"weight": torch.zeros(6)}, "weight must be [D, W], got [6]"),
    "no_taps": ({"weight": torch.zeros(6, 0)}, "weight must be [D, W], got [6, 0]"),
    "channels": ({"weight": torch.zeros(5, 4)}, "got [2, 20, 6]"),
    "x_dims": ({"x": torch.zeros(20, 6)}, "x must be [B, T, D]"),
    "activation": ({"activation": "gelu"}, "activation='gelu': accepted are None, 'silu' and 'swish'"),
    "backend": ({"backend": "cudnn"}, "backend='cudnn': accepted are 'triton', 'cuda' and 'mix'"),
    "bias": ({"bias": torch.zeros(5)}, "bias must be [6], got [5]"),
    "residual": ({"residual": torch.zeros(2, 19, 6)}, "residual must be shaped like x"),
    "state": ({"initial_state": torch.zeros(2, 6, 3)}, "initial_state must be [2, 6, 4], got [2, 6, 3]"),
    "integer": ({"x": torch.zeros(2, 20, 6, dtype=torch.int32)}, "x is torch.int32"),
    "device": ({"bias": torch.zeros(6, device="meta")}, "bias is torch.float32 on meta"),
    "packed_batch": ({"cu_seqlens": torch.tensor([0, 20])}, "x has B=2"),
}


@pytest.mark.parametrize("name", CONV_ERRORS)
def test_conv_errors(name):
    change, message = CONV_ERRORS[name]
    tensors, _ = conv()
    with pytest.raises(ValueError) as raised:  # noqa: PT011  (the message is checked below)
        cconv.causal_conv1d(**{**tensors, **change})
    assert message in str(raised.value)
    ok, reason = cconv.is_supported(**{**tensors, **change})
    assert not ok
    assert message in reason


NOT_TENSORS = {"None": (None, "=None"), "numpy": (numpy.zeros((2, 70, 2, 16)), " of type numpy.ndarray"),
               "list": ([0, 5], " of type list")}


TENSORS = [
    *(("kda", name, "torch.Tensor") for name in ("q", "k", "v", "g", "beta")),
    *(("kda", name, "torch.Tensor or None") for name in ("initial_state", "cu_seqlens", "A_log", "dt_bias")),
    *(("cconv", name, "torch.Tensor") for name in ("x", "weight")),
    *(("cconv", name, "torch.Tensor or None") for name in ("bias", "residual", "initial_state", "cu_seqlens")),
]


@pytest.mark.parametrize(("family", "name", "accepted", "what"), [
    *((*case, what) for case in TENSORS for what in ("numpy", "list")),
    *((*case, "None") for case in TENSORS if case[2] == "torch.Tensor" and case[1] != "weight"),
])
def test_what_is_no_tensor_is_named(family, name, accepted, what):
    value, said = NOT_TENSORS[what]
    tensors, flags = kda(h0=True, gate="softplus") if family == "kda" else conv(bias=True, residual=True, h0=True)
    call = {**tensors, **flags, name: value}
    operator, question = MINE[family]
    with pytest.raises(TypeError) as raised:
        operator(**call)
    assert str(raised.value) == f"{name}{said}: must be a {accepted}"
    assert question(**call) == (False, f"TypeError: {raised.value}")


@pytest.mark.parametrize("family", MINE)
def test_a_host_copy_that_is_no_tensor_is_named(family):
    tensors, flags = (kda if family == "kda" else conv)(sequences=(5, 7), T=12)
    with pytest.raises(TypeError, match="cu_seqlens_cpu of type list: must be a tor"):
        MINE[family][0](**tensors, **flags, cu_seqlens_cpu=[0, 5, 12])


def test_gate_parameters_without_the_gate_are_ignored_as_fla_ignores_them():
    tensors, _ = kda(grad=False)
    want = chunk_kda(**tensors)[0]
    assert torch.equal(chunk_kda(**tensors, A_log="anything", dt_bias=torch.zeros(1))[0], want)


@pytest.mark.parametrize("x", [torch.zeros(()), torch.zeros(6)])
def test_conv_with_packed_sequences_of_no_shape_at_all(x):
    with pytest.raises(ValueError, match="x must be"):
        cconv.causal_conv1d(x, torch.zeros(6, 4), cu_seqlens=torch.tensor([0, 6]))


# ---------------------------------------------------------------------------------------------------- types and Nones
def test_kda_none_pattern():
    tensors, flags = kda()
    o, ht = chunk_kda(**tensors, **flags)
    assert ht is None
    tensors, flags = kda(gate="softplus", h0=True)
    del tensors["dt_bias"]
    o, ht = chunk_kda(**tensors, **flags, output_final_state=True)
    assert o.shape == (2, 70, 2, 8)
    assert ht.shape == (2, 2, 16, 8)
    assert all(grad is not None for grad in gradients((o, ht), tensors).values())
    frozen = {name: t.detach() for name, t in tensors.items()}
    assert not chunk_kda(**frozen, **flags)[0].requires_grad
    partly = {**frozen, "beta": frozen["beta"].requires_grad_()}
    assert list(gradients(chunk_kda(**partly, **flags), partly)) == ["beta"]


def test_kda_gradients_come_in_each_inputs_dtype():
    tensors, flags = kda(dtype=torch.bfloat16, gate="softplus", h0=True, grad=False)
    tensors["g"], tensors["beta"] = tensors["g"].half(), tensors["beta"].bfloat16()
    tensors = {name: t.requires_grad_() for name, t in tensors.items()}
    o, ht = chunk_kda(**tensors, **flags, output_final_state=True)
    assert (o.dtype, ht.dtype) == (torch.bfloat16, torch.float32)
    for name, grad in gradients((o, ht), tensors).items():
        assert grad.dtype == tensors[name].dtype, name


def test_conv_none_pattern():
    tensors, _ = conv(dtype=torch.bfloat16)
    y, state = cconv.causal_conv1d(**tensors)
    assert (y.dtype, state) == (torch.bfloat16, None)
    y, state = cconv.causal_conv1d(**tensors, output_final_state=True)
    assert (state.dtype, state.shape) == (torch.bfloat16, (2, 6, 4))


def test_chunk_size_and_recompute_are_accepted_on_a_cpu():
    tensors, flags = kda(grad=False)
    o, _ = chunk_kda(**tensors, **flags)
    for flag in ({"chunk_size": 32}, {"chunk_size": 64}, {"disable_recompute": True}):
        assert torch.equal(o, chunk_kda(**tensors, **flags, **flag)[0])


def test_calls_share_no_state():
    """Results are new tensors, inputs are left alone, and routes remember no tensor."""
    tensors, flags = kda(h0=True)
    before = {name: t.detach().clone() for name, t in tensors.items()}
    o, ht = chunk_kda(**tensors, **flags, output_final_state=True)
    o2, ht2 = chunk_kda(**tensors, **flags, output_final_state=True)
    o.detach().zero_()
    assert o2.abs().sum() > 0
    assert ht.data_ptr() != ht2.data_ptr()
    assert all(torch.equal(before[name], t) for name, t in tensors.items())
    assert len(dispatch._routes) == 1
