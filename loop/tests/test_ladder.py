"""The entry script, with stand-ins for pip, venv and loop: what it makes, when it makes it again, and when not."""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

CHECKOUT = Path(__file__).resolve().parents[2]

# Run by the made environment's Python at start-up: `pip` notes how it was called, `loop` prints its arguments.
STAND_INS = {
    "pip/__main__.py": """
import json, os, sys
from pathlib import Path
root = Path(os.environ["TEST_ROOT"])
if os.environ.get("PIP_FAILS"):
    sys.exit("no such release")
with open(root / "pip-calls.jsonl", "a") as f:
    constraints = Path(sys.argv[sys.argv.index("--constraint") + 1]).read_text()
    f.write(json.dumps({"argv": sys.argv[1:], "constraints": constraints}) + "\\n")
print("noise of pip")
""",
    "pip/__init__.py": "",
    "venv/__init__.py": "",
    "venv/__main__.py": """
import importlib.util, os, sys  # the real one, less the pip that ensurepip would take seconds to install
where = os.path.join(os.path.dirname(os.__file__), "venv", "__init__.py")
spec = importlib.util.spec_from_file_location("real_venv", where)
real = importlib.util.module_from_spec(spec)
spec.loader.exec_module(real)
real.EnvBuilder(system_site_packages="--system-site-packages" in sys.argv, symlinks=True).create(sys.argv[-1])
""",
    "loop/__main__.py": "import json, os, sys\nprint(json.dumps([sys.argv[1:], os.getcwd(), sys.prefix]))\n",
    "loop/__init__.py": "",
}


@pytest.fixture
def tree(tmp_path):
    """A checkout in a path with spaces: the real script and small definitions; stand-ins beside it."""
    root = tmp_path / "my kernels" / "kernel fun"
    (root / "package").mkdir(parents=True)
    shutil.copy(CHECKOUT / "ladder", root / "ladder")
    (root / "pyproject.toml").write_text("[project]\n")
    (root / "package" / "pyproject.toml").write_text("[project]\n")
    (root / "constraints.txt").write_text("# pins\ntorch==2.13.0\ntriton==3.7.1\nruff==0.1\n")
    stand_ins = tmp_path / "stand-ins"
    for name, text in STAND_INS.items():
        path = stand_ins / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return root


