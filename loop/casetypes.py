"""What a case is: one problem of a family, with how its values are drawn. The named ones are in `loop.cases`."""

import hashlib
from dataclasses import dataclass, field, fields

import torch

from kernel_fun._common.problem import CHUNK, INTERPRETER, ConvProblem, KdaProblem

DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}
LOWER_BOUND = -5.0  # of the safe gate, as fla's tests and layers use it


@dataclass(frozen=True, repr=False)
class Dist:
    """How a KDA case draws its values; `loop.inputs` holds the formulas.

    keys: "rand" draws q, k, v from U(0,1) (keys correlate: the hard case for the inverse), "randn" from N(0,1);
    "equal" is "randn" with one key for all tokens of a row and head, and beta within 2 % of beta_max.
    beta_max: beta = beta_max * sigmoid(randn) when the kernel is given beta itself.
    strength: multiplies the log decay. mask: share of gate entries set to mask_value ("log" gates only).
    raw: sizes, with either sign, of a quarter of the raw gates; A_log is then log U(15,16) and -log U(15,16) by turns.
    """

    keys: str = "randn"
    beta_max: float = 1.0
    strength: float = 1.0
    mask: float = 0.0
    mask_value: float = -1000.0
    raw: tuple[float, ...] = ()

    def __repr__(self):
        """A case's sha is of this text: what was added later is named only where it says something."""
        named = [f.name for f in fields(self) if f.name != "raw" or self.raw]
        return f"Dist({', '.join(f'{name}={getattr(self, name)!r}' for name in named)})"


@dataclass(frozen=True)
class KdaCase:
    """One `chunk_kda` problem. q, k [B,T,H,K]; v [B,T,HV,V]; `lengths` packs sequences into B=1 (then T is their
    sum)."""

    id: str
    T: int
    H: int
    K: int
    V: int
    why: str
    tags: frozenset[str]
    B: int = 1
    HV: int = 0  # 0: as many as H
    lengths: tuple[int, ...] = ()
    dtype: str = "bf16"
    g_dtype: str = "fp32"
    beta_dtype: str = "fp32"
    gate: str = "log"
    l2norm: bool = False
    beta_sigmoid: bool = False
    neg_eigval: bool = False
    h0: bool = False
    ht: bool = False
    dist: Dist = field(default_factory=Dist)

    family = "kda"

    def __post_init__(self):
        if not self.HV:
            object.__setattr__(self, "HV", self.H)
        if self.lengths and (self.B != 1 or sum(self.lengths) != self.T):
            raise ValueError(
                f"case {self.id}: packed lengths sum to {sum(self.lengths)}, so B=1 and T={sum(self.lengths)}"
            )

    @property
    def N(self) -> int:
        """Sequences: states have this many rows."""
        return len(self.lengths) or self.B

    @property
    def lower_bound(self) -> float | None:
        return LOWER_BOUND if self.gate == "safe" else None

    def problem(self, arch: tuple[int, int] = INTERPRETER) -> KdaProblem:
        """What kernels are given; `arch` is the compute capability, (0, 0) for the interpreter."""
        raw = self.gate != "log"
        return KdaProblem(
            B=self.B, T=self.T, H=self.H, HV=self.HV, K=self.K, V=self.V, N=self.N, NT=_chunks(self),
            dtype=DTYPES[self.dtype], g_dtype=DTYPES[self.g_dtype], beta_dtype=DTYPES[self.beta_dtype],
            gate=self.gate, lower_bound=self.lower_bound, safe_gate=self.gate == "safe", scale=self.K**-0.5,
            l2norm=self.l2norm, beta_sigmoid=self.beta_sigmoid, neg_eigval=self.neg_eigval, has_h0=self.h0,
            output_final_state=self.ht, has_A_log=raw, has_dt_bias=raw, varlen=bool(self.lengths), arch=arch,
        )  # fmt: skip

    def op_kwargs(self) -> dict:
        """The keyword arguments of `chunk_kda` that are not tensors."""
        return {
            "scale": self.K**-0.5,
            "output_final_state": self.ht,
            "use_qk_l2norm_in_kernel": self.l2norm,
            "use_gate_in_kernel": self.gate != "log",
            "use_beta_sigmoid_in_kernel": self.beta_sigmoid,
            "allow_neg_eigval": self.neg_eigval,
            "safe_gate": self.gate == "safe",
            "lower_bound": self.lower_bound,
        }

    @property
    def sha(self) -> str:
        return _sha(self)

    def shape(self) -> str:
        heads = f"H{self.H}" + (f" HV{self.HV}" if self.HV != self.H else "")
        return f"B{self.B} T{self.T} {heads} K{self.K} V{self.V}"

    def describe(self) -> str:
        """One line: the shape and every flag that is on."""
        on = [n for n in ("l2norm", "beta_sigmoid", "neg_eigval", "h0", "ht") if getattr(self, n)]
        packed = [f"packed {','.join(map(str, self.lengths))}"] if self.lengths else []
        types = f"{self.dtype} g:{self.g_dtype} beta:{self.beta_dtype}"
        return " ".join([self.shape(), types, f"gate:{self.gate}", *packed, *on])


@dataclass(frozen=True)
class ConvCase:
    """One `causal_conv1d` problem. x, y [B,T,D]; weight [D,W]; `layout` says how x lies in memory."""

    id: str
    T: int
    D: int
    W: int
    why: str
    tags: frozenset[str]
    B: int = 1
    lengths: tuple[int, ...] = ()
    dtype: str = "bf16"
    w_dtype: str = "fp32"
    activation: str | None = "silu"
    bias: bool = False
    residual: bool = False
    h0: bool = False
    ht: bool = False
    layout: str = "contiguous"  # "sliced": channels D..2D of a [B,T,3D] projection; "transposed": [B,D,T] in memory

    family = "cconv"

    @property
    def N(self) -> int:
        return len(self.lengths) or self.B

    def problem(self, arch: tuple[int, int] = INTERPRETER) -> ConvProblem:
        return ConvProblem(
            B=self.B, T=self.T, D=self.D, W=self.W, N=self.N, dtype=DTYPES[self.dtype], w_dtype=DTYPES[self.w_dtype],
            activation=self.activation, has_bias=self.bias, has_residual=self.residual, has_h0=self.h0,
            output_final_state=self.ht, varlen=bool(self.lengths), arch=arch,
        )  # fmt: skip

    def op_kwargs(self) -> dict:
        return {"activation": self.activation, "output_final_state": self.ht}

    @property
    def sha(self) -> str:
        return _sha(self)

    def shape(self) -> str:
        return f"B{self.B} T{self.T} D{self.D} W{self.W}"

    def describe(self) -> str:
        on = [n for n in ("bias", "residual", "h0", "ht") if getattr(self, n)]
        packed = [f"packed {','.join(map(str, self.lengths))}"] if self.lengths else []
        kinds = f"{self.dtype} w:{self.w_dtype} act:{self.activation} x:{self.layout}"
        return " ".join([self.shape(), kinds, *packed, *on])


Case = KdaCase | ConvCase


def _chunks(case) -> int:
    lengths = case.lengths or (case.T,) * case.B
    return sum(-(-n // CHUNK) for n in lengths)


def _sha(case) -> str:
    """Identity of what a case means: every field but its tags and its reason."""
    text = repr([(f.name, getattr(case, f.name)) for f in fields(case) if f.name not in ("tags", "why")])
    return hashlib.sha256(text.encode()).hexdigest()[:16]
