"""The named cases: shape, flags and input distribution of every problem that is checked, timed or recorded.

A case is what two rows must share to be comparable, so an id never changes its meaning: to change a case, add another
one. Tags: "tiny" runs on a CPU in Triton's interpreter; "gpu" is too large for that; "smoke" is the quick choice on
either machine; "primary" are the headline cases; "full" is everything a promotion is checked on."""

import difflib
from collections.abc import Iterator

import torch

from .casetypes import DTYPES, Case, ConvCase, Dist, KdaCase

__all__ = [
    "CCONV", "DTYPES", "FAMILIES", "KDA", "Case", "ConvCase", "Dist", "KdaCase", "closest", "family_cases", "get",
    "require_device", "select",
]  # fmt: skip


def _tags(text: str) -> frozenset[str]:
    return frozenset(text.split())


# --------------------------------------------------------------------------------------------------------------- kda
_PROD = Dist(keys="rand", beta_max=2.0)
_STRONG = Dist(keys="rand", beta_max=2.0, strength=16.0)
_TRAIN = {"gate": "softplus", "g_dtype": "bf16", "l2norm": True}
_STATE = {"h0": True, "ht": True}
_RAW = Dist("randn", raw=(20.0, 60.0, 200.0))


def _tiny(name, why, tags="tiny full", **kw) -> KdaCase:
    base = {"T": 128, "H": 1, "K": 64, "V": 64, "dist": _PROD}
    return KdaCase(id=name, why=why, tags=_tags(tags), **{**base, **kw})


def _gpu(name, why, tags="gpu full", **kw) -> KdaCase:
    return KdaCase(id=name, why=why, tags=_tags(tags), **{"K": 128, "V": 128, **kw})


_PROD8192 = {"B": 16, "T": 8192, "H": 16, "V": 256, "dist": _PROD}
_KIMI8192 = {"B": 4, "T": 8192, "H": 32, "beta_dtype": "bf16"}
_LENGTHS = (1300, 547, 2048, 963, 271, 3063)
_SHORT = (0, 1, 130, 64, 1, 0, 0, 700, 33, 128, 1, 0)

