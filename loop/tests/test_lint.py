"""What a grep can hold: house rules over the tree, each with the reason a line is refused.

Rules are functions from a checkout to a list of complaints, so that each can be shown to complain about a wrong tree.
"""

import ast
import re
import subprocess
from pathlib import Path

import pytest

from loop import cases, contract, readme, registry

CHECKOUT = Path(__file__).resolve().parents[2]
DOCUMENTS = (
    "README.md",
    "CONTRIBUTING.md",
    "TRAPS.md",
    "package/README.md",
    "package/ALGORITHM.md",
    "package/INTEGRATION.md",
)
LIMITS = {"loop/*.py": 300, "loop/controls/*.py": 300, "ideas/*/kernel.py": 800, "package/src/**/*.py": 800}
NOTEBOOKS = ("notebooks/*.py", "ideas/*/bench.ipynb")
KERNELS = ("ideas/*/kernel.py", "package/src/kernel_fun/*/stages/*.py", "loop/controls/*.py")
FIELDS = ["Fact", "Why", "How to apply", "Check"]


def files(root: Path, *patterns: str) -> list[Path]:
    return sorted(p for pattern in patterns for p in root.glob(pattern) if p.is_file())


def grep(root: Path, pattern: str, *where: str, but: tuple[str, ...] = ()) -> list[str]:
    """`file:line` of every match in the files of `where`, except in `but`."""
    found = []
    for path in files(root, *where):
        name = path.relative_to(root).as_posix()
        for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), 1):
            if re.search(pattern, line) and name not in but:
                found.append(f"{name}:{number}: {line.strip()[:80]}")
    return found


def postponed_annotations(root):
    return grep(root, r"^from __future__ import .*annotations", *KERNELS)


def kernels_in_notebooks(root):
    return grep(root, r"@(triton|cute|gluon)\.(jit|kernel|autotune)", *NOTEBOOKS)


def shell_in_notebooks(root):
    return grep(root, r'^\s*"?[!%](?!%)\w', *NOTEBOOKS)


def timing_elsewhere(root):
    """One timing routine; profile.py reads times that the profiler took, firstcall.py those of a process."""
    where = ("loop/*.py", "loop/controls/*.py", "ideas/*/kernel.py", "package/src/kernel_fun/*/**/*.py")
    return grep(root, r"torch\.cuda\.Event|\bdo_bench\b|elapsed_time\(", *where, but=("loop/bench.py",))


def tuners_in_kernels(root):
    return grep(root, r"^\s*@triton\.(autotune|heuristics)", *KERNELS)


def long_files(root):
    found = []
    for pattern, limit in LIMITS.items():
        for path in files(root, pattern):
            lines = len(path.read_text(encoding="utf-8").splitlines())
            if lines > limit:
                found.append(f"{path.relative_to(root)}: {lines} lines, at most {limit}")
    return found


def modules_without_docstring(root):
    found = []
    for path in files(root, "loop/*.py", "loop/tests/*.py", "ideas/*/kernel.py", "package/src/**/*.py"):
        source = path.read_text(encoding="utf-8")
        if source.strip() and ast.get_docstring(ast.parse(source)) is None:
            found.append(f"{path.relative_to(root)}: no module docstring")
    return found


def dead_paths(root):
    """Paths of this repository that a document names and that are not there."""
    found = []
    path_like = re.compile(
        r"(?<![\w/.-])((?:ideas|notebooks|loop|bench_logs|profiles|package|\.ci|\.github)/[\w./-]*[\w/])"
    )
    for name in DOCUMENTS:
        document = root / name
        if not document.exists():
            found.append(f"{name} is missing")
            continue
        for match in path_like.finditer(document.read_text(encoding="utf-8")):
            target = match[1].rstrip("/.")
            example = re.search(r"031|NNN", target)
            if not example and not (root / target).exists() and not (document.parent / target).exists():
                found.append(f"{name}: {target} does not exist")
    return found


def malformed_traps(root):
    """Each entry of TRAPS.md: a title, then Fact, Why, How to apply and Check, once each and in this order."""
    found = []
    text = (root / "TRAPS.md").read_text(encoding="utf-8")
    for entry in re.split(r"^### ", text, flags=re.MULTILINE)[1:]:
        title, _, body = entry.partition("\n")
        names = re.findall(r"^- ([A-Z][a-z ]+):", body.split("\n## ")[0], re.MULTILINE)
        if names != FIELDS:
            found.append(f"TRAPS.md, {title!r}: {', '.join(names)}; expected {', '.join(FIELDS)}")
    return found


