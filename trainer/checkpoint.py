"""Checkpoints: written atomically by all ranks, read only through verified reads, resharded on load.

A checkpoint is a folder `step-00000100/` of safetensors (`model/`, `optimizer/`: the shards of each rank)
and JSON (`state.json`, `config.json`, `tokenizer.json`). Nothing in it can execute. It is written under a
temporary name, every file and folder is flushed to the disk, and the last act is a rename; the trainer
never touches it again.

Reading checks names, shapes and types both ways, and each rank takes just the byte ranges of its own
shards, hashed in a private buffer as they are read (supplychain.artifact). So a checkpoint of one world
size loads on any.
"""

from __future__ import annotations

import math
import os
import shutil
import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import LoadPlan, LoadPlanner, SavePlan, SavePlanner
from torch.distributed.checkpoint.state_dict_loader import load as dcp_load
from torch.distributed.checkpoint.state_dict_saver import save as dcp_save
from torch.distributed.checkpoint.storage import StorageReader, StorageWriter, WriteResult
from torch.futures import Future

from supplychain.artifact import (
    MANIFEST,
    VerifiedArtifact,
    VerifiedFile,
    canonical_json,
    parse_json,
    sync_folder,
)
from trainer.distributed import together
from trainer.errors import TrainerError
from trainer.plan import Reads
from trainer.tensorfile import Piece, header, read_header, whole_shape

STATE_SCHEMA = "urn:secure-train:training-state:v1"
MODEL, OPTIMIZER = "model", "optimizer"
PIECE_BYTES = 16 << 20  # private memory of one read

_DTYPES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U8": torch.uint8,
}

_NAMES = {dtype: name for name, dtype in _DTYPES.items()}


@dataclass(frozen=True)
class TrainingState:
    """Everything beside tensors that the next step depends on, and what a reader wants to know.

    There is no generator state: initial weights and data order are functions of the seed, and nothing else in
    training draws random numbers.
    """

    step: int  # optimizer steps done
    tokens: int  # tokens trained on
    loss: str  # of the last reported step, as a decimal
    loader: Mapping[str, Any]
    plan: str  # sha256 of the plan of the segment that wrote it
    facts: Mapping[str, str]  # what the bits depend on: see reproducible.py
    world_size: int

    def to_json(self) -> bytes:
        return canonical_json(
            {
                "schema": STATE_SCHEMA,
                "step": str(self.step),
                "tokens": str(self.tokens),
                "loss": self.loss,
                "loader": dict(self.loader),
                "plan": self.plan,
                "facts": dict(self.facts),
                "world_size": str(self.world_size),
            }
        )

    @staticmethod
    def from_json(data: bytes) -> TrainingState:
        document = parse_json(data, what="the checkpoint's state.json", limit=1 << 20)
        try:
            if document.pop("schema") != STATE_SCHEMA:
                raise ValueError("it is of another version")
            state = TrainingState(
                step=int(document.pop("step")),
                tokens=int(document.pop("tokens")),
                loss=str(document.pop("loss")),
                loader=dict(document.pop("loader")),
                plan=str(document.pop("plan")),
                facts=dict(document.pop("facts")),
                world_size=int(document.pop("world_size")),
            )
            if document:
                raise ValueError(f"it has the unknown key {next(iter(document))!r:.40}")
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            raise TrainerError(
                "ST-C05",
                f"the checkpoint's state is malformed: {type(error).__name__}: {error}",
                where="state.json",
                expected=STATE_SCHEMA,
            ) from None
        return state


# --- writing -------------------------------------------------------------------------------------------


def name(step: int) -> str:
    """The folder of a step's checkpoint."""
    return f"step-{step:08d}"


def save(
    folder: Path,
    step: int,
    model: Mapping[str, Tensor],
    optimizer: Mapping[str, Tensor],
    documents: Mapping[str, bytes],
) -> Path:
    """Write a checkpoint of all ranks into `folder` and return its final path. Collective: when one rank
    fails, all raise, and no folder has the final name. ST-C03, ST-C04.
    """
    leads = dist.get_rank() == 0
    final = folder / name(step)
    partial = folder / f".{name(step)}.partial"
    with together("making the checkpoint's folder"), _write_errors(partial):
        if leads:
            if (final / MANIFEST).exists():
                raise TrainerError(
                    "ST-C04",
                    f"there is a signed checkpoint of step {step} already",
                    where=str(final),
                    next_step="resume from it, or choose another run folder",
                )
            shutil.rmtree(partial, ignore_errors=True)  # of a run that was killed while it saved
            partial.mkdir(parents=True)
    for part, tensors in ((MODEL, model), (OPTIMIZER, optimizer)):
        _write_tensors(partial / part, tensors)
    with together("writing the checkpoint's documents"), _write_errors(partial):
        if leads:
            for file, data in documents.items():
                _write(partial / file, data)
            for path in (partial / MODEL, partial / OPTIMIZER, partial):
                sync_folder(path)
    with together("renaming the checkpoint"), _write_errors(final):
        if leads:
            if (
                final.exists()
            ):  # complete but never signed: left by a run that was killed before the launcher got to it
                final.rename(_unused(folder / f".{name(step)}.unsigned"))
            partial.rename(final)
            sync_folder(folder)
    return final


