"""The `nereus` command: its commands, and the exit code of what they raise.

Exit codes: 0 done; 1 the run failed, or no plan is feasible; 2 bad input, said in one line without a traceback.
"""

import sys

import typer

from nereus.commands.bench import bench
from nereus.commands.plan import plan
from nereus.commands.report import report
from nereus.commands.reshape import reshape
from nereus.commands.signals import end_cleanly_on_sigterm
from nereus.commands.status import status
from nereus.commands.stop import stop
from nereus.commands.train import train
from nereus.errors import InputError, NereusError

app = typer.Typer(
    add_completion=False,
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    help="Keeps RL post-training of language models on the best parallel plan while everything drifts.",
)
for command in (plan, train, status, report, stop, reshape, bench):
    app.command()(command)


def main() -> None:
    """Entry point of the `nereus` command."""
    end_cleanly_on_sigterm()
    try:
        app(prog_name="nereus")
    except InputError as error:
        sys.exit(_say(f"error: {error}", 2))
    except NereusError as error:
        sys.exit(_say(f"failed: {error}", 1))


def _say(text: str, code: int) -> int:
    print(text, file=sys.stderr)
    return code
