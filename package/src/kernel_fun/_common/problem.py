"""A problem: everything about a call that decides which kernels run.

Frozen and hashable, so that plans, compiled kernels and warm shapes can be kept per problem. A kernel's `supports(p)`
and `run(..., p)` receive one; so do the harness's cases, floors and contracts. Nothing in here touches a tensor's
values.
"""

from dataclasses import dataclass

import torch

CHUNK = 64  # rows per chunk, everywhere in this package
INTERPRETER = (0, 0)  # the `arch` of a problem whose kernels run in Triton's interpreter, on a CPU


@dataclass(frozen=True)
class KdaProblem:
    """One `chunk_kda` call. q, k [B,T,H,K]; v [B,T,HV,V]; g [B,T,HV,K]; beta [B,T,HV]; states fp32 [N,HV,K,V]."""

    B: int
    T: int
    H: int
    HV: int
    K: int
    V: int
    N: int  # sequences: B when dense, len(cu_seqlens) - 1 when packed
    NT: int  # chunks of 64 rows over the whole call: B*ceil(T/64), or the sum over packed sequences
    dtype: torch.dtype = torch.bfloat16  # of q, k, v and o
    g_dtype: torch.dtype = torch.float32
    beta_dtype: torch.dtype = torch.float32
    gate: str = "log"  # "log": g is the log decay; "softplus", "safe": g is raw and activated in the kernel
    lower_bound: float | None = None  # of the safe gate
    safe_gate: bool = False  # the caller promises gates >= -5 a step
    scale: float = 1.0
    l2norm: bool = False
    beta_sigmoid: bool = False
    neg_eigval: bool = False
    has_h0: bool = False
    output_final_state: bool = False
    has_A_log: bool = False
    has_dt_bias: bool = False
    varlen: bool = False
    arch: tuple[int, int] = INTERPRETER  # compute capability

    @property
    def chunks_per_row(self) -> int:
        """Chunks along the second axis of h and dh: per batch row when dense, all of them when packed."""
        return self.NT if self.varlen else self.NT // max(self.B, 1)

    @property
    def scan_ctas(self) -> int:
        """CTAs of the serial scan, the chain's smallest grid, with V in tiles of 64."""
        return self.N * self.HV * -(-self.V // 64)

    @property
    def beta_scale(self) -> float:
        return 2.0 if self.neg_eigval else 1.0


@dataclass(frozen=True)
class ConvProblem:
    """One `causal_conv1d` call. x, y [B,T,D]; weight [D,W]; states [N,D,W]."""

    B: int
    T: int
    D: int
    W: int
    N: int
    dtype: torch.dtype = torch.bfloat16
    w_dtype: torch.dtype = torch.float32
    activation: str | None = None  # None or "silu"; "swish" is the same function and arrives as "silu"
    has_bias: bool = False
    has_residual: bool = False
    has_h0: bool = False
    output_final_state: bool = False
    varlen: bool = False
    arch: tuple[int, int] = INTERPRETER
