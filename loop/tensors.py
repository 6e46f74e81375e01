"""Every tensor of both chains: symbolic shape, dtype rule, unit and meaning. Data only; `loop.contract` reads it.

Shapes are in the letters of a problem, plus C = 64 rows a chunk and NTb = chunks along one batch row (all of them
when packed). A key `name@stage` is the tensor as that stage leaves it, where a stage changes a tensor's shape, dtype
or meaning. dtype: "p" as q or x, "g" as the gate given, "beta" as the beta given, "w" as the weight, or a torch
dtype's short name. when: the problem's flag without which the tensor is None."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Tensor:
    """One tensor of a chain, by fla's name for it."""

    shape: tuple[str, ...]
    dtype: str
    unit: str
    meaning: str
    when: str = ""


def _t(shape: str, dtype: str, unit: str, meaning: str, when: str = "") -> Tensor:
    return Tensor(tuple(shape.split()), dtype, unit, meaning, when)


KDA = {
    "q_raw": _t("B T H K", "p", "1", "queries as given"),
    "k_raw": _t("B T H K", "p", "1", "keys as given"),
    "v": _t("B T HV V", "p", "1", "values"),
    "g_raw": _t("B T HV K", "g", "nat or raw", "log decay of a step, or its raw activation input"),
    "beta_raw": _t("B T HV", "beta", "1 or raw", "write strength, or its raw sigmoid input"),
    "A_log": _t("HV", "fp32", "nat", "log of the gate's rate per value head", "has_A_log"),
    "dt_bias": _t("HV*K", "fp32", "raw", "added to the raw gate", "has_dt_bias"),
    "h0": _t("N HV K V", "fp32", "1", "state before each sequence", "has_h0"),
    "q": _t("B T H K", "p", "1", "queries, of unit length if the kernel normalises"),
    "k": _t("B T H K", "p", "1", "keys, of unit length if the kernel normalises"),
    "q_rstd": _t("B T H", "fp32", "1", "1 / length of the given query", "l2norm"),
    "k_rstd": _t("B T H", "fp32", "1", "1 / length of the given key", "l2norm"),
    "beta": _t("B T HV", "beta_act", "1", "write strength, sigmoid applied"),
    "gk": _t("B T HV K", "fp32", "log2", "chunk-local inclusive sum of the log decay"),
    "Aqk": _t(
        "B T HV C", "p", "1", "scale * gated q k^T inside the chunk, lower with diagonal; strict upper undefined"
    ),
    "Akk": _t("B T HV C", "p", "1", "(I + diag(beta) strict gated k k^T)^-1; upper zero"),
    "w": _t("B T HV K", "p", "1", "Akk (beta 2^gk k)"),
    "u": _t("B T HV V", "p", "1", "Akk (beta v)"),
    "kg": _t("B T HV K", "p", "1", "k 2^(G - gk), G the chunk's last gk"),
    "qg": _t("B T HV K", "p", "1", "q 2^gk"),
    "h": _t("B NTb HV K V", "p", "1", "state before each chunk"),
    "v_new": _t("B T HV V", "p", "1", "u - w h: what each token writes"),
    "ht": _t("N HV K V", "fp32", "1", "state after each sequence", "output_final_state"),
    "o": _t("B T HV V", "p", "1", "output"),
    "do": _t("B T HV V", "p", "d/o", "gradient of o"),
    "dht": _t("N HV K V", "fp32", "d/ht", "gradient of ht", "output_final_state"),
    "dAqk": _t("B T HV C", "fp32", "d/Mqk", "scale * tril(do v_new^T)"),
    "dv": _t("B T HV V", "p", "d/v_new", "Aqk^T do: the part of v_new's gradient inside the chunk"),
    "dv@bwd.dhu": _t("B T HV V", "p", "d/v_new", "whole gradient of v_new"),
    "dv@bwd.wy": _t("B T HV V", "p", "d/v", "gradient of v"),
    "dh": _t("B NTb HV K V", "p", "d/h", "gradient of the state after each chunk"),
    "dh0": _t("N HV K V", "fp32", "d/h0", "gradient of h0", "has_h0"),
    "dq": _t("B T HV K", "fp32", "d/q", "gradient of q across chunks, per value head"),
    "dk": _t("B T HV K", "fp32", "d/k", "gradient of k across chunks, per value head"),
    "db": _t("B T HV", "fp32", "d/beta", "gradient of beta across chunks"),
    "dg": _t("B T HV K", "fp32", "d/gk", "gradient of the natural-log gk across chunks"),
    "dAkk": _t("B T HV C", "fp32", "d/L", "gradient of diag(beta) Mkk, strict lower"),
    "dq@bwd.intra": _t("B T HV K", "fp32", "d/q", "gradient of q, per value head"),
    "dk@bwd.intra": _t("B T HV K", "fp32", "d/k", "gradient of k, per value head"),
    "db@bwd.intra": _t("B T HV", "fp32", "d/beta", "gradient of beta"),
    "dg@bwd.intra": _t("B T HV K", "fp32", "d/gk", "gradient of the natural-log gk"),
    "dq@bwd.gva": _t("B T H K", "fp32", "d/q", "gradient of q, summed over the value heads that share it"),
    "dk@bwd.gva": _t("B T H K", "fp32", "d/k", "gradient of k, summed over the value heads that share it"),
    "dg@bwd.cumsum": _t("B T HV K", "fp32", "d/nat", "gradient of the step's natural-log decay"),
    "dg@bwd.gate": _t("B T HV K", "fp32", "d/g_raw", "gradient of the gate as given"),
    "dA_log": _t("HV", "fp32", "d/A_log", "gradient of A_log", "has_A_log"),
    "ddt_bias": _t("HV*K", "fp32", "d/dt_bias", "gradient of dt_bias", "has_dt_bias"),
    "dq@bwd.norm": _t("B T H K", "fp32", "d/q_raw", "gradient of the query as given"),
    "dk@bwd.norm": _t("B T H K", "fp32", "d/k_raw", "gradient of the key as given"),
    "dbeta": _t("B T HV", "fp32", "d/beta_raw", "gradient of beta as given"),
}

