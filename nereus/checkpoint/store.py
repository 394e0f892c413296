"""A job's trained state on disk: saved under one plan, restored under any other.

    workers write rank files into `.NAME.partial` --checksums--> driver writes manifest.json, syncs, renames --> NAME

A folder without a manifest, or with a file of another size or checksum, is no checkpoint: `latest` passes over it and
says why. Frozen models are not saved (their folders are), nor are copies of trained parameters, which a weight
synchronization makes again. Files hold the flat buffers as they are; restoring intersects boxes as every move does.
"""

import dataclasses
import json
import os
import shutil
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, cast

import torch
import xxhash
from typing_extensions import Buffer

from nereus.errors import CheckpointError
from nereus.model import ModelSpec
from nereus.plan import Layout, ModelStage
from nereus.shards.boxes import flat_numel
from nereus.shards.moves import Holding, plan_moves
from nereus.shards.state import Counters, RankState, StateKind, strided

MANIFEST = "manifest.json"
CHUNK_BYTES = 16 << 20


@dataclasses.dataclass(frozen=True, slots=True)
class SavedRank:
    """One flat buffer of one rank in one file. digest: xxh3 of the file."""

    model_stage: ModelStage
    layout: Layout
    rank: int
    kind: StateKind
    dtype: str
    file: str
    num_bytes: int
    digest: str

    def to_json(self) -> dict[str, Any]:
        row = dataclasses.asdict(self)
        return row | {"model_stage": self.model_stage.name, "layout": self.layout.axes}

    @classmethod
    def from_json(cls, row: Mapping[str, Any]) -> "SavedRank":
        layout = Layout.of_axes(row["layout"])
        fields = {"model_stage": ModelStage.parse(row["model_stage"]), "layout": layout}
        return cls(**{**row, **fields, "kind": StateKind(row["kind"])})


@dataclasses.dataclass(frozen=True, slots=True)
class Manifest:
    """Everything a checkpoint holds. step: the last committed step; counters: by model-stage."""

    step: int
    counters: Mapping[str, Counters]
    files: tuple[SavedRank, ...]

    @classmethod
    def joined(cls, step: int, parts: "Iterable[SavedState]") -> "Manifest":
        """Of what every worker wrote; raises CheckpointError where ranks disagree on their counters."""
        counters: dict[str, Counters] = {}
        files: list[SavedRank] = []
        for part in parts:
            files += part.files
            for name, found in part.counters.items():
                if counters.setdefault(name, found) != found:
                    raise CheckpointError(f"step {step}: ranks of {name} disagree: {counters[name]} and {found}")
        return cls(step, counters, tuple(files))

    def of(self, model_stage: ModelStage) -> tuple[SavedRank, ...]:
        return tuple(file for file in self.files if file.model_stage == model_stage)


@dataclasses.dataclass(frozen=True, slots=True)
class SavedState:
    """What one worker wrote: its files, and the counters of each model-stage."""

    files: tuple[SavedRank, ...]
    counters: Mapping[str, Counters]


def save_rank(folder: Path, model_stage: ModelStage, state: RankState) -> tuple[SavedRank, ...]:
    """Write one rank's flat buffers; called by the worker that holds them."""
    saved: list[SavedRank] = []
    for kind, flat in state.flats.items():
        name = f"{model_stage}.rank{state.rank}.{kind}.bin"
        raw = memoryview(cast(Buffer, flat.detach().cpu().contiguous().view(torch.uint8).numpy()))
        digest = xxhash.xxh3_64()
        with (folder / name).open("wb") as file:
            for start in range(0, len(raw), CHUNK_BYTES):
                chunk = raw[start : start + CHUNK_BYTES]
                digest.update(chunk)
                file.write(chunk)
            file.flush()
            os.fsync(file.fileno())
        dtype = str(flat.dtype).removeprefix("torch.")
        saved.append(SavedRank(model_stage, state.layout, state.rank, kind, dtype, name, len(raw), digest.hexdigest()))
    return tuple(saved)


def restore_rank(folder: Path, manifest: Manifest, model_stage: ModelStage, state: RankState) -> None:
    """Fill one rank's flat buffers, under whatever layout, from the boxes that the checkpoint's files hold."""
    files = manifest.of(model_stage)
    layout = files[0].layout
    ranks = range(layout.num_ranks)
    source = Holding.by_device(layout, {rank: rank for rank in ranks})
    here = layout.num_ranks
    moves = plan_moves(state.spec, source, Holding.by_device(state.layout, {here: state.rank}))
    for kind, flat in state.flats.items():
        opened = {file.rank: _mapped(folder / file.file, file) for file in files if file.kind is kind}
        if set(opened) != set(ranks):
            raise CheckpointError(f"{folder}: {model_stage} lacks {kind} of ranks {sorted(set(ranks) - set(opened))}")
        for move in moves.remote:
            for run in move.runs:
                strided(flat, run, "target").copy_(strided(opened[move.source], run, "source"))
    state.counters = manifest.counters[model_stage.name]


