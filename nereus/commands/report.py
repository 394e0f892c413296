"""`nereus report`: a picture of a run."""

from pathlib import Path
from typing import Annotated

import typer

from nereus.commands.output import check_destination


def report(
    run: Annotated[Path, typer.Argument(metavar="RUN", help="The run.dir of a run.")],
    svg: Annotated[Path, typer.Option(metavar="FILE", help="Where the picture goes.")] = Path("run.svg"),
) -> None:
    """Draw a run: reward, response length, devices and where the plan changed."""
    from nereus.reports.figure import run_figure

    check_destination(str(svg))
    svg.write_text(run_figure(run))
    print(f"written to {svg}")
