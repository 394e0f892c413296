"""Where commands put what they found: `--json`, and the run folder they are asked about."""

import json
import os
import sys
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console

from nereus.errors import InputError

Json = Annotated[str | None, typer.Option("--json", metavar="FILE", help="Write the result as JSON; - for stdout.")]
Run = Annotated[Path, typer.Argument(metavar="RUN", help="The run.dir of a running job.")]


class LastingConsole(Console):
    """A console whose reader may leave (`| head`): what nobody reads is dropped, and the command goes on."""

    def on_broken_pipe(self) -> None:
        self.quiet = True
        unread = os.open(os.devnull, os.O_WRONLY)
        os.dup2(unread, (sys.stderr if self.stderr else sys.stdout).fileno())
        os.close(unread)


def check_destination(destination: str | None) -> None:
    """Raise InputError where `--json` names a place that cannot be written, before hours of work end in it."""
    if destination is None or destination == "-":
        return
    if not Path(destination).parent.is_dir():
        raise InputError(f"--json {destination}: the folder {Path(destination).parent} does not exist")
    if Path(destination).is_dir():
        raise InputError(f"--json {destination!r} is a folder; name a file in it, or - for standard output")


def write_json(value: Any, destination: str | None) -> None:
    """Write a result where `--json` asks for it."""
    if destination == "-":
        sys.stdout.write(json.dumps(value, indent=2) + "\n")
    elif destination is not None:
        try:
            Path(destination).write_text(json.dumps(value, indent=2) + "\n")
        except OSError as error:
            raise InputError(f"--json {destination}: cannot be written ({error.strerror})") from None
