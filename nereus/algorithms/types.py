"""What passes between the stages of a step, besides the rollout batch (`buffer.py`). Values only.

Knows nothing of plans, workers or algorithms: a sample has its place in the global order and nothing about who made it.
"""

import dataclasses
import enum

import torch

__all__ = ["GlobalCounts", "OutputKind", "Outputs", "Sample", "Sampling"]


@dataclasses.dataclass(frozen=True, slots=True)
class Sample:
    """One finished generation.

    prompt_index: the prompt's global place in the step's batch; group_index: which of the prompt's samples this is.
    (prompt_index, group_index) orders a batch whatever finished first.
    finished: a stop token ended it (the stop token is in response_tokens), not the length limit.
    policy_version: the actor updates behind the weights that produced it.
    """

    prompt_index: int
    group_index: int
    prompt_tokens: tuple[int, ...]
    response_tokens: tuple[int, ...]
    finished: bool
    policy_version: int = 0

    @property
    def place(self) -> tuple[int, int]:
        """The sample's position in the global order."""
        return self.prompt_index, self.group_index


@dataclasses.dataclass(frozen=True, slots=True)
class Sampling:
    """What an algorithm asks of generation for one prompt: so many sampled responses."""

    num_sampled: int = 1


@dataclasses.dataclass(frozen=True, slots=True)
class GlobalCounts:
    """What the sums of a loss are divided by: counts of the whole (mini-)batch, the same on every share of it.

    tokens: response tokens whose mask is set; sequences: samples with at least one such token.
    """

    tokens: int
    sequences: int


class OutputKind(enum.StrEnum):
    """What a model computes for an objective or an inference task, for the T response tokens of N samples.

    With p prompt tokens before it, response token i of a sample is predicted from position p + i - 1.
    """

    LOGPROBS = "logprobs"
    """[T]: log-probability of each response token, with its distribution's entropy [T] on request."""
    VALUES = "values"
    """[T]: the scalar head at the position that predicts each response token."""
    SCORES = "scores"
    """[N]: the scalar head at the last token of each sequence, as HF sequence classification pools."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Outputs:
    """A model's outputs for one micro-batch, on the device of the model; only what was asked for is set."""

    logprobs: torch.Tensor | None = None  # [T]
    entropy: torch.Tensor | None = None  # [T]
    values: torch.Tensor | None = None  # [T]
    scores: torch.Tensor | None = None  # [N]
