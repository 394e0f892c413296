"""Prompts of a run: read from jsonl or parquet files or made by a reasoning-gym task, tokenized, put in an order.

A row is what the source says; a prompt is a row with its tokens. Nothing here knows batches of a plan: the order of
prompts is a function of one position, so the data position of a run is one integer.
"""

import dataclasses
import difflib
import functools
import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow
import pyarrow.parquet

from nereus.data.tokenizers import Tokenizer
from nereus.errors import DataError
from nereus.recipe.sections import DataSource

__all__ = ["Prompt", "PromptOrder", "Row", "held_out", "read_rows", "tokenize"]

REQUIRED_COLUMNS = ("data_source", "prompt", "reward_model")


@dataclasses.dataclass(frozen=True, slots=True)
class Row:
    """One question as its source gives it. `origin` names it in messages: a file and line, or a task and index.

    text: the prompt, or the contents of its messages; messages: set where the prompt is a chat.
    """

    origin: str
    text: str
    data_source: str
    ground_truth: Any
    messages: tuple[Mapping[str, str], ...] | None = None
    ability: str = ""
    extra_info: Mapping[str, Any] = dataclasses.field(default_factory=dict)


@dataclasses.dataclass(frozen=True, slots=True)
class Prompt:
    """A tokenized question. `index` is its place among the prompts it was loaded with."""

    index: int
    tokens: tuple[int, ...]
    text: str
    data_source: str
    ground_truth: Any
    ability: str = ""
    extra_info: Mapping[str, Any] = dataclasses.field(default_factory=dict)


class PromptOrder:
    """Shuffled epochs over `num_prompts`: which prompt stands at a position of the endless stream.

    A pure function of (seed, position): epoch e is a permutation keyed by (seed, e).
    """

    def __init__(self, num_prompts: int, *, seed: int) -> None:
        assert num_prompts > 0, "an order needs at least one prompt"
        self.num_prompts = num_prompts
        self.seed = seed

    def __getitem__(self, position: int) -> int:
        epoch, place = divmod(position, self.num_prompts)
        return int(_permutation(self.num_prompts, self.seed, epoch)[place])

    def take(self, position: int, count: int) -> tuple[int, ...]:
        """The prompts at `position` and the `count - 1` after it; they may run into the next epoch."""
        return tuple(self[p] for p in range(position, position + count))


@functools.lru_cache(maxsize=4)
def _permutation(num_prompts: int, seed: int, epoch: int) -> np.ndarray[Any, np.dtype[np.int64]]:
    return np.random.Generator(np.random.Philox(np.random.SeedSequence((seed, epoch)))).permutation(num_prompts)


def read_rows(source: DataSource) -> tuple[Row, ...]:
    """Every row of a source; raises DataError naming the file and line, or the task, and what is accepted."""
    if source.reasoning_gym is not None:
        return _task_rows(source, source.reasoning_gym)
    return tuple(row for path in source.files for row in _file_rows(path))


def held_out(train: Sequence[Row], val: Sequence[Row], *, limit: int) -> tuple[tuple[Row, ...], int]:
    """The first `limit` rows of `val` whose question does not occur in `train`, and how many of `val` do occur."""
    seen = {row.text for row in train}
    fresh = [row for row in val if row.text not in seen]
    if not fresh:
        raise DataError(
            f"every one of the {len(val)} held-out questions occurs in training; use another file or far-apart seeds"
        )
    return tuple(fresh[:limit]), len(val) - len(fresh)


def tokenize(rows: Sequence[Row], tokenizer: Tokenizer, *, max_prompt_length: int) -> tuple[Prompt, ...]:
    """Prompts of rows, in order; raises DataError for the first that is empty or longer than `max_prompt_length`.

    Chats go through the tokenizer's chat template where it has one, else their contents are joined by newlines.
    """
    plain = [i for i, row in enumerate(rows) if row.messages is None or not tokenizer.has_chat_template]
    tokens = dict(zip(plain, tokenizer.encode_prompts([rows[i].text for i in plain]), strict=True))
    prompts: list[Prompt] = []
    for index, row in enumerate(rows):
        ids = tokens[index] if index in tokens else tokenizer.encode_chat(row.messages or ())
        if not ids:
            raise DataError(f"{row.origin}: the prompt is empty")
        if len(ids) > max_prompt_length:
            raise DataError(
                f"{row.origin}: the prompt has {len(ids)} tokens; data.max_prompt_length is {max_prompt_length}"
            )
        prompts.append(
            Prompt(index, tuple(ids), row.text, row.data_source, row.ground_truth, row.ability, row.extra_info)
        )
    return tuple(prompts)


