"""Every wrong candidate is rejected with the status that names its mistake, and the same chain without one passes."""

import pytest

from loop import cases, check, controls
from loop.verdict import Status

GPU = [name for name in controls.NAMES if controls.load(name).GPU]


def test_there_are_enough_and_each_says_what_it_is():
    assert len(controls.NAMES) >= 6
    for name in controls.NAMES:
        module = controls.load(name)
        assert module.__doc__
        assert Status(module.EXPECTED) is not Status.PASSED
        cases.get(module.FAMILY, module.CASE)


@pytest.mark.parametrize("name", [n for n in controls.NAMES if n not in GPU])
def test_rejected(name):
    module = controls.load(name)
    result = check.check(controls.arm(name), cases.get(module.FAMILY, module.CASE), baseline=None)
    assert result.status == module.EXPECTED, f"{result}\n{result.detail}"
    assert result.token is None
    assert not result.ok
    assert result.message
    assert "\n" not in result.message


@pytest.mark.gpu
@pytest.mark.parametrize("name", GPU)
def test_rejected_on_a_gpu(name):
    module = controls.load(name)
    result = check.check(controls.arm(name), cases.get(module.FAMILY, module.CASE), baseline=None)
    assert result.status == module.EXPECTED, f"{result}\n{result.detail}"


@pytest.mark.parametrize(
    ("family", "case"), sorted({(controls.load(n).FAMILY, controls.load(n).CASE) for n in controls.NAMES})
)
def test_the_honest_chain_passes_the_same_cases(family, case):
    result = check.check(controls.honest(family), cases.get(family, case), baseline=None)
    assert result.status is Status.PASSED, f"{result}\n{result.detail}"
    assert result.token


def test_an_unknown_control_is_named():
    with pytest.raises(ValueError, match="control 'nope' is unknown; known: absorbs_nan"):
        controls.load("nope")
