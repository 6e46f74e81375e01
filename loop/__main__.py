"""The command line: `./ladder COMMAND`, or `python -m loop COMMAND`.

Commands only read their arguments, show progress on stderr and print results; the work is in the modules they name.
A command exits 0 only on success, and answers bad input with one line.
"""

import json
from pathlib import Path
from typing import Annotated

import typer

from loop import console, measuring
from loop.arguments import Case, Family, Idea, Impl, Out, finish

app = typer.Typer(
    add_completion=False,
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
    help="Kernels are tried, checked, timed and kept or refuted here. Start with: ./ladder demo",
)

# ---------------------------------------------------------------------------------------------------------------- ideas
@app.command()
def new(
    number: Annotated[str, typer.Argument(help="1 to 999, not used before.")],
    slug: Annotated[str, typer.Argument(help="Words joined by hyphens.")],
    family: Annotated[str, typer.Option(help="kda or cconv.")],
    span: Annotated[
        list[str], typer.Option(help="Stages replaced: first or first..last; repeat it for the other pass.")
    ],
    parent: Annotated[str | None, typer.Option(help="The idea it is a delta against.")] = None,
):
    """Make an idea's folder: IDEA.md to fill in, kernel.py that already passes, bench.ipynb."""
    from loop import run, scaffold

    with console.waiting("reading what there is"):
        made = scaffold.new(number, slug, family=family, spans=span, parent=parent)
    print(run.shown(made))


@app.command("open")
def open_(idea: Idea):
    """Open the idea's notebook in JupyterLab."""
    from loop import lab

    raise typer.Exit(lab.open_lab(idea))


@app.command()
def ideas():
    """List every idea, broken ones with their error."""
    from rich.table import Table

    from loop import registry

    table = Table("idea", "family", "spans", "status", "error")
    with console.waiting("loading every kernel"):
        listed = registry.all_ideas()
    for i in listed:
        table.add_row(
            i.name, i.family or "", ", ".join(i.spans), registry.front_matter(i.folder).get("status", ""), i.error or ""
        )
    console.show(table)


# ------------------------------------------------------------------------------------------------------ check and bench
@app.command()
def check(
    family: Family,
    impl: Impl,
    case: Case = "smoke",
    seeds: Annotated[int, typer.Option(help="Fresh seeds a case; with one, a stored result would pass.", min=2)] = 2,
    out: Out = None,
):
    """Check arms against the fp64 oracle, with poisoned memory, guard bands and repeats; record the outcome."""
    from loop import rows, runner

    listed, writer = runner.cases_of(family, case), runner.writer(family, f"check-{impl}", out)
    names = runner.split(impl)
    with console.progress() as progress:
        found = runner.check(family, names, listed, seeds, writer, progress)
    console.show(runner.check_table(found))
    console.say(f"rows: {writer.path}")
    finish(rows.all_passed(found, names))


@app.command()
def bench(
    family: Family,
    impl: Impl,
    case: Case = "smoke",
    mode: Annotated[str, typer.Option(help="fwd, bwd, fwdbwd, or with -loop (eager calls), by commas.")] = "fwdbwd",
    baseline: Annotated[
        str, typer.Option(help="What ratios are against; default 000, and ship where --impl has it.")
    ] = "",
    blocks: Annotated[
        int | None, typer.Option(help="Paired blocks; default 21, 15 when slow, 5 on a CPU.", min=1)
    ] = None,
    out: Out = None,
):
    """Check, then time arms against each other in one process; record and show the ratios."""
    from loop import results, rows, runner

    listed, modes, names = runner.cases_of(family, case), runner.modes_of(mode), runner.split(impl)
    against = runner.split(baseline) if baseline else results.default_baselines(names)
    writer = runner.writer(family, impl, out)
    with console.progress() as progress:
        found = runner.bench(family, names, listed, modes, against, blocks, writer, progress)
    console.show(runner.bench_table(found))
    console.say(f"rows: {writer.path}")
    finish(rows.all_passed(found, names))


measuring.add(app)


