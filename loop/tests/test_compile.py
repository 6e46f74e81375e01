"""Every idea's kernels compile for Hopper where there is no GPU, and none copies over an operand that is being read."""

import importlib.util
import os
import re
import subprocess
import sys

import pytest

from loop import inflight, registry, sm90

pytestmark = pytest.mark.slow
IDEAS = [i for i in registry.all_ideas() if i.error is None and i.kernel.exists()]
SOURCE = {i.id: i.kernel.read_text(encoding="utf-8") for i in IDEAS}
TRITON = [i.id for i in IDEAS if hasattr(registry.load(i.id), "COMPILE")]
CUTE = [
    number
    for number, folder in registry.folders().items()
    if number != registry.BASELINE and re.search(r"^import cutlass", (folder / "kernel.py").read_text(), re.MULTILINE)
]

# Compiles what the idea itself compiles for this case: its function is run, and its kernels are not.
COMPILE_CUTE = """
import dataclasses, sys, torch
import cutlass.cute as cute
from triton.experimental.gluon._runtime import GluonJITFunction
from kernel_fun._common import launch
from loop import cases, contract, registry, spans

launch.launch = lambda *a, **k: None  # before the idea, or a promoted kernel that it builds on, takes it from there
GluonJITFunction.run = lambda *a, **k: None
compiled = []
def compile(*args, compile=cute.compile, **kwargs):
    compiled.append(compile(*args, **{**kwargs, "options": ""}))
    return lambda *a, **k: None
cute.compile = compile
case, module = cases.get("kda", "tiny_wide"), registry.load(sys.argv[1])
if not module.supports(dataclasses.replace(case.problem(), arch=(9, 0)))[0]:
    case = dataclasses.replace(case, V=128)  # an idea may take no wider one
p = dataclasses.replace(case.problem(), arch=(9, 0))
assert module.supports(p) == (True, ""), module.supports(p)
for span, fn in module.SPANS.items():
    env, meta = spans.operands(case, p, contract.parse_span("kda", span)[0], 0, torch.device("cpu"))
    spans._step("kda", span, fn)(env, meta)
assert compiled
"""


def test_a_settled_idea_says_what_to_compile():
    settled = {i.id for i in IDEAS if registry.front_matter(i.folder).get("status") in ("promoted", "kept", "refuted")}
    elsewhere = {"008"}  # its tiles come by tensor descriptors: compiled in test_bwd_scan_idea.py
    assert {i for i in settled if "@triton.jit" in SOURCE[i]} - set(TRITON) - elsewhere == set()


@pytest.mark.parametrize("idea", TRITON)
def test_triton_kernels_compile_for_hopper(idea):
    built = sm90.compile_each(registry.load(idea).COMPILE)
    assert built
    for b in built:
        assert ".target sm_90" in b.ptx
        assert b.regs <= 255
        assert b.smem <= 227 * 1024
        assert inflight.overwritten(b.ttgir) == []


@pytest.mark.parametrize("idea", CUTE)
def test_cute_kernels_compile_for_hopper(idea):
    if importlib.util.find_spec("cutlass") is None:
        pytest.skip("needs nvidia-cutlass-dsl (the workspace's extra `cute`)")
    path = os.pathsep.join([str(registry.root()), *filter(None, sys.path)])
    child = subprocess.run(
        [sys.executable, "-c", COMPILE_CUTE, idea],
        env=os.environ
        | {"CUTE_DSL_ARCH": "sm_90a", "PYTHONPATH": path, "TRITON_INTERPRET": "1", "CUDA_VISIBLE_DEVICES": ""},
        capture_output=True,
        text=True,
        check=False,
    )
    assert child.returncode == 0, child.stderr[-2000:]
