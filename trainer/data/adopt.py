"""Datasets that exist already, in the forms of other trainers: `python -m trainer.data.adopt DIR ...`.

    NAME.bin with NAME.idx   Megatron: the index gives token type and documents
    NAME.bin                 nanoGPT: tokens and nothing else; or with the 1024-byte header of llm.c
    NAME.npy                 OLMo-core: tokens and nothing else; or a NumPy array
    NAME.arrow               fms-fsdp (IBM): a record batch of tokens for each document

In place, nothing of it is copied or changed: an index and dataset.json are put beside the files, and whoever
calls this signs all of it. `--out` converts instead, which Arrow and token types of another width need. Every
token is read once, to find the largest and where documents end; what does not add up is refused.
"""

from __future__ import annotations

import argparse
import hashlib
import struct
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO, NoReturn

import numpy as np
import numpy.typing as npt

from supplychain.artifact import SecureTrainError, canonical_json, write_durably
from trainer.data import tokenization
from trainer.data.command import run_command
from trainer.data.prepare import appearing
from trainer.data.shards import (
    DESCRIPTION,
    END,
    PREPARATION,
    TOKENIZER,
    TYPES,
    Description,
    Shard,
    Tokens,
    Writer,
    dtype_of,
    write_description,
)
from trainer.data.sources import extra

SCHEMA = "urn:secure-train:adoption:v1"
SCAN = 1 << 22  # tokens that are looked at, at one time
SUFFIXES = (".bin", ".npy", ".arrow")
EXECUTABLE = (".pkl", ".pickle", ".pt", ".pth", ".py")  # what must not be signed as data

_MEGATRON = b"MMIDIDX\x00\x00"
_MEGATRON_TYPES = {1: "u1", 2: "i1", 3: "<i2", 4: "<i4", 5: "<i8", 8: "<u2"}
_LLM_C = struct.pack("<i", 20240520)
_LLM_C_HEADER = 1024
_NUMPY = b"\x93NUMPY"


@dataclass(frozen=True)
class Request:
    """What to adopt, and what its files do not say themselves."""

    folder: Path
    out: Path | None = None
    tokenizer: Path | None = None
    vocab_size: int | None = None
    dtype: str | None = None  # of files without a header
    end_id: int | None = None  # the token that ends a document


@dataclass(frozen=True)
class Found:
    """A file of tokens: its form, where they begin, their type, and where documents end, if that is known."""

    name: str
    form: str
    path: Path
    dtype: np.dtype[Any]
    offset: int = 0
    ends: Tokens | None = None

    @property
    def split(self) -> str:
        stem = self.path.stem.lower()
        return "validation" if stem.startswith("val") else "test" if stem.startswith("test") else "train"

    @property
    def fits(self) -> bool:
        """Whether it can stay as it is."""
        return self.form != "arrow" and self.dtype.kind in "iu" and self.dtype.itemsize in (2, 4)


def adopt(request: Request) -> dict[str, object]:
    """Describe the dataset where it lies, or write it anew. Returns the counts that are printed."""
    files = find(request)
    vocabulary = _Vocabulary.of(request)
    if request.out:
        with appearing(request.out) as folder:
            description = _convert(files, vocabulary, folder)
    else:
        description = _in_place(request.folder, files, vocabulary)
    return {
        "out": str(request.out or request.folder),
        "forms": {file.name: file.form for file in files},
        "documents": description.documents,
        "tokens": description.tokens,
        "shards": len(description.shards),
        "vocab_size": description.vocab_size,
        "tokenizer": description.tokenizer,
    }


@dataclass(frozen=True)
class _Vocabulary:
    """What the tokens mean, as far as it is known."""

    size: int
    tokenizer: bytes | None
    end_id: int | None

    @staticmethod
    def of(request: Request) -> _Vocabulary:
        beside = request.folder / TOKENIZER
        path = request.tokenizer or (beside if beside.is_file() else None)
        if path is None:
            if request.vocab_size is None:
                next_step = "give --vocab-size or --tokenizer"
                _refuse("nothing says how large the vocabulary is", request.folder, next_step)
            return _Vocabulary(request.vocab_size, None, request.end_id)
        data = path.read_bytes()
        encoder = tokenization.Encoder(data)
        end_id = encoder.end_id if request.end_id is None else request.end_id
        return _Vocabulary(request.vocab_size or encoder.vocab_size, data, end_id)

    @property
    def digest(self) -> str | None:
        return hashlib.sha256(self.tokenizer).hexdigest() if self.tokenizer else None


