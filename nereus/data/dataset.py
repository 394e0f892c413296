"""The data of a run, read once before any worker starts: tokenizer, training prompts, held-out prompts."""

import dataclasses
from collections.abc import Iterator, Sequence

from nereus.config import RunConfig
from nereus.data.prompts import Prompt, Row, held_out, read_rows, tokenize
from nereus.data.tasks import worked_answer
from nereus.data.tokenizers import Tokenizer, load_tokenizer, train_tokenizer
from nereus.errors import DataError
from nereus.model import ModelSpec

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


def load_data(config: RunConfig) -> RunData:
    """Read, split and tokenize what `config.data` names; raises DataError naming what cannot be used."""
    rows = read_rows(config.data.train)
    val_rows, num_removed = held_out(rows, read_rows(config.data.val), limit=config.trainer.val_samples)
    tokenizer = _tokenizer(config, rows)
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
        raise DataError(
            f"{tokenizer.source}: the tokenizer has {tokenizer.vocab_size} tokens; the model has {spec.vocab}"
        )


def _tokenizer(config: RunConfig, rows: Sequence[Row]) -> Tokenizer:
    if config.data.tokenizer == "trained":
        return train_tokenizer(_texts(rows[:TOKENIZER_ROWS]), vocab_size=config.data.vocab_size)
    folder = config.data.tokenizer or config.model.path
    assert folder is not None, "RunConfig asks for data.tokenizer where there is no model.path"
    return load_tokenizer(folder)


def _texts(rows: Sequence[Row]) -> Iterator[str]:
    """Questions, with their worked answer where there is one."""
    for row in rows:
        worked = row.data_source == "chain_sum" and "expression" in row.extra_info
        yield row.text + (worked_answer(row.extra_info["expression"]) if worked else str(row.ground_truth))
