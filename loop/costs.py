"""Matrix-product operations of every stage, as functions of a problem. Data only; `loop.contract` reads it.

Each product [m,k][k,n] counts 2 m k n, once per chunk of 64 rows and value head; triangular products and ragged
chunks count whole. These are the products of the chain's own decomposition: a rewriting can need fewer, so a share of
the tensor bound above one is possible."""

from kernel_fun._common.problem import CHUNK, KdaProblem

C = CHUNK


def _chunks(p: KdaProblem) -> int:
    return p.NT * p.HV


KDA = {
    # gated q k^T and k k^T; the inverse by doubling costs C^3/3 multiply-adds
    "fwd.intra": lambda p: _chunks(p) * (2 * 2 * C * C * p.K + 2 * C**3 // 3),
    "fwd.wy": lambda p: _chunks(p) * 2 * C * C * (p.K + p.V),
    "fwd.scan": lambda p: _chunks(p) * 2 * 2 * C * p.K * p.V,  # w h; kg^T v_new
    "fwd.out": lambda p: _chunks(p) * (2 * C * p.K * p.V + 2 * C * C * p.V),  # qg h; Aqk v_new
    "bwd.recompute": lambda p: _chunks(p) * 2 * C * C * (p.K + p.V),
    "bwd.rescan": lambda p: _chunks(p) * 2 * 2 * C * p.K * p.V,
    "bwd.dAv": lambda p: _chunks(p) * 2 * 2 * C * C * p.V,  # do v_new^T; Aqk^T do
    "bwd.dhu": lambda p: _chunks(p) * 3 * 2 * C * p.K * p.V,  # kg dh; qg^T do; w^T dv
    # do h^T, v_new dh^T, dv h^T; Akk^T dw and dw kb^T; Akk^T dv and dv v^T; Akk^T dA Akk^T
    "bwd.wy": lambda p: _chunks(p) * (3 * 2 * C * p.K * p.V + 2 * 2 * C * C * (p.K + p.V) + 2 * 2 * C**3),
    "bwd.intra": lambda p: _chunks(p) * 4 * 2 * C * C * p.K,  # dAqk k, dAkk k, dAqk^T q, dAkk^T k
}

FLOPS = {"kda": KDA, "cconv": {}}
