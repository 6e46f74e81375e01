"""What commands say: results on stdout, progress and errors on stderr."""

import contextlib
import errno
import os
import signal
import sys
import threading
import time
import warnings
from collections.abc import Callable, Iterator

WIDTH = 200  # of tables that go to a file or a pipe
PATIENCE = 2.0  # seconds that a command may be silent


def watched(stream) -> bool:
    """Does somebody look at a terminal there? Not in CI, some of which give a job one, whatever FORCE_COLOR says."""
    return stream.isatty() and not os.environ.get("CI")


def width() -> int:
    """Columns of stdout."""
    from rich.console import Console

    return Console().width if sys.stdout.isatty() else WIDTH


def show(*things) -> None:
    """Tables and text, on stdout."""
    from rich.console import Console

    console = Console(width=width())
    for thing in things:
        console.print(thing, highlight=False)


def say(line: str) -> None:
    """One line on stderr."""
    print(line, file=sys.stderr, flush=True)


@contextlib.contextmanager
def progress() -> Iterator:
    """A function (what, done, total) that shows where the work is, on stderr."""
    try:
        with _bar() as show_step:
            yield show_step
    except KeyboardInterrupt:
        say("interrupted; the rows written so far are complete")
        raise


@contextlib.contextmanager
def _bar() -> Iterator:
    """A progress bar; without a terminal, one line per new step."""
    from rich.console import Console
    from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

    if not watched(sys.stderr):
        last, began = [""], time.monotonic()

        def line(what: str, done: int, total: int) -> None:
            if what != last[0]:
                say(f"{time.monotonic() - began:5.1f} s  {what}")
                last[0] = what

        yield line
        return
    columns = (TextColumn("{task.description}"), BarColumn(), TimeElapsedColumn())
    with Progress(*columns, console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task("starting")
        yield lambda what, done, total: bar.update(task, description=what, completed=done, total=total)


@contextlib.contextmanager
def waiting(what: str) -> Iterator[None]:
    """Say on stderr what is being done, once it has taken longer than PATIENCE."""
    timer = threading.Timer(PATIENCE, say, [what])
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()


def guarded(app: Callable) -> None:
    """Run the command line. What it refuses is one line on stderr and exit code 2, a lost GPU context one line and 1.

    An exit that no command asked for comes from code under test, and is no success whatever its code.
    """
    warnings.formatwarning = lambda message, *_, **__: f"warning: {message}\n"
    _outlive_exits()
    with contextlib.suppress(ValueError):  # of a thread, which may not
        signal.signal(signal.SIGTERM, signal.default_int_handler)  # of a scheduler, or of `timeout`: as Ctrl-C
    try:
        code = app(standalone_mode=False, prog_name="./ladder")
    except (ValueError, OSError) as err:
        full = isinstance(err, OSError) and err.errno in (errno.ENOSPC, errno.EDQUOT)
        say(f"error: {err.strerror}; free some, or give another folder with --out" if full else f"error: {err}")
        sys.exit(2)
    except SystemExit as end:
        if isinstance(end.__context__, BrokenPipeError):  # of `./ladder board | head`, which has read enough
            sys.exit(128 + signal.SIGPIPE)
        say(f"error: something that was run called sys.exit({end.code!r}), so the command did not come to its end")
        sys.exit(1)
    except Exception as err:
        if hasattr(err, "format_message"):  # of click or of typer's own copy of it: arguments that are not understood
            say(_usage(err))
            sys.exit(2)
        if "broke the GPU's context" not in str(err):
            raise
        say(f"error: {err}")
        sys.exit(1)
    sys.exit(code or 0)


def _outlive_exits() -> None:
    """Let `os._exit` of this process, which code under test may call at its import or later, be no silent success."""
    leave, own = os._exit, os.getpid()

    def left(code: int) -> None:
        if os.getpid() == own:
            say(f"error: something that was run called os._exit({code!r}), so the command did not come to its end")
        leave(1 if os.getpid() == own else code)

    os._exit = left


def _usage(err) -> str:
    """A usage error in one line; the whole help where no command was given."""
    said = err.format_message()
    if said.startswith("Usage:"):
        return said
    command = getattr(getattr(err, "ctx", None), "command_path", "")
    return f"error: {' '.join(said.split()).rstrip('.')}" + (f"; see {command} --help" if command else "")
