"""The fp64 oracle, in two forms that share no code.

`recurrent` walks token by token and takes its gradients from autograd: slow, and evidently right. `chunked` runs the
package's plain-torch chain in fp64: fast enough for production shapes, where `take` cuts out a few heads first (heads
do not touch each other; the parameters' gradients need every batch row, so all rows stay) and rows are done a few at
a time to bound memory. A test holds the two forms to 1e-10. Everything is float64 on the inputs' device; results
carry the contract's names, None where the case has none."""

import dataclasses
import math

import torch
import torch.nn.functional as F

from . import contract
from .cases import Case
from .inputs import INCOMING, LEAVES, Inputs, run
from .tensors import OP_NAMES

NORM_EPS = 1e-6
RECURRENT_TOKENS = 256
TOKEN_HEADS = 1 << 17  # of one chunked piece: about 8 GB at K 128, V 256


def widen(inputs: Inputs) -> Inputs:
    """The same values in float64 (integer tensors as they are)."""
    return inputs.like({n: t.double() if t is not None and t.is_floating_point() else t for n, t in inputs.items()})


def recurrent(inputs: Inputs) -> dict:
    """Results and gradients token by token."""
    step = _kda_recurrent if inputs.case.family == "kda" else _conv_recurrent
    return run(lambda x, grad: step(x), widen(inputs))


