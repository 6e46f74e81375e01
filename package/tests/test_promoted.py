"""What ships: each file is the one its provenance names, keeps the interface, and one that does not import says why."""
import ast
import hashlib
import importlib
import importlib.util
import re
import sys
import types
from importlib import metadata
from pathlib import Path

import pytest
import torch

import kernel_fun
from kernel_fun._common import cute, dispatch, promoted, support
from kernel_fun._common.problem import ConvProblem, KdaProblem

PACKAGE = Path(kernel_fun.__file__).parent
CHAINS = {family: importlib.import_module(f"kernel_fun.{family}.chain") for family in ("kda", "cconv")}
PROBLEMS = {
    "kda": KdaProblem(B=1, T=64, H=1, HV=1, K=128, V=128, N=1, NT=1, arch=(9, 0)),
    "cconv": ConvProblem(B=1, T=64, D=64, W=4, N=1, arch=(9, 0)),
}


def shipped(family):
    return importlib.import_module(f"kernel_fun.{family}._provenance").SHIPPED


@pytest.mark.parametrize("family", CHAINS)
def test_every_shipped_file_is_the_one_that_was_promoted(family):
    folder = PACKAGE / family / "stages"
    listed = {f"{entry.module}.py": entry.sha256 for entry in shipped(family)}
    there = {path.name: hashlib.sha256(path.read_bytes()).hexdigest() for path in folder.glob("*.py")}
    del there["__init__.py"]
    assert there == listed


@pytest.mark.parametrize("family", CHAINS)
def test_every_shipped_kernel_keeps_the_interface(family):
    for name, module, why in promoted.modules(f"kernel_fun.{family}"):
        if module is None:
            assert why == cute.reason() != ""  # nothing else keeps one from being used; the route says so
            continue
        assert family == module.FAMILY
        assert promoted.module_steps(module, PROBLEMS[family], name, CHAINS[family].STAGES, CHAINS[family].OUTPUTS)
        ok, reason = module.supports(PROBLEMS[family])
        assert (not reason) is ok


@pytest.mark.parametrize("path", sorted(PACKAGE.rglob("*.py")), ids=lambda path: path.stem)
def test_no_sum_depends_on_the_order_of_programs(path):
    """No atomics, in Triton, in the CuTe DSL or in PTX: the same inputs give the same bits."""
    assert not re.search(r"\batomic_|\b(atom|red)(\.async)?\.", path.read_text())


@pytest.mark.parametrize("family", CHAINS)
@pytest.mark.parametrize("base", promoted.BASES)
def test_every_stage_has_a_function_under_the_promoted_kernels(family, base):
    chain, p = CHAINS[family], PROBLEMS[family]
    steps = chain.base_steps(p, base)
    assert all(step.source.startswith(f"{base}:{step.span[0]}") for step in steps)
    covered = [name for step in steps for name in step.span]
    assert sorted(set(covered)) == sorted(stage.name for stage in chain.STAGES)
    with pytest.raises(ValueError, match="base='cuda': accepted are 'fla' and 'reference'"):
        chain.make_plan(p, base="cuda")


@pytest.mark.parametrize("family", CHAINS)
def test_shipped_kernels_import_only_what_is_installed_with_the_package(family):
    for entry in shipped(family):
        tree = ast.parse((PACKAGE / family / "stages" / f"{entry.module}.py").read_text())
        roots = set()
        for node in ast.walk(tree):
            if isinstance(node, ast.Import):
                roots |= {alias.name.split(".")[0] for alias in node.names}
            elif isinstance(node, ast.ImportFrom):
                assert node.level == 0
                roots.add(node.module.split(".")[0])
        assert roots.issubset({*sys.stdlib_module_names, "torch", "triton", "cutlass", "cuda", "fla", "kernel_fun"})


@pytest.fixture
def family_with_a_kernel(monkeypatch):
    """A made-up family package whose one kernel is `source`."""

    def make(source, name="made_up"):
        package, provenance = types.ModuleType(name), types.ModuleType(f"{name}._provenance")
        provenance.SHIPPED = (types.SimpleNamespace(module="k001_x"),)
        stages = types.ModuleType(f"{name}.stages")
        stages.__path__ = []
        package.__path__ = []
        for module in (package, provenance, stages):
            monkeypatch.setitem(sys.modules, module.__name__, module)

        class Finder:
            @staticmethod
            def find_spec(fullname, path=None, target=None):
                if fullname == f"{name}.stages.k001_x":
                    return importlib.util.spec_from_loader(fullname, Finder())
                return None

            def create_module(self, spec):
                return None

            def get_source(self, fullname):
                return source

            def exec_module(self, module):
                exec(source, module.__dict__)

        monkeypatch.setattr(sys, "meta_path", [Finder, *sys.meta_path])
        return name

    yield make
    promoted.modules.cache_clear()


