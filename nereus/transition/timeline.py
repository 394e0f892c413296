"""When the operations of a transition run, and how long the whole takes. Pure."""

from nereus.transition.cost import Rates
from nereus.transition.primitives import TransitionDag


def waits(dag: TransitionDag) -> list[set[int]]:
    """For every operation the earlier ones it waits for: its edges, the commit, the last one on each of its devices."""
    result: list[set[int]] = [set() for _ in dag.operations]
    for index in range(dag.num_staged, len(dag.operations)):
        result[index].update(range(dag.num_staged))
    for edge in dag.edges:
        result[edge.after].add(edge.before)
    last: dict[int, int] = {}
    for operation in dag.operations:
        devices = operation.devices
        result[operation.id].update(last[device] for device in devices if device in last)
        last.update(dict.fromkeys(devices, operation.id))
    return result


def start_times(dag: TransitionDag) -> tuple[float, ...]:
    """Start of every operation in seconds when each runs as soon as it may and links between nodes are not shared."""
    starts: list[float] = []
    for before, _ in zip(waits(dag), dag.loads, strict=True):
        starts.append(max((starts[i] + dag.loads[i].seconds for i in before), default=0.0))
    return tuple(starts)


def transition_seconds(dag: TransitionDag, rates: Rates) -> float:
    """Predicted seconds of the whole transition: the critical path with shared links.

    Operations that run at once and enter the same node slow each other down where together they ask for more than the
    node's link gives: each then advances at the share that its most crowded node leaves it.
    """
    before = waits(dag)
    left = [load.seconds for load in dag.loads]
    ended: set[int] = set()
    now_s = 0.0
    while len(ended) < len(left):
        running = [i for i in range(len(left)) if i not in ended and before[i] <= ended]
        speeds = _speeds(dag, running, rates)
        step_s = min(left[i] / speed for i, speed in zip(running, speeds, strict=True))
        now_s += step_s
        for i, speed in zip(running, speeds, strict=True):
            left[i] -= step_s * speed
            if left[i] <= 1e-12 * (1 + dag.loads[i].seconds):
                ended.add(i)
    return now_s


def _speeds(dag: TransitionDag, running: list[int], rates: Rates) -> list[float]:
    """Share of its speed on idle links that each running operation gets."""
    if rates.node_bytes_per_s is None:
        return [1.0] * len(running)
    asked: dict[int, float] = {}
    for i in running:
        for node, entering in enumerate(dag.loads[i].node_bytes):
            asked[node] = asked.get(node, 0.0) + entering / max(dag.loads[i].seconds, 1e-12)
    slowdown = {node: max(1.0, rate / rates.node_bytes_per_s) for node, rate in asked.items()}
    return [
        1.0 / max((slowdown[n] for n, entering in enumerate(dag.loads[i].node_bytes) if entering), default=1.0)
        for i in running
    ]