def _file_rows(path: Path) -> Iterator[Row]:
    readers = {".jsonl": _jsonl, ".json": _jsonl, ".parquet": _parquet}
    if path.suffix not in readers:
        raise DataError(f"{path}: a data file ends in {', '.join(readers)}")
    if not path.is_file():
        raise DataError(f"{path}: no such data file")
    empty = True
    for origin, columns in readers[path.suffix](path):
        empty = False
        yield _row(origin, columns)
    if empty:
        raise DataError(f"{path}: the file is empty; it needs rows with {', '.join(REQUIRED_COLUMNS)}")


def _jsonl(path: Path) -> Iterator[tuple[str, Mapping[str, Any]]]:
    with path.open("rb") as lines:
        for number, line in enumerate(lines, start=1):
            if not line.strip():
                continue
            try:
                columns = json.loads(line)
            except (json.JSONDecodeError, UnicodeDecodeError) as error:
                raise DataError(f"{path}:{number}: broken json line: {error}") from None
            if not isinstance(columns, dict):
                raise DataError(f"{path}:{number}: a line is a json object, found {type(columns).__name__}")
            yield f"{path}:{number}", columns


def _parquet(path: Path) -> Iterator[tuple[str, Mapping[str, Any]]]:
    try:
        rows = pyarrow.parquet.read_table(path).to_pylist()
    except (pyarrow.ArrowException, OSError) as error:
        raise DataError(f"{path}: not a parquet file that can be read: {error}") from None
    for number, columns in enumerate(rows):
        yield f"{path} row {number}", columns


def _row(origin: str, columns: Mapping[str, Any]) -> Row:
    for name in REQUIRED_COLUMNS:
        if columns.get(name) is None:
            raise DataError(f"{origin}: column {name!r} is missing; there are: {', '.join(columns) or 'none'}")
    prompt, reward = columns["prompt"], columns["reward_model"]
    if not isinstance(reward, Mapping) or "ground_truth" not in reward:
        raise DataError(f"{origin}: reward_model needs ground_truth, found {reward!r}")
    messages = None if isinstance(prompt, str) else _messages(origin, prompt)
    return Row(
        origin=origin,
        text=prompt if messages is None else "\n".join(message["content"] for message in messages),
        data_source=str(columns["data_source"]),
        ground_truth=reward["ground_truth"],
        messages=messages,
        ability=str(columns.get("ability") or ""),
        extra_info=columns.get("extra_info") or {},
    )


def _messages(origin: str, prompt: Any) -> tuple[Mapping[str, str], ...]:
    def is_message(value: Any) -> bool:
        return isinstance(value, Mapping) and all(isinstance(value.get(key), str) for key in ("role", "content"))

    if not isinstance(prompt, list) or not prompt or not all(map(is_message, prompt)):
        raise DataError(
            f"{origin}: prompt must be a text or a list of messages with role and content, found {prompt!r}"
        )
    return tuple(prompt)


def _task_rows(source: DataSource, task: str) -> tuple[Row, ...]:
    # Importing the collection takes about two seconds; only runs that use it pay.
    import reasoning_gym
    from reasoning_gym.factory import DATASETS

    if task not in DATASETS:
        near = difflib.get_close_matches(task, DATASETS, n=3)
        hint = f"did you mean {' or '.join(near)}?" if near else f"there are: {', '.join(sorted(DATASETS))}"
        raise DataError(f"reasoning_gym: no task {task!r}; {hint}")
    valid = [field.name for field in dataclasses.fields(DATASETS[task][1]) if field.name not in ("seed", "size")]
    for option in source.options:
        if option not in valid:
            raise DataError(f"reasoning_gym {task}: no option {option!r}; there are: {', '.join(valid)}")
    try:
        items = list(reasoning_gym.create_dataset(task, seed=source.seed, size=source.size, **source.options))
    except (AssertionError, TypeError, ValueError) as error:
        raise DataError(f"reasoning_gym {task}: the options {source.options} are refused: {error}") from None
    return tuple(
        Row(
            origin=f"{task} {source.seed + index}",
            text=f"{item['question']}\n",
            data_source=task,
            ground_truth=item["answer"],
            ability="reasoning",
            extra_info={"index": source.seed + index, **item["metadata"]},
        )
        for index, item in enumerate(items)
    )
