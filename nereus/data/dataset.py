"""The data of a run, read once before any worker starts: tokenizer, training prompts, held-out prompts."""

import dataclasses
from collections.abc import Callable, Sequence

from nereus.data.prompts import Prompt, Row, held_out, read_rows, tokenize
from nereus.data.tokenizers import Tokenizer, load_tokenizer, train_tokenizer
from nereus.errors import DataError
from nereus.model import ModelSpec
from nereus.recipe.config import RunConfig

__all__ = ["RunData", "check_vocab", "load_data"]

TOKENIZER_ROWS = 2000
"""Questions a tokenizer is trained on."""


@dataclasses.dataclass(frozen=True, slots=True)
class RunData:
    """`num_removed`: held-out questions left out because they occur in training."""

    tokenizer: Tokenizer
    train: tuple[Prompt, ...]
    val: tuple[Prompt, ...]
    num_removed: int


def load_data(config: RunConfig, *, answer: Callable[[Row], str] | None = None) -> RunData:
    """Read, split and tokenize what `config.data` names; raises DataError naming what cannot be used.

    answer: what a trained tokenizer learns beside a question; None: the ground truth as text.
    """
    rows = read_rows(config.data.train)
    val_rows, num_removed = held_out(rows, read_rows(config.data.val), limit=config.trainer.val_samples)
    tokenizer = _tokenizer(config, rows, answer or (lambda row: str(row.ground_truth)))
    limit = config.data.max_prompt_length
    return RunData(
        tokenizer=tokenizer,
        train=tokenize(rows, tokenizer, max_prompt_length=limit),
        val=tokenize(val_rows, tokenizer, max_prompt_length=limit),
        num_removed=num_removed,
    )


def check_vocab(tokenizer: Tokenizer, spec: ModelSpec) -> None:
    """Raise DataError where the tokenizer has tokens that the model does not know."""
    if tokenizer.vocab_size > spec.vocab:
        token, index = tokenizer.largest
        raise DataError(
            f"{tokenizer.source}: token {token!r} has id {index}; the model's vocabulary has {spec.vocab} rows"
        )


def _tokenizer(config: RunConfig, rows: Sequence[Row], answer: Callable[[Row], str]) -> Tokenizer:
    if config.data.tokenizer == "trained":
        texts = (row.text + answer(row) for row in rows[:TOKENIZER_ROWS])
        return train_tokenizer(texts, vocab_size=config.data.vocab_size)
    folder = config.data.tokenizer or config.model.path
    assert folder is not None, "RunConfig asks for data.tokenizer where there is no model.path"
    return load_tokenizer(folder)