KDA = (
    _tiny("tiny", "two rows of two chunks, precomputed gate", "tiny smoke full", B=2),
    _tiny("tiny_gate", "the training call: gate and norm in the kernel", "tiny smoke primary full", H=2, **_TRAIN),
    _tiny("tiny_wide", "the training call's own K and V", H=2, K=128, V=256, T=64, **_TRAIN),
    _tiny("tiny_safe", "bounded gate, beta's sigmoid in the kernel", gate="safe", g_dtype="bf16", l2norm=True,
          beta_sigmoid=True, beta_dtype="bf16", dist=Dist()),
    _tiny("tiny_neg", "negative eigenvalues: beta = 2 sigmoid in the kernel", beta_sigmoid=True, neg_eigval=True,
          beta_dtype="bf16", dist=Dist()),
    _tiny("tiny_ragged", "a last chunk of 37 rows", T=101, B=2, **_TRAIN),
    _tiny("tiny_varlen", "packed: a full chunk and a bit, an empty sequence, one token, ragged",
          T=171, lengths=(70, 0, 1, 100), **_STATE, **_TRAIN),
    _tiny("tiny_gva", "two value heads share a q/k head", H=2, HV=4, T=96, **_TRAIN),
    _tiny("tiny_state", "initial and final state with gradients", B=2, **_STATE),
    # no h0 with strong gates: its gradient is the few numbers that survive the first steps, too few for an error
    _tiny("tiny_strong", "gates 16 times stronger: a thousand log2 units a chunk", dist=_STRONG, ht=True),
    _tiny("tiny_mask", "a tenth of the gate entries at -1000", dist=Dist("randn", 1.0, mask=0.1), **_STATE),
    _tiny("tiny_reset", "a tenth of the gate entries at -inf, where fla itself gives NaN", "tiny full",
          dist=Dist("randn", 1.0, mask=0.1, mask_value=float("-inf")), ht=True),
    _tiny("tiny_weak", "decay of a thousandth a step: the state outlives the sequence", T=192,
          dist=Dist("randn", 1.0, strength=1e-3), **_STATE),
    _tiny("tiny_persist", "nothing decays: rounding of a carried state adds up", "tiny full", T=1024,
          dist=Dist("randn", 0.04, strength=2e-5), **_STATE),
    _tiny("tiny_fp16", "fp16 tensors", dtype="fp16", dist=Dist(), **{**_TRAIN, "g_dtype": "fp16"}),
    _tiny("tiny_raw", "raw gates of up to 200 at both ends of A_log", H=2, dist=_RAW, **_TRAIN),
    _tiny("tiny_raw_safe", "the same where the gate is bounded", H=2, dist=_RAW, **{**_TRAIN, "gate": "safe"}),
    _gpu("prod8192_gate", "the training call: softplus gate and norm in the kernel, fp32 beta up to 2",
         "gpu primary full", **_PROD8192, **_TRAIN),
    _gpu("prod8192", "the same with the gate computed before", "gpu primary full", **_PROD8192),
    _gpu("prod8192_gate_b8", "half the batch", **{**_PROD8192, "B": 8}, **_TRAIN),
    _gpu("kimi8192_softplus", "32 heads, V 128, unbounded gate", "gpu primary full", **_KIMI8192, **_TRAIN),
    _gpu("kimi8192_safe", "32 heads, V 128, bounded gate and beta's sigmoid in the kernel", "gpu primary full",
         beta_sigmoid=True, **_KIMI8192, **{**_TRAIN, "gate": "safe"}),
    _gpu("long64k_softplus", "one sequence of 65536", "gpu primary full", T=65536, H=32, beta_dtype="bf16", **_TRAIN),
    _gpu("small", "16 heads of one sequence: fewer programs than SMs", "gpu smoke primary full", B=1, T=4096, H=16,
         beta_dtype="bf16", **_TRAIN),
    _gpu("gva", "two value heads share a q/k head", B=4, T=8192, H=16, HV=32, beta_dtype="bf16", **_TRAIN),
    _gpu("varlen8192", "six packed sequences", "gpu primary full", T=sum(_LENGTHS), H=32, lengths=_LENGTHS,
         beta_dtype="bf16", **_TRAIN),
    _gpu("ragged", "T is not a multiple of 64", B=4, T=4001, H=16, beta_dtype="bf16", **_TRAIN),
    _gpu("state", "initial and final state with gradients", B=4, T=4096, H=16, dist=_PROD, **_STATE, **_TRAIN),
    _gpu("strong", "gates 16 times stronger", "gpu smoke full", B=2, T=4096, H=16, dist=_STRONG, ht=True),
    _gpu("strong_mask", "gates 16 times stronger and a tenth of the entries at -1000", B=2, T=4096, H=16,
         dist=Dist("randn", 1.0, strength=16.0, mask=0.1), ht=True),
    _gpu("weak", "decay of a thousandth a step with beta near 2: fla itself misses budgets here", B=2, T=4096, H=16,
         dist=Dist("rand", 2.0, strength=1e-3)),
    _gpu("persist", "nothing decays: rounding of a carried state adds up", B=1, T=8192, H=16,
         dist=Dist("randn", 0.04, strength=2e-5), **_STATE),
    _gpu("long131k", "more than 2^30 elements a tensor, and a last chunk of two rows", T=131138, H=64,
         beta_dtype="bf16", **_TRAIN),
    _gpu("fp16", "fp16 tensors", B=2, T=4096, H=16, dtype="fp16", **{**_TRAIN, "g_dtype": "fp16"}),
    _gpu("raw_large", "raw gates of up to 200 at both ends of A_log", T=2048, H=16, dist=_RAW, **_TRAIN),
    _gpu("raw_large_safe", "the same where the gate is bounded", T=2048, H=16, dist=_RAW, **{**_TRAIN, "gate": "safe"}),
    _gpu("k64", "the narrowest heads", B=2, T=1024, H=16, **{**_TRAIN, "K": 64, "V": 64}),
    _gpu("k64_fp16", "the narrowest heads in fp16, with states", B=2, T=1000, H=16, dtype="fp16", **_STATE,
         **{**_TRAIN, "K": 64, "V": 64, "g_dtype": "fp16"}),
    _gpu("v512", "the widest values", T=2048, H=16, V=512, **_TRAIN),
    _gpu("neg", "negative eigenvalues: beta = 2 sigmoid in the kernel", T=2048, H=16, beta_sigmoid=True,
         neg_eigval=True, beta_dtype="bf16", **_TRAIN),
    _gpu("packed_short", "packed with states: empty sequences, one token, chunks and a bit", T=sum(_SHORT), H=16,
         lengths=_SHORT, **_STATE, **_TRAIN),
    # gates strong enough for a bf16 state to keep its digits, and weak enough for the triangle's powers not to
    _gpu("equal_keys", "one key again and again, beta near 1", T=1024, H=16, dist=Dist("equal", 1.0, strength=0.5),
         **_STATE),
    _gpu("equal_keys_beta2", "the same with beta near 2", T=1024, H=16, dist=Dist("equal", 2.0, strength=1.3),
         **_STATE),
    _gpu("equal_keys_fp16", "the same with weaker gates, in fp16", T=1024, H=16, dtype="fp16",
         dist=Dist("equal", 2.0, strength=0.1), **_STATE),
)  # fmt: skip