# --- finding -------------------------------------------------------------------------------------------


def find(request: Request) -> list[Found]:
    """The token files of a folder and its folders, by name; ST-D16 if there are none, or what they say is
    wrong."""
    if not request.folder.is_dir():
        raise SecureTrainError("ST-U01", "the folder does not exist", where=str(request.folder))
    paths = sorted(path for path in request.folder.rglob("*") if path.is_file())
    found = [_examine(path, request) for path in paths if path.suffix in SUFFIXES]
    if not found:
        _refuse("there are no token files in it", request.folder, f"files of {', '.join(SUFFIXES)}")
    return found


def _examine(path: Path, request: Request) -> Found:
    name = path.relative_to(request.folder).as_posix()
    with open(path, "rb") as file:
        head = file.read(_LLM_C_HEADER)
        if path.suffix == ".arrow":
            return Found(name, "arrow", path, np.dtype("<u4"))
        index = path.with_suffix(".idx")
        if path.suffix == ".bin" and index.is_file():
            return _megatron(name, path, index)
        if head.startswith(_NUMPY):
            return _numpy(name, path, file)
        if head.startswith(_LLM_C):
            return Found(name, "llm.c", path, np.dtype("<u2"), _LLM_C_HEADER)
    dtype = request.dtype or (dtype_of(request.vocab_size) if request.vocab_size else None)
    if dtype is None:
        _refuse("nothing says of what type the tokens of a file are", path, "give --dtype uint16 or uint32")
    return Found(name, "tokens", path, TYPES[dtype])


def _numpy(name: str, path: Path, file: BinaryIO) -> Found:
    file.seek(0)
    try:
        version = np.lib.format.read_magic(file)
        formats = np.lib.format
        read = formats.read_array_header_1_0 if version == (1, 0) else formats.read_array_header_2_0
        shape, _, dtype = read(file)
    except ValueError as error:
        _refuse(f"the header of a NumPy array cannot be read: {error!s:.100}", path)
    size = path.stat().st_size - file.tell()
    is_row = len(shape) == 1 and dtype.kind in "iu" and dtype.byteorder != ">"
    if not is_row or shape[0] * dtype.itemsize != size:
        _refuse(f"the array is no row of little-endian integers: {dtype}, shape {shape}", path)
    return Found(name, "numpy", path, dtype, file.tell())


def _megatron(name: str, path: Path, index: Path) -> Found:
    """Megatron's index: a header, the length and place of each sequence, and which begin documents."""
    data = index.read_bytes()
    header = struct.Struct("<9sQBQQ")
    if len(data) < header.size or not data.startswith(_MEGATRON):
        _refuse("the index beside it is not Megatron's", index, "its first bytes are MMIDIDX")
    _, version, code, sequences, documents = header.unpack_from(data)
    size = header.size + sequences * 12 + documents * 8
    if version != 1 or code not in _MEGATRON_TYPES or len(data) not in (size, size + sequences):
        _refuse("the index of Megatron's does not add up", index)
    dtype = np.dtype(_MEGATRON_TYPES[code])
    lengths = np.frombuffer(data, "<i4", sequences, header.size).astype(np.int64)
    places = np.frombuffer(data, "<i8", sequences, header.size + 4 * sequences)
    begins = np.frombuffer(data, "<i8", documents, header.size + 12 * sequences)
    ends = np.concatenate([[0], np.cumsum(lengths)])
    good = (
        bool((lengths >= 0).all())
        and np.array_equal(places, ends[:-1] * dtype.itemsize)
        and ends[-1] * dtype.itemsize == path.stat().st_size
        and documents > 0
        and begins[0] == 0
        and begins[-1] == sequences
        and bool((np.diff(begins) >= 0).all())
    )
    if not good:
        _refuse("the index of Megatron's does not describe its file", index)
    return Found(name, "megatron", path, dtype, ends=np.unique(ends[begins][1:]))


