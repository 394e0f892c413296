import collections
import json
from pathlib import Path
from typing import Any

import pyarrow
import pyarrow.parquet
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from nereus.data.prompts import PromptOrder, Row, held_out, read_rows, tokenize
from nereus.data.tokenizers import byte_tokenizer, load_tokenizer
from nereus.errors import DataError
from nereus.recipe.sections import DataSource


def question(text: Any, **columns: Any) -> dict[str, Any]:
    truth = {"style": "rule", "ground_truth": "4"}
    return {"data_source": "sums", "prompt": text, "ability": "math", "reward_model": truth, **columns}


def jsonl(folder: Path, *lines: Any) -> Path:
    path = folder / "data.jsonl"
    path.write_text("".join(f"{line if isinstance(line, str) else json.dumps(line)}\n" for line in lines))
    return path


def parquet(folder: Path, *rows: dict[str, Any]) -> Path:
    path = folder / "data.parquet"
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(list(rows)), path)
    return path


def files(*paths: Path) -> DataSource:
    return DataSource(files=paths)


def task(name: str, **keys: int) -> DataSource:
    return DataSource.model_validate({"reasoning_gym": name, **keys})


def rows(*texts: str) -> list[Row]:
    return [Row(origin=f"row {i}", text=text, data_source="sums", ground_truth="4") for i, text in enumerate(texts)]


@pytest.mark.parametrize("write", [jsonl, parquet])
def test_both_formats_give_verls_columns(write: Any, tmp_path: Path) -> None:
    path = write(tmp_path, question("2 + 2 =", extra_info={"index": 7}), question("1 + 3 =", extra_info={"index": 8}))
    first, second = read_rows(files(path))
    assert (first.text, second.text) == ("2 + 2 =", "1 + 3 =")
    assert (first.data_source, first.ground_truth, first.ability) == ("sums", "4", "math")
    assert first.extra_info == {"index": 7}


def test_several_files_are_read_one_after_the_other(tmp_path: Path) -> None:
    source = files(jsonl(tmp_path, question("a")), parquet(tmp_path, question("b")))
    assert [row.text for row in read_rows(source)] == ["a", "b"]


@pytest.mark.parametrize("write", [jsonl, parquet])
def test_a_chat_is_joined_without_a_template_and_formatted_with_one(write: Any, tmp_path: Path) -> None:
    chat = [{"role": "system", "content": "Add."}, {"role": "user", "content": "2 + 2"}]
    (row,) = read_rows(files(write(tmp_path, question(chat))))
    byte_tokenizer().save(tmp_path)
    plain = load_tokenizer(tmp_path)
    (prompt,) = tokenize([row], plain, max_prompt_length=99)
    assert prompt.text == plain.decode(prompt.tokens) == "Add.\n2 + 2"
    (tmp_path / "chat_template.jinja").write_text("{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}")
    (prompt,) = tokenize([row], load_tokenizer(tmp_path), max_prompt_length=99)
    assert plain.decode(prompt.tokens) == "<system>Add.<user>2 + 2"


def test_an_empty_file_is_refused(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"data.jsonl: the file is empty"):
        read_rows(files(jsonl(tmp_path)))
    empty = pyarrow.table({"prompt": pyarrow.array([], pyarrow.string())})
    pyarrow.parquet.write_table(empty, tmp_path / "data.parquet")
    with pytest.raises(DataError, match=r"data.parquet: the file is empty"):
        read_rows(files(tmp_path / "data.parquet"))


@pytest.mark.parametrize("line", ['{"prompt": "a"', "\udcff", "nonsense"])
def test_a_broken_json_line_is_refused_with_file_and_line(line: str, tmp_path: Path) -> None:
    path = tmp_path / "data.jsonl"
    path.write_bytes(f"{json.dumps(question('a'))}\n\n{line}\n".encode(errors="surrogateescape"))
    with pytest.raises(DataError, match=r"data.jsonl:3: broken json line"):
        read_rows(files(path))


@pytest.mark.parametrize(
    ("row", "says"),
    [
        ("[1, 2]", "data.jsonl:1: a line is a json object, found list"),
        ({"data_source": "x", "question": "a"}, "column 'prompt' is missing; there are: data_source, question"),
        ({"data_source": "x", "prompt": "a"}, "column 'reward_model' is missing"),
        (question("a", reward_model={"style": "rule"}), "reward_model needs ground_truth"),
        (question([{"role": "user"}]), "messages with role and content"),
        (question([]), "messages with role and content"),
        (question(5), "messages with role and content"),
    ],
)
def test_a_row_that_lacks_something_is_refused(row: Any, says: str, tmp_path: Path) -> None:
    with pytest.raises(DataError, match=says):
        read_rows(files(jsonl(tmp_path, row)))