# ------------------------------------------------------------------------------------------------------------- cconv
def _tiny_conv(name, why, tags="tiny full", **kw) -> ConvCase:
    return ConvCase(id=name, why=why, tags=_tags(tags), **{"B": 2, "T": 70, "D": 48, "W": 4, **kw})


_PACKED = {"B": 1, "T": 75, "lengths": (40, 0, 1, 2, 32)}


def _gpu_conv(name, why, tags="gpu full", **kw) -> ConvCase:
    return ConvCase(id=name, why=why, tags=_tags(tags), **{"B": 16, "T": 8192, "D": 2048, "W": 4, **kw})


CCONV = (
    _tiny_conv("tiny", "the training call", "tiny smoke primary full"),
    _tiny_conv("tiny_bias", "bias", bias=True),
    _tiny_conv("tiny_residual", "a residual added after the activation", residual=True),
    _tiny_conv("tiny_linear", "no activation", activation=None, bias=True, residual=True),
    _tiny_conv("tiny_state", "initial and final state with gradients", **_STATE),
    _tiny_conv("tiny_varlen", "packed: an empty sequence, some shorter than W", **_PACKED),
    _tiny_conv("tiny_varlen_state", "packed with states", bias=True, residual=True, **_PACKED, **_STATE),
    _tiny_conv("tiny_w2", "two taps", W=2),
    _tiny_conv("tiny_w3", "three taps", W=3, bias=True),
    _tiny_conv("tiny_fp16", "fp16", dtype="fp16"),
    _tiny_conv("tiny_fp32", "fp32", dtype="fp32"),
    _tiny_conv("tiny_wbf16", "weight in bf16", w_dtype="bf16"),
    _tiny_conv("tiny_sliced", "x is a slice of a wider projection", layout="sliced"),
    _tiny_conv("tiny_transposed", "x lies as [B,D,T]", layout="transposed"),
    _gpu_conv("prod8192_qk", "q or k of the training call", "gpu smoke primary full"),
    _gpu_conv("prod8192_v", "v of the training call", "gpu primary full", D=4096),
    _gpu_conv("t2048", "short rows", T=2048),
    _gpu_conv("b1t65536", "one long sequence", B=1, T=65536),
    _gpu_conv("w2", "two taps", T=2048, W=2),
    _gpu_conv("w3", "three taps", T=2048, W=3),
    _gpu_conv("fp16", "fp16", T=2048, dtype="fp16"),
    _gpu_conv("fp32", "fp32", T=2048, dtype="fp32"),
    _gpu_conv("sliced", "x is a slice of a wider projection", T=2048, layout="sliced"),
    _gpu_conv("transposed", "x lies as [B,D,T]", T=2048, layout="transposed"),
    _gpu_conv("packed", "six packed sequences without states, as fla's Gluon kernels take them too", B=1,
              T=sum(_LENGTHS), lengths=_LENGTHS),
    _gpu_conv("packed_short", "64 packed sequences of 5 to 150 tokens", B=1, T=4096, lengths=(37, 5, 64, 150) * 16),
    _gpu_conv("varlen8192", "six packed sequences with states", B=1, T=sum(_LENGTHS), lengths=_LENGTHS, bias=True,
              residual=True, **_STATE),
)  # fmt: skip

_ALL = {"kda": KDA, "cconv": CCONV}
FAMILIES = tuple(_ALL)
_BY_ID = {family: {case.id: case for case in cases} for family, cases in _ALL.items()}


def closest(word: str, known) -> str:
    """The end of a one-line error: the names nearest to `word`, or all when none is near."""
    known = list(known)
    near = difflib.get_close_matches(word, known, n=4, cutoff=0.4)
    return f"closest: {', '.join(near)}" if near else f"known: {', '.join(known)}"


def family_cases(family: str) -> dict[str, Case]:
    """id -> case of one family. ValueError names the families."""
    if family not in _BY_ID:
        raise ValueError(f"family {family!r} is unknown; known: {', '.join(FAMILIES)}")
    return _BY_ID[family]


def get(family: str, name: str) -> Case:
    """The case called `name`. ValueError, in one line, names the closest ones."""
    known = family_cases(family)
    if name not in known:
        raise ValueError(f"case {name!r} is unknown in {family}; {closest(name, known)}")
    return known[name]


def select(family: str, *tags: str) -> Iterator[Case]:
    """The family's cases that carry all of `tags`, in their order here."""
    return (case for case in family_cases(family).values() if case.tags.issuperset(tags))


def require_device(case: Case, device) -> None:
    """ValueError, in one line, when a case made for a GPU is asked for on another device."""
    if "gpu" in case.tags and torch.device(device).type != "cuda":
        tiny = ", ".join(c.id for c in select(case.family, "tiny", "smoke"))
        raise ValueError(f"case {case.id!r} needs a GPU and torch finds none here; on a CPU use {tiny}")
