"""The rollout batch: what a step knows of its samples, in global order, packed without padding.

It lives on the driver, outside the workers, so an update that failed can be done again. Workers get pieces of it:
mini-batches are cut from the global order first, then shared out over units, then cut into micro-batches. A piece owns
its memory; sending it sends nothing else.

    tokens            p p p r r | p r r r r | ...          prompt then response of each sample
    response columns        r r |   r r r r | ...          old_logprobs, values, advantages, ...
    sample columns    one entry | one entry | ...          scores, finished, ...
"""

import dataclasses
from collections.abc import Iterable, Sequence

import torch

from nereus.algorithms.types import GlobalCounts, Sample

__all__ = ["RESPONSE_COLUMNS", "RolloutBatch", "SAMPLE_COLUMNS", "gather_ragged", "shares", "starts"]

SAMPLE_COLUMNS = (
    "prompt_index",
    "group_index",
    "policy_version",
    "finished",
    "prompt_lengths",
    "response_lengths",
    "scores",
)
RESPONSE_COLUMNS = (
    "response_mask",
    "old_logprobs",
    "reference_logprobs",
    "values",
    "token_rewards",
    "advantages",
    "returns",
)


def shares(num: int, parts: int) -> tuple[range, ...]:
    """`parts` contiguous ranges over range(num) whose sizes differ by at most one, larger ones first."""
    assert num >= 0 and parts >= 1, f"cannot share {num} over {parts}"
    size, larger = divmod(num, parts)
    starts = [i * size + min(i, larger) for i in range(parts + 1)]
    return tuple(range(a, b) for a, b in zip(starts, starts[1:], strict=False))


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class RolloutBatch:
    """N samples with T response tokens in all. Immutable: a new column makes a new batch around the same tensors.

    A column that is None has not been computed yet.
    """

    prompt_index: torch.Tensor  # [N] int64
    group_index: torch.Tensor  # [N] int64
    policy_version: torch.Tensor  # [N] int64
    finished: torch.Tensor  # [N] bool
    prompt_lengths: torch.Tensor  # [N] int64
    response_lengths: torch.Tensor  # [N] int64
    tokens: torch.Tensor  # [sum of prompt_lengths + response_lengths] int64
    response_mask: torch.Tensor  # [T] bool: the token counts in losses and advantages
    scores: torch.Tensor | None = None  # [N] the reward of the whole response, or a reward model's label
    old_logprobs: torch.Tensor | None = None  # [T] under the actor before this step's updates
    reference_logprobs: torch.Tensor | None = None  # [T]
    values: torch.Tensor | None = None  # [T] under the critic before this step's updates
    token_rewards: torch.Tensor | None = None  # [T]
    advantages: torch.Tensor | None = None  # [T]
    returns: torch.Tensor | None = None  # [T]

    def __post_init__(self) -> None:
        assert self.prompt_lengths.shape == self.response_lengths.shape, "one pair of lengths for each sample"
        assert self.tokens.numel() == int(self.sequence_lengths.sum()), "tokens do not match the lengths"
        for names, size in ((SAMPLE_COLUMNS, self.num_samples), (RESPONSE_COLUMNS, self.num_response_tokens)):
            for name in names:
                column = getattr(self, name)
                assert column is None or column.shape == (size,), f"{name} is {tuple(column.shape)}, not ({size},)"

    @classmethod
    def from_samples(cls, samples: Iterable[Sample]) -> "RolloutBatch":
        """Pack samples, given in any order, in the global order; every response token counts."""
        ordered = sorted(samples, key=lambda sample: sample.place)
        assert len({sample.place for sample in ordered}) == len(ordered), "two samples have the same place"
        response_lengths = torch.tensor([len(s.response_tokens) for s in ordered], dtype=torch.int64)
        return cls(
            prompt_index=torch.tensor([s.prompt_index for s in ordered], dtype=torch.int64),
            group_index=torch.tensor([s.group_index for s in ordered], dtype=torch.int64),
            policy_version=torch.tensor([s.policy_version for s in ordered], dtype=torch.int64),
            finished=torch.tensor([s.finished for s in ordered], dtype=torch.bool),
            prompt_lengths=torch.tensor([len(s.prompt_tokens) for s in ordered], dtype=torch.int64),
            response_lengths=response_lengths,
            tokens=torch.tensor(
                [t for s in ordered for t in (*s.prompt_tokens, *s.response_tokens)], dtype=torch.int64
            ),
            response_mask=torch.ones(int(response_lengths.sum()), dtype=torch.bool),
        )

    @property
    def num_samples(self) -> int:
        return self.response_lengths.numel()

    @property
    def num_response_tokens(self) -> int:
        """T: response tokens, masked ones too."""
        return self.response_mask.numel()

    @property
    def sequence_lengths(self) -> torch.Tensor:
        """[N] prompt and response together."""
        return self.prompt_lengths + self.response_lengths

    @property
    def sample_of_token(self) -> torch.Tensor:
        """[T] which sample of this batch a response token belongs to."""
        place = torch.arange(self.num_samples, device=self.response_lengths.device)
        return torch.repeat_interleave(place, self.response_lengths)

    @property
    def valid_lengths(self) -> torch.Tensor:
        """[N] response tokens that count."""
        return self.sum_by_sample(self.response_mask.to(torch.int64))

    @property
    def counts(self) -> GlobalCounts:
        """What losses over this batch are divided by. Take it from the whole mini-batch, never from a share."""
        return GlobalCounts(tokens=int(self.response_mask.sum()), sequences=int((self.valid_lengths > 0).sum()))

    def sum_by_sample(self, column: torch.Tensor) -> torch.Tensor:
        """[T] -> [N]: the sum over each sample's response tokens."""
        return column.new_zeros(self.num_samples).index_add(0, self.sample_of_token, column)

    def column(self, name: str) -> torch.Tensor:
        """A column that must have been computed by now."""
        value: torch.Tensor | None = getattr(self, name)
        assert value is not None, f"the batch has no {name} yet"
        return value

    def with_columns(self, **columns: torch.Tensor) -> "RolloutBatch":
        """A batch with these columns added or replaced."""
        return dataclasses.replace(self, **columns)

    def prompt(self, sample: int) -> list[int]:
        """The prompt's token ids."""
        start = int(self.sequence_lengths[:sample].sum())
        return [int(t) for t in self.tokens[start : start + int(self.prompt_lengths[sample])]]

    def response(self, sample: int) -> list[int]:
        """The response's token ids."""
        end = int(self.sequence_lengths[: sample + 1].sum())
        return [int(t) for t in self.tokens[end - int(self.response_lengths[sample]) : end]]

    def select(self, indices: Sequence[int] | torch.Tensor) -> "RolloutBatch":
        """The samples at `indices`, in that order, with all their columns, in memory of their own."""
        chosen = torch.as_tensor(indices, dtype=torch.int64, device=self.response_lengths.device)
        of_tokens = gather_ragged(self.sequence_lengths, chosen)
        of_response = gather_ragged(self.response_lengths, chosen)
        columns = {"tokens": self.tokens[of_tokens]}
        for names, index in ((SAMPLE_COLUMNS, chosen), (RESPONSE_COLUMNS, of_response)):
            columns.update({name: getattr(self, name)[index] for name in names if getattr(self, name) is not None})
        return RolloutBatch(**columns)

    def shares(self, parts: int) -> tuple["RolloutBatch", ...]:
        """`parts` contiguous shares of the global order, sizes at most one apart."""
        return tuple(self.select(share) for share in shares(self.num_samples, parts))

    def micro_batches(self, max_samples: int) -> tuple["RolloutBatch", ...]:
        """As few contiguous pieces as `max_samples` allows, sizes at most one apart; an empty batch is one piece."""
        return self.shares(max(1, -(-self.num_samples // max_samples)))

    def to(self, device: torch.device | str) -> "RolloutBatch":
        """The same batch with its tensors on a device."""
        columns = {field.name: getattr(self, field.name) for field in dataclasses.fields(self)}
        return self.with_columns(**{name: c.to(device) for name, c in columns.items() if c is not None})


def starts(lengths: torch.Tensor) -> torch.Tensor:
    """[N] -> [N]: the exclusive running sum."""
    return lengths.cumsum(0) - lengths


def gather_ragged(lengths: torch.Tensor, chosen: torch.Tensor) -> torch.Tensor:
    """Indices into a flat ragged column of rows `lengths` [N] that pick the rows `chosen` [M], one after the other."""
    chosen_lengths = lengths[chosen]
    shift = starts(lengths)[chosen] - starts(chosen_lengths)
    total = int(chosen_lengths.sum())
    return torch.repeat_interleave(shift, chosen_lengths) + torch.arange(total, device=lengths.device)
