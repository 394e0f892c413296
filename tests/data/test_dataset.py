import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest

from nereus.data.dataset import check_vocab, load_data
from nereus.data.tokenizers import byte_tokenizer, load_tokenizer
from nereus.errors import DataError
from nereus.examples.chain_sum.answers import taught_answer
from nereus.recipe.config import RunConfig, load_config, parse_config

RECIPE = Path(__file__).parents[2] / "recipes" / "quickstart.yaml"


def from_file(folder: Path, *texts: str, **data: Any) -> RunConfig:
    path = folder / "data.jsonl"
    lines = [{"data_source": "s", "prompt": text, "reward_model": {"ground_truth": text}} for text in texts]
    path.write_text("\n".join(map(json.dumps, lines)))
    (folder / "val.jsonl").write_text(json.dumps(lines[0] | {"prompt": "held out"}))
    data = {"train": str(path), "val": str(folder / "val.jsonl"), "tokenizer": "byte", **data}
    return parse_config({"model": {"path": str(folder)}, "data": data, "reward": {"function": "a:b"}})


def test_the_quickstarts_data_are_as_its_design_says() -> None:
    data = load_data(load_config(RECIPE, ["data.train.size=3000"]), answer=taught_answer)
    assert 340 <= data.tokenizer.vocab_size <= 384
    assert len(data.train) == 3000 and len(data.val) == 400
    assert not {prompt.text for prompt in data.train} & {prompt.text for prompt in data.val}
    assert max(len(prompt.tokens) for prompt in data.train) <= 16


def test_a_tokenizer_can_be_trained_on_any_prompts(tmp_path: Path) -> None:
    data = load_data(from_file(tmp_path, "aaaa bbbb", "bbbb cccc", tokenizer="trained", vocab_size=270))
    assert 258 < data.tokenizer.vocab_size <= 270
    assert data.tokenizer.decode(data.train[1].tokens) == "bbbb cccc"


def test_the_tokenizer_of_the_model_folder_is_the_default(tmp_path: Path) -> None:
    byte_tokenizer().save(tmp_path)
    data = load_data(from_file(tmp_path, "one", "two", tokenizer=None))
    assert data.tokenizer.source == str(tmp_path) and [prompt.index for prompt in data.train] == [0, 1]


def test_a_tokenizer_larger_than_the_models_vocabulary_is_refused() -> None:
    config = load_config(RECIPE)
    assert config.model.shape is not None
    spec = config.model.shape.spec(vocab=258)
    check_vocab(byte_tokenizer(), spec)
    with pytest.raises(DataError, match=r"byte: token .* has id 257; the model's vocabulary has 257 rows"):
        check_vocab(byte_tokenizer(), dataclasses.replace(spec, vocab=257))


def test_an_id_beyond_the_number_of_tokens_counts(tmp_path: Path) -> None:
    """A tokenizer of 259 entries of which one has id 300: a model of 280 rows has no row for it."""
    byte_tokenizer().save(tmp_path)
    path = tmp_path / "tokenizer.json"
    document = json.loads(path.read_text(encoding="utf-8"))
    document["model"]["vocab"]["far"] = 300
    path.write_text(json.dumps(document), encoding="utf-8")
    tokenizer = load_tokenizer(tmp_path)
    assert tokenizer.vocab_size == 301
    config = load_config(RECIPE)
    assert config.model.shape is not None
    with pytest.raises(DataError, match="token 'far' has id 300; the model's vocabulary has 280 rows"):
        check_vocab(tokenizer, config.model.shape.spec(vocab=280))
    check_vocab(tokenizer, config.model.shape.spec(vocab=301))
