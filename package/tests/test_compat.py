"""The probe of fla's functions: passes on the installed fla, names what has moved, and can be told to fall back."""
import pytest
from small_inputs import kda

from kernel_fun import versions
from kernel_fun._common import compat


@pytest.fixture(autouse=True)
def fresh_probe():
    compat._moved.cache_clear()
    yield
    compat._moved.cache_clear()


@pytest.mark.parametrize("family", compat.CALLS)
def test_the_installed_fla_has_everything(family):
    assert compat.drift(family) == []
    assert compat.reason(family) == ""


def test_a_missing_function_is_named(monkeypatch):
    monkeypatch.delattr("fla.ops.kda.wy_fast.recompute_w_u_fwd")
    with pytest.raises(compat.FlaDriftError, match=r"fla\.ops\.kda\.wy_fast\.recompute_w_u_fwd is gone"):
        compat.reason("kda")


def test_a_missing_module_is_named(monkeypatch):
    monkeypatch.setitem(compat.CALLS, "kda", (("fla.ops.kda.nowhere", "f", ()),))
    with pytest.raises(compat.FlaDriftError, match=r"fla\.ops\.kda\.nowhere\.f is gone"):
        compat.reason("kda")


def test_a_renamed_keyword_is_named(monkeypatch):
    def moved(q, k, v, do, A, scale, cu_seqlens, indices, chunk_size):
        raise AssertionError("never called")

    monkeypatch.setattr("fla.ops.kda.chunk_bwd.chunk_kda_bwd_dAv", moved)
    with pytest.raises(compat.FlaDriftError, match="chunk_kda_bwd_dAv no longer takes chunk_indices"):
        compat.reason("kda")


def test_drift_becomes_a_reason_under_the_switch(monkeypatch):
    monkeypatch.setenv("KERNEL_FUN_FALLBACK", "1")
    monkeypatch.delattr("fla.ops.kda.gate.kda_gate_bwd")
    assert "kda_gate_bwd is gone" in compat.reason("kda")
    assert versions()["fla-core"] in compat.reason("kda")


def test_a_cpu_call_does_not_ask_fla(monkeypatch):
    from kernel_fun.kda import chunk_kda

    monkeypatch.setattr(compat, "CALLS", {})
    tensors, flags = kda(T=3, grad=False)
    chunk_kda(**tensors, **flags)


def test_a_keyword_of_some_versions_is_passed_where_it_is_taken():
    def newer(x, chunk_offsets=None):
        pass

    def older(x):
        pass

    assert compat.if_taken(newer, chunk_offsets=1) == {"chunk_offsets": 1}
    assert compat.if_taken(older, chunk_offsets=1) == {}


def test_every_keyword_our_stages_pass_is_in_the_table():
    """The table is complete: each fla call in fla_stages.py passes only keywords that the probe asks for."""
    import ast
    import pathlib

    from kernel_fun.cconv import fla_stages as conv_stages
    from kernel_fun.kda import fla_stages as kda_stages

    for family, module in (("kda", kda_stages), ("cconv", conv_stages)):
        asked = {name: set(keywords) for _, name, keywords in compat.CALLS[family]}
        tree = ast.parse(pathlib.Path(module.__file__).read_text())
        imports = [node for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)]
        imported = {a.name for node in imports if (node.module or "").startswith("fla.") for a in node.names}
        for node in ast.walk(tree):
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id in imported:
                passed = {keyword.arg for keyword in node.keywords if keyword.arg}  # if_taken(...) asks for itself
                assert passed <= asked[node.func.id], node.func.id
        assert imported - {"RCP_LN2"} <= {*asked}
