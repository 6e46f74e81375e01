"""The names by which tests on a GPU tell fla's kernels from ours are those of the installed fla."""
import importlib.util
import re
from pathlib import Path

import pytest
from gpu_calls import KDA, flas_kernels, flas_names, layers, of_module, ours_among, plan_of, triton_names, untuned
from small_inputs import kda
from test_gpu_launches import FLAS

from kernel_fun._common import promoted
from kernel_fun.kda import chain

fla = pytest.importorskip("fla", reason="fla-core is not installed")
STAGES = ("ops/kda/chunk_bwd.py", "ops/kda/chunk_intra.py", "ops/kda/chunk_intra_token_parallel.py", "ops/kda/gate.py",
          "ops/kda/wy_fast.py", "ops/common/chunk_delta_h.py", "ops/common/gate.py")
# kernels of those files that chunk_kda launches nowhere
ELSEWHERE = {"kda_gate_fwd_kernel", "prepare_wy_repr_bwd_kda_kernel"}


def test_every_stage_of_flas_has_its_kernels_named():
    stages = {stage.name for stage in chain.STAGES}
    assert set(FLAS) == stages | {"fwd.intra..fwd.wy"}
    named = set().union(*FLAS.values())
    since_06 = set() if importlib.util.find_spec("fla.backends") else {"l2norm_fwd_kernel_row", "l2norm_bwd_kernel_row"}
    assert named - since_06 <= flas_names()
    root = Path(fla.__file__).parent
    launched = {n for f in STAGES for n in re.findall(r"(\w+)\[\(?\w+[^\]]*\]\($", (root / f).read_text(), re.M)}
    assert launched - ELSEWHERE <= named
    assert len(launched) > 8


def test_no_kernel_of_ours_is_called_as_one_of_flas():
    assert not triton_names("kda") & flas_names()
    assert not triton_names("cconv") & flas_names()
    assert ours_among({"kernel_cutlass__kernel_0", "kda_gate_bwd_kernel"}) == {"kernel_cutlass__kernel_0"}


def test_every_promoted_kernel_can_be_seen():
    """By a Triton kernel that its module holds, or as one in the CuTe DSL."""
    for name, module, why in promoted.modules("kernel_fun.kda"):
        if module is None:
            pytest.skip(why)
        names = triton_names("kda") | {"kernel_cutlass__kernel_0"}
        assert of_module(names, module), name
        assert not of_module(flas_names(), module), name


def test_untuned_leaves_one_configuration_and_gives_the_rest_back(monkeypatch):
    kernel = next(k for k in flas_kernels() if layers(k)[-1].__name__ == "kda_gate_bwd_kernel")
    tuner = next(layer for layer in layers(kernel) if hasattr(layer, "configs"))
    before = len(tuner.configs)
    with monkeypatch.context() as patched:
        untuned(patched)
        assert len(tuner.configs) == 1 < before
    assert len(tuner.configs) == before


def test_the_plan_of_a_call_is_the_one_it_follows():
    made, flags = KDA["kimi"]
    tensors, more = kda(**made)
    plan = plan_of(tensors, flags | more)
    assert {source.partition(":")[0] for source in plan.sources()} == {"reference"}
