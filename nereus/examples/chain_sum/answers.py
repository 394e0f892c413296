"""Answers to teach before RL: worked and direct ones for the warm start, right and wrong ones for a reward model.

The task is `chain_sum` (sums and differences of a few numbers), whose worked answer can be written down from the
question. Every batch is a function of (seed, step), so a warm start resumes and repeats exactly.
"""

import dataclasses
import enum
from collections.abc import Sequence

import numpy as np

from nereus.data.prompts import Prompt, Row
from nereus.data.tokenizers import Tokenizer
from nereus.errors import DataError

__all__ = ["Example", "Pair", "WarmStart", "direct_answer", "taught_answer", "worked_answer"]


class _Stream(enum.IntEnum):
    """Independent random streams of one seed."""

    ANSWERS = 1
    PAIRS = 2


@dataclasses.dataclass(frozen=True, slots=True)
class Example:
    """A prompt and the answer to learn; the answer ends with the end-of-sequence token."""

    prompt_tokens: tuple[int, ...]
    response_tokens: tuple[int, ...]


@dataclasses.dataclass(frozen=True, slots=True)
class Pair:
    """A prompt with a right and a wrong answer of the same form."""

    prompt_tokens: tuple[int, ...]
    right_tokens: tuple[int, ...]
    wrong_tokens: tuple[int, ...]


def terms(expression: str) -> list[int]:
    """Signed terms of `7 - 8 + 2`."""
    words = expression.split(" ")
    signs = ["+", *words[1::2]]
    return [int(word) if sign == "+" else -int(word) for sign, word in zip(signs, words[::2], strict=True)]


def direct_answer(result: int) -> str:
    return f"#### {result}"


def worked_answer(expression: str, *, slips: Sequence[int] = ()) -> str:
    """The sum line by line (`7 - 8 = -1`), then `#### result`.

    `slips[i]` is added to the result of line i, as a mistake that is carried on.
    """
    first, *rest = terms(expression)
    total, lines = first, []
    for index, term in enumerate(rest):
        after = total + term + (slips[index] if index < len(slips) else 0)
        lines.append(f"{total} {'-' if _negative(expression, index) else '+'} {abs(term)} = {after}")
        total = after
    return "\n".join([*lines, direct_answer(total)])


def taught_answer(row: Row) -> str:
    """What is taught of a row: its worked answer where the task has one, else the ground truth."""
    worked = row.data_source == "chain_sum" and "expression" in row.extra_info
    return worked_answer(row.extra_info["expression"]) if worked else str(row.ground_truth)


def _negative(expression: str, index: int) -> bool:
    """Whether the sign before term index + 1 is a minus; a term 0 has lost its own."""
    return expression.split(" ")[1 + 2 * index] == "-"


class WarmStart:
    """Batches of worked and direct answers to the training prompts.

    `worked_share` of a batch is worked until `switch_at` of the `steps`, `late_worked_share` after: the skill stays,
    the habit goes, and RL has something to find.
    """

    def __init__(
        self,
        prompts: Sequence[Prompt],
        tokenizer: Tokenizer,
        *,
        steps: int,
        batch: int,
        seed: int,
        worked_share: float = 0.7,
        switch_at: float = 0.8,
        late_worked_share: float = 0.15,
    ) -> None:
        self._prompts = prompts
        self._expressions = [_expression(prompt) for prompt in prompts]
        self._tokenizer = tokenizer
        self._steps, self._batch, self._seed = steps, batch, seed
        self._shares = worked_share, switch_at, late_worked_share

    def worked_share(self, step: int) -> float:
        """The share of worked answers in the batch of a step (from 0)."""
        early, switch_at, late = self._shares
        return early if step < self._steps * switch_at else late

    def examples(self, step: int) -> tuple[Example, ...]:
        """The batch of a step, drawn with replacement."""
        rng = np.random.default_rng((self._seed, _Stream.ANSWERS, step))
        picks = rng.integers(len(self._prompts), size=self._batch)
        worked = rng.random(self._batch) < self.worked_share(step)
        texts = [
            worked_answer(self._expressions[i]) if long else direct_answer(sum(terms(self._expressions[i])))
            for i, long in zip(picks, worked, strict=True)
        ]
        answers = self._answers(texts)
        return tuple(Example(self._prompts[i].tokens, answer) for i, answer in zip(picks, answers, strict=True))

    def pairs(self, step: int) -> tuple[Pair, ...]:
        """Right and wrong answers for the reward model's batch of a step; half of them worked."""
        rng = np.random.default_rng((self._seed, _Stream.PAIRS, step))
        picks = rng.integers(len(self._prompts), size=self._batch)
        texts: list[str] = []
        for i in picks:
            texts.extend(_right_and_wrong(self._expressions[i], rng))
        answers = self._answers(texts)
        return tuple(
            Pair(self._prompts[i].tokens, answers[2 * row], answers[2 * row + 1]) for row, i in enumerate(picks)
        )

    def _answers(self, texts: Sequence[str]) -> list[tuple[int, ...]]:
        return [(*tokens, self._tokenizer.eos_id) for tokens in self._tokenizer.encode_batch(texts)]


def _expression(prompt: Prompt) -> str:
    expression = prompt.extra_info.get("expression")
    if prompt.data_source != "chain_sum" or not isinstance(expression, str):
        raise DataError(f"prompt {prompt.index} is of {prompt.data_source}; worked answers exist for chain_sum alone")
    return expression


def _right_and_wrong(expression: str, rng: np.random.Generator) -> tuple[str, str]:
    """A right answer and one off by a few, either direct or worked with a slip in one line."""
    slip = int(rng.integers(1, 6)) * int(rng.choice((-1, 1)))
    numbers = terms(expression)
    if rng.random() < 0.5:
        result = sum(numbers)
        return direct_answer(result), direct_answer(result + slip)
    slips = [0] * (len(numbers) - 1)
    slips[int(rng.integers(len(slips)))] = slip
    return worked_answer(expression), worked_answer(expression, slips=slips)