@pytest.mark.parametrize(("source", "why"), [
    ("import kernel_fun.not_here", "does not import: No module named 'kernel_fun.not_here'"),
    ("raise RuntimeError('no flavor fits\\nsecond line')", "does not import: no flavor fits"),
    ("    syntax", "does not import: unexpected indent (<string>, line 1)"),
])
def test_a_kernel_that_does_not_import_is_a_reason(family_with_a_kernel, source, why):
    chain = CHAINS["kda"]
    steps, reasons = promoted.steps_for(family_with_a_kernel(source), PROBLEMS["kda"], chain.STAGES, chain.OUTPUTS)
    assert steps == []
    assert reasons == [f"k001_x: {why}"]


# -------------------------------------------------------------------------------------------------------- the CuTe DSL
BASE, CU12, CU13 = "nvidia-cutlass-dsl", "nvidia-cutlass-dsl-libs-cu12", "nvidia-cutlass-dsl-libs-cu13"
FOR_12 = "pip install 'nvidia-cutlass-dsl>=4.8.1'"
FOR_13 = "pip install 'nvidia-cutlass-dsl[cu13]>=4.8.1'"
HERE = {BASE: "4.8.1", CU12: "4.8.1", CU13: "4.8.1"}
WITHOUT_13 = {BASE: "4.8.1", CU12: "4.8.1"}
WITHOUT_12 = {BASE: "4.8.1", CU13: "4.8.1"}


def machine(monkeypatch, installed, cuda, driver):
    """Pretend: packages by version, torch's CUDA version, the driver's as cuDriverGetVersion gives it."""

    def version(package):
        if package not in installed:
            raise metadata.PackageNotFoundError(package)
        return installed[package]

    monkeypatch.setattr(cute.metadata, "version", version)
    monkeypatch.setattr(cute, "find_spec", lambda name: None)
    monkeypatch.setattr(torch.version, "cuda", cuda)
    monkeypatch.setattr(torch._C, "_cuda_getDriverVersion", lambda: driver, raising=False)


@pytest.mark.parametrize(("installed", "cuda", "driver", "why"), [
    (HERE, "13.0", 13000, ""),
    (HERE, "12.8", 12090, ""),
    (HERE, "12.8", 13000, ""),
    (WITHOUT_13, "12.8", 12090, ""),
    (WITHOUT_13, None, 0, ""),
    ({BASE: "4.9.0.dev1"}, "13.0", 13000, ""),
    ({}, "13.0", 13000, "the CuTe DSL is not installed: " + FOR_13),
    ({}, "12.8", 12090, "the CuTe DSL is not installed: " + FOR_12),
    ({**HERE, BASE: "4.3.0"}, "13.0", 13000,
     "the CuTe DSL is 4.3.0, kernels need 4.8.1 or later: " + FOR_13),
    (WITHOUT_13, "13.0", 13000,
     "the CuTe DSL is the build for CUDA 12, torch is for CUDA 13: " + FOR_13),
    (WITHOUT_12, "12.8", 13000,
     "the CuTe DSL is the build for CUDA 13, torch is for CUDA 12: " + FOR_12),
    (HERE, "12.6", 12060, "the NVIDIA driver supports CUDA 12.6, the CuTe DSL needs one for CUDA 12.9 or later"),
    (HERE, "13.0", 12080, "the NVIDIA driver supports CUDA 12.8, the CuTe DSL needs one for CUDA 13.0 or later"),
])
def test_each_thing_wrong_with_the_cute_dsl_is_one_line(monkeypatch, installed, cuda, driver, why):
    machine(monkeypatch, installed, cuda, driver)
    assert cute.reason() == why


def test_a_copy_of_the_cute_dsl_without_metadata_is_taken_as_it_is(monkeypatch):
    machine(monkeypatch, {}, "13.0", 13000)
    monkeypatch.setattr(cute, "find_spec", lambda name: name == "cutlass")
    assert cute.reason() == ""


@pytest.mark.parametrize("source", ["import cutlass.cute as cute", "def run():\n    from cutlass import Int32"])
def test_a_kernel_in_cute_is_not_even_imported_where_it_cannot_run(monkeypatch, family_with_a_kernel, source):
    machine(monkeypatch, WITHOUT_13, "13.0", 13000)
    package = family_with_a_kernel(f"{source}\nraise AssertionError('imported')")
    chain = CHAINS["kda"]
    steps, reasons = promoted.steps_for(package, PROBLEMS["kda"], chain.STAGES, chain.OUTPUTS)
    assert steps == []
    assert reasons == [f"k001_x: {cute.reason()}"]


def test_a_kernel_that_launches_one_in_cute_is_itself_in_cute(monkeypatch, family_with_a_kernel):
    machine(monkeypatch, WITHOUT_13, "13.0", 13000)
    name = next(e.module for e in shipped("kda") if promoted._in_cute(f"kernel_fun.kda.stages.{e.module}"))
    package = family_with_a_kernel(f"from kernel_fun.kda.stages.{name} import (\n    run,\n)\nraise AssertionError")
    chain = CHAINS["kda"]
    steps, reasons = promoted.steps_for(package, PROBLEMS["kda"], chain.STAGES, chain.OUTPUTS)
    assert (steps, reasons) == ([], [f"k001_x: {cute.reason()}"])


