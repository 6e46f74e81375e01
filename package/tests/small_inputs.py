"""Small inputs for both operators, and a token-by-token recurrence to hold them against."""
import torch
import torch.nn.functional as F


def kda(B=2, T=70, H=2, HV=None, K=16, V=8, dtype=torch.float64, gate="log", h0=False, device="cpu", seed=0, grad=True,
        sequences=None):
    """(tensors, flags): the keyword arguments of a `chunk_kda` call, leaves with requires_grad.

    gate: "log" (g is a log decay), "softplus" or "safe" (raw, activated by the operator). sequences: lengths to pack.
    """
    HV = HV or H
    random = torch.Generator().manual_seed(seed)

    def draw(*shape):
        return torch.randn(shape, generator=random, dtype=torch.float64)

    if sequences is not None:
        B, T = 1, max(T, sum(sequences))
    g = draw(B, T, HV, K)
    tensors = {
        "q": F.normalize(draw(B, T, H, K), dim=-1).to(dtype),
        "k": F.normalize(draw(B, T, H, K), dim=-1).to(dtype),
        "v": draw(B, T, HV, V).to(dtype),
        "g": F.logsigmoid(g) if gate == "log" else g,
        "beta": draw(B, T, HV).sigmoid() * 1.5,
    }
    wide = torch.float64 if dtype == torch.float64 else torch.float32
    tensors["g"], tensors["beta"] = tensors["g"].to(wide), tensors["beta"].to(wide)
    flags = {}
    if gate != "log":
        flags["use_gate_in_kernel"] = True
        tensors["A_log"], tensors["dt_bias"] = draw(HV).abs().to(wide), draw(HV * K).to(wide)
    if gate == "safe":
        flags.update(safe_gate=True, lower_bound=-5.0)
    if h0:
        tensors["initial_state"] = draw(len(sequences) if sequences else B, HV, K, V).to(wide)
    tensors = {name: t.to(device).requires_grad_(grad) for name, t in tensors.items()}
    if sequences is not None:
        flags["cu_seqlens"] = torch.tensor([0, *torch.tensor(sequences).cumsum(0).tolist()], device=device)
    return tensors, flags


def recurrence(q, k, v, g, beta, scale=None, initial_state=None, A_log=None, dt_bias=None, use_gate_in_kernel=False,
               lower_bound=None, use_qk_l2norm_in_kernel=False, use_beta_sigmoid_in_kernel=False,
               allow_neg_eigval=False, state_v_first=False, cu_seqlens=None, safe_gate=False, output_final_state=True):
    """One token at a time in fp64, for autograd: S = diag(e^g) S;  S += beta k (v - k^T S)^T;  o = scale q^T S."""
    q, k, v, g, beta = (t.double() for t in (q, k, v, g, beta))
    B, T, H, K = q.shape
    HV, V = v.shape[2:]
    scale = K**-0.5 if scale is None else scale
    if use_qk_l2norm_in_kernel:
        q, k = (t * torch.rsqrt(t.square().sum(-1, keepdim=True) + 1e-6) for t in (q, k))
    if use_gate_in_kernel:
        x = g if dt_bias is None else g + dt_bias.double().view(HV, K)
        rate = 1.0 if A_log is None else A_log.double().view(HV, 1).exp()
        g = -rate * F.softplus(x) if lower_bound is None else lower_bound * torch.sigmoid(rate * x)
    if use_beta_sigmoid_in_kernel:
        beta = (2.0 if allow_neg_eigval else 1.0) * beta.sigmoid()
    q, k = (t.repeat_interleave(HV // H, 2) for t in (q, k))
    ends = [T * b for b in range(B + 1)] if cu_seqlens is None else cu_seqlens.tolist()
    q, k, v, g, beta = (t.flatten(0, 1) for t in (q, k, v, g, beta))
    o, states = [], []
    for n, (start, end) in enumerate(zip(ends, ends[1:], strict=False)):
        S = q.new_zeros(HV, K, V)
        if initial_state is not None:
            S = initial_state[n].double()
            S = S.mT if state_v_first else S
        for t in range(start, end):
            S = S * g[t].exp()[..., None]
            error = v[t] - (k[t][..., None] * S).sum(-2)
            S = S + beta[t][:, None, None] * k[t][..., None] * error[:, None, :]
            o.append(scale * (q[t][..., None] * S).sum(-2))
        states.append(S.mT if state_v_first else S)
    o = torch.stack(o)
    tail = v.shape[0] - o.shape[0]
    return F.pad(o, (0, 0, 0, 0, 0, tail)).view(B, T, HV, V), torch.stack(states)


def conv(B=2, T=20, D=6, W=4, dtype=torch.float64, bias=False, residual=False, h0=False, device="cpu", seed=0,
         sequences=None):
    """(tensors, flags) of a `causal_conv1d` call."""
    random = torch.Generator().manual_seed(seed)
    if sequences is not None:
        B, T = 1, max(T, sum(sequences))

    def draw(*shape):
        return torch.randn(shape, generator=random, dtype=torch.float64).to(device, dtype).requires_grad_()

    tensors = {"x": draw(B, T, D), "weight": draw(D, W)}
    if bias:
        tensors["bias"] = draw(D)
    if residual:
        tensors["residual"] = draw(B, T, D)
    if h0:
        tensors["initial_state"] = draw(len(sequences) if sequences else B, D, W)
    flags = {}
    if sequences is not None:
        flags["cu_seqlens"] = torch.tensor([0, *torch.tensor(sequences).cumsum(0).tolist()], device=device)
    return tensors, flags


def conv_definition(x, weight, bias=None, residual=None, initial_state=None, activation=None, cu_seqlens=None):
    """The convolution by F.conv1d in fp64 over each sequence with its history in front; (y, final state)."""
    D, W = weight.shape
    B, T = x.shape[:2]
    ends = [T * b for b in range(B + 1)] if cu_seqlens is None else cu_seqlens.tolist()
    flat = x.double().flatten(0, 1)
    y, states = [], []
    for n, (start, end) in enumerate(zip(ends, ends[1:], strict=False)):
        past = flat.new_zeros(W, D) if initial_state is None else initial_state[n].double().T
        rows = torch.cat([past, flat[start:end]])
        if end > start:
            z = F.conv1d(rows[1:].T[None], weight.double()[:, None], None if bias is None else bias.double(), groups=D)
            y.append(z[0].T)
        states.append(rows[-W:].T)
    y = torch.cat(y)
    y = F.silu(y) if activation in ("silu", "swish") else y
    if residual is not None:
        y = y + residual.double().flatten(0, 1)[: y.shape[0]]
    return F.pad(y, (0, 0, 0, B * T - y.shape[0])).view(B, T, D), torch.stack(states)


def gradients(outputs, leaves, seed=1, retain=False):
    """d(sum of outputs weighted at random) / d(leaves), by name."""
    random = torch.Generator().manual_seed(seed)
    loss = 0
    for out in outputs:
        if out is not None:
            weights = torch.randn(out.shape, generator=random, dtype=torch.float64)
            loss = loss + (out.double() * weights.to(out.device)).sum()
    names = [name for name, t in leaves.items() if t.requires_grad]
    grads = torch.autograd.grad(loss, [leaves[name] for name in names], retain_graph=retain, allow_unused=True)
    return dict(zip(names, grads, strict=True))


def rms(a, b) -> float:
    """|a - b| / |b| in root mean square; infinite when a holds a NaN or an infinity."""
    a, b = a.detach().double(), b.detach().double()
    if not a.isfinite().all():
        return float("inf")
    return float((a - b).square().mean().sqrt() / (b.square().mean().sqrt() + 1e-12))
