"""`nereus reshape`: ask a running job to move to another plan."""

from typing import Annotated

import typer

from nereus.commands.output import Run


def reshape(
    run: Run,
    stages: Annotated[list[str], typer.Argument(metavar="MODEL-STAGE=PLAN...", help="actor-training=d1t4p1@0-3")],
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Say what would move and how long it would take.")] = False,
) -> None:
    """Ask a running job to move to another plan before its next step."""
    from nereus.decide.outlook import describe_move, recorded_outlook
    from nereus.reports.control import ask_reshape, parse_stages, running, target_plan

    found, named = running(run), parse_stages(stages)
    outlook = recorded_outlook(run / "events.jsonl")
    target = outlook.complete(target_plan(found, named))
    assert found.plan is not None
    print(describe_move(outlook, found.plan, target))
    if not dry_run:
        ask_reshape(run, {m.name: str(stage_plan) for m, stage_plan in target.stages if m.name in named})
        print("asked; events.jsonl will say what came of it")
