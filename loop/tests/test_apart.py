"""What a function does in a process of its own stays there; its result comes back, or how it ended."""

import os
import signal
import sys
import time

import pytest

from loop import apart


def test_what_it_returns_comes_back_and_what_it_changes_does_not():
    here = []
    assert apart.apart(lambda: here.append(1) or {"a": [1, "x", None]}, 30) == {"a": [1, "x", None]}
    assert here == []


def test_a_long_answer_is_read_whole():
    assert len(apart.apart(lambda: "x" * 10**6, 30)) == 10**6


@pytest.mark.parametrize(
    ("work", "said"),
    [
        (lambda: 1 / 0, "raised ZeroDivisionError: division by zero"),
        (lambda: sys.exit(0), "raised SystemExit: 0"),
        (lambda: os._exit(0), "ended its process with exit code 0"),
        (lambda: os.kill(os.getpid(), signal.SIGSEGV), "ended its process by SIGSEGV"),
        (lambda: os.abort(), "ended its process by SIGABRT"),
    ],
)
def test_how_it_ended(work, said):
    with pytest.raises(apart.Lost, match=said):
        apart.apart(work, 30)


def test_what_hangs_is_ended():
    began = time.monotonic()
    with pytest.raises(apart.Lost, match=r"took longer than 0\.3 s"):
        apart.apart(lambda: time.sleep(60), 0.3)
    assert time.monotonic() - began < 10


def test_it_says_nothing_where_the_parent_speaks(capfd):
    apart.apart(lambda: print("out", flush=True) or print("err", file=sys.stderr, flush=True), 30)
    assert capfd.readouterr() == ("", "")
