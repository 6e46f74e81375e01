"""Inputs of a case: seeded, on any device, drawn as fla's own tests and training calls draw them.

kda, by the case's `dist`: q, k, v from U(0,1) or N(0,1), q and k of unit length unless the kernel normalises; for
"log" gates g = logsigmoid(N) times the strength with a share masked, else g = N raw with A_log = log(strength *
U(1,16)) and dt_bias = N/2; beta = beta_max * sigmoid(N), or N where the kernel applies the sigmoid; states and all
incoming gradients N. `Dist` says what its "equal" keys and `raw` gates change. cconv: x N, weight U(+-1/sqrt(W)), the
rest N."""

import numpy as np
import torch
import torch.nn.functional as F

from .cases import DTYPES, Case, ConvCase, KdaCase

LEAVES = {
    "kda": ("q", "k", "v", "g", "beta", "A_log", "dt_bias", "initial_state"),
    "cconv": ("x", "weight", "bias", "residual", "initial_state"),
}
GRADIENTS = {
    "kda": ("dq", "dk", "dv", "dg", "dbeta", "dA_log", "ddt_bias", "dh0"),
    "cconv": ("dx", "dw", "db", "dresidual", "dh0"),
}
RESULTS = {"kda": ("o", "ht"), "cconv": ("y", "ht")}
INCOMING = {"kda": ("do", "dht"), "cconv": ("dy", "dht")}


class Inputs(dict):
    """Op-level tensors by name, None where the case has none; `.case` and `.seed` say where they come from.

    Names: the family's LEAVES (what gradients are taken for), `cu_seqlens` int64 [N+1], and INCOMING, the gradients
    of the results."""

    def __init__(self, case: Case, seed: int, tensors: dict):
        super().__init__(tensors)
        self.case, self.seed = case, seed

    def like(self, tensors: dict) -> "Inputs":
        """The same case and seed with other tensors."""
        return Inputs(self.case, self.seed, tensors)

    def leaves(self) -> dict:
        """The tensors that gradients are taken for; those the case lacks are left out."""
        return {n: self[n] for n in LEAVES[self.case.family] if self[n] is not None}


class TorchSampler:
    """Draws on `device` from torch's generator: fast, but its numbers depend on the device."""

    def __init__(self, seed: int, device):
        self.device = torch.device(device)
        self._generator = torch.Generator(device=self.device).manual_seed(seed)

    def randn(self, *shape, dtype=torch.float32) -> torch.Tensor:
        return torch.randn(shape, generator=self._generator, device=self.device, dtype=dtype)

    def rand(self, *shape, dtype=torch.float32) -> torch.Tensor:
        return torch.rand(shape, generator=self._generator, device=self.device, dtype=dtype)


class NumpySampler:
    """Draws on the CPU from numpy's RandomState, whose stream is frozen: the same numbers on every machine, then
    moved to `device`."""

    def __init__(self, seed: int, device):
        self.device = torch.device(device)
        self._state = np.random.RandomState(seed)

    def _move(self, x, dtype):
        return torch.from_numpy(x).to(dtype).to(self.device)

    def randn(self, *shape, dtype=torch.float32) -> torch.Tensor:
        return self._move(self._state.standard_normal(shape), dtype)

    def rand(self, *shape, dtype=torch.float32) -> torch.Tensor:
        return self._move(self._state.random_sample(shape), dtype)


def make(case: Case, seed: int, device="cpu", sampler=TorchSampler) -> Inputs:
    """The tensors of `case` for `seed` on `device`. Equal (case, seed, device kind, sampler) give equal bits."""
    draw = sampler(seed, device)
    tensors = _kda(case, draw) if case.family == "kda" else _cconv(case, draw)
    tensors["cu_seqlens"] = None
    if case.lengths:
        bounds = np.cumsum([0, *case.lengths])
        tensors["cu_seqlens"] = torch.tensor(bounds, dtype=torch.int64, device=draw.device)
    return Inputs(case, seed, tensors)


