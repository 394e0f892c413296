"""Models in HF layout: loading the boxes a rank needs, saving whole tensors, starting from random weights.

    load_unit(folder, spec, state)      sharded safetensors -> a rank's flat buffers, only its boxes are read
    save_folder(folder, spec, tensors)  whole tensors one after the other -> shards, index, config.json

What a folder holds is checked by `weight_files`; how tensors come together from ranks is the caller's affair.
"""

import contextlib
import json
import shutil
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import safetensors
import safetensors.torch
import torch

from nereus.checkpoint.weight_files import INDEX_FILE, SINGLE_FILE, StoredTensor, read_folder, wanted_tensors
from nereus.errors import ModelError
from nereus.hf_config import SUPPORTED
from nereus.model import ModelSpec, Param
from nereus.shards.boxes import Box, Shard
from nereus.shards.state import RankState, StateKind

__all__ = ["copy_tokenizer", "hf_config", "init_folder", "init_tensors", "init_unit", "load_unit", "save_folder"]

INIT_STD = 0.02
MAX_SHARD_BYTES = 4 * 10**9
GENERATION_CONFIG = "generation_config.json"
TOKENIZER_FILES = (
    "tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "added_tokens.json", "tokenizer.model",
    "vocab.json", "merges.txt", "chat_template.jinja", GENERATION_CONFIG,
)  # fmt: skip


def load_unit(folder: str | Path, spec: ModelSpec, state: RankState, *, fresh_score: bool = False) -> None:
    """Read a rank's boxes of every parameter into its parameter buffer, and its fp32 masters where it has them.

    Other dtypes are converted. `fresh_score`: a scalar head that the folder lacks is zeroed (a critic that starts from
    a language model). Raises ModelError naming the file and the tensor.
    """
    root = Path(folder)
    wanted = wanted_tensors(read_folder(root), root, spec, fresh_score=fresh_score)
    with _OpenFiles() as files:
        for shard in state.shards:
            if shard.box.numel == 0:
                continue
            tensor = wanted.get(shard.param.name)
            _write(state, shard, torch.zeros(shard.box.shape) if tensor is None else files.read(tensor, shard.box))


def init_unit(spec: ModelSpec, state: RankState, *, seed: int) -> None:
    """Fill a rank's boxes with the random weights of `init_tensors`, the same for every layout."""
    for name, tensor in init_tensors(spec, seed=seed):
        if name in state:
            shard = state.shard(name)
            _write(state, shard, tensor[shard.box.within(Box.whole(shard.param.shape))])


def init_tensors(
    spec: ModelSpec, *, seed: int, dtype: torch.dtype = torch.float32
) -> Iterator[tuple[str, torch.Tensor]]:
    """(name, tensor) of every parameter: matrices normal with deviation 0.02, norms one, biases zero."""
    generator = torch.Generator().manual_seed(seed)
    for param in spec.params:
        if param.name.endswith("norm.weight"):
            tensor = torch.ones(param.shape)
        elif param.name.endswith("bias"):
            tensor = torch.zeros(param.shape)
        else:
            tensor = torch.empty(param.shape).normal_(0.0, INIT_STD, generator=generator)
        yield param.name, tensor.to(dtype)


def init_folder(spec: ModelSpec, folder: str | Path, *, seed: int, dtype: torch.dtype = torch.float32) -> None:
    """Write a model with random weights as an HF folder."""
    save_folder(folder, spec, init_tensors(spec, seed=seed, dtype=dtype))


def save_folder(
    folder: str | Path,
    spec: ModelSpec,
    tensors: Iterable[tuple[str, torch.Tensor]],
    *,
    tokenizer_folder: str | Path | None = None,
    stop_ids: Sequence[int] = (),
    max_shard_bytes: int = MAX_SHARD_BYTES,
) -> None:
    """Write whole tensors, in any order, as a new HF folder; it appears under its name when it is complete.

    stop_ids: tokens that end a response, for those who generate with the folder. At most one shard file's tensors are
    held at a time. Raises ModelError where the folder exists already.
    """
    target = Path(folder)
    if target.exists():
        raise ModelError(f"{target}: exists already; a model is saved to a new folder")
    partial = target.with_name(f".{target.name}.partial")
    shutil.rmtree(partial, ignore_errors=True)
    partial.mkdir(parents=True)
    dtype = _write_shards(partial, spec, tensors, max_shard_bytes)
    eos = {"eos_token_id": stop_ids[0] if len(stop_ids) == 1 else list(stop_ids)} if stop_ids else {}
    _write_json(partial / "config.json", hf_config(spec, dtype=dtype) | eos)
    if tokenizer_folder is not None:
        copy_tokenizer(tokenizer_folder, partial)
    if eos:
        _write_json(partial / GENERATION_CONFIG, eos)
    partial.rename(target)


def _write_json(path: Path, value: Mapping[str, Any]) -> None:
    path.write_text(json.dumps(value, indent=2) + "\n", encoding="utf-8")


def copy_tokenizer(source: str | Path, target: str | Path) -> None:
    """Copy the tokenizer's files of one HF folder into another."""
    for name in TOKENIZER_FILES:
        if (Path(source) / name).is_file():
            shutil.copyfile(Path(source) / name, Path(target) / name)


