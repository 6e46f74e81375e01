"""Every idea of the tree passes the check on the case that its notebook opens with."""

import pytest

import loop.tests.notebook_tools  # noqa: F401
from loop import check, registry, session

IDEAS = [idea.id for idea in registry.all_ideas() if idea.error is None]


@pytest.mark.parametrize("idea", IDEAS)
def test_an_idea_passes_its_check(idea):
    s = session.open_idea(idea)
    ok, reason = s.arm().supports(s.case)
    if not ok:
        pytest.skip(f"not for this machine: {reason}")
    found = check.check(s.arm(), s.case)
    assert found.ok, f"{found}\n{found.detail}"
