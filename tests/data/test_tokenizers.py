from pathlib import Path

import pytest
import transformers
from hypothesis import given, settings
from hypothesis import strategies as st

from nereus.data.tokenizers import Tokenizer, byte_tokenizer, load_tokenizer, train_tokenizer
from nereus.errors import DataError

QUESTIONS = [
    f"State the sum: {a} - {b} + {c} =\n{a} - {b} = {a - b}\n#### {a - b + c}"
    for a in range(9)
    for b in range(9)
    for c in range(9)
]


@pytest.fixture(scope="module")
def trained() -> Tokenizer:
    return train_tokenizer(QUESTIONS, vocab_size=320)


@given(st.text())
@settings(max_examples=50, deadline=None)
def test_bytes_come_back_as_the_same_text(text: str) -> None:
    tokenizer = byte_tokenizer()
    tokens = tokenizer.encode(text)
    assert len(tokens) == len(text.encode()) and all(2 <= token < tokenizer.vocab_size for token in tokens)
    assert tokenizer.decode(tokens) == text


def test_the_byte_tokenizer_has_one_token_a_byte_and_two_more() -> None:
    assert byte_tokenizer().vocab_size == 258


def test_a_trained_tokenizer_keeps_whole_numbers_apart_from_text(trained: Tokenizer) -> None:
    words = [trained.decode([token]) for token in trained.encode("State the sum: 3 - 5 + 7 =\n")]
    assert words == ["State the sum: ", "3", " - ", "5", " + ", "7", " =\n"]
    assert trained.vocab_size <= 320


def test_special_tokens_are_not_decoded_and_differ(trained: Tokenizer) -> None:
    assert trained.pad_id != trained.eos_id
    assert trained.decode([*trained.encode("#### 7"), trained.eos_id, trained.pad_id]) == "#### 7"


def test_a_batch_is_encoded_and_decoded_as_its_texts_are(trained: Tokenizer) -> None:
    batch = trained.encode_batch(QUESTIONS[:20])
    assert batch == [trained.encode(text) for text in QUESTIONS[:20]]
    assert trained.decode_batch(batch) == QUESTIONS[:20]
    assert trained.encode_batch([]) == []


def test_a_saved_tokenizer_is_an_hf_folder(trained: Tokenizer, tmp_path: Path) -> None:
    trained.save(tmp_path)
    loaded = load_tokenizer(tmp_path)
    hf = transformers.AutoTokenizer.from_pretrained(str(tmp_path))
    assert loaded.encode(QUESTIONS[5]) == trained.encode(QUESTIONS[5]) == hf(QUESTIONS[5])["input_ids"]
    assert (loaded.eos_id, loaded.pad_id, loaded.vocab_size) == (trained.eos_id, trained.pad_id, trained.vocab_size)


def test_chats_go_through_the_template_with_the_opening_of_the_answer(tmp_path: Path) -> None:
    byte_tokenizer().save(tmp_path)
    (tmp_path / "chat_template.jinja").write_text(
        "{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}"
        "{% if add_generation_prompt %}<answer>{% endif %}"
    )
    tokenizer = load_tokenizer(tmp_path)
    assert tokenizer.has_chat_template and not byte_tokenizer().has_chat_template
    assert tokenizer.decode(tokenizer.encode_chat([{"role": "user", "content": "hi"}])) == "<user>hi<answer>"


def test_a_folder_that_is_not_there_is_refused_with_the_nearest(tmp_path: Path) -> None:
    (tmp_path / "tokenizer").mkdir()
    with pytest.raises(DataError, match="tokeniser: no such tokenizer folder.*did you mean .*tokenizer?"):
        load_tokenizer(tmp_path / "tokeniser")


def test_a_folder_without_a_tokenizer_is_refused(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="holds no tokenizer.json"):
        load_tokenizer(tmp_path)


@pytest.mark.parametrize("text", ['{"model": ', "[]", '{"version": "1.0", "model": {"type": "BPE", "vocab": 3}}'])
def test_a_broken_tokenizer_is_refused(text: str, tmp_path: Path) -> None:
    byte_tokenizer().save(tmp_path)
    (tmp_path / "tokenizer.json").write_text(text)
    with pytest.raises(DataError, match="cannot be read"):
        load_tokenizer(tmp_path)


def test_a_tokenizer_without_an_end_token_is_refused(tmp_path: Path) -> None:
    byte_tokenizer().save(tmp_path)
    hf = transformers.AutoTokenizer.from_pretrained(str(tmp_path), eos_token=None)
    with pytest.raises(DataError, match="no end-of-sequence token"):
        Tokenizer(hf, source="folder")


def test_a_chat_that_the_template_refuses_is_refused_with_its_reason(tmp_path: Path) -> None:
    byte_tokenizer().save(tmp_path)
    (tmp_path / "chat_template.jinja").write_text("{{ raise_exception('no system messages') }}")
    with pytest.raises(DataError, match="the chat template refuses .*: no system messages"):
        load_tokenizer(tmp_path).encode_chat([{"role": "system", "content": "hi"}])


@pytest.mark.parametrize("key", ["attention_bias", "tie_word_embeddings"])
def test_a_config_that_the_loader_refuses_is_refused_in_one_line(trained: Tokenizer, key: str, tmp_path: Path) -> None:
    trained.save(tmp_path)
    (tmp_path / "config.json").write_text(f'{{"model_type": "llama", "{key}": null}}')
    with pytest.raises(DataError, match=key) as caught:
        load_tokenizer(tmp_path)
    assert "\n" not in str(caught.value)
