"""What a step tells the monitor: lengths, devices, memory, seconds. Values only.

A `Signals` is built from a step's report while the job runs, and from the step's line of `events.jsonl` in a replay;
both give the same value, so that whatever is decided from signals can be decided again.
"""

import dataclasses
from collections.abc import Mapping
from typing import Any

from nereus.errors import DataError
from nereus.plan import ModelStage
from nereus.planner.workload import Lengths
from nereus.runtime.seam import StepReport

NUM_QUANTILES = 20
"""Equal shares into which `LengthSummary.quantiles` cuts the samples of a step."""

P95 = 0.95


@dataclasses.dataclass(frozen=True, slots=True)
class LengthSummary:
    """Response lengths of one step in tokens, and the mean prompt."""

    mean: float
    p95: float
    longest: float
    prompt_mean: float

    def quantiles(self) -> Lengths:
        """A distribution with this mean and this longest sample, near this p95.

        Of equal shares the last is the longest; below it a power k of the share, p95 (u / 0.95)^k, whose integral
        0.95 p95 / (k + 1) is what the mean leaves for it, then scaled so that the mean is met.
        """
        left = self.mean - self.longest / NUM_QUANTILES
        exponent = max(0.0, P95 * self.p95 / left - 1) if left > 0 else float(NUM_QUANTILES)
        body = [self.p95 * ((i + 0.5) / NUM_QUANTILES / P95) ** exponent for i in range(NUM_QUANTILES - 1)]
        scale = left * NUM_QUANTILES / sum(body) if left > 0 else 1.0
        return Lengths((*(max(1.0, min(value * scale, self.longest)) for value in body), self.longest))


@dataclasses.dataclass(frozen=True, slots=True)
class Signals:
    """One step as the monitor sees it.

    step_s: measured. task_s: by model-stage. operations: {class: (work, seconds)}. peak_bytes: by device.
    engine_bytes: by device, held beside the state when the step has ended.
    """

    step: int
    step_s: float
    lengths: LengthSummary
    task_s: Mapping[ModelStage, float] = dataclasses.field(default_factory=dict)
    operations: Mapping[str, tuple[float, float]] = dataclasses.field(default_factory=dict)
    peak_bytes: Mapping[int, int] = dataclasses.field(default_factory=dict)
    engine_bytes: Mapping[int, int] = dataclasses.field(default_factory=dict)

    @property
    def operation_s(self) -> dict[str, float]:
        """Seconds by operation class."""
        return {name: seconds for name, (_, seconds) in self.operations.items()}

    @classmethod
    def of(cls, report: StepReport) -> "Signals":
        """The signals of a step that has ended."""
        metrics = report.metrics
        lengths = LengthSummary(
            mean=metrics["response_length/mean"],
            p95=metrics["response_length/p95"],
            longest=metrics["response_length/max"],
            prompt_mean=metrics["prompt_length/mean"],
        )
        return cls(
            report.step,
            report.step_s,
            lengths,
            task_s=dict(report.task_s),
            operations={name: (work, seconds) for name, (work, seconds) in report.operations.items()},
            peak_bytes=dict(report.peak_bytes),
            engine_bytes=dict(report.engine_bytes),
        )

    @classmethod
    def from_event(cls, line: Mapping[str, Any]) -> "Signals":
        """The same of a `step` line of `events.jsonl`; raises DataError where the line lacks a field."""
        try:
            lengths = line["lengths"]
            return cls(
                line["step"],
                line["step_s"],
                LengthSummary(lengths["mean"], lengths["p95"], lengths["max"], lengths["prompt_mean"]),
                task_s={ModelStage.parse(name): seconds for name, seconds in line["tasks"].items()},
                operations={name: (row["work"], row["seconds"]) for name, row in line["operations"].items()},
                peak_bytes={int(device): peak for device, peak in line["peak_bytes"].items()},
                engine_bytes={int(device): held for device, held in line.get("engine_bytes", {}).items()},
            )
        except KeyError as error:
            raise DataError(f"the event of step {line.get('step', '?')} lacks {error}") from None
