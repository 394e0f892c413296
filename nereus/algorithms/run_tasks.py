"""Runs the tasks of a workflow: each when its predecessors have ended and its devices are free.

    caller --starts--> one thread a running task --ends--> caller wakes, frees devices, starts what is ready

Ready tasks that want the same device go in the workflow's order, so two runs of one plan do the same.
"""

import sys
from collections.abc import Callable, Collection, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait

from nereus.plan import ModelStage
from nereus.workflow import Task

__all__ = ["run_tasks"]


def run_tasks(
    tasks: Sequence[Task],
    devices_of: Callable[[ModelStage], Collection[int]],
    execute: Callable[[Task], None],
    *,
    ended: Collection[str] = (),
) -> None:
    """Execute the tasks whose names are not in `ended`; those in it count as run.

    The first error is raised once running tasks have ended; an interrupt at once: whoever ends the workers ends those.
    """
    devices = {task.model_stage: devices_of(task.model_stage) for task in tasks}
    waiting, done = [task for task in tasks if task.name not in ended], set(ended)
    running: dict[Future[None], Task] = {}
    threads = ThreadPoolExecutor(max_workers=max(1, len(tasks)), thread_name_prefix="task")
    try:
        while waiting or running:
            busy = {device for task in running.values() for device in devices[task.model_stage]}
            for task in list(waiting):
                wanted = devices[task.model_stage]
                if done.issuperset(task.after) and busy.isdisjoint(wanted):
                    running[threads.submit(execute, task)] = task
                    waiting.remove(task)
                if done.issuperset(task.after):
                    busy.update(wanted)
            for future in wait(running, return_when=FIRST_COMPLETED).done:
                task = running.pop(future)
                future.result()
                done.add(task.name)
    finally:
        threads.shutdown(wait=not isinstance(sys.exception(), KeyboardInterrupt))