def chunked(inputs: Inputs, token_heads: int = TOKEN_HEADS) -> dict:
    """Results and gradients through the package's reference chain; `token_heads` (tokens x value heads) bounds a
    piece."""
    case = inputs.case
    per_row = case.T * (case.HV if case.family == "kda" else max(1, case.D // 64))
    rows = case.B if case.lengths else max(1, min(case.B, token_heads // per_row))
    if rows >= case.B:
        return run(_chain_op, widen(inputs))
    pieces = [run(_chain_op, widen(_rows(inputs, b, min(b + rows, case.B)))) for b in range(0, case.B, rows)]
    return {name: _join(case, name, [piece[name] for piece in pieces]) for name in pieces[0]}


def oracle(inputs: Inputs) -> dict:
    """The form that suits the length: token by token for short rows, chunked for the rest."""
    return recurrent(inputs) if inputs.case.T <= RECURRENT_TOKENS else chunked(inputs)


def term_sizes(inputs: Inputs, truth: dict) -> dict:
    """Root sum of squares of the parts of an output that is one long cancelling sum: dA_log [HV], a part per dimension.

    Such a sum can come out near zero by chance; an error is then measured against what was summed, not against the
    accident."""
    if truth.get("dA_log") is None:
        return {}
    x, c = widen(inputs), inputs.case
    raw = x["g"] + x["dt_bias"].view(c.HV, c.K)
    # d/dA_log of a gate is its own value (softplus) or its slope times the raw input (safe), against the slope in dg
    terms = truth["dg"] * (F.softplus(raw) / torch.sigmoid(raw) if c.gate == "softplus" else raw)
    # along a sequence terms share their errors (dg is a running sum); from one gate dimension to the next they do not
    return {"dA_log": terms.sum((0, 1)).square().sum(-1).sqrt()}


# ---------------------------------------------------------------------------------------------------- token by token
def _sequences(x: Inputs) -> list[tuple[int, int, int]]:
    """(batch row, first token, one past the last) of every sequence."""
    if x["cu_seqlens"] is None:
        return [(b, 0, x.case.T) for b in range(x.case.B)]
    ends = x["cu_seqlens"].tolist()
    return [(0, a, b) for a, b in zip(ends, ends[1:], strict=False)]


def _kda_recurrent(x: Inputs):
    """o [B,T,HV,V] and ht [N,HV,K,V] (or None), by the defining recurrence over natural-log gates.

    S_t = diag(exp g_t) S_{t-1};  S_t += beta_t k_t (v_t - k_t^T S_t)^T;  o_t = scale S_t^T q_t
    """
    c = x.case
    q, k, g, beta = x["q"], x["k"], x["g"], x["beta"]
    if c.l2norm:
        q, k = (y / (y.square().sum(-1, keepdim=True) + NORM_EPS).sqrt() for y in (q, k))
    if c.gate != "log":
        raw, rate = g + x["dt_bias"].view(c.HV, c.K), x["A_log"].exp()[:, None]
        g = (
            -rate * F.softplus(raw, threshold=1e3)
            if c.gate == "softplus"
            else c.lower_bound * torch.sigmoid(rate * raw)
        )
    if c.beta_sigmoid:
        beta = torch.sigmoid(beta) * (2 if c.neg_eigval else 1)
    q, k = (y.repeat_interleave(c.HV // c.H, 2) for y in (q, k))
    rows, finals = [[] for _ in range(c.B)], []
    for n, (b, start, end) in enumerate(_sequences(x)):
        S = q.new_zeros(c.HV, c.K, c.V) if x["initial_state"] is None else x["initial_state"][n]
        for t in range(start, end):
            S = g[b, t].exp()[..., None] * S
            miss = x["v"][b, t] - torch.einsum("hk,hkv->hv", k[b, t], S)
            S = S + beta[b, t, :, None, None] * k[b, t][..., None] * miss[:, None, :]
            rows[b].append(c.K**-0.5 * torch.einsum("hk,hkv->hv", q[b, t], S))
        finals.append(S)
    o = torch.stack([torch.stack(row) for row in rows])
    return o, torch.stack(finals) if c.ht else None


def _conv_recurrent(x: Inputs):
    """y [B,T,D] and ht [N,D,W] (or None): a window of the last W inputs slides over each sequence."""
    c = x.case
    rows, finals = [[] for _ in range(c.B)], []
    for n, (b, start, end) in enumerate(_sequences(x)):
        h0 = x["initial_state"]
        window = x["x"].new_zeros(c.D, c.W) if h0 is None else h0[n]
        for t in range(start, end):
            window = torch.cat([window[:, 1:], x["x"][b, t, :, None]], 1)
            z = (window * x["weight"]).sum(1)
            if x["bias"] is not None:
                z = z + x["bias"]
            y = z * torch.sigmoid(z) if c.activation else z
            rows[b].append(y if x["residual"] is None else y + x["residual"][b, t])
        finals.append(window)
    y = torch.stack([torch.stack(row) for row in rows])
    return y, torch.stack(finals) if c.ht else None


# ----------------------------------------------------------------------------------------------------------- chunked
def _chain_op(x: Inputs, grad: bool):
    """The package's reference chain as an op, in the inputs' dtype."""
    import importlib

    family, p = x.case.family, fp64_problem(x.case)
    plan = importlib.import_module(f"kernel_fun.{family}.chain").make_plan(p, base="reference", shipped=False)
    apply = importlib.import_module(f"kernel_fun.{family}.autograd").apply
    names = OP_NAMES[family]
    return apply(plan, p, cu_seqlens=x["cu_seqlens"], **{_keyword(n, names): x[n] for n in LEAVES[family]})


def _keyword(name: str, names: dict) -> str:
    """The keyword of a package `apply` for an op-level tensor: states have the chain's name, everything else its
    own."""
    return names[name] if name == "initial_state" else name


def fp64_problem(case: Case):
    """The case's problem with every tensor in float64."""
    kinds = [f for f in ("dtype", "g_dtype", "beta_dtype", "w_dtype") if hasattr(case.problem(), f)]
    return dataclasses.replace(case.problem(), **dict.fromkeys(kinds, torch.float64))


def _rows(inputs: Inputs, first: int, end: int) -> Inputs:
    """Batch rows first..end of a dense case: tensors with a batch or sequence axis are cut, parameters are shared."""
    case = dataclasses.replace(inputs.case, B=end - first)
    cut = {n: t[first:end] if t is not None and _axis(case, n, ("B", "N")) == 0 else t for n, t in inputs.items()}
    return Inputs(case, inputs.seed, cut)


def _join(case: Case, name: str, pieces: list):
    """One output from its pieces: batch rows side by side, parameters' gradients summed."""
    if pieces[0] is None:
        return None
    return torch.cat(pieces) if _axis(case, name, ("B", "N")) == 0 else torch.stack(pieces).sum(0)


def _axis(case: Case, name: str, letters: tuple[str, ...]) -> int | None:
    """Which axis of an op-level tensor is one of `letters`."""
    if name == "cu_seqlens":
        return None
    found = contract.tensor(case.family, OP_NAMES[case.family].get(name, name), _stage_for(case.family, name)).shape
    return next((i for i, x in enumerate(found) if x in letters), None)


def _stage_for(family: str, name: str) -> str | None:
    """Inputs are read as the first stage finds them; outputs as the last leaves them."""
    given = (*LEAVES[family], *INCOMING[family])
    return contract.stages(family)[0].name if name in given else None


# ------------------------------------------------------------------------------------------------------------ slices
@dataclasses.dataclass(frozen=True)
class Slice:
    """A few independent columns of a problem: value heads with their q/k heads (whole groups), or convolution
    channels."""

    heads: tuple[int, ...]  # value heads, or channels
    groups: tuple[int, ...]  # q/k heads; empty for cconv


def choose(case: Case, count: int, seed: int) -> Slice:
    """`count` groups of heads (or 64-channel blocks) at random. A slice of everything when there are no more than
    that."""
    draw = torch.Generator().manual_seed(seed)
    if case.family == "cconv":
        blocks = math.ceil(case.D / 64)
        picked = sorted(torch.randperm(blocks, generator=draw)[:count].tolist())
        return Slice(tuple(d for b in picked for d in range(64 * b, min(64 * b + 64, case.D))), ())
    return _groups(case, sorted(torch.randperm(case.H, generator=draw)[:count].tolist()))


def take(inputs: Inputs, part: Slice) -> Inputs:
    """The inputs of the smaller problem that `part` is."""
    c = inputs.case
    kda = c.family == "kda"
    case = dataclasses.replace(c, **({"H": len(part.groups), "HV": len(part.heads)} if kda else {"D": len(part.heads)}))
    return Inputs(case, inputs.seed, take_tensors(c, inputs, part))


def groups_within(case: Case, token_heads: int) -> int:
    """How many of a KDA case's groups of heads are at most `token_heads` (tokens x value heads)."""
    return token_heads // (case.B * case.T * (case.HV // case.H))


def head_parts(case: Case, token_heads: int) -> list[Slice]:
    """All heads of a KDA case in consecutive slices of about `token_heads` (tokens x value heads) each."""
    groups = max(1, groups_within(case, token_heads))
    return [_groups(case, range(g, min(g + groups, case.H))) for g in range(0, case.H, groups)]


def _groups(case: Case, groups) -> Slice:
    """The q/k heads `groups` with their value heads."""
    per = case.HV // case.H
    return Slice(tuple(h * per + i for h in groups for i in range(per)), tuple(groups))


def put_together(case: Case, pieces: list[dict]) -> dict:
    """Op-level tensors from those of consecutive slices of heads; the opposite of `take_tensors`."""
    named = {n: [piece[n] for piece in pieces] for n in pieces[0]}
    return {n: None if x[0] is None else torch.cat(x, _heads_axis(case, n)) for n, x in named.items()}


def _heads_axis(case: Case, name: str) -> int:
    return next(a for letter in ("HV", "H", "HV*K") if (a := _axis(case, name, (letter,))) is not None)


def take_tensors(case: Case, tensors: dict, part: Slice) -> dict:
    """`part` of every op-level tensor, inputs or outputs, by the head and channel axes of the contract."""
    return {n: None if t is None else _take(case, n, t, part) for n, t in tensors.items()}


def _take(case, name, t, part):
    for letter, chosen in (("HV", part.heads), ("D", part.heads), ("H", part.groups)):
        axis = _axis(case, name, (letter,))
        if axis is not None:
            return t.index_select(axis, torch.tensor(chosen, device=t.device))
    if _axis(case, name, ("HV*K",)) is not None:
        return t.view(case.HV, case.K)[list(part.heads)].reshape(-1)
    return t
