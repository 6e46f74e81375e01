"""Fixtures of the harness's tests: a repository of its own, with ideas small enough to read here."""

import pytest
import torch

GOOD_KERNEL = '''"""Sum the value heads that share a q/k head, in torch.

Parent: 000
Delta: none, this is a test's idea
Why it should be faster: it is not; 0 bytes, 0 flops
Constraints: none
"""
import torch

FAMILY = "kda"


def supports(p):
    return (True, "") if p.K <= 256 else (False, f"needs K <= 256, got {p.K}")


def run(*, dq, dk, p):
    group = (p.B, p.T, p.H, p.HV // p.H, p.K)
    return {"dq": dq.reshape(group).sum(3), "dk": dk.reshape(group).sum(3)}


SPANS = {"bwd.gva": run}
'''


def pytest_collection_modifyitems(items):
    """Long tests begin first. Tests that need a GPU say so where there is none."""
    items.sort(key=lambda item: "slow" not in item.keywords)
    if torch.cuda.is_available():
        return
    for item in items:
        if "gpu" in item.keywords:
            item.add_marker(pytest.mark.skip(reason="needs an NVIDIA GPU; torch finds none here"))


@pytest.fixture
def ladder_root(tmp_path, monkeypatch):
    """An empty repository that the harness takes for its own."""
    root = tmp_path / "repo"
    (root / "ideas").mkdir(parents=True)
    monkeypatch.setenv("LOOP_ROOT", str(root))
    return root


@pytest.fixture
def add_idea(ladder_root):
    """`add_idea("005", "slug", source)` writes an idea's kernel.py and IDEA.md; without a source, a good one."""

    def add(number="005", slug="sum-heads", source=GOOD_KERNEL, family="kda"):
        folder = ladder_root / "ideas" / f"{number}-{slug}"
        folder.mkdir(exist_ok=True)
        (folder / "kernel.py").write_text(source)
        facts = f"id: {number}   # never reused\nslug: {slug}\nfamily: {family}\nstatus: running"
        (folder / "IDEA.md").write_text(
            f"---\n{facts}\n---\n\n## Hypothesis\n\nNone: 1.0.\n\n## Outcome\n\nAs expected.\n"
        )
        return folder

    return add
