"""What an HF model folder's safetensors files hold, read from their headers alone. No torch, no weights.

A file is eight bytes with the header's length, the header (JSON: name -> dtype, shape, data offsets), then the data.
So a missing tensor, a wrong shape and a truncated file are all found before anything is loaded.
"""

import dataclasses
import json
import struct
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from nereus.errors import ModelError
from nereus.model import Head, ModelSpec

__all__ = ["INDEX_FILE", "SINGLE_FILE", "StoredTensor", "check_folder", "read_folder"]

INDEX_FILE = "model.safetensors.index.json"
SINGLE_FILE = "model.safetensors"
SCORE_HEAD = "score.weight"
LM_HEAD, EMBEDDING = "lm_head.weight", "model.embed_tokens.weight"
DTYPES = ("F64", "F32", "F16", "BF16")
PIECE_BYTES = 8 << 20


@dataclasses.dataclass(frozen=True, slots=True)
class StoredTensor:
    """Where a tensor lies and what the header says of it. start, num_bytes: of its data in the file."""

    name: str
    path: Path
    dtype: str
    shape: tuple[int, ...]
    start: int
    num_bytes: int

    def pieces(self) -> Iterator[bytes]:
        """Its data, a few megabytes at a time."""
        with self.path.open("rb") as file:
            file.seek(self.start)
            for done in range(0, self.num_bytes, PIECE_BYTES):
                yield file.read(min(PIECE_BYTES, self.num_bytes - done))


def check_folder(folder: str | Path, spec: ModelSpec, *, fresh_score: bool = False) -> None:
    """Raise ModelError unless `folder` holds every parameter of `spec`, whole and in its shape.

    fresh_score: a scalar head that is absent is no error (a critic that starts from a language model). A tensor that
    the spec has no place for is one: it would be left out of what is computed.
    """
    stored = read_folder(folder)
    wanted_tensors(stored, Path(folder), spec, fresh_score=fresh_score)
    named = {param.name for param in spec.params}
    unasked = sorted(name for name in stored if name not in named and not _may_stay_unread(name, spec))
    if unasked:
        raise ModelError(
            f"{stored[unasked[0]].path}: tensor {unasked[0]} has no place in the model that config.json describes "
            f"({len(unasked)} such tensors)"
        )
    if spec.tied and LM_HEAD in stored and not _equal(stored[EMBEDDING], stored[LM_HEAD]):
        raise ModelError(
            f"{stored[LM_HEAD].path}: {LM_HEAD} differs from {EMBEDDING}, and config.json says tie_word_embeddings; "
            f"set it to false, or take {LM_HEAD} out"
        )


def _may_stay_unread(name: str, spec: ModelSpec) -> bool:
    """A head that is tied or replaced by a scalar one, and tables that older versions of `transformers` saved."""
    return name.endswith("rotary_emb.inv_freq") or (name == LM_HEAD and (spec.tied or spec.head is Head.SCORE))


def _equal(a: StoredTensor, b: StoredTensor) -> bool:
    same_form = (a.dtype, a.shape, a.num_bytes) == (b.dtype, b.shape, b.num_bytes)
    return same_form and all(x == y for x, y in zip(a.pieces(), b.pieces(), strict=True))


def wanted_tensors(
    stored: Mapping[str, StoredTensor], folder: Path, spec: ModelSpec, *, fresh_score: bool
) -> dict[str, StoredTensor]:
    """The stored tensor of each parameter of `spec`; a fresh score head has none."""
    found: dict[str, StoredTensor] = {}
    for param in spec.params:
        tensor = stored.get(param.name)
        if tensor is None:
            if fresh_score and param.name == SCORE_HEAD:
                continue
            hint = "; it is a language model, not a reward model" if param.name == SCORE_HEAD else ""
            raise ModelError(f"{folder}: tensor {param.name} is missing{hint}")
        if tensor.shape != param.shape:
            raise ModelError(
                f"{tensor.path}: tensor {param.name} has shape {list(tensor.shape)}; "
                f"config.json asks for {list(param.shape)}"
            )
        if tensor.dtype not in DTYPES:
            raise ModelError(f"{tensor.path}: tensor {param.name} is {tensor.dtype}; supported: {', '.join(DTYPES)}")
        found[param.name] = tensor
    return found


def read_folder(folder: str | Path) -> dict[str, StoredTensor]:
    """Every tensor of a folder by name; raises ModelError naming the file that is missing, broken or truncated."""
    root = Path(folder)
    if not root.is_dir():
        raise ModelError(f"{root}: no such model folder")
    index = root / INDEX_FILE
    if not index.is_file():
        if not (root / SINGLE_FILE).is_file():
            raise ModelError(f"{root}: holds neither {SINGLE_FILE} nor {INDEX_FILE}; weights must be safetensors")
        return _read_file(root / SINGLE_FILE)
    files = _weight_map(index)
    headers = {name: _read_file(root / name, needed_by=index) for name in sorted(set(files.values()))}
    for tensor, name in files.items():
        if tensor not in headers[name]:
            raise ModelError(f"{root / name}: tensor {tensor} is missing; {INDEX_FILE} says it is there")
    return {tensor: headers[name][tensor] for tensor, name in files.items()}


def _weight_map(index: Path) -> dict[str, str]:
    try:
        files = json.loads(index.read_bytes())["weight_map"]
    except (ValueError, KeyError, TypeError) as error:
        raise ModelError(f"{index}: not a weight index ({type(error).__name__}: {error})") from None
    if not isinstance(files, dict) or not all(isinstance(name, str) for name in files.values()):
        raise ModelError(f"{index}: weight_map must map tensor names to files")
    return files


def _read_file(path: Path, *, needed_by: Path | None = None) -> dict[str, StoredTensor]:
    """The tensors of one file, after its size was compared with where its data end."""
    if not path.is_file():
        raise ModelError(f"{path}: the weight file is missing" + (f"; {needed_by.name} names it" if needed_by else ""))
    size = path.stat().st_size
    header_bytes, header = _header(path, size)
    tensors: dict[str, StoredTensor] = {}
    ends: list[tuple[int, str]] = []
    try:
        for name, entry in header.items():
            if name != "__metadata__":
                start, end = map(int, entry["data_offsets"])
                tensors[name] = StoredTensor(
                    name, path, str(entry["dtype"]), tuple(map(int, entry["shape"])), header_bytes + start, end - start
                )
                ends.append((end, name))
    except (KeyError, TypeError, ValueError, IndexError) as error:
        raise ModelError(f"{path}: broken header ({type(error).__name__}: {error})") from None
    needed = header_bytes + max(ends, default=(0, ""))[0]
    if size < needed:
        lost = min(name for end, name in ends if header_bytes + end > size)
        raise ModelError(f"{path}: truncated: {size} bytes, {needed} needed; tensor {lost} is not whole")
    return tensors


def _header(path: Path, size: int) -> tuple[int, dict[str, Any]]:
    """(bytes before the data, header)."""
    with path.open("rb") as file:
        start = file.read(8)
        length = struct.unpack("<Q", start)[0] if len(start) == 8 else size
        if 8 + length > size:
            raise ModelError(f"{path}: truncated: {size} bytes do not hold the header")
        try:
            header = json.loads(file.read(length))
        except ValueError as error:
            raise ModelError(f"{path}: broken header ({error})") from None
    if not isinstance(header, dict):
        raise ModelError(f"{path}: broken header (not a mapping)")
    return 8 + length, header
