"""`nereus plan`: the best plan of a job on a cluster, without starting anything."""

from typing import Annotated

import typer
from rich.console import Console

from nereus import plan as find_plan
from nereus.commands.output import Json, check_destination, write_json
from nereus.planner.api import load_lengths
from nereus.planner.report import show

EXIT_INFEASIBLE = 1
CLUSTER_HELP = """NODESxDEVICESxTYPE such as 8x8xh200, a YAML file, local (what this machine has), ray (the Ray cluster
that runs here), ray:HOST:PORT or ray://HOST:PORT."""


def plan(
    model: Annotated[str, typer.Option(help="Actor: HF folder, config.json or built-in name (llama-3.1-8b).")],
    cluster: Annotated[str, typer.Option(help=CLUSTER_HELP)],
    algorithm: Annotated[str, typer.Option(help="ppo, grpo or remax.")] = "ppo",
    batch: Annotated[int, typer.Option(help="Prompts of a step.")] = 512,
    prompt: Annotated[float, typer.Option(help="Tokens of a prompt.")] = 1024,
    response: Annotated[float, typer.Option(help="Mean tokens of a response; --lengths gives a distribution.")] = 1024,
    n: Annotated[int, typer.Option("--n", help="Samples of a prompt.")] = 1,
    mini_batches: Annotated[int, typer.Option(help="Optimizer updates of a step.")] = 1,
    max_staleness: Annotated[
        int, typer.Option(help="Updates the generating policy may lag behind; from 1 on generation overlaps the rest.")
    ] = 0,
    lengths: Annotated[str | None, typer.Option(metavar="FILE", help="Response lengths, one number a line.")] = None,
    memory_gb: Annotated[float | None, typer.Option(help="Count devices as having no more memory.")] = None,
    placement: Annotated[str, typer.Option(help="colocated, disjoint or free.")] = "free",
    critic: Annotated[str | None, typer.Option(metavar="MODEL", help="Default: the actor's shape.")] = None,
    reward: Annotated[str | None, typer.Option(metavar="MODEL", help="A reward model. Default: none.")] = None,
    reference: Annotated[str | None, typer.Option(metavar="MODEL", help="Default: the actor's shape.")] = None,
    dtype: Annotated[str, typer.Option(help="bf16, fp32 or fp64.")] = "bf16",
    explain: Annotated[bool, typer.Option("--explain", help="Runners-up, and what kept faster ones out.")] = False,
    compare: Annotated[
        str | None, typer.Option(metavar="PLAN", help='Price a plan as well: "actor-training=d4t2p2".')
    ] = None,
    json_file: Json = None,
) -> None:
    """Find the fastest plan that fits, and say what it costs and why."""
    check_destination(json_file)
    result = find_plan(
        model, cluster, algorithm=algorithm, batch=batch, prompt=prompt,
        response=load_lengths(lengths) if lengths is not None else response, n=n, mini_batches=mini_batches,
        max_staleness=max_staleness, memory_gb=memory_gb, placement=placement, critic=critic, reward=reward,
        reference=reference, dtype=dtype,
        alternatives=json_file is not None, explain=explain, compare=compare,
    )  # fmt: skip
    if json_file != "-":
        show(result, Console())
    write_json(result.to_json(), json_file)
    if not result.feasible:
        raise typer.Exit(EXIT_INFEASIBLE)
