"""Text to tokens and back: an HF tokenizer folder, the built-in byte tokenizer, or one trained on the task's own texts.

All three are HF fast tokenizers behind one small class, so any of them can be saved as a folder that others read.
"""

import difflib
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

import jinja2
import tokenizers
import transformers
from huggingface_hub.errors import StrictDataclassError
from tokenizers import decoders, models, pre_tokenizers, trainers

from nereus.errors import DataError

__all__ = ["Tokenizer", "byte_tokenizer", "load_tokenizer", "train_tokenizer"]

PAD, EOS = "<pad>", "<eos>"
SPECIAL_TOKENS = [PAD, EOS]
CONFIG_FILE = "tokenizer_config.json"


class Tokenizer:
    """Encodes prompts and answers, decodes responses. Holds an HF tokenizer and nothing else."""

    def __init__(self, hf: transformers.PreTrainedTokenizerBase, *, source: str) -> None:
        if hf.eos_token_id is None:
            raise DataError(f"{source}: the tokenizer has no end-of-sequence token; set eos_token in {CONFIG_FILE}")
        self._hf = hf
        self.source = source

    @property
    def eos_id(self) -> int:
        return int(self._hf.eos_token_id)

    @property
    def pad_id(self) -> int:
        """The padding token, or the end-of-sequence token where the tokenizer has none."""
        return self.eos_id if self._hf.pad_token_id is None else int(self._hf.pad_token_id)

    @property
    def vocab_size(self) -> int:
        """One more than the largest token id: the rows that a model of it needs."""
        return self.largest[1] + 1

    @property
    def largest(self) -> tuple[str, int]:
        """The token with the largest id, and the id; ids may leave gaps."""
        token, index = max(self._hf.get_vocab().items(), key=lambda entry: int(entry[1]))
        return str(token), int(index)

    @property
    def has_chat_template(self) -> bool:
        return bool(self._hf.chat_template)

    def encode(self, text: str) -> list[int]:
        """Tokens of a text alone, without special tokens around it."""
        return self.encode_batch([text])[0]

    def encode_batch(self, texts: Sequence[str]) -> list[list[int]]:
        """`encode` for many texts at once; much faster."""
        return self._ids(texts, add_special_tokens=False)

    def encode_prompts(self, texts: Sequence[str]) -> list[list[int]]:
        """Tokens of texts that begin a sequence: with the start token where the tokenizer has one, without an end."""
        ids = self._ids(texts, add_special_tokens=True)
        return [row[:-1] if row and row[-1] == self.eos_id else row for row in ids]

    def encode_chat(self, messages: Sequence[Mapping[str, str]]) -> list[int]:
        """Tokens of chat messages through the chat template, with the opening of the model's turn; raises DataError."""
        chat = [dict(message) for message in messages]
        try:
            ids = self._hf.apply_chat_template(chat, add_generation_prompt=True, tokenize=True, return_dict=False)
        except jinja2.TemplateError as error:
            raise DataError(f"{self.source}: the chat template refuses {chat!r}: {error}") from None
        return [int(token) for token in ids]

    def decode(self, tokens: Sequence[int]) -> str:
        """The text of tokens; special tokens are left out."""
        return str(self._hf.decode(list(tokens), skip_special_tokens=True))

    def decode_batch(self, batch: Sequence[Sequence[int]]) -> list[str]:
        return [self.decode(tokens) for tokens in batch]

    def save(self, folder: Path) -> None:
        """Write the tokenizer's files in HF format."""
        self._hf.save_pretrained(str(folder))

    def _ids(self, texts: Sequence[str], *, add_special_tokens: bool) -> list[list[int]]:
        if not texts:
            return []
        return [list(row) for row in self._hf(list(texts), add_special_tokens=add_special_tokens)["input_ids"]]


def load_tokenizer(folder: str | Path) -> Tokenizer:
    """The tokenizer of an HF folder, or the byte tokenizer by the name `byte`; raises DataError."""
    if str(folder) == "byte":
        return byte_tokenizer()
    path = Path(folder)
    if not path.is_dir():
        raise DataError(f"{path}: no such tokenizer folder; give an HF tokenizer folder or byte{_near(path)}")
    if not any((path / name).is_file() for name in ("tokenizer.json", "tokenizer.model", "vocab.json")):
        raise DataError(f"{path}: holds no tokenizer.json, tokenizer.model or vocab.json")
    try:
        hf = transformers.AutoTokenizer.from_pretrained(str(path), local_files_only=True)
    except (OSError, ValueError, KeyError, TypeError, AttributeError, StrictDataclassError) as error:
        said = " ".join(str(error).split())
        raise DataError(f"{path}: the tokenizer cannot be read: {type(error).__name__}: {said}") from None
    return Tokenizer(hf, source=str(path))


def _near(path: Path) -> str:
    siblings = [entry.name for entry in path.parent.iterdir()] if path.parent.is_dir() else []
    near = difflib.get_close_matches(path.name, siblings, n=1)
    return f"; did you mean {path.parent / near[0]}?" if near else ""


def byte_tokenizer() -> Tokenizer:
    """258 tokens: padding, end of sequence and one for each byte."""
    vocab = {token: index for index, token in enumerate(SPECIAL_TOKENS + _byte_alphabet())}
    bpe = tokenizers.Tokenizer(models.BPE(vocab=vocab, merges=[]))
    bpe.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    return _wrap(bpe, source="byte")


def train_tokenizer(texts: Iterable[str], *, vocab_size: int) -> Tokenizer:
    """Byte-level BPE of at most `vocab_size` tokens trained on `texts`.

    Whole numbers stay apart from other text and a fixed phrase may become one token, so that a small model sees an
    arithmetic question as numbers and signs.
    """
    bpe = tokenizers.Tokenizer(models.BPE())
    bpe.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Digits(individual_digits=False),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=SPECIAL_TOKENS,
        initial_alphabet=_byte_alphabet(),
        show_progress=False,
    )
    bpe.train_from_iterator(texts, trainer)
    return _wrap(bpe, source="trained")


def _byte_alphabet() -> list[str]:
    return sorted(pre_tokenizers.ByteLevel.alphabet())


def _wrap(bpe: tokenizers.Tokenizer, *, source: str) -> Tokenizer:
    bpe.decoder = decoders.ByteLevel()
    bpe.add_special_tokens(SPECIAL_TOKENS)
    hf = transformers.PreTrainedTokenizerFast(
        tokenizer_object=bpe, pad_token=PAD, eos_token=EOS, clean_up_tokenization_spaces=False
    )
    return Tokenizer(hf, source=source)
