"""`nereus status`: where a run is."""

from nereus.commands.output import Run


def status(run: Run) -> None:
    """Say where a run is."""
    from nereus.reports.control import Status

    found = Status.read(run)
    state = found.phase if found.alive or found.ended else "ended without saying so"
    print(f"{state}, step {found.step} of {found.steps}{f': {found.reason}' if found.reason else ''}")
    for model_stage, stage_plan in found.plan.stages if found.plan else ():
        print(f"  {model_stage.name}: {stage_plan}")