# --- reading -------------------------------------------------------------------------------------------


def _documents(found: Found, vocabulary: _Vocabulary) -> Iterator[tuple[npt.NDArray[Any], Tokens]]:
    """The tokens of a file, some at a time, and where documents end among them, counted from its first."""
    if found.form == "arrow":
        yield from _arrow(found, vocabulary)
        return
    size = found.path.stat().st_size - found.offset
    if size % found.dtype.itemsize or size == 0:
        _refuse(f"{size} bytes are no whole number of tokens of {found.dtype}", found.path)
    tokens = np.memmap(found.path, found.dtype, "r", found.offset)
    done = 0
    for first in range(0, len(tokens), SCAN):
        part = np.array(tokens[first : first + SCAN])
        _check(part, vocabulary.size, found.path)
        after = first + len(part)
        if found.ends is not None:
            ends = found.ends[done : np.searchsorted(found.ends, after, side="right")]
            done += len(ends)
        elif vocabulary.end_id is not None:
            ends = np.flatnonzero(part == vocabulary.end_id) + first + 1
        else:
            ends = np.empty(0, np.int64)
        if after == len(tokens) and not (ends.size and ends[-1] == after):
            ends = np.append(ends, after)
        yield part, ends


def _arrow(found: Found, vocabulary: _Vocabulary) -> Iterator[tuple[npt.NDArray[Any], Tokens]]:
    """A record batch is a document, or each of its rows that is a list; the end token is added."""
    ipc = extra("pyarrow.ipc", "pyarrow")
    tail = [] if vocabulary.end_id is None else [vocabulary.end_id]
    done = 0
    try:
        with ipc.open_file(str(found.path)) as file:
            for number in range(file.num_record_batches):
                column = file.get_batch(number).column("tokens")
                column.validate(full=True)
                lists = [column] if str(column.type) in _INTEGERS else [row.values for row in column]
                for values in lists:
                    if not len(values):
                        continue
                    document = np.append(values.to_numpy(zero_copy_only=False), tail).astype(np.int64)
                    _check(document, vocabulary.size, found.path)
                    done += len(document)
                    yield document, np.array([done])
    except (ValueError, OSError, KeyError, AttributeError) as error:
        _refuse(f"it is not the Arrow form of fms-fsdp: {error!s:.100}", found.path)


_INTEGERS = ("uint8", "uint16", "uint32", "uint64", "int8", "int16", "int32", "int64")


def _check(tokens: npt.NDArray[Any], vocab_size: int, path: Path) -> None:
    least, largest = int(tokens.min()), int(tokens.max())
    if least < 0 or largest >= vocab_size:
        raise SecureTrainError(
            "ST-D11",
            "a token is outside the vocabulary",
            where=str(path),
            expected=f"0 to {vocab_size - 1}",
            found=str(largest if least >= 0 else least),
            next_step="give the right --dtype, --vocab-size or --tokenizer",
        )


# --- in place ------------------------------------------------------------------------------------------


def _in_place(folder: Path, files: list[Found], vocabulary: _Vocabulary) -> Description:
    _require_place(folder, files)
    written: list[Path] = []

    def write(name: str, data: bytes) -> None:
        written.append(folder / name)
        write_durably(folder / name, data)

    try:
        shards = []
        for number, found in enumerate(files):
            ends = np.concatenate([ends for _, ends in _documents(found, vocabulary)])
            shard = Shard(
                f"adopted-{number:05d}", found.split, int(ends[-1]), len(ends), found.name, found.offset
            )
            write(shard.idx, ends.astype(END).tobytes())
            shards.append(shard)
        if vocabulary.tokenizer and not (folder / TOKENIZER).exists():
            write(TOKENIZER, vocabulary.tokenizer)
        dtype = f"uint{files[0].dtype.itemsize * 8}"
        description = Description(dtype, vocabulary.size, vocabulary.digest, tuple(shards))
        write(PREPARATION, _statement(files, vocabulary, description, converted=False))
        written.append(folder / DESCRIPTION)
        write_description(folder, description)
    except BaseException:
        for path in written:
            path.unlink(missing_ok=True)
        raise
    return description