def _write_tensors(folder: Path, tensors: Mapping[str, Tensor]) -> None:
    # DCP's own exception derives from BaseException and carries every rank's failure; one clear error is
    # enough.
    with together("writing the checkpoint's tensors"), _write_errors(folder):
        try:
            dcp_save(dict(tensors), storage_writer=Writer(folder))
        except CheckpointException as error:
            failures = error.failures
            mine = failures.get(dist.get_rank())
            raise (mine[0] if mine else _other_rank(failures)) from None


class Writer(StorageWriter):
    """Where torch.distributed.checkpoint puts its tensors: one safetensors file per rank, in the sharded
    layout of its own Hugging Face storage, and no other file. Tensors are written one after another, in no
    more memory than the largest of them takes, and the same tensors make the same bytes.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def reset(self, checkpoint_id: str | os.PathLike[str] | None = None) -> None:
        pass

    def set_up_storage_writer(self, is_coordinator: bool, *_: Any, **__: Any) -> None:
        pass

    def prepare_local_plan(self, plan: SavePlan) -> SavePlan:
        self.folder.mkdir(exist_ok=True)
        return plan

    def prepare_global_plan(self, plans: list[SavePlan]) -> list[SavePlan]:
        names = [f"shard-{rank:05d}-of-{len(plans):05d}.safetensors" for rank in range(1, len(plans) + 1)]
        return [replace(plan, storage_data=name) for plan, name in zip(plans, names, strict=True)]

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        pieces = []
        for item in plan.items:
            if item.tensor_data is None:
                raise TypeError(f"{item.index.fqn} is no tensor")
            chunk, dtype = item.tensor_data.chunk, item.tensor_data.properties.dtype
            size = chunk.sizes.numel() * dtype.itemsize
            pieces.append(
                Piece(item.index.fqn, _NAMES[dtype], tuple(chunk.sizes), tuple(chunk.offsets), 0, size)
            )
        if pieces:
            with (self.folder / plan.storage_data).open("xb") as file:
                file.write(header(pieces))
                for item in plan.items:
                    tensor = cast(Tensor, planner.resolve_data(item)).detach().cpu().contiguous()
                    file.write(tensor.reshape(-1).view(torch.uint8).numpy())
                file.flush()
                os.fsync(file.fileno())
        done: Future[list[WriteResult]] = Future()
        results = zip(plan.items, pieces, strict=True)
        done.set_result([WriteResult(item.index, piece.end, plan.storage_data) for item, piece in results])
        return done

    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        pass

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: str | os.PathLike[str]) -> bool:
        return False


def _other_rank(failures: Mapping[int, Any]) -> TrainerError:
    rank = min(failures)
    return TrainerError(
        "ST-T08",
        f"rank {rank} failed in a checkpoint: {failures[rank][0]}",
        next_step="see that rank's message",
    )


@contextmanager
def _write_errors(path: Path) -> Iterator[None]:
    """Turns an OSError of the body into ST-C03."""
    try:
        yield
    except OSError as error:
        raise TrainerError(
            "ST-C03",
            f"the checkpoint could not be written: {error.strerror or error}",
            where=str(error.filename or path),
            next_step="free space or mend the file system, then resume",
        ) from None


def _write(path: Path, data: bytes) -> None:
    with path.open("xb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())


def _unused(path: Path) -> Path:
    return next(free for n in range(1_000_000) if not (free := path.with_name(f"{path.name}-{n}")).exists())


# --- reading -------------------------------------------------------------------------------------------


def load(artifact: VerifiedArtifact, part: str, template: dict[str, Tensor], reads: Reads = "always") -> None:
    """Fill the template's tensors (whole, or the shards of this rank) in place from `model/` or `optimizer/`.
    Collective if there is a process group. ST-C01, ST-C02, and ST-A.. for bytes that were not signed.
    """
    alone = not dist.is_initialized()
    reader = VerifiedReader(artifact, part, reads)
    try:
        if alone:
            reader.index(template)
        else:
            with together("reading the checkpoint's headers"):
                reader.index(template)
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message=".*torch.distributed is disabled.*")
            dcp_load(template, storage_reader=reader, no_dist=alone)
    except CheckpointException as error:
        raise (reader.failure or _other_rank(error.failures)) from None
    except RuntimeError:
        if reader.failure is None:
            raise
        raise reader.failure from None
    finally:
        reader.close()


class VerifiedReader(StorageReader):
    """Where torch.distributed.checkpoint gets its bytes: from verified reads only, and never through
    pickle.
    """

    def __init__(self, artifact: VerifiedArtifact, part: str, reads: Reads = "always") -> None:
        self.artifact = artifact
        self.part = part
        self.failure: Exception | None = None
        self._files: dict[str, VerifiedFile] = {}
        self._pieces: dict[str, list[tuple[VerifiedFile, Piece]]] = {}
        self._located: dict[MetadataIndex, tuple[VerifiedFile, Piece]] = {}
        for entry in artifact.manifest.files:
            if entry.path.startswith(f"{part}/") and entry.path.endswith(".safetensors"):
                self._files[entry.path] = artifact.open_file(entry.path, verify=reads)

    def close(self) -> None:
        for file in self._files.values():
            file.close()

    def index(self, template: Mapping[str, Tensor]) -> None:
        """Read all headers and compare with what is to be filled. ST-C01, ST-C02."""
        for file in self._files.values():
            for piece in read_header(file):
                self._pieces.setdefault(piece.name, []).append((file, piece))
        where = str(self.artifact.root / self.part)
        missing, unknown = template.keys() - self._pieces.keys(), self._pieces.keys() - template.keys()
        if missing or unknown:
            odd = min(missing or unknown)
            raise TrainerError(
                "ST-C02",
                f"the checkpoint {'lacks' if missing else 'has the unknown'} tensor {odd!r:.100}",
                where=where,
                expected=f"{len(template)} tensors",
                found=f"{len(self._pieces)} tensors, {len(missing)} missing, {len(unknown)} unknown",
                next_step="take the model section of its config.json",
            )
        for key, pieces in self._pieces.items():
            shape = whole_shape([piece for _, piece in pieces])
            if shape is None:
                raise TrainerError(
                    "ST-C01", f"the shards of {key!r:.100} do not make up one tensor", where=where
                )
            dtype, wanted = _DTYPES[pieces[0][1].dtype], template[key]
            if shape != tuple(wanted.shape) or dtype != wanted.dtype:
                raise TrainerError(
                    "ST-C02",
                    f"the checkpoint's {key!r:.100} is of another shape or type",
                    where=where,
                    expected=f"{tuple(wanted.shape)} {wanted.dtype}",
                    found=f"{shape} {dtype}",
                    next_step="take the model section of its config.json",
                )
            self._pieces[key] = [(file, piece) for file, piece in pieces if piece.end > piece.start]
            for file, piece in self._pieces[key]:
                self._located[MetadataIndex(key, torch.Size(piece.offsets))] = (file, piece)

    # The rest is the interface that dcp.load calls.

    def reset(self, checkpoint_id: str | os.PathLike[str] | None = None) -> None:
        pass

    def read_metadata(self, *_: Any, **__: Any) -> Metadata:
        tensors: dict[str, Any] = {}
        for key, pieces in self._pieces.items():
            tensors[key] = TensorStorageMetadata(
                properties=TensorProperties(dtype=_DTYPES[pieces[0][1].dtype]),
                size=torch.Size(whole_shape([piece for _, piece in pieces]) or ()),
                chunks=[ChunkStorageMetadata(torch.Size(p.offsets), torch.Size(p.shape)) for _, p in pieces],
            )
        return Metadata(state_dict_metadata=tensors)

    def set_up_storage_reader(self, metadata: Metadata, is_coordinator: bool, *_: Any, **__: Any) -> None:
        pass

    def prepare_local_plan(self, plan: LoadPlan) -> LoadPlan:
        return plan

    def prepare_global_plan(self, plans: list[LoadPlan]) -> list[LoadPlan]:
        return plans

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Future[None]:
        try:
            for item in plan.items:
                file, piece = self._located[item.storage_index]
                target = planner.resolve_tensor(item).detach()
                for rows, values in _read_region(
                    file, piece, tuple(item.storage_offsets), tuple(item.lengths)
                ):
                    target[rows].copy_(values)
                planner.commit_tensor(item, target)
        except Exception as error:
            self.failure = error
            raise RuntimeError(str(error)) from None  # what crosses to other ranks must be plain
        done: Future[None] = Future()
        done.set_result(None)
        return done

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: str | os.PathLike[str]) -> bool:
        return False


def _read_region(
    file: VerifiedFile, piece: Piece, offsets: tuple[int, ...], lengths: tuple[int, ...]
) -> Iterator[tuple[Any, Tensor]]:
    """The rectangle at `offsets` of a piece, as (index into the target, values), in bounded memory."""
    dtype = _DTYPES[piece.dtype]
    if not math.prod(lengths):
        return
    if not piece.shape:
        yield ..., _tensor(file.read(piece.start, piece.end - piece.start), dtype, ())
        return
    row = math.prod(piece.shape[1:]) * dtype.itemsize
    inner = tuple(
        slice(offset, offset + length) for offset, length in zip(offsets[1:], lengths[1:], strict=True)
    )
    step = max(1, PIECE_BYTES // row)
    for first in range(0, lengths[0], step):
        count = min(step, lengths[0] - first)
        view = file.read(piece.start + (offsets[0] + first) * row, count * row)
        yield (
            slice(first, first + count),
            _tensor(view, dtype, (count, *piece.shape[1:]))[(slice(None), *inner)],
        )


def _tensor(view: memoryview, dtype: torch.dtype, shape: tuple[int, ...]) -> Tensor:
    return torch.frombuffer(bytearray(view), dtype=dtype).view(shape)
