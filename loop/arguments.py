"""Arguments that several commands take, and how a command ends."""

from pathlib import Path
from typing import Annotated

import typer

Out = Annotated[Path | None, typer.Option(help="Folder for what the command writes.")]
Case = Annotated[str, typer.Option(help="Case ids or tags (tiny, smoke, primary, full), separated by commas.")]
Impl = Annotated[str, typer.Option(help="Arms: 000, ship, 005, 005+007, 005@000 or a peer, separated by commas.")]
Family = Annotated[str, typer.Argument(help="kda or cconv.")]
Idea = Annotated[str, typer.Argument(help="An idea's number or name, e.g. 005.")]


def finish(ok: bool) -> None:
    """Exit with 1 unless `ok`."""
    if not ok:
        raise typer.Exit(1)
