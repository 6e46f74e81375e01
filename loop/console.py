"""What commands say: results on stdout, progress and errors on stderr."""

import contextlib
import sys
import warnings
from collections.abc import Callable, Iterator

WIDTH = 200  # of tables that go to a file or a pipe


def show(*things) -> None:
    """Tables and text, on stdout."""
    from rich.console import Console

    console = Console(width=None if sys.stdout.isatty() else WIDTH)
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

    console = Console(stderr=True)
    if not console.is_terminal:
        last = [""]

        def line(what: str, done: int, total: int) -> None:
            if what != last[0]:
                say(what)
                last[0] = what

        yield line
        return
    columns = (TextColumn("{task.description}"), BarColumn(), TimeElapsedColumn())
    with Progress(*columns, console=console, transient=True) as bar:
        task = bar.add_task("starting")
        yield lambda what, done, total: bar.update(task, description=what, completed=done, total=total)


def guarded(command: Callable[[], None]) -> None:
    """Run a command; what it refuses is one line on stderr and exit code 2, a lost GPU context one line and 1."""
    warnings.formatwarning = lambda message, *_, **__: f"warning: {message}\n"
    try:
        command()
    except (ValueError, OSError) as err:
        say(f"error: {err}")
        sys.exit(2)
    except RuntimeError as err:
        if "broke the GPU's context" not in str(err):
            raise
        say(f"error: {err}")
        sys.exit(1)
