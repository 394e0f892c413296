"""What `nereus plan` prints: a table of model-stages, the critical path, and on request the reasons."""

from collections.abc import Iterator

from rich import box
from rich.console import Console
from rich.table import Table

from nereus.cluster import GB
from nereus.plan import format_devices
from nereus.planner.api import PlanResult
from nereus.planner.evaluate import PlanPrice


def show(result: PlanResult, console: Console) -> None:
    """Print a result."""
    if result.refusal is not None:
        console.print(f"[bold red]no plan fits[/]: {result.refusal.reason}", highlight=False)
        for line in result.refusal.valid:
            console.print(f"  {line}", highlight=False)
    if result.price is not None:
        show_stages(result.price, console, title="plan")
        for line in critical_path(result):
            console.print(line, highlight=False)
    for note in result.notes:
        console.print(f"note: {note}", highlight=False)
    if result.alternatives:
        console.print(_alternatives(result))
    for excluded in result.excluded:
        console.print(
            f"excluded: {excluded.model_stage} as {excluded.shape} would take {excluded.seconds:.2f} s; "
            f"{excluded.reason}",
            highlight=False,
        )
    if result.compared is not None:
        _show_compared(result, result.compared, console)


def show_stages(priced: PlanPrice, console: Console, *, title: str) -> None:
    """The table of model-stages, and below it a line for each with the parts of its memory."""
    console.print(stage_table(priced, title=title))
    for model_stage, stage in priced.stages.items():
        parts = ", ".join(f"{part} {size / GB:.2f}" for part, size in stage.memory.active.items())
        shared = "; weights shared" if stage.shares_weights else ""
        console.print(f"memory of {model_stage} (GB): {parts}{shared}", highlight=False)


def stage_table(priced: PlanPrice, *, title: str) -> Table:
    """Units, layout, devices, seconds and GB, a row for each model-stage."""
    table = Table(title=title, title_justify="left", box=box.SIMPLE_HEAD, pad_edge=False)
    for name in (
        "model-stage",
        "units",
        "layout",
        "devices",
        "micro",
        "redo",
        "seconds",
        "GB",
    ):
        table.add_column(
            name,
            no_wrap=name != "devices",
            min_width=len(name),
            overflow="fold",
            justify="right" if name in ("units", "seconds", "GB", "micro") else "left",
        )
    for model_stage, stage_plan in priced.plan.stages:
        stage = priced.stages[model_stage]
        table.add_row(
            model_stage.name,
            str(stage_plan.dp),
            str(stage_plan.layout),
            format_devices(stage_plan.devices),
            str(stage.micro_batch),
            stage.recompute.value,
            f"{stage.cost.seconds:.3f}",
            f"{stage.memory.active_bytes / GB:.2f}",
        )
    fullest = max(priced.device_bytes, key=lambda d: priced.device_bytes[d] - priced.capacity_bytes[d])
    table.caption = (
        f"fullest device {fullest}: {priced.device_bytes[fullest] / GB:.2f} of "
        f"{priced.capacity_bytes[fullest] / GB:.2f} GB usable, with what is idle on it"
    )
    return table


def critical_path(result: PlanResult) -> Iterator[str]:
    """The waves of a step, their seconds, and the throughput."""
    priced = result.price
    assert priced is not None
    waves = result.problem.workflow.waves
    parts = []
    for wave, seconds in enumerate(priced.wave_seconds):
        names = " | ".join(name for name, at in waves.items() if at == wave)
        parts.append(f"{names} {seconds:.3f} s")
    moved = f"weight synchronization {sum(priced.sync_seconds.values()):.3f} s"
    if priced.overlapped:
        generation, *rest = parts
        yield f"critical path: {generation} (of the next batch) beside {' -> '.join(rest)}, then {moved}"
    else:
        yield "critical path: " + " -> ".join([*parts, moved])
    yield f"step {priced.step_seconds:.3f} s, {result.tokens_per_second:,.0f} tokens/s"


def _alternatives(result: PlanResult) -> Table:
    assert result.price is not None
    table = Table(title="runners-up", title_justify="left")
    table.add_column("differs in")
    table.add_column("step (s)", justify="right")
    table.add_column("slower by", justify="right")
    for other in result.alternatives:
        slower = other.price.step_seconds / result.price.step_seconds - 1
        table.add_row(other.note, f"{other.price.step_seconds:.3f}", f"{slower:.2%}")
    return table


def _show_compared(result: PlanResult, compared: PlanPrice, console: Console) -> None:
    show_stages(compared, console, title="compared plan")
    verdict = f"step {compared.step_seconds:.3f} s"
    if not compared.feasible:
        verdict += f"; does not fit: {compared.excess_bytes / GB:.2f} GB too much on the fullest device"
    elif result.price is not None:
        change = compared.step_seconds / result.price.step_seconds - 1
        verdict += f", {abs(change):.2%} {'slower' if change >= 0 else 'faster'} than the plan above"
    console.print(f"compared plan: {verdict}", highlight=False)
