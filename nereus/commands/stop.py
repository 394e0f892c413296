"""`nereus stop`: ask a run to end."""

from nereus.commands.output import Run


def stop(run: Run) -> None:
    """Ask a run to end before its next step."""
    from nereus.reports.control import ask_stop

    found = ask_stop(run)
    print(f"the run will end before step {found.step + 2}, or the one after")
