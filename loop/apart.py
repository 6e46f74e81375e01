"""A function in a forked process, so that an exit, a crash or a hang of what it runs stays there.

For code of ideas that a batch or a page meets before, or without, a process that the idea has to itself. A fork costs
milliseconds where a fresh process would import torch again. The child must not use CUDA: a fork cannot.
"""

import contextlib
import faulthandler
import json
import os
import select
import signal
import sys
import time
import warnings
from collections.abc import Callable


class Lost(Exception):
    """The child left no result; the message, in one line, says how it ended."""


def apart(work: Callable[[], object], seconds: float):
    """What `work()` returns, through JSON. Lost when it raises, ends its process or takes longer than `seconds`."""
    receive, send = os.pipe()
    sys.stdout.flush()
    sys.stderr.flush()
    with warnings.catch_warnings():  # of threads, which the child does not have; it only loads or asks Python code
        warnings.simplefilter("ignore", DeprecationWarning)
        child = os.fork()
    if child == 0:
        _child(work, send)
    os.close(send)
    try:
        text = _read(receive, time.monotonic() + seconds)
    except BaseException:
        text = None
        raise
    finally:
        os.close(receive)
        if text is None:
            with contextlib.suppress(ProcessLookupError):
                os.kill(child, signal.SIGKILL)
        _, status = os.waitpid(child, 0)
    if text is None:
        raise Lost(f"took longer than {seconds:g} s")
    try:
        answer = json.loads(text)
    except ValueError:
        code = os.waitstatus_to_exitcode(status)
        how = f"by {signal.Signals(-code).name}" if code < 0 else f"with exit code {code}"
        raise Lost(f"ended its process {how}") from None
    if "raised" in answer:
        raise Lost(f"raised {answer['raised']}")
    return answer["result"]


def _child(work: Callable[[], object], send: int) -> None:
    """Run it and send what it returns; never returns, and says nothing where the parent speaks."""
    try:
        faulthandler.disable()
        silent = open(os.devnull, "r+", encoding="utf-8")  # noqa: SIM115
        for stream in (0, 1, 2):
            os.dup2(silent.fileno(), stream)
        sys.stdout = sys.stderr = silent
        try:
            answer = json.dumps({"result": work()})
        except BaseException as err:
            answer = json.dumps({"raised": f"{type(err).__name__}: {' '.join(str(err).split())[:300]}"})
        with os.fdopen(send, "w", encoding="utf-8") as pipe:
            pipe.write(answer)
    finally:
        os._exit(0)


def _read(receive: int, deadline: float) -> bytes | None:
    """All that the child sends; None when the deadline passes first."""
    parts = []
    while (left := deadline - time.monotonic()) > 0:
        if not select.select([receive], [], [], left)[0]:
            return None
        part = os.read(receive, 65536)
        if not part:
            return b"".join(parts)
        parts.append(part)
    return None