def _kda(c: KdaCase, draw) -> dict:
    dtype, HV = DTYPES[c.dtype], c.HV
    positive = draw.rand if c.dist.keys == "rand" else draw.randn
    q, k = (positive(c.B, c.T, c.H, c.K, dtype=dtype) for _ in range(2))
    if not c.l2norm:
        q, k = (F.normalize(x.float(), dim=-1).to(dtype) for x in (q, k))
    if c.dist.keys == "equal":
        k = k[:, :1].expand_as(k).contiguous()
    v = positive(c.B, c.T, HV, c.V, dtype=dtype)
    A_log = dt_bias = None
    if c.gate == "log":
        g = F.logsigmoid(draw.randn(c.B, c.T, HV, c.K)).mul_(c.dist.strength)
        if c.dist.mask:
            g.masked_fill_(draw.rand(c.B, c.T, HV, c.K) < c.dist.mask, c.dist.mask_value)
        g = g.to(DTYPES[c.g_dtype])
    else:
        g = draw.randn(c.B, c.T, HV, c.K, dtype=DTYPES[c.g_dtype])
        A_log = draw.rand(HV).mul(15).add(1).mul(c.dist.strength).log()
        dt_bias = draw.randn(HV * c.K).mul(0.5)
        if c.dist.raw:
            g, A_log = _large(g, draw, c.dist.raw), draw.rand(HV).add(15).log()
            A_log[1::2] *= -1
    beta = draw.randn(c.B, c.T, HV)
    if c.dist.keys == "equal":
        beta = c.dist.beta_max * (1 - 0.02 * draw.rand(c.B, c.T, HV))
    elif not c.beta_sigmoid:
        beta = c.dist.beta_max * beta.sigmoid()
    return {
        "q": q, "k": k, "v": v, "g": g, "beta": beta.to(DTYPES[c.beta_dtype]), "A_log": A_log, "dt_bias": dt_bias,
        "initial_state": draw.randn(c.N, HV, c.K, c.V) if c.h0 else None,
        "do": draw.randn(c.B, c.T, HV, c.V, dtype=dtype),
        "dht": draw.randn(c.N, HV, c.K, c.V) if c.ht else None,
    }  # fmt: skip


def _large(g, draw, sizes):
    """A quarter of the raw gates at one of `sizes`, with the sign they had."""
    at = draw.rand(*g.shape)
    size = torch.tensor(sizes, device=g.device)[(draw.rand(*g.shape) * len(sizes)).long().clamp_max(len(sizes) - 1)]
    return torch.where(at < 0.25, g.sign() * size.to(g.dtype), g)


def _cconv(c: ConvCase, draw) -> dict:
    dtype = DTYPES[c.dtype]
    if c.layout == "transposed":
        x = draw.randn(c.B, c.D, c.T, dtype=dtype).transpose(1, 2)
    elif c.layout == "sliced":
        x = draw.randn(c.B, c.T, 3 * c.D, dtype=dtype)[..., c.D : 2 * c.D]
    else:
        x = draw.randn(c.B, c.T, c.D, dtype=dtype)
    bound = c.W**-0.5
    weight = draw.rand(c.D, c.W).mul(2 * bound).sub(bound).to(DTYPES[c.w_dtype])
    return {
        "x": x, "weight": weight,
        "bias": draw.randn(c.D).to(weight.dtype) if c.bias else None,
        "residual": draw.randn(c.B, c.T, c.D, dtype=dtype) if c.residual else None,
        "initial_state": draw.randn(c.N, c.D, c.W, dtype=dtype) if c.h0 else None,
        "dy": draw.randn(c.B, c.T, c.D, dtype=dtype),
        "dht": draw.randn(c.N, c.D, c.W, dtype=dtype) if c.ht else None,
    }  # fmt: skip


def run(op, inputs: Inputs, grad: bool = True) -> dict:
    """Results and gradients of `op(inputs, grad) -> (result, ht)` by contract name; None where there is none.

    With `grad`, gradients come from `torch.autograd.grad` against the case's incoming gradients, so nothing
    accumulates."""
    family = inputs.case.family
    if not grad:
        with torch.no_grad():
            return dict(zip(RESULTS[family], op(inputs, False), strict=True))
    leaves = {n: t.detach().requires_grad_() for n, t in inputs.leaves().items()}
    results = op(inputs.like({**inputs, **leaves}), True)
    incoming = [inputs[n] for n in INCOMING[family]]
    pairs = [(r, d) for r, d in zip(results, incoming, strict=True) if r is not None and d is not None]
    grads = torch.autograd.grad([r for r, _ in pairs], list(leaves.values()), [d for _, d in pairs], allow_unused=True)
    outputs = {n: None if r is None else r.detach() for n, r in zip(RESULTS[family], results, strict=True)}
    found = dict(zip(leaves, grads, strict=True))
    outputs.update({out: found.get(leaf) for leaf, out in zip(LEAVES[family], GRADIENTS[family], strict=True)})
    return outputs
