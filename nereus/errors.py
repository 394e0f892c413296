"""Every error a user can cause or meet.

    NereusError                     exit 1
    ├── InputError                  exit 2: what was asked cannot be done; nothing was started
    │   ├── ConfigError             a recipe key: unknown, out of range, contradictory
    │   ├── PlanError               a plan or layout that the model or the cluster does not admit
    │   ├── ModelError              a model folder: missing, truncated or unsupported
    │   ├── DataError               a data file, tokenizer or reward function
    │   └── ClusterError            devices or nodes that are needed and not there
    ├── NoFeasiblePlan              the planner found nothing; names the binding limit
    ├── GroupError                  a process group: a peer died, was late or disagreed
    ├── WorkerError                 a worker raised, was late or died; carries device and task
    ├── DeviceMemoryError           a worker passed its memory limit
    ├── UpdateAborted               an optimizer update was voted down; nothing was applied
    ├── CheckpointError             saved state that is not whole; names the file
    ├── StateLost                   nothing whole is left of a model-stage, and no saved state to go on from
    ├── TornStateError              state that a move did not finish, or that is gone; never computed on
    └── TransitionAborted           a transition was rolled back; carries the operation
        └── PlanBroken              and the plan in force is not whole any more (`transition.remains`)

A refusal inside the decision code is a value with a reason, not an exception.
"""


class NereusError(Exception):
    """Base of all errors a user can cause or meet."""


class InputError(NereusError):
    """What was asked cannot be done; the message names the key or file and what would be accepted."""


class ConfigError(InputError):
    """A recipe key is unknown, out of range or contradicts another."""

    def __init__(self, key: str, problem: str) -> None:
        super().__init__(f"{key}: {problem}")
        self.key = key


class PlanError(InputError):
    """A plan or layout that the model or the cluster does not admit."""


class ModelError(InputError):
    """A model folder that is missing, truncated or of an unsupported kind."""


class DataError(InputError):
    """A data file, tokenizer or reward function that cannot be used."""


class ClusterError(InputError):
    """Devices or nodes that are needed and not there."""


class NoFeasiblePlan(NereusError):
    """No plan fits; the message names the binding limit and what would be valid."""


class GroupError(NereusError):
    """A process group or the store behind it failed: a peer died, was late or disagreed.

    `group` names the group (and the operation), or the store.
    """

    def __init__(self, group: str, problem: str) -> None:
        super().__init__(f"{group}: {problem}")
        self.group = group
        self.problem = problem

    def __reduce__(self) -> tuple[type["GroupError"], tuple[str, str]]:
        return GroupError, (self.group, self.problem)


class WorkerError(NereusError):
    """A worker raised, was late or died.

    `device` is its device id, `task` what it was asked to do.
    """

    def __init__(self, device: int, task: str, problem: str) -> None:
        super().__init__(f"worker {device}, {task}: {problem}")
        self.device = device
        self.task = task
        self.problem = problem

    def __reduce__(self) -> tuple[type["WorkerError"], tuple[int, str, str]]:
        return WorkerError, (self.device, self.task, self.problem)


class DeviceMemoryError(NereusError):
    """A worker holds more memory than its device has (`cluster.memory_gb` where that is set)."""

    def __init__(self, held_bytes: int, limit_bytes: int) -> None:
        super().__init__(f"out of memory: {held_bytes / 1e6:.1f} MB held, {limit_bytes / 1e6:.1f} MB allowed")
        self.held_bytes, self.limit_bytes = held_bytes, limit_bytes

    def __reduce__(self) -> tuple[type["DeviceMemoryError"], tuple[int, int]]:
        return DeviceMemoryError, (self.held_bytes, self.limit_bytes)


class UpdateAborted(NereusError):
    """An optimizer update was voted down; parameters and moments are those before it."""


class CheckpointError(NereusError):
    """A checkpoint that is not whole; the message names the file."""


class StateLost(NereusError):
    """Nothing whole is left of a model-stage, neither on workers nor saved; the message names it and what happened."""


class TornStateError(NereusError):
    """A buffer that a move left unfinished or unverified, or that is gone, was to be used."""

    def __init__(self, device: int, buffer: str, problem: str) -> None:
        super().__init__(f"device {device}, {buffer}: {problem}")
        self.device, self.buffer, self.problem = device, buffer, problem

    def __reduce__(self) -> tuple[type["TornStateError"], tuple[int, str, str]]:
        return TornStateError, (self.device, self.buffer, self.problem)


class TransitionAborted(NereusError):
    """A transition was rolled back; `operation` names the operation that failed."""

    def __init__(self, operation: str, problem: str) -> None:
        super().__init__(f"{operation}: {problem}")
        self.operation = operation
        self.problem = problem

    def __reduce__(self) -> tuple[type["TransitionAborted"], tuple[object, ...]]:
        return TransitionAborted, (self.operation, self.problem)
