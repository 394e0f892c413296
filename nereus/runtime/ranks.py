"""Which groups a rank of a model-stage belongs to. Pure, but for joining them."""

import dataclasses
import functools
from collections.abc import Callable, Mapping
from datetime import timedelta

from torch._C._distributed_c10d import Store

from nereus.cluster import Link
from nereus.comm.groups import BackendName, Group, GroupSpec
from nereus.engines.meter import Meter
from nereus.engines.train import RankGroups, vote_timeout
from nereus.errors import GroupError
from nereus.model import ModelSpec
from nereus.plan import ModelStage, StagePlan


@dataclasses.dataclass(frozen=True, slots=True)
class RankGroupSpecs:
    """The groups of one rank before they stand; members in rank order."""

    tp: GroupSpec
    pp: GroupSpec
    dp: GroupSpec
    tie: GroupSpec
    all: GroupSpec


def rank_group_specs(
    spec: ModelSpec, model_stage: ModelStage, stage_plan: StagePlan, device: int, *, epoch: int
) -> RankGroupSpecs:
    """The groups of `device` in a model-stage under an epoch."""
    position = stage_plan.position(device)
    assert position is not None, f"device {device} has no part in {model_stage}"
    unit_index, rank = position
    unit, layout = stage_plan.units[unit_index], stage_plan.layout
    tp_rank, pp_rank = layout.tp_rank(rank), layout.pp_rank(rank)
    at = f"e{epoch}/{model_stage}"
    same_stage = tuple(unit[layout.rank(tp_rank=t, pp_rank=pp_rank)] for t in range(layout.tp))
    same_position = tuple(unit[layout.rank(tp_rank=tp_rank, pp_rank=p)] for p in range(layout.pp))
    tied = spec.tied and layout.pp > 1 and pp_rank in (0, layout.pp - 1)
    return RankGroupSpecs(
        tp=GroupSpec(f"{at}/u{unit_index}/tp{pp_rank}", same_stage),
        pp=GroupSpec(f"{at}/u{unit_index}/pp{tp_rank}", same_position),
        dp=GroupSpec(f"{at}/dp{rank}", tuple(other[rank] for other in stage_plan.units)),
        tie=GroupSpec(f"{at}/u{unit_index}/tie{tp_rank}", (same_position[0], same_position[-1]) if tied else (device,)),
        all=GroupSpec(f"{at}/all", stage_plan.devices),
    )


def join_groups(
    specs: RankGroupSpecs,
    store: Store,
    device: int,
    *,
    timeout: timedelta,
    backend: BackendName,
    trains: bool,
    meter: Meter,
    nodes: Mapping[int, str],
) -> RankGroups:
    """Join every group in one order that is the same on all ranks, so joins cannot wait for each other in a circle.

    Groups that only training uses (dp, tie, all) stay single where the model-stage does not train. What the others
    take is told to `meter`; `nodes` says which node each device is on. Where a join fails, those before it are left.
    """
    joined: list[Group] = []

    def join(spec: GroupSpec, used: bool = True, wait: timedelta = timeout) -> Group:
        group = spec.join(store, device, timeout=wait, backend=backend) if used else Group.single(spec.name)
        group.observe = functools.partial(_observed, meter, spec.size, _link(spec, nodes))
        joined.append(group)
        return group

    try:
        return RankGroups(
            tp=join(specs.tp),
            pp=join(specs.pp),
            dp=join(specs.dp, trains),
            tie=join(specs.tie, trains),
            all=join(specs.all, trains, vote_timeout(timeout)),
        )
    except GroupError:
        for group in joined:
            group.close()
        raise


def _link(spec: GroupSpec, nodes: Mapping[int, str]) -> Link:
    return Link.INTRA_NODE if len({nodes[device] for device in spec.devices}) == 1 else Link.INTER_NODE


def _observed(meter: Meter, size: int, link: Link, operation: str, num_bytes: int, seconds: float) -> None:
    """Count a collective as the planner does: the bytes a rank puts on the wire."""
    if operation in WIRE_FACTOR:
        meter.add(f"{operation}@{link}", WIRE_FACTOR[operation](size) * num_bytes, seconds)


WIRE_FACTOR: dict[str, Callable[[int], float]] = {
    "all_reduce": lambda size: 2 * (size - 1) / size,
    "all_gather": lambda size: size - 1,
    "point_to_point": lambda size: 1,
}
"""Bytes a rank sends for each byte of its tensor, by operation and group size."""