CCONV = {
    "x": _t("B T D", "p", "1", "input, in any strides"),
    "weight": _t("D W", "w", "1", "taps, the newest last"),
    "bias": _t("D", "w", "1", "added before the activation", "has_bias"),
    "residual": _t("B T D", "p", "1", "added after the activation", "has_residual"),
    "h0": _t("N D W", "p", "1", "the W inputs before each sequence", "has_h0"),
    "y": _t("B T D", "p", "1", "output, contiguous"),
    "ht": _t("N D W", "p", "1", "the last W inputs of each sequence", "output_final_state"),
    "dy": _t("B T D", "p", "d/y", "gradient of y, in any strides"),
    "dht": _t("N D W", "p", "d/ht", "gradient of ht", "output_final_state"),
    "dx": _t("B T D", "p", "d/x", "gradient of x"),
    "dw": _t("D W", "w", "d/weight", "gradient of the taps"),
    "db": _t("D", "w", "d/bias", "gradient of the bias", "has_bias"),
    "dresidual": _t("B T D", "p", "d/residual", "gradient of the residual: dy itself", "has_residual"),
    "dh0": _t("N D W", "p", "d/h0", "gradient of h0", "has_h0"),
}

TABLES = {"kda": KDA, "cconv": CCONV}

# Op-level name -> the chain's name for it; and the input that each gradient belongs to, whose dtype it has.
OP_NAMES = {
    "kda": {"q": "q_raw", "k": "k_raw", "g": "g_raw", "beta": "beta_raw", "initial_state": "h0"},
    "cconv": {"initial_state": "h0"},
}
GRADIENT_OF = {
    "kda": {"dq": "q_raw", "dk": "k_raw", "dv": "v", "dg": "g_raw", "dbeta": "beta_raw", "dA_log": "A_log",
            "ddt_bias": "dt_bias", "dh0": "h0"},
    "cconv": {"dx": "x", "dw": "weight", "db": "bias", "dresidual": "residual", "dh0": "h0"},
}  # fmt: skip
