"""The commands that measure without comparing arms: first calls, profiles, stages, spans by themselves."""

from typing import Annotated

import typer

from loop import console
from loop.arguments import Case, Family, Idea, Impl, Out, finish


def add(app: typer.Typer) -> None:
    """Give the command line these commands."""
    for command in (firstcall, span, stages, profile):
        app.command()(command)


def span(
    ideas: Annotated[str, typer.Argument(metavar="idea", help="Ideas by number or name, separated by commas.")],
    case: Case = "smoke",
    set_: Annotated[
        list[str] | None, typer.Option("--set", help="NAME=VALUE for a constant of the kernel module; repeat it.")
    ] = None,
):
    """Time ideas' spans by themselves, kernel by kernel, with variants of their constants; records nothing."""
    from loop import alone, registry, runner

    constants, names = alone.settings(set_ or ()), runner.split(ideas)
    found, family = [], registry.load(names[0]).FAMILY
    with console.progress() as progress:
        for c in runner.cases_of(family, case):
            for name in names:
                progress(f"{name} on {c.id}", 0, 1)
                try:
                    found += alone.time_spans(name, c, constants)
                except alone.Unsupported as why:
                    console.say(str(why))
    if found:
        console.show(alone.table(found))
    finish(bool(found))


def firstcall(family: Family, impl: Impl, case: Case = "smoke", out: Out = None):
    """Time the first call of arms, each in a fresh process with empty kernel caches."""
    from loop import firstcall as work
    from loop import rows, runner

    listed, writer = runner.cases_of(family, case), runner.writer(family, f"firstcall-{impl}", out)
    with console.progress() as progress:
        found = [
            work.firstcall(family, name, c.id, writer=writer, progress=progress)
            for c in listed
            for name in runner.split(impl)
        ]
    console.show(runner.firstcall_table(found))
    console.say(f"rows: {writer.path}")
    finish(rows.all_passed(found))


def profile(
    idea: Idea,
    case: Annotated[str, typer.Option(help="One case id.")],
    mode: Annotated[str, typer.Option(help="fwd, bwd or fwdbwd.")] = "fwdbwd",
    out: Out = None,
):
    """Write the kernels of one call, with registers, spills and shared memory, to profiles/."""
    from loop import contract, registry, run, runner
    from loop import profile as work

    registry.folder(idea)
    (mode,) = runner.modes_of(mode, contract.MODES)[:1]
    if out:
        run.make_folder(out)
    with console.progress() as progress:
        progress(f"profile {idea} on {case}", 0, 1)
        path = work.profile(idea, case, mode, out)
    print(path)


def stages(
    family: Family,
    case: Annotated[str, typer.Option(help="One case id; default the first primary one.")] = "",
    out: Out = None,
):
    """Write what each stage takes in fla's chain and in the shipped one, for the page's stage budget."""
    from loop import budget, run, runner

    found = case or runner.cases_of(family, "primary")[0].id
    if out:
        run.make_folder(out)
    with console.progress() as progress:
        path = budget.measure(runner.family(family), found, out, progress)
    print(run.shown(path))