def stubs(root):
    """Unfinished work that says so. The word list is split here so that this line is not a find of its own."""
    words = "|".join(("TO" + "DO", "FIX" + "ME", "XX" + "X", "NotImplementedError" + r"\(\)"))
    return grep(
        root,
        rf"\b({words})\b",
        "loop/**/*.py",
        "ideas/*/*.py",
        "package/**/*.py",
        "notebooks/*.py",
        "*.md",
        "package/*.md",
    )


def stale_numbers(root):
    """The README's numbers are those of the committed rows."""
    text = (root / "README.md").read_text(encoding="utf-8")
    if text == readme.rendered(text, *readme.committed()):
        return []
    return ["README.md: numbers differ from the rows in bench_logs; `.venv/bin/python -m loop.readme` writes them"]


def large_files(root):
    """Committed files over 1 MB, and the notebooks' and profilers' products."""
    listed = subprocess.run(["git", "ls-files", "-z"], cwd=root, capture_output=True, check=False)
    if listed.returncode:
        return []  # an unpacked archive, where there is nothing to commit
    found = []
    for name in listed.stdout.decode().split("\0"):
        path = root / name
        if (
            name
            and path.is_file()
            and (path.stat().st_size > 1_000_000 or name.endswith((".ncu-rep", ".nsys-rep", ".sqlite")))
        ):
            found.append(f"{name}: {path.stat().st_size} bytes")
    return found


RULES = (
    postponed_annotations,
    kernels_in_notebooks,
    shell_in_notebooks,
    timing_elsewhere,
    tuners_in_kernels,
    long_files,
    modules_without_docstring,
    dead_paths,
    malformed_traps,
    stubs,
    stale_numbers,
    large_files,
)


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: rule.__name__)
def test_house_rule(rule):
    assert rule(CHECKOUT) == []


WRONG = {
    postponed_annotations: ("ideas/001-x/kernel.py", "from __future__ import annotations\n"),
    kernels_in_notebooks: ("notebooks/x.py", "# %%\n@triton.jit\ndef k(): ...\n"),
    shell_in_notebooks: ("notebooks/x.py", "# %%\n!false\n"),
    timing_elsewhere: ("loop/other.py", "start = torch.cuda.Event(enable_timing=True)\n"),
    tuners_in_kernels: ("ideas/001-x/kernel.py", "@triton.autotune(configs=[])\n"),
    long_files: ("loop/long.py", "x = 1\n" * 301),
    modules_without_docstring: ("loop/bare.py", "x = 1\n"),
    dead_paths: ("CONTRIBUTING.md", "see loop/gone.py\n"),
    malformed_traps: ("TRAPS.md", "### A\n- Fact: x\n- How to apply: y\n- Why: z\n- Check: w\n"),
    stubs: ("loop/unfinished.py", "# TO" + "DO: the rest\n"),
    stale_numbers: ("README.md", f"{readme.BEGIN}\n| a number without a row |\n{readme.END}\n"),
    large_files: ("profiles/x.md", "x" * 1_000_001),
}


def test_every_rule_is_shown_to_complain():
    assert set(WRONG) == set(RULES)


@pytest.mark.parametrize("rule", WRONG, ids=lambda rule: rule.__name__)
def test_a_wrong_tree_is_refused(rule, tmp_path):
    name, text = WRONG[rule]
    for document in DOCUMENTS:
        (tmp_path / document).parent.mkdir(exist_ok=True)
        (tmp_path / document).touch()
    (tmp_path / "README.md").write_text(readme.rendered(f"{readme.BEGIN}\n{readme.END}\n", *readme.committed()))
    subprocess.run(["git", "init", "-q"], cwd=tmp_path, check=True)
    before = rule(tmp_path)
    path = tmp_path / name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)
    subprocess.run(["git", "add", "-A"], cwd=tmp_path, check=True)
    assert len(rule(tmp_path)) == len(before) + 1


def test_every_primary_case_has_its_baseline_in_every_mode():
    recorded = {(e["family"], e["case"], e["mode"]) for e in readme.committed()[0] if e["arm"] == "000"}
    primary = [c for family in cases.FAMILIES for c in cases.select(family, "gpu", "primary")]
    assert {(c.family, c.id, mode) for c in primary for mode in contract.MODES} - recorded == set()