def hf_config(spec: ModelSpec, *, dtype: torch.dtype = torch.float32) -> dict[str, Any]:
    """The `config.json` from which `ModelSpec.from_config` and transformers build the same model."""
    architecture = next(name for name, kind in SUPPORTED.items() if kind == (spec.family, spec.head))
    config: dict[str, Any] = {
        "architectures": [architecture],
        "model_type": spec.family,
        "vocab_size": spec.vocab,
        "hidden_size": spec.hidden,
        "intermediate_size": spec.ffn,
        "num_hidden_layers": spec.num_layers,
        "num_attention_heads": spec.num_heads,
        "num_key_value_heads": spec.num_kv_heads,
        "head_dim": spec.head_dim,
        "hidden_act": "silu",
        "rms_norm_eps": spec.rms_eps,
        "max_position_embeddings": spec.max_positions,
        "tie_word_embeddings": spec.tied,
        "rope_parameters": _rope_parameters(spec),
        "dtype": str(dtype).removeprefix("torch."),
    }
    if spec.family != "llama":
        config["sliding_window"] = spec.sliding_window
    if spec.family in ("qwen2", "qwen3"):
        config |= {"use_sliding_window": spec.sliding_window is not None, "max_window_layers": 0}
    if spec.head == "score":
        config |= {"id2label": {"0": "LABEL_0"}, "label2id": {"LABEL_0": 0}}
    return config


def _rope_parameters(spec: ModelSpec) -> dict[str, Any]:
    scaling = spec.rope_scaling
    if scaling is None:
        return {"rope_type": "default", "rope_theta": spec.rope_theta}
    return {
        "rope_type": "llama3",
        "rope_theta": spec.rope_theta,
        "factor": scaling.factor,
        "low_freq_factor": scaling.low_freq_factor,
        "high_freq_factor": scaling.high_freq_factor,
        "original_max_position_embeddings": scaling.original_max_position,
    }


def _write(state: RankState, shard: Shard, box: torch.Tensor) -> None:
    """Set a rank's box of a parameter, in the dtype of each buffer that holds parameter values."""
    for kind in (StateKind.PARAM, StateKind.MASTER):
        if kind in state.flats:
            state.view(shard.param.name, kind).copy_(box)


class _OpenFiles(contextlib.ExitStack):
    """Weight files opened once each; closed together."""

    def __init__(self) -> None:
        super().__init__()
        self._open: dict[Path, Any] = {}

    def read(self, tensor: StoredTensor, box: Box) -> torch.Tensor:
        """One box of a tensor, in the file's dtype."""
        try:
            if tensor.path not in self._open:
                self._open[tensor.path] = self.enter_context(safetensors.safe_open(str(tensor.path), framework="pt"))
            part = self._open[tensor.path].get_slice(tensor.name)[box.within(Box.whole(tensor.shape))]
        except (safetensors.SafetensorError, OSError) as error:
            raise ModelError(f"{tensor.path}: tensor {tensor.name} cannot be read: {error}") from None
        assert isinstance(part, torch.Tensor)
        return part


def _write_shards(
    folder: Path, spec: ModelSpec, tensors: Iterable[tuple[str, torch.Tensor]], max_shard_bytes: int
) -> torch.dtype:
    """Write the tensors in files of at most `max_shard_bytes` (one tensor at least), and the index of several files."""
    missing = {param.name: param for param in spec.params}
    groups: list[list[str]] = []
    batch: dict[str, torch.Tensor] = {}
    num_bytes = total_bytes = 0
    dtype = torch.float32
    for name, tensor in tensors:
        _check_shape(missing.pop(name), tensor)
        if batch and num_bytes + tensor.nbytes > max_shard_bytes:
            groups.append(_write_group(folder, len(groups), batch))
            batch, num_bytes = {}, 0
        batch[name] = _own(tensor)
        num_bytes, total_bytes, dtype = num_bytes + tensor.nbytes, total_bytes + tensor.nbytes, tensor.dtype
    groups.append(_write_group(folder, len(groups), batch))
    assert not missing, f"tensors {sorted(missing)} were not given"
    if len(groups) == 1:
        _group_path(folder, 0).rename(folder / SINGLE_FILE)
        return dtype
    weight_map: dict[str, str] = {}
    for index, names in enumerate(groups):
        path = folder / f"model-{index + 1:05d}-of-{len(groups):05d}.safetensors"
        _group_path(folder, index).rename(path)
        weight_map |= dict.fromkeys(names, path.name)
    document = {"metadata": {"total_size": total_bytes}, "weight_map": weight_map}
    (folder / INDEX_FILE).write_text(json.dumps(document, indent=2) + "\n")
    return dtype


def _check_shape(param: Param, tensor: torch.Tensor) -> None:
    assert tuple(tensor.shape) == param.shape, f"{param.name} is {tuple(tensor.shape)}, not {param.shape}"


def _own(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor in memory of its own on the CPU; safetensors refuses views that share a buffer."""
    tensor = tensor.detach().cpu().contiguous()
    return tensor if tensor.untyped_storage().nbytes() == tensor.nbytes else tensor.clone()


def _write_group(folder: Path, index: int, batch: dict[str, torch.Tensor]) -> list[str]:
    safetensors.torch.save_file(batch, str(_group_path(folder, index)), metadata={"format": "pt"})
    return list(batch)


def _group_path(folder: Path, index: int) -> Path:
    return folder / f"{index}.part"
