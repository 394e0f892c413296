"""`nereus train`: run a recipe."""

import sys
from pathlib import Path
from typing import Annotated

import typer

from nereus.commands.output import Json, LastingConsole, check_destination, write_json
from nereus.commands.signals import end_cleanly_on_sigterm

EXIT_INTERRUPTED = 130


def train(
    recipe: Annotated[Path, typer.Argument(metavar="RECIPE", help="Recipe (YAML).")],
    overrides: Annotated[
        list[str] | None, typer.Argument(metavar="KEY=VALUE", help="Keys over the recipe's, such as trainer.steps=10.")
    ] = None,
    json_file: Json = None,
) -> None:
    """Run the recipe's post-training job."""
    check_destination(json_file)
    console = LastingConsole(stderr=json_file == "-")
    console.print("nereus: loading", style="dim")
    from nereus.recipe.config import load_config
    from nereus.reports.view import Lines, LiveView

    config = load_config(recipe, overrides or [])
    with LiveView(console) if console.is_terminal else Lines(console) as view:
        view.phase("loading libraries")
        from nereus.launch.training import run_training
        from nereus.reports.tables import change_table, controller_share, evaluation_table

        end_cleanly_on_sigterm()  # importing Ray has put its own handler there
        try:
            result = run_training(config, view)
        except KeyboardInterrupt:
            print("interrupted; everything that was started has ended", file=sys.stderr)
            raise typer.Exit(EXIT_INTERRUPTED) from None
    for note in result.notes:
        console.print(note, highlight=False, markup=False)
    console.print(evaluation_table(result.evaluations))
    changes = change_table(result.changes, result.steps)
    if changes is not None:
        console.print(changes)
        console.print(controller_share(result.steps), highlight=False)
    console.print(f"run folder: {result.run_dir}", highlight=False, markup=False)
    write_json(result.to_json(), json_file)