def test_readme_numbers_come_from_rows():
    entry = {"family": "kda", "case": "c", "mode": "fwd", "arm": "ship", "baseline": "000", "device": "NVIDIA X"}
    entry |= {
        "ratio": 2.0,
        "ci_low": 1.9,
        "ci_high": 2.1,
        "ms": 1.0,
        "baseline_ms": 2.0,
        "floor_ms": 0.5,
        "peak_bytes": 3,
        "baseline_peak_bytes": 4,
        "row_id": "abc",
    }
    text = f"head\n{readme.BEGIN}\nold\n{readme.END}\ntail\n"
    shown = readme.rendered(
        text,
        [entry, entry | {"device": "cpu", "row_id": "hidden"}, entry | {"arm": "002", "row_id": "hidden"}],
        {"abc": (2.5, 1.5)},
    )
    alone = "| c |  |  |  |  |  | 2.00 |  | 50 % | 2.50 to 1.50 | 0.75 | `abc` |"
    assert alone in shown
    step = [entry, entry | {"mode": "fwdbwd", "ratio": 3.0, "baseline_ms": 3.0, "row_id": "step"}]
    both = readme.rendered(text, [*step, entry | {"mode": "fwdbwd-loop", "row_id": "hidden"}], {})
    assert "| c |  | 3.00 | 1.00 | **3.00** | 1.900 to 2.100 | 2.00 |  | 50 % |  | 0.75 | `step` |" in both
    assert "hidden" not in both
    two = [step[1], step[1] | {"case": "d", "ratio": 4.0, "peak_bytes": 2}]
    assert "NVIDIA X, a forward and backward 3.0 to 4.0 times as fast as fla's, in 0.50 to 0.75 of its memory:" in (
        readme.rendered(text, two, {})
    )
    named = readme.rendered(text, [entry | {"case": case} for case in ("small", "prod8192")], {})
    assert named.index("| prod8192 | B16 T8192 H16 K128 V256: ") < named.index("| small | B1 T4096 H16 K128 V128: ")
    assert "rows are of an earlier source" not in shown
    assert "old" not in shown
    assert "hidden" not in shown
    assert shown.startswith("head\n")
    assert shown.endswith("\ntail\n")
    assert "1 of 1 rows are of an earlier source" in readme.rendered(text, [entry | {"stale": True}], {})
    assert readme.rendered(shown, [], {}) == readme.rendered(text, [], {})
    with pytest.raises(ValueError, match="expected one"):
        readme.rendered("no marks", [], {})


def test_release_refuses_before_it_sends():
    """The job that may upload needs the job whose steps compare the tag and check the metadata."""
    text = (CHECKOUT / ".github" / "workflows" / "release.yml").read_text(encoding="utf-8")
    build, _, rest = text.partition("\n  rehearsal:")
    assert build.index("TAG") < build.index("twine check --strict") < build.index("upload-artifact")
    assert "id-token: write" not in build
    assert rest.count("needs: build") == rest.count("id-token: write") == rest.count("pypa/gh-action-pypi-publish") == 2
    assert "password" not in text


@pytest.mark.parametrize(("tag", "wheel", "ok"), [
    ("v1.2.0", "kernel_fun-1.2.0-py3-none-any.whl", True), ("v1.3.0", "kernel_fun-1.2.0-py3-none-any.whl", False),
    ("1.2.0", "kernel_fun-1.2.0-py3-none-any.whl", False), ("v1.2.0", None, False),
])  # fmt: skip
def test_the_tag_step_itself(tag, wheel, ok, tmp_path):
    text = (CHECKOUT / ".github" / "workflows" / "release.yml").read_text(encoding="utf-8")
    block = text.partition("Refuse a tag that disagrees")[2].partition("run: |\n")[2].partition("      - name:")[0]
    script = "\n".join(line[10:] for line in block.splitlines())
    (tmp_path / "dist").mkdir()
    if wheel:
        (tmp_path / "dist" / wheel).touch()
    done = subprocess.run(
        ["bash", "-eo", "pipefail", "-c", script], cwd=tmp_path, env={"TAG": tag, "PATH": "/usr/bin:/bin"}, check=False
    )
    assert (done.returncode == 0) == ok


def test_every_idea_loads_and_keeps_the_rules():
    ideas = registry.all_ideas()
    assert {i.name: i.error for i in ideas if i.error} == {}
    kernels = [i for i in ideas if i.kernel.exists()]
    assert {i.name: found for i in kernels if (found := registry.lint(i.id))} == {}
    documents = {i.name: registry.front_matter(i.folder) for i in ideas}
    assert [
        name for name, facts in documents.items() if set(facts) < {"id", "slug", "family", "spans", "parent", "status"}
    ] == []
    assert [
        n for n, f in documents.items() if f.get("status") not in ("proposed", "running", "promoted", "kept", "refuted")
    ] == []
