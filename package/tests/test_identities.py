"""The identities of ALGORITHM.md section 4 that kernels use to skip work, on the reference's own tensors in fp64."""
import pytest
import torch
from small_inputs import kda, rms

from kernel_fun._common.problem import KdaProblem
from kernel_fun.kda import chain, reference


@pytest.fixture(scope="module")
def env():
    """Every tensor of the chain, both passes, for one call of three chunks with states."""
    tensors, _ = kda(B=2, T=192, H=2, K=16, V=8, h0=True, grad=False)
    p = KdaProblem(B=2, T=192, H=2, HV=2, K=16, V=8, N=2, NT=6, dtype=torch.float64, g_dtype=torch.float64, scale=0.25,
                   beta_dtype=torch.float64, has_h0=True, output_final_state=True)
    inputs = [tensors.get(n) for n in ("q", "k", "v", "g", "beta", "A_log", "dt_bias", "initial_state")]
    env = dict(zip(chain.INPUTS, inputs, strict=True))
    random = torch.Generator().manual_seed(3)
    env["do"] = torch.randn(2, 192, 2, 8, generator=random, dtype=torch.float64)
    env["dht"] = torch.randn(2, 2, 16, 8, generator=random, dtype=torch.float64)
    meta = {"p": p, "cu_seqlens": None, "chunk_indices": None, "chunk_offsets": None}
    kept = {}
    for step in chain.base_steps(p, "reference"):
        new = step(env, meta)
        kept.update({(step.span[0], name): value for name, value in new.items()})
        env.update(new)
    pack = {name: reference.pack(t, p, None) for name, t in env.items()
            if name in ("k", "v", "gk", "Akk", "v_new", "w", "kg", "u")}
    pack["beta"] = reference.pack(env["beta"][..., None], p, None)
    for name in ("dv", "dAkk", "db"):
        t = kept["bwd.wy", name]
        pack[name] = reference.pack(t[..., None] if t.dim() == 3 else t, p, None)
    pack["dvn"] = reference.pack(kept["bwd.dhu", "dv"], p, None)
    pack["h"], pack["dh"] = kept["bwd.rescan", "h"].flatten(0, 1), kept["bwd.dhu", "dh"].flatten(0, 1)
    return p, pack


def test_the_solve_differentiates_without_a_chain_of_products(env):
    _, t = env
    assert rms(t["dAkk"], -((t["Akk"].mT @ t["dvn"]) @ t["v_new"].mT).tril(-1)) < 1e-12


def test_the_gradient_of_v_replaces_w_and_u(env):
    _, t = env
    kb = t["k"] * torch.exp2(t["gk"])
    assert rms(t["dv"], t["beta"] * (t["Akk"].mT @ t["dvn"])) < 1e-12
    dMkk = t["beta"] * t["dAkk"]
    assert rms(dMkk, -(t["dv"] @ t["v_new"].mT).tril(-1)) < 1e-12
    dkb = t["Akk"].mT @ (-t["dvn"] @ t["h"].mT)          # gradient of beta k 2^gk, by the staged form
    assert rms(t["beta"] * dkb, -t["dv"] @ t["h"].mT) < 1e-12
    db = (dkb * kb).sum(-1) + ((t["Akk"].mT @ t["dvn"]) * t["v"]).sum(-1)
    assert rms(t["db"][..., 0], db) < 1e-12


def test_v_new_is_beta_times_the_prediction_error(env):
    _, t = env
    error = t["v"] - (t["k"] * torch.exp2(t["gk"])) @ t["h"]
    assert rms(t["v_new"], t["Akk"] @ (t["beta"] * error)) < 1e-12


def test_the_state_term_of_the_gate_gradient(env):
    _, t = env
    G = t["gk"][..., -1:, :].mT
    after = torch.exp2(G) * t["h"] + t["kg"].mT @ t["v_new"]
    direct = torch.exp2(G[..., 0]) * (t["h"] * t["dh"]).sum(-1) + (t["kg"] * (t["v_new"] @ t["dh"].mT)).sum(-2)
    assert rms(direct, (after * t["dh"]).sum(-1)) < 1e-12


def test_the_scan_is_affine_in_its_first_state(env):
    p, t = env
    eye = torch.eye(p.K, dtype=torch.float64)
    for chunks in ([0, 1, 2], [3, 4, 5]):
        M, B = eye.expand(p.HV, p.K, p.K), torch.zeros(p.HV, p.K, p.V, dtype=torch.float64)
        for c in chunks:
            decay = torch.exp2(t["gk"][c, :, -1, :])[..., None]
            M = decay * M - t["kg"][c].mT @ (t["w"][c] @ M)
            B = decay * B + t["kg"][c].mT @ (t["u"][c] - t["w"][c] @ B)
        last = chunks[-1]
        decay = torch.exp2(t["gk"][last, :, -1, :])[..., None]
        final = decay * t["h"][last] + t["kg"][last].mT @ t["v_new"][last]
        assert rms(M @ t["h"][chunks[0]] + B, final) < 1e-12


def test_a_boundary_between_two_rows_factors_their_decay(env):
    _, t = env
    gk = t["gk"]
    for r, m, s in ((63, 40, 7), (32, 31, 0), (17, 16, 16)):
        whole = torch.exp2(gk[..., r, :] - gk[..., s, :])
        parts = torch.exp2(gk[..., r, :] - gk[..., m, :]), torch.exp2(gk[..., m, :] - gk[..., s, :])
        assert all(bool((part <= 1).all()) for part in parts)
        assert rms(whole, parts[0] * parts[1]) < 1e-12