def _require_place(folder: Path, files: list[Found]) -> None:
    """That nothing of the folder stands in the way of signing it as it is."""
    for name in (DESCRIPTION, PREPARATION):
        if (folder / name).exists():
            raise SecureTrainError(
                "ST-U05", "the folder is a dataset already", where=str(folder / name), next_step="sign it"
            )
    for path in folder.rglob("*"):
        if path.suffix in EXECUTABLE:
            next_step = "move it out, or convert with --out"
            _refuse("a file in it can execute code when it is loaded", path, next_step)
    types = {(found.dtype.itemsize, found.fits) for found in files}
    if len(types) > 1 or not files[0].fits:
        found = ", ".join(f"{file.name} {file.form} {file.dtype}" for file in files[:5])
        _refuse(f"the files cannot stay as they are ({found:.200})", folder, "convert them with --out")


# --- converted -----------------------------------------------------------------------------------------


def _convert(files: list[Found], vocabulary: _Vocabulary, folder: Path) -> Description:
    writer = Writer(folder, vocab_size=vocabulary.size, tokenizer=vocabulary.digest, shard_tokens=1 << 28)
    for found in files:
        rest, begin = np.empty(0, writer.dtype), 0  # of a document that goes on in the next part
        for part, ends in _documents(found, vocabulary):
            tokens = np.concatenate([rest, part])
            whole = int(ends[-1]) - begin if ends.size else 0
            if whole:
                writer.add(found.split, tokens[:whole], np.diff(ends, prepend=begin))
            rest, begin = tokens[whole:], begin + whole
    description = writer.finish()
    if vocabulary.tokenizer:
        write_durably(folder / TOKENIZER, vocabulary.tokenizer)
    write_durably(folder / PREPARATION, _statement(files, vocabulary, description, converted=True))
    return description


def _statement(
    files: list[Found], vocabulary: _Vocabulary, description: Description, *, converted: bool
) -> bytes:
    """preparation.json: what was adopted, and how. In place the manifest has the digests."""
    return canonical_json(
        {
            "schema": SCHEMA,
            "converted": converted,
            "sources": [
                {"name": file.name, "form": file.form, "size": str(file.path.stat().st_size)}
                | ({"sha256": _sha256(file.path)} if converted else {})
                for file in files
            ],
            "end_of_document_id": None if vocabulary.end_id is None else str(vocabulary.end_id),
            "counts": {"documents": str(description.documents), "tokens": str(description.tokens)},
        }
    )


def _sha256(path: Path) -> str:
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _refuse(what: str, path: Path, next_step: str | None = None) -> NoReturn:
    raise SecureTrainError("ST-D16", what, where=str(path), next_step=next_step)


# --- the command ---------------------------------------------------------------------------------------


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m trainer.data.adopt", description=__doc__.split("\n")[0])
    take = parser.add_argument
    take("folder", type=Path, metavar="DIR")
    take("--out", type=Path, metavar="DIR", help="convert into this folder, which must not exist")
    take("--tokenizer", type=Path, metavar="FILE", help="the tokenizer.json that made the tokens")
    take("--vocab-size", type=int, metavar="N", help="size of the vocabulary, if there is no tokenizer")
    take("--dtype", choices=sorted(TYPES), help="type of tokens in files without a header")
    take("--end-id", type=int, metavar="N", help="the token that ends a document")
    take("--failure", type=Path, metavar="FILE", help="on an error, write it here as JSON instead")
    given = parser.parse_args(arguments)
    request = Request(given.folder, given.out, given.tokenizer, given.vocab_size, given.dtype, given.end_id)
    return run_command(lambda: adopt(request), given.failure)


if __name__ == "__main__":
    raise SystemExit(main())