def _mapped(path: Path, file: SavedRank) -> torch.Tensor:
    dtype: torch.dtype = getattr(torch, file.dtype)
    return torch.from_file(str(path), shared=False, size=file.num_bytes // dtype.itemsize, dtype=dtype)


class CheckpointStore:
    """The checkpoints of one run, one folder each, named by step."""

    def __init__(self, root: Path) -> None:
        self.root = root

    def begin(self, step: int) -> Path:
        """An empty folder for the workers to write into; what an interrupted save left there is removed."""
        partial = self._partial(step)
        shutil.rmtree(partial, ignore_errors=True)
        partial.mkdir(parents=True)
        return partial

    def commit(self, manifest: Manifest, specs: Mapping[ModelStage, ModelSpec]) -> Path:
        """Make the folder of `begin` the checkpoint of its step; raises CheckpointError where a rank is missing."""
        _check_complete(manifest, specs)
        partial, target = self._partial(manifest.step), self.root / f"step-{manifest.step}"
        text = {
            "step": manifest.step,
            "counters": {name: dataclasses.asdict(counters) for name, counters in manifest.counters.items()},
            "files": [file.to_json() for file in manifest.files],
        }
        with (partial / MANIFEST).open("w", encoding="utf-8") as file:
            json.dump(text, file, indent=1)
            file.flush()
            os.fsync(file.fileno())
        shutil.rmtree(target, ignore_errors=True)
        partial.rename(target)
        _sync_folder(self.root)
        return target

    def latest(self) -> tuple[Path, Manifest, list[str]]:
        """The newest whole checkpoint, and what was passed over and why; raises CheckpointError where there is none."""
        problems: list[str] = []
        folders = sorted(self.root.glob("step-*"), key=lambda path: int(path.name.removeprefix("step-")), reverse=True)
        for folder in folders:
            try:
                return folder, read_manifest(folder), problems
            except CheckpointError as error:
                problems.append(str(error))
        raise CheckpointError(f"{self.root}: no whole checkpoint" + "".join(f"; {problem}" for problem in problems))

    def _partial(self, step: int) -> Path:
        return self.root / f".step-{step}.partial"


def read_manifest(folder: Path) -> Manifest:
    """The manifest of a checkpoint whose files have their size and checksum; CheckpointError names one that has not."""
    path = folder / MANIFEST
    if not path.is_file():
        raise CheckpointError(f"{folder}: {MANIFEST} is missing")
    text = json.loads(path.read_text())
    counters = {name: Counters(**row) for name, row in text["counters"].items()}
    manifest = Manifest(text["step"], counters, tuple(SavedRank.from_json(row) for row in text["files"]))
    for file in manifest.files:
        _check_file(folder / file.file, file)
    return manifest


def _check_file(path: Path, file: SavedRank) -> None:
    if not path.is_file():
        raise CheckpointError(f"{path}: missing")
    if path.stat().st_size != file.num_bytes:
        raise CheckpointError(f"{path}: {path.stat().st_size} bytes, {file.num_bytes} were written")
    digest = xxhash.xxh3_64()
    with path.open("rb") as opened:
        while chunk := opened.read(CHUNK_BYTES):
            digest.update(chunk)
    if digest.hexdigest() != file.digest:
        raise CheckpointError(f"{path}: its checksum differs from what was written")


def _check_complete(manifest: Manifest, specs: Mapping[ModelStage, ModelSpec]) -> None:
    """Every rank of a unit of every saved model-stage is there, whole."""
    for model_stage, spec in specs.items():
        files = manifest.of(model_stage)
        if not files:
            raise CheckpointError(f"step {manifest.step}: nothing of {model_stage} was saved")
        layout = files[0].layout
        for kind in {file.kind for file in files}:
            sizes = {file.rank: file.num_bytes for file in files if file.kind is kind}
            for rank in range(layout.num_ranks):
                wanted = flat_numel(spec, layout, rank)
                if rank not in sizes or sizes[rank] % wanted:
                    raise CheckpointError(f"step {manifest.step}: {kind} of {model_stage}, rank {rank}, is not whole")


def _sync_folder(folder: Path) -> None:
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
