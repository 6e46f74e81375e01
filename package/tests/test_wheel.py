"""The wheel: what is in it, its metadata, and that it works and passes these tests where only the wheel is."""
import email
import importlib.util
import os
import re
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

import kernel_fun

ROOT = Path(__file__).resolve().parents[1]
pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def wheel(tmp_path_factory):
    """Built from a copy, so that nothing is left in the tree; without the build backend here, pip fetches it."""
    if not (ROOT / "pyproject.toml").exists():
        pytest.skip("no source tree here to build from (these are the installed wheel's tests)")
    source, out = tmp_path_factory.mktemp("source") / "package", tmp_path_factory.mktemp("dist")
    shutil.copytree(ROOT, source, ignore=shutil.ignore_patterns("__pycache__", ".*", "dist", "build"))
    pip = [sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", "--wheel-dir", str(out), str(source)]
    if importlib.util.find_spec("hatchling"):
        pip.append("--no-build-isolation")
    done = subprocess.run(pip, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    (path,) = out.glob("*.whl")
    return path


@pytest.fixture(scope="module")
def installed(wheel, tmp_path_factory):
    """Environment variables of a Python that finds the wheel, and neither the source tree nor the ladder."""
    site = tmp_path_factory.mktemp("site")
    pip = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--target", str(site), str(wheel)]
    done = subprocess.run(pip, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    return {**os.environ, "PYTHONPATH": str(site)}


def test_contents(wheel):
    assert wheel.name == f"kernel_fun-{kernel_fun.__version__}-py3-none-any.whl"
    with zipfile.ZipFile(wheel) as archive:
        names = archive.namelist()
        meta = email.message_from_bytes(archive.read(next(n for n in names if n.endswith("METADATA"))))
    tree = {str(p.relative_to(ROOT / "src")) for p in (ROOT / "src").rglob("*.py")}
    assert {n for n in names if n.endswith(".py")} == tree
    assert any(n.endswith("licenses/LICENSE") for n in names)
    assert meta["Version"] == kernel_fun.__version__
    assert meta["License-Expression"] == "Apache-2.0"
    assert {*meta.get_all("Provides-Extra")} == {"cu12", "cu13", "test"}
    base = [r for r in meta.get_all("Requires-Dist") if "extra ==" not in r]
    assert {re.split(r"[^\w-]", r)[0] for r in base} == {"torch", "triton", "fla-core"}
    assert not any(re.search("==|<|~=", r.split(";")[0]) for r in base)  # floors: an image keeps what it has


def run(environment, cwd, *command):
    command = [sys.executable, *command]
    return subprocess.run(command, capture_output=True, text=True, env=environment, cwd=cwd, check=False)


def test_the_installed_wheel_answers(installed, tmp_path):
    done = run(installed, tmp_path, "-m", "kernel_fun", "versions")
    assert done.returncode == 0, done.stderr
    assert f"kernel_fun {kernel_fun.__version__}" in done.stdout
    code = "import kernel_fun, sys; print(kernel_fun.__file__); assert 'torch' not in sys.modules"
    done = run(installed, tmp_path, "-c", code)
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith(installed["PYTHONPATH"])


def test_the_installed_wheel_passes_its_tests(installed, tmp_path):
    shutil.copytree(ROOT / "tests", tmp_path / "tests", ignore=shutil.ignore_patterns("__pycache__"))
    (tmp_path / "pytest.ini").write_text("[pytest]\n")
    done = run(installed, tmp_path, "-m", "pytest", "-q", "-x", "-m", "not slow and not gpu", "tests")
    assert done.returncode == 0, done.stdout[-3000:]
    assert re.search(r"\d+ passed", done.stdout)
