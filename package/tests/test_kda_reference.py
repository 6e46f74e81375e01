"""chunk_kda on CPU tensors against the token-by-token recurrence in fp64: outputs and gradients, over every flag."""
import pytest
import torch
from small_inputs import gradients, kda, recurrence, rms

from kernel_fun.kda import chunk_kda, is_supported

CASES = {
    "plain": {},
    "ragged_gva": {"T": 131, "H": 2, "HV": 4},
    "chunk_exact": {"T": 128},
    "one_token": {"T": 1},
    "state": {"h0": True},
    "scale": {"flags": {"scale": 0.3}},
    "l2norm": {"flags": {"use_qk_l2norm_in_kernel": True}},
    "sigmoid": {"flags": {"use_beta_sigmoid_in_kernel": True}},
    "neg_eigval": {"flags": {"use_beta_sigmoid_in_kernel": True, "allow_neg_eigval": True}},
    "softplus": {"gate": "softplus"},
    "safe": {"gate": "safe", "h0": True},
    "packed": {"sequences": (70, 1, 64, 3), "h0": True},
    "packed_short": {"sequences": (5, 20), "T": 90, "gate": "softplus", "h0": True},
    "packed_empty": {"sequences": (5, 0, 66), "h0": True},
    "all": {"T": 67, "HV": 4, "gate": "softplus", "h0": True, "flags": {
        "use_qk_l2norm_in_kernel": True, "use_beta_sigmoid_in_kernel": True, "allow_neg_eigval": True}},
}


@pytest.mark.parametrize("name", CASES)
def test_equals_the_recurrence(name):
    case = dict(CASES[name])
    extra = case.pop("flags", {})
    tensors, flags = kda(**case)
    flags.update(extra)
    assert is_supported(**tensors, **flags) == (True, "plain torch on CPU tensors")
    outputs = chunk_kda(**tensors, **flags, output_final_state=True)
    expected = recurrence(**tensors, **flags)
    for got, want in zip(outputs, expected, strict=True):
        assert rms(got, want) < 1e-10
    got, want = gradients(outputs, tensors), gradients(expected, tensors)
    for key, grad in want.items():
        assert got[key].dtype == tensors[key].dtype
        assert rms(got[key], grad) < 1e-9, key


def test_state_v_first_is_the_transposed_call():
    tensors, flags = kda(h0=True)
    o, ht = chunk_kda(**tensors, **flags, output_final_state=True)
    state = tensors["initial_state"].detach().mT.contiguous().requires_grad_()
    turned = {**tensors, "initial_state": state}
    o2, ht2 = chunk_kda(**turned, **flags, output_final_state=True, state_v_first=True)
    assert torch.equal(o, o2)
    assert torch.equal(ht, ht2.mT)
    assert ht2.is_contiguous()
    a, b = gradients((o,), tensors), gradients((o2,), turned)
    assert torch.equal(a["initial_state"], b["initial_state"].mT)
    with pytest.warns(DeprecationWarning, match="state_v_first"):
        o3, _ = chunk_kda(**turned, **flags, transpose_state_layout=True)
    assert torch.equal(o, o3)


def test_rows_beyond_the_last_sequence_are_zero_and_inert():
    tensors, flags = kda(sequences=(5, 20), T=90)
    with torch.no_grad():
        for name in ("q", "k", "v", "g", "beta"):
            tensors[name][:, 25:] = float("nan")
    o, _ = chunk_kda(**tensors, **flags)
    assert o[:, :25].isfinite().all()
    assert torch.count_nonzero(o[:, 25:]) == 0
    for name, grad in gradients((o,), tensors).items():
        assert torch.count_nonzero(grad[:, 25:]) == 0, name
        assert grad.isfinite().all(), name


@pytest.mark.parametrize("strength", [16.0, 1000.0, float("inf")])
def test_strong_gates_stay_finite(strength):
    tensors, flags = kda(T=80, grad=False)
    masked = torch.rand(tensors["g"].shape, generator=torch.Generator().manual_seed(0)) < 0.5
    tensors["g"] = torch.where(masked, -strength, tensors["g"])
    tensors = {name: t.requires_grad_() for name, t in tensors.items()}
    outputs = chunk_kda(**tensors, **flags, output_final_state=True)
    expected = recurrence(**tensors, **flags)
    for got, want in zip(outputs, expected, strict=True):
        assert rms(got, want) < 1e-9
    for name, grad in gradients(outputs, tensors).items():
        assert grad.isfinite().all(), name


@pytest.mark.parametrize(("dtype", "budget"), [(torch.float32, 2e-5), (torch.float16, 3e-3), (torch.bfloat16, 2e-2)])
def test_half_and_single_precision(dtype, budget):
    tensors, flags = kda(T=100, gate="softplus", h0=True, dtype=dtype)
    flags["use_qk_l2norm_in_kernel"] = True
    outputs = chunk_kda(**tensors, **flags, output_final_state=True)
    assert outputs[0].dtype == dtype
    assert outputs[1].dtype == torch.float32
    expected = recurrence(**tensors, **flags)
    for got, want in zip(outputs, expected, strict=True):
        assert rms(got, want) < budget
    got, want = gradients(outputs, tensors), gradients(expected, tensors)
    for name, grad in want.items():
        assert got[name].dtype == tensors[name].dtype
        assert got[name].shape == tensors[name].shape
        assert rms(got[name], grad) < 3 * budget, name


def test_non_contiguous_and_expanded_inputs():
    tensors, flags = kda()
    o, _ = chunk_kda(**tensors, **flags)
    strided = {name: t.detach().transpose(0, 1).contiguous().transpose(0, 1) for name, t in tensors.items()}
    strided = {name: t.requires_grad_() for name, t in strided.items()}
    o2, _ = chunk_kda(**strided, **flags)
    assert torch.equal(o, o2)
    a, b = gradients((o,), tensors), gradients((o2,), strided)
    assert all(torch.equal(a[name], b[name]) for name in a)
    base = torch.full((1, 1, 2, 16), -0.3, dtype=torch.float64, requires_grad=True)
    wide = {**tensors, "g": base.expand(2, 70, 2, 16)}
    o3, _ = chunk_kda(**wide, **flags)
    grad = torch.autograd.grad(o3.sum(), base)[0]
    assert grad.shape == base.shape
    assert grad.abs().sum() > 0


def test_gate_parameters_in_fla_tests_shape():
    tensors, flags = kda(gate="softplus")
    o, _ = chunk_kda(**tensors, **flags)
    shaped = {**tensors, "A_log": tensors["A_log"].detach().view(1, 1, -1, 1).requires_grad_()}
    o2, _ = chunk_kda(**shaped, **flags)
    assert torch.equal(o, o2)
    assert gradients((o2,), shaped)["A_log"].shape == (1, 1, 2, 1)


def test_only_the_final_state_is_differentiated():
    tensors, flags = kda(h0=True)
    _, ht = chunk_kda(**tensors, **flags, output_final_state=True)
    _, want = recurrence(**tensors, **flags)
    got, expected = gradients((ht,), tensors), gradients((want,), tensors)
    for name, grad in expected.items():
        if grad is not None:
            assert rms(got[name], grad) < 1e-9, name


def test_autocast_changes_nothing():
    tensors, flags = kda(dtype=torch.float32)
    o, _ = chunk_kda(**tensors, **flags)
    want = gradients((o,), tensors)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        o2, _ = chunk_kda(**tensors, **flags)
        got = gradients((o2,), tensors)
    assert torch.equal(o, o2)
    assert all(torch.equal(got[name], want[name]) for name in want)