def test_a_missing_column_of_a_parquet_file_is_refused(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"parquet row 0: column 'prompt' is missing; there are: data_source, text"):
        read_rows(files(parquet(tmp_path, {"data_source": "x", "text": "a"})))


def test_a_file_that_is_missing_broken_or_of_another_kind_is_refused(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"nowhere.jsonl: no such data file"):
        read_rows(files(tmp_path / "nowhere.jsonl"))
    (tmp_path / "broken.parquet").write_bytes(b"PAR1 nothing PAR1")
    with pytest.raises(DataError, match=r"broken.parquet: not a parquet file"):
        read_rows(files(tmp_path / "broken.parquet"))
    with pytest.raises(DataError, match=r"data.csv: a data file ends in .jsonl, .json, .parquet"):
        read_rows(files(tmp_path / "data.csv"))


def test_a_prompt_longer_than_the_limit_is_refused_with_its_row_its_tokens_and_the_limit(tmp_path: Path) -> None:
    found = read_rows(files(jsonl(tmp_path, question("short"), question("much longer"))))
    assert len(tokenize(found, byte_tokenizer(), max_prompt_length=11)) == 2
    with pytest.raises(DataError, match=r"data.jsonl:2: the prompt has 11 tokens; data.max_prompt_length is 10"):
        tokenize(found, byte_tokenizer(), max_prompt_length=10)


def test_an_empty_prompt_is_refused() -> None:
    with pytest.raises(DataError, match="row 1: the prompt is empty"):
        tokenize(rows("a", ""), byte_tokenizer(), max_prompt_length=10)


def test_a_task_gives_its_questions_answers_and_metadata() -> None:
    source = task("chain_sum", seed=5, size=10, min_terms=4, max_terms=6, max_digits=1)
    found = read_rows(source)
    assert len(found) == 10 and found == read_rows(source)
    for row in found:
        expression = row.extra_info["expression"]
        assert 4 <= len(expression.split(" ")[::2]) <= 6 and expression in row.text and row.text.endswith("\n")
        assert str(eval(expression)) == row.ground_truth


def test_an_unknown_task_is_refused_with_the_nearest() -> None:
    with pytest.raises(DataError, match=r"no task 'chain_sums'; did you mean chain_sum"):
        read_rows(task("chain_sums"))


def test_an_unknown_or_wrong_option_of_a_task_is_refused() -> None:
    with pytest.raises(DataError, match=r"chain_sum: no option 'min_term'; there are: min_terms, max_terms"):
        read_rows(task("chain_sum", min_term=3))
    with pytest.raises(DataError, match="refused: min_terms must be positive"):
        read_rows(task("chain_sum", min_terms=0))


def test_held_out_questions_that_occur_in_training_are_removed_and_counted() -> None:
    val, removed = held_out(rows("a", "b"), rows("b", "c", "a", "d", "e"), limit=2)
    assert [row.text for row in val] == ["c", "d"] and removed == 2


def test_held_out_questions_that_all_occur_in_training_are_refused() -> None:
    with pytest.raises(DataError, match="every one of the 1 held-out questions occurs in training"):
        held_out(rows("a", "b"), rows("b"), limit=2)


@given(st.integers(1, 40), st.integers(0, 5), st.integers(0, 200), st.integers(1, 90))
@settings(max_examples=60, deadline=None)
def test_an_order_is_shuffled_epochs_that_resume_at_any_position(
    size: int, seed: int, position: int, count: int
) -> None:
    order = PromptOrder(size, seed=seed)
    stream = [order[p] for p in range(position + count)]
    assert PromptOrder(size, seed=seed).take(position, count) == tuple(stream[position:])
    for start in range(0, len(stream) - size + 1, size):
        assert collections.Counter(stream[start : start + size]) == collections.Counter(range(size))


def test_epochs_and_seeds_are_shuffled_differently() -> None:
    order = PromptOrder(50, seed=0)
    assert order.take(0, 50) != order.take(50, 50)
    assert order.take(0, 50) != PromptOrder(50, seed=1).take(0, 50)
    assert order.take(0, 50) != tuple(range(50))