# ----------------------------------------------------------------------------------------------------------- the record
@app.command()
def board(
    family: Annotated[list[str] | None, typer.Option(help="Only this family.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="A list of objects, one per time.")] = False,
    as_html: Annotated[bool, typer.Option("--html", help="Write the page of the whole ladder.")] = False,
    logs: Annotated[
        list[Path] | None, typer.Option(help="Folders or files of rows; default bench_logs and out/bench_logs.")
    ] = None,
    out: Out = None,
):
    """The leaderboard per family, case and mode: ratios, intervals, times, share of the floor."""
    from loop import board as work
    from loop import registry, rows, runner

    families = [runner.family(f) for f in family] if family else registry.FAMILIES
    if as_html and as_json:
        raise ValueError("--html --json: one of the two")
    for path in logs or ():
        if not path.exists():
            raise ValueError(f"--logs {path}: there is no such file or folder")
    with console.waiting("reading the rows"):
        found = rows.read(*(logs or ()))
    if as_html:
        from loop import page, run

        path = run.make_folder(out or run.out_folder() / "board") / "index.html"
        with console.waiting("writing the pages"):
            page.write(path, [r for r in found if r.family in families])
        print(run.shown(path))
        return
    if as_json:
        print(json.dumps(work.entries(found, families), indent=1))
        return
    with console.waiting("comparing the rows with the sources"):
        tables = work.tables(found, families, console.width())
    console.show(*tables or ["no rows yet; run: ./ladder bench kda --impl 000"])


@app.command()
def promote(
    idea: Idea,
    as_fast: Annotated[
        str, typer.Option(help="What it is better for, where it is not faster than the package but as fast.")
    ] = "",
    beside: Annotated[
        list[str] | None, typer.Option(help="An idea without which it shall not serve a call; repeat it for more.")
    ] = None,
):
    """Copy an idea's kernel.py into the package with its evidence, or say what is missing."""
    from loop import promote as work

    with console.waiting("reading the rows, and what their commits hold"):
        entry = work.promote(idea, as_fast=as_fast, beside=beside or ())
    print(f"{entry['source']} -> stages/{entry['module']}.py, sha256 {entry['sha256'][:12]}, {entry['commit'][:12]}")
    for line in entry["evidence"]:
        print(f"  {line}")


@app.command()
def demote(idea: Idea):
    """Take an idea's kernel out of the package again, or say what still needs it."""
    from loop import demote as work

    with console.waiting("asking every case whether it still needs it"):
        gone = work.demote(idea)
    print(f"{gone.name} is out of the package; now: ./ladder test, .venv/bin/python -m loop.readme, a commit")


@app.command()
def drift():
    """What has moved since each promotion; exits 1 when anything has."""
    from loop import drift as work

    report = work.drift()
    for item in report:
        print(f"{item['family']} {item['module']}: {'; '.join(item['moved']) or 'as promoted'}")
    if not report:
        print("nothing is promoted yet")
    finish(not any(item["moved"] for item in report))


# ------------------------------------------------------------------------------------------------------------ notebooks
@app.command()
def run(
    idea: Idea,
    parameter: Annotated[
        list[str] | None, typer.Option("-p", "--parameter", help="NAME=VALUE of the notebook's parameters.")
    ] = None,
    timeout: Annotated[float, typer.Option(help="Seconds a cell.", min=1)] = 900.0,
    out: Out = None,
):
    """Run an idea's notebook through papermill; 0 only if its kernel lived, every cell ran and a row was written."""
    from loop import run as work

    raise typer.Exit(work.command(idea, parameter or (), out, timeout))


@app.command()
def nightly(
    only: Annotated[list[str] | None, typer.Option(help="Only this idea; repeat it for more.")] = None,
    family: Annotated[str | None, typer.Option(help="Only this family.")] = None,
    tier: Annotated[
        str | None, typer.Option(help="smoke, primary or full: all of its cases; default the notebook's own.")
    ] = None,
    jobs: Annotated[int, typer.Option(help="Processes at once, on a CPU.")] = 1,
    devices: Annotated[str, typer.Option(help="GPUs, one process on each, e.g. 0,1; default the first.")] = "",
    executor: Annotated[str, typer.Option(help="local, or submitit.")] = "local",
    force: Annotated[bool, typer.Option("--force", help="Run again what passed before and has not changed.")] = False,
    fail_on: Annotated[str, typer.Option(help="Changes that fail the batch too, by commas, e.g. slower.")] = "",
    accept: Annotated[str | None, typer.Option(help="Run nothing: compare later batches with this one.")] = None,
    timeout: Annotated[float, typer.Option(help="Seconds an idea and case.", min=1)] = 3600.0,
    out: Out = None,
):
    """Run every idea's notebook, one process each, past failures; say what changed and write a page."""
    from loop import nightly as work

    if accept is not None:
        raise typer.Exit(work.accept(accept, out))
    asked = {"only": only or (), "family": family, "tier": tier, "jobs_at_once": jobs, "devices": devices}
    how = {"executor": executor, "force": force, "fail_on": fail_on, "out": out, "timeout": timeout}
    raise typer.Exit(work.nightly(**asked, **how))


@app.command()
def demo(
    idea: Annotated[str | None, typer.Argument(help="An idea; default the promoted one of largest ratio.")] = None,
    out: Out = None,
):
    """The main job once, on whatever this machine has: an idea's notebook, its checks, times and verdict."""
    from loop import demo as work

    raise typer.Exit(work.demo(idea, out))


@app.command(context_settings={"allow_extra_args": True, "ignore_unknown_options": True})
def test(context: typer.Context):
    """Lint and test everything but timing. Further arguments go to pytest."""
    from loop import selftest

    raise typer.Exit(selftest.selftest(context.args))


def main() -> None:
    """Run a command; ValueError and OSError become one line on stderr and exit code 2."""
    console.guarded(app)


if __name__ == "__main__":
    main()
