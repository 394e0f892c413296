"""Commands: parse, call, print. What they do is the Python interface's; exit codes and streams are decided here.

Exit codes: 0 done; 1 the run failed, or no plan is feasible; 2 bad input, said in one line without a traceback.
"""

import json
import signal
import sys
from pathlib import Path
from types import FrameType
from typing import Annotated, Any

import typer
from rich.console import Console

from nereus.commands.plan import plan
from nereus.errors import InputError, NereusError

app = typer.Typer(
    add_completion=False,
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    help="Keeps RL post-training of language models on the best parallel plan while everything drifts.",
)

app.command()(plan)

Json = Annotated[str | None, typer.Option("--json", metavar="FILE", help="Write the result as JSON; - for stdout.")]


@app.command()
def train(
    recipe: Annotated[Path, typer.Argument(metavar="RECIPE", help="Recipe (YAML).")],
    overrides: Annotated[
        list[str] | None, typer.Argument(metavar="KEY=VALUE", help="Keys over the recipe's, such as trainer.steps=10.")
    ] = None,
    json_file: Json = None,
) -> None:
    """Run the recipe's post-training job."""
    check_destination(json_file)
    console = Console(stderr=json_file == "-")
    console.print("nereus: loading", style="dim")
    from nereus.config import load_config
    from nereus.reports.view import Lines, LiveView

    config = load_config(recipe, overrides or [])
    with LiveView(console) if console.is_terminal else Lines(console) as view:
        view.phase("loading libraries")
        from nereus.reports.tables import change_table, controller_share, evaluation_table
        from nereus.training import run_training

        _end_cleanly_on_sigterm()  # importing Ray has put its own handler there
        try:
            result = run_training(config, view)
        except KeyboardInterrupt:
            raise typer.Exit(_say("interrupted; everything that was started has ended", 130)) from None
    for note in result.notes:
        console.print(note, highlight=False)
    console.print(evaluation_table(result.evaluations))
    changes = change_table(result.changes, result.steps)
    if changes is not None:
        console.print(changes)
        console.print(controller_share(result.steps), highlight=False)
    console.print(f"run folder: {result.run_dir}", highlight=False)
    write_json(result.to_json(), json_file)


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


Run = Annotated[Path, typer.Argument(metavar="RUN", help="The run.dir of a running job.")]


@app.command()
def status(run: Run) -> None:
    """Say where a run is."""
    from nereus.control import Status

    found = Status.read(run)
    state = found.phase if found.alive or found.phase in ("done", "failed") else "ended without saying so"
    print(f"{state}, step {found.step} of {found.steps}")
    for model_stage, stage_plan in found.plan.stages if found.plan else ():
        print(f"  {model_stage.name}: {stage_plan}")


@app.command()
def report(
    run: Annotated[Path, typer.Argument(metavar="RUN", help="The run.dir of a run.")],
    svg: Annotated[Path, typer.Option(metavar="FILE", help="Where the picture goes.")] = Path("run.svg"),
) -> None:
    """Draw a run: reward, response length, devices and where the plan changed."""
    from nereus.reports.figure import run_figure

    check_destination(str(svg))
    svg.write_text(run_figure(run))
    print(f"written to {svg}")


@app.command()
def stop(run: Run) -> None:
    """Ask a run to end before its next step."""
    from nereus.control import ask_stop

    found = ask_stop(run)
    print(f"the run will end before step {found.step + 2}, or the one after")


@app.command()
def reshape(
    run: Run,
    stages: Annotated[list[str], typer.Argument(metavar="MODEL-STAGE=PLAN...", help="actor-training=d1t4p1@0-3")],
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Say what would move and how long it would take.")] = False,
) -> None:
    """Ask a running job to move to another plan before its next step."""
    from nereus.control import ask_reshape, parse_stages, running, target_plan
    from nereus.outlook import describe_move, recorded_outlook

    found, named = running(run), parse_stages(stages)
    target = target_plan(found, named)
    assert found.plan is not None
    print(describe_move(recorded_outlook(run / "events.jsonl"), found.plan, target))
    if not dry_run:
        ask_reshape(run, named)
        print("asked; events.jsonl will say what came of it")


BENCHMARKS = ("generate", "reshard", "planner", "costmodel", "coordination", "dag")


@app.command()
def bench(
    name: Annotated[str, typer.Argument(help=f"One of {', '.join(BENCHMARKS)}.")],
    quick: Annotated[bool, typer.Option("--quick", help="A form that ends within a minute.")] = False,
    json_file: Json = None,
) -> None:
    """Measure and print one table."""
    import importlib.util

    check_destination(json_file)
    if name not in BENCHMARKS:
        raise InputError(f"no benchmark {name!r}; there are {', '.join(BENCHMARKS)}")
    path = Path(__file__).resolve().parent.parent / "benchmarks" / f"{name}.py"
    if not path.is_file():
        raise InputError(f"{path} not found: benchmarks run from a checkout of the repository")
    spec = importlib.util.spec_from_file_location(f"benchmarks_{name}", path)
    assert spec is not None and spec.loader is not None
    sys.path.insert(0, str(path.parent))
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    write_json(module.run(quick=quick), json_file)


def _interrupt(signum: int, frame: FrameType | None) -> None:
    raise KeyboardInterrupt


def _end_cleanly_on_sigterm() -> None:
    signal.signal(signal.SIGTERM, _interrupt)


def main() -> None:
    """Entry point of the `nereus` command."""
    _end_cleanly_on_sigterm()
    try:
        app(prog_name="nereus")
    except InputError as error:
        sys.exit(_say(f"error: {error}", 2))
    except NereusError as error:
        sys.exit(_say(f"failed: {error}", 1))


def _say(text: str, code: int) -> int:
    print(text, file=sys.stderr)
    return code