KERNEL = """
FAMILY = "kda"
def run(*, q, p):
    return {}
SPANS = {"bwd.intra..bwd.cumsum": run}
WRITES = {"bwd.intra..bwd.cumsum": ("dq", "dk", "db", "dg")}
def supports(p):
    return (p.K == 128, "" if p.K == 128 else f"needs K=128, got {p.K}")
"""
REST = "; fla's own: fwd.norm to fwd.out, bwd.regate to bwd.wy, bwd.gate to bwd.beta"


def test_a_kernel_takes_its_span_and_fla_the_rest(monkeypatch, lines):
    module = types.ModuleType("k001_x")
    exec(KERNEL, module.__dict__)
    monkeypatch.setattr(promoted, "modules", lambda package: (("k001_x", module, ""),))
    chain = CHAINS["kda"]
    plan = chain.make_plan(PROBLEMS["kda"])
    assert "k001_x" in plan.sources()
    assert "fla:fwd.scan" in plan.sources()
    assert not {"fla:bwd.intra", "fla:bwd.gva", "fla:bwd.cumsum"} & {*plan.sources()}

    class Elsewhere:
        is_cpu, is_cuda, device = False, True, types.SimpleNamespace(index=0)

    assert dispatch.route("kda", chain, PROBLEMS["kda"], Elsewhere, True).what == f"k001_x{REST}"
    monkeypatch.setattr(promoted, "modules", lambda package: (("k002_y", None, "no CuTe DSL"), ("k001_x", module, "")))
    dispatch._routes.clear()
    found = dispatch.route("kda", chain, PROBLEMS["kda"], Elsewhere, True)
    assert (found.what, found.missing) == (f"k001_x{REST}", ("k002_y: no CuTe DSL",))
    for _ in range(2):
        support.engaged("kda", found.what, found.missing)
    assert lines()[2:] == [("WARNING", "kernel-fun kda: runs without k002_y: no CuTe DSL")]
    monkeypatch.setattr(promoted, "modules", lambda package: (("k001_x", module, ""),))
    small = KdaProblem(B=1, T=64, H=1, HV=1, K=96, V=128, N=1, NT=1, arch=(9, 0))
    assert dispatch.route("kda", chain, small, Elsewhere, True).reason == "k001_x: needs K=128, got 96"


def test_a_kernel_serves_only_beside_those_it_names():
    p = KdaProblem(B=1, T=64, H=1, HV=1, K=64, V=128, N=1, NT=1, arch=(9, 0))
    steps, reasons = promoted.steps_for("kernel_fun.kda", p, CHAINS["kda"].STAGES, CHAINS["kda"].OUTPUTS)
    assert "k017_bwd_scan_one" not in {step.source for step in steps}
    assert "k017_bwd_scan_one: serves only beside k019_bwd_keys_exact" in reasons


def test_beside_is_followed_to_its_end(monkeypatch):
    """k003 beside k002 beside k001, which declines: none of the three serves."""
    module = types.ModuleType("k001_x")
    exec(KERNEL, module.__dict__)
    willing = types.ModuleType("k002_y")
    exec(KERNEL.replace("p.K == 128", "True"), willing.__dict__)
    names = (("k003_z", willing, ""), ("k002_y", willing, ""), ("k001_x", module, ""))
    entry = types.SimpleNamespace
    entries = [entry(module="k003_z", beside=("k002_y",)), entry(module="k002_y", beside=("k001_x",)),
               entry(module="k001_x", beside=())]
    monkeypatch.setattr(promoted, "modules", lambda package: names)
    monkeypatch.setattr("kernel_fun.kda._provenance.SHIPPED", entries)
    p = KdaProblem(B=1, T=64, H=1, HV=1, K=64, V=128, N=1, NT=1, arch=(9, 0))
    steps, reasons = promoted.steps_for("kernel_fun.kda", p, CHAINS["kda"].STAGES, CHAINS["kda"].OUTPUTS)
    assert steps == []
    assert reasons == ["k003_z: serves only beside k002_y", "k002_y: serves only beside k001_x",
                       "k001_x: needs K=128, got 64"]


@pytest.mark.parametrize("gate", ["log", "softplus", "safe"])
@pytest.mark.parametrize("K", [128, 64, 96])
def test_the_forward_keeps_no_more_than_flas(gate, K):
    """With whatever ships: a subset of what fla saves, or the caller's own q and k instead of normalised ones; and one
    of the raw gate and its sum, where fla may save both."""
    raw = gate != "log"
    p = KdaProblem(B=1, T=64, H=1, HV=1, K=K, V=128, N=1, NT=1, arch=(9, 0), gate=gate, l2norm=True, beta_sigmoid=True,
                   has_h0=True, has_A_log=raw, has_dt_bias=raw, lower_bound=-5.0 if gate == "safe" else None)
    saved = {*CHAINS["kda"].make_plan(p).saved}
    gates = {"A_log", "dt_bias", "g_raw", "gk"}
    rest = {"q_rstd", "k_rstd", "v", "beta_raw", "beta", "Aqk", "Akk", "h0"}
    assert saved <= gates | {"q", "k"} | rest or saved <= gates | {"q_raw", "k_raw"} | rest
    assert not {"g_raw", "gk"} <= saved