def base_python(tmp_path: Path, **installed: str) -> Path:
    """A Python with exactly these distributions installed, as an environment of its own."""
    base = tmp_path / f"base-{'-'.join(installed) or 'bare'}"
    if not base.exists():
        make_venv(base)
        for name, version in installed.items():
            info = site_of(base) / f"{name}-{version}.dist-info"
            info.mkdir()
            (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n")
            (site_of(base) / name).mkdir()
    return base / "bin" / "python"


def make_venv(path: Path) -> None:
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", path], check=True)


def site_of(venv: Path) -> Path:
    return venv / "lib" / f"python{sys.version_info[0]}.{sys.version_info[1]}" / "site-packages"


def ladder(tree: Path, *args: str, python: Path | str | None = None, cwd: Path | None = None, **environment: str):
    """Run ./ladder with stand-ins for pip and loop on the path of every Python below it."""
    tmp = tree.parents[1]
    env = {**os.environ, "PYTHONPATH": str(tmp / "stand-ins"), "TEST_ROOT": str(tree), **environment}
    command = [str(python or base_python(tmp)), str(tree / "ladder"), *args]
    return subprocess.run(command, cwd=cwd or tree, env=env, capture_output=True, text=True, timeout=120, check=False)


def pip_calls(tree: Path) -> list[dict]:
    path = tree / "pip-calls.jsonl"
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def test_makes_the_environment_once_and_runs_from_anywhere(tree, tmp_path):
    first = ladder(tree, "board", "--json", "a b", cwd=tmp_path)
    assert first.returncode == 0, first.stderr
    args, cwd, prefix = json.loads(first.stdout)  # and pip's noise is not on stdout
    assert (args, cwd, prefix) == (["board", "--json", "a b"], str(tmp_path), str(tree / ".venv"))
    assert "making" in first.stderr
    assert "noise of pip" in first.stderr
    (call,) = pip_calls(tree)
    assert call["argv"][-4:] == ["-e", f"{tree}[dev,cute]", "-e", str(tree / "package")]
    assert call["constraints"] == (tree / "constraints.txt").read_text()

    again = ladder(tree, "demo")
    assert (again.returncode, again.stderr, len(pip_calls(tree))) == (0, "", 1)


@pytest.mark.parametrize("name", ["pyproject.toml", "package/pyproject.toml", "constraints.txt"])
def test_installs_again_when_a_definition_changes_and_keeps_the_environment(tree, name):
    ladder(tree)
    (tree / ".venv" / "kept").touch()
    with open(tree / name, "a") as f:
        f.write("# changed\n")
    changed = ladder(tree)
    assert "updating" in changed.stderr
    assert len(pip_calls(tree)) == 2
    assert (tree / ".venv" / "kept").exists()


def test_a_half_made_environment_is_made_again(tree):
    failed = ladder(tree, PIP_FAILS="1")
    assert failed.returncode == 2
    assert failed.stdout == ""
    assert failed.stderr.rstrip().endswith("./ladder tries again next time")
    (tree / ".venv" / "left over").touch()
    assert ladder(tree).returncode == 0
    assert not (tree / ".venv" / "left over").exists()

    (tree / "constraints.txt").write_text("torch==2.14.0\n")
    assert ladder(tree, PIP_FAILS="1").returncode == 2  # an update that fails leaves no stamp either
    (tree / ".venv" / "left over").touch()
    assert ladder(tree).returncode == 0
    assert not (tree / ".venv" / "left over").exists()


def test_a_moved_checkout_is_installed_again(tree):
    ladder(tree)
    moved = tree.rename(tree.parent / "elsewhere")
    assert ladder(moved).returncode == 0
    assert pip_calls(moved)[1]["argv"][-1] == str(moved / "package")


def test_uses_the_torch_of_the_python_in_use_and_pins_what_it_has(tree, tmp_path):
    image = base_python(tmp_path, torch="2.11.0+cu130", triton="3.6.0", ruff="9.9")
    made = ladder(tree, python=image)
    assert made.returncode == 0, made.stderr
    assert "using torch 2.11.0+cu130 of this Python" in made.stderr
    (call,) = pip_calls(tree)
    assert call["constraints"] == "# pins\ntorch==2.11.0+cu130\ntriton==3.6.0\nruff==0.1\n"
    seen = "import importlib.metadata as m; print(m.version('torch'), m.version('triton'))"
    out = subprocess.run([tree / ".venv/bin/python", "-c", seen], capture_output=True, text=True, check=True)
    assert out.stdout.split() == ["2.11.0+cu130", "3.6.0"]

    assert ladder(tree).stderr == ""  # another Python in use later does not undo it
    shutil.rmtree(tmp_path / "base-torch-triton-ruff" / "lib")  # but an image that has gone does
    assert "making" in ladder(tree).stderr
    assert pip_calls(tree)[1]["constraints"] == (tree / "constraints.txt").read_text()


def test_an_image_that_is_an_environment_keeps_its_pth_files_and_page_templates(tree, tmp_path):
    image = base_python(tmp_path, torch="2.11.0")
    base = image.parents[1]
    (base / "hidden").mkdir()
    (base / "hidden" / "reached_by_pth.py").touch()
    (site_of(base) / "some-package.pth").write_text(f"{base / 'hidden'}\n")
    (base / "share/jupyter/nbconvert/templates").mkdir(parents=True)
    (base / "share/jupyter/kernels/python3").mkdir(parents=True)
    made = ladder(tree, python=image)
    assert made.returncode == 0, made.stderr
    done = subprocess.run([tree / ".venv/bin/python", "-c", "import reached_by_pth"], capture_output=True, check=False)
    assert done.returncode == 0, done.stderr
    assert (tree / ".venv/share/jupyter/nbconvert/templates").is_dir()
    assert not (tree / ".venv/share/jupyter/kernels").exists()  # they may start the image's Python

    (tree / "constraints.txt").write_text("# other\n")
    assert "updating" in ladder(tree, python=image).stderr
    assert (tree / ".venv/share/jupyter/nbconvert").is_symlink()


def test_refuses_a_python_that_is_not_tested(tree, tmp_path):
    text = (tree / "ladder").read_text().replace("SUPPORTED = ((3, 11), (3, 12))", "SUPPORTED = ((2, 7),)")
    (tree / "ladder").write_text(text)
    refused = ladder(tree)
    assert refused.returncode == 2
    assert refused.stderr.startswith("ladder: needs Python 3.11 or 3.12, found 3.")
    assert refused.stderr.count("\n") == 1
    assert not (tree / ".venv").exists()


def test_runs_under_its_own_environment_too(tree):
    ladder(tree)
    inside = tree / ".venv" / "bin" / "python"
    assert json.loads(ladder(tree, "x", python=inside).stdout)[0] == ["x"]
    (tree / "constraints.txt").write_text("# other\n")
    updated = ladder(tree, "x", python=inside)
    assert updated.returncode == 0, updated.stderr
    assert "updating" in updated.stderr


def test_two_first_calls_at_once_make_one_environment(tree):
    base_python(tree.parents[1])
    env = {**os.environ, "PYTHONPATH": str(tree.parents[1] / "stand-ins"), "TEST_ROOT": str(tree)}
    command = [str(base_python(tree.parents[1])), str(tree / "ladder")]
    both = [subprocess.Popen(command, env=env, stdout=subprocess.PIPE, stderr=subprocess.PIPE) for _ in range(2)]
    assert [process.wait(120) for process in both] == [0, 0]
    for process in both:
        process.communicate()
    assert len(pip_calls(tree)) == 1
