"""Runs the tasks of a workflow: each when its predecessors have ended and its devices are free.

    caller --starts--> one thread a running task --ends--> caller wakes, frees devices, starts what is ready

Ready tasks that want the same device go in the workflow's order, so two runs of one plan do the same.
"""

import sys
import time
from collections.abc import Callable, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait

from nereus.plan import ModelStage, Plan
from nereus.workflow import Task


def run_tasks(tasks: Sequence[Task], plan: Plan, execute: Callable[[Task], None]) -> dict[ModelStage, float]:
    """Seconds of each model-stage, summed over its tasks.

    The first error is raised once running tasks have ended; an interrupt at once: whoever ends the workers ends those.
    """
    seconds: dict[ModelStage, float] = {task.model_stage: 0.0 for task in tasks}
    waiting, done = list(tasks), set[str]()
    running: dict[Future[float], Task] = {}
    threads = ThreadPoolExecutor(max_workers=max(1, len(tasks)), thread_name_prefix="task")
    try:
        while waiting or running:
            busy = {device for task in running.values() for device in plan[task.model_stage].devices}
            for task in list(waiting):
                devices = plan[task.model_stage].devices
                if done.issuperset(task.after) and busy.isdisjoint(devices):
                    running[threads.submit(_timed, execute, task)] = task
                    waiting.remove(task)
                if done.issuperset(task.after):
                    busy.update(devices)
            for future in wait(running, return_when=FIRST_COMPLETED).done:
                task = running.pop(future)
                seconds[task.model_stage] += future.result()
                done.add(task.name)
        return seconds
    finally:
        threads.shutdown(wait=not isinstance(sys.exception(), KeyboardInterrupt))


def _timed(execute: Callable[[Task], None], task: Task) -> float:
    started = time.perf_counter()
    execute(task)
    return time.perf_counter() - started
