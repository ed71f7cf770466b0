"""Reading what datasets are prepared from: files in, documents out, one at a time.

Owns the formats. Each is one function from a stream of bytes to documents, entered in FORMATS under the
suffix of its files; a compression is one from stream to stream, in COMPRESSIONS. Promises strictness: what
is not exactly what its name says is an error with file and line (ST-D02), nothing is left out; memory is
bounded by the longest document; the digest that is recorded for a file is of the bytes that were read.
"""

from __future__ import annotations

import gzip
import hashlib
import io
import json
import os
import zlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO, NoReturn, cast

from supplychain.artifact import SecureTrainError
from trainer import corpus

MAX_DOCUMENT = 256 << 20  # bytes
_BUFFER = 1 << 20


@dataclass(frozen=True)
class Options:
    """What a format may need to know: the key of the text in a record, and what of a text file is a
    document."""

    text_key: str = "text"
    document: str = "file"  # or "paragraph" (blank lines separate), or "line"


@dataclass
class Opened:
    """A source while it is read. `sha256` and `size` are right once `documents` is used up."""

    name: str
    documents: Iterator[str]
    _stream: _Hashing

    @property
    def read(self) -> int:
        """Bytes of the file that were read so far."""
        return self._stream.count

    @property
    def sha256(self) -> str:
        return self._stream.sha256.hexdigest()


@dataclass(frozen=True)
class Source:
    """A file to read. `name` is how it is recorded: relative to the folder that was given, so that the result
    does not depend on where that lies.
    """

    name: str
    path: Path
    size: int

    def open(self, options: Options) -> Opened:
        try:
            file = open(self.path, "rb", buffering=0)  # noqa: SIM115  # closed when `documents` ends
        except OSError as error:
            raise _unreadable(self.path, error) from None
        stream = _Hashing(file)
        return Opened(self.name, _documents(self, stream, options), stream)


@dataclass(frozen=True)
class Corpus:
    """The text that is packaged with secure-train, as a source."""

    name: str = f"corpus:{corpus.NAME}"

    @property
    def size(self) -> int:
        return len(corpus.text())

    def open(self, options: Options) -> Opened:
        stream = _Hashing(io.BytesIO(corpus.text().encode()))
        return Opened(self.name, (stream.read(len(text)).decode() for text in corpus.documents()), stream)


def find(paths: list[Path]) -> list[Source]:
    """The files at `paths`, folders with all they hold, in an order that depends on names only."""
    found: list[Source] = []
    for path in paths:
        if path.is_dir():
            files = sorted(_walk(path), key=lambda file: file.relative_to(path).as_posix().encode())
            found += [Source(f.relative_to(path).as_posix(), f, f.stat().st_size) for f in files]
        elif path.is_file():
            found.append(Source(path.name, path, path.stat().st_size))
        else:
            raise SecureTrainError(
                "ST-U01", "a source does not exist", where=str(path), next_step="check the path"
            )
    for source in found:
        _format_of(source)
    return found


def _walk(folder: Path) -> Iterator[Path]:
    try:
        names = os.listdir(folder)
    except OSError as error:
        raise _unreadable(folder, error) from None
    for name in names:
        path = folder / name
        if path.is_dir():
            if path.is_symlink():
                raise SecureTrainError(
                    "ST-D02",
                    "a source folder holds a link to another folder",
                    where=str(path),
                    next_step="name that folder as a source of its own",
                )
            yield from _walk(path)
        else:
            yield path


# --- formats -------------------------------------------------------------------------------------------


def _text(stream: BinaryIO, options: Options, where: str) -> Iterator[str]:
    """Plain UTF-8 text, taken as it is."""
    if options.document == "file":
        data = stream.read(MAX_DOCUMENT + 1)
        _check_length(data, where)
        yield _decoded(data, where)
        return
    paragraph: list[str] = []
    for number, line in _lines(stream, where):
        text = _decoded(line, f"{where}, line {number}")
        if options.document == "line":
            yield text.rstrip("\r\n")
        elif text.strip():
            paragraph.append(text)
        elif paragraph:
            yield "".join(paragraph)
            paragraph = []
    if paragraph:
        yield "".join(paragraph)


def _json_lines(stream: BinaryIO, options: Options, where: str) -> Iterator[str]:
    """A JSON object a line, the text under one of its keys."""
    for number, line in _lines(stream, where):
        place = f"{where}, line {number}"
        if not line.strip():
            continue
        try:
            record = json.loads(_decoded(line, place), object_pairs_hook=_unique_keys)
        except RecursionError:
            _refuse("the record is nested too deeply", place)
        except ValueError as error:
            _refuse(f"the record is not JSON: {error}", place)
        text = record.get(options.text_key) if isinstance(record, dict) else None
        if not isinstance(text, str):
            _refuse(f"the record has no text under the key {options.text_key!r}", place)
        try:
            text.encode()
        except UnicodeEncodeError:
            _refuse("the text has half of a surrogate pair, which is no character", place)
        yield text


Format = Callable[[BinaryIO, Options, str], Iterator[str]]
FORMATS: dict[str, Format] = {".txt": _text, ".text": _text, ".md": _text, ".jsonl": _json_lines}
COMPRESSIONS: dict[str, Callable[[BinaryIO], BinaryIO]] = {
    ".gz": lambda stream: cast(BinaryIO, gzip.GzipFile(fileobj=stream)),
}


def _format_of(source: Source) -> tuple[Format, Callable[[BinaryIO], BinaryIO] | None]:
    stem, suffix = os.path.splitext(source.name.lower())
    compression = COMPRESSIONS.get(suffix)
    if compression:
        suffix = os.path.splitext(stem)[1]
    if suffix not in FORMATS:
        raise SecureTrainError(
            "ST-D02",
            "the format of a source is not known",
            where=str(source.path),
            expected=f"{', '.join(FORMATS)}, and each with {', '.join(COMPRESSIONS)}",
            found=source.path.name,
            next_step="rename it, convert it, or move it out of the folder",
        )
    return FORMATS[suffix], compression


def _documents(source: Source, stream: _Hashing, options: Options) -> Iterator[str]:
    """The documents of a file, with every way of being broken made into one error."""
    read, decompress = _format_of(source)
    with stream, io.BufferedReader(stream, _BUFFER) as raw:
        try:
            yield from read(decompress(raw) if decompress else raw, options, str(source.path))
            while raw.read(_BUFFER):  # so that the digest covers what a format did not need
                pass
        except (EOFError, zlib.error, gzip.BadGzipFile) as error:
            _refuse(f"the compressed data is damaged or cut off ({error})", str(source.path))
        except OSError as error:
            raise _unreadable(source.path, error) from None


def _lines(stream: BinaryIO, where: str) -> Iterator[tuple[int, bytes]]:
    number = 0
    while line := stream.readline(MAX_DOCUMENT + 1):
        number += 1
        _check_length(line, f"{where}, line {number}")
        yield number, line


def _check_length(data: bytes, where: str) -> None:
    if len(data) > MAX_DOCUMENT:
        _refuse(f"a document is longer than {MAX_DOCUMENT >> 20} MiB", where)


def _decoded(data: bytes, where: str) -> str:
    try:
        return data.decode("utf-8")
    except UnicodeDecodeError as error:
        _refuse(f"the text is not UTF-8 (byte {error.start}: 0x{data[error.start]:02x})", where)


def _unique_keys(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    record = dict(pairs)
    if len(record) != len(pairs):
        raise ValueError("a key stands twice in one object")
    return record


def _refuse(what: str, where: str) -> NoReturn:
    raise SecureTrainError("ST-D02", what, where=where, next_step="mend the source, or leave the file out")


def _unreadable(path: Path, error: OSError) -> SecureTrainError:
    return SecureTrainError(
        "ST-U01",
        f"a source cannot be read: {error.strerror}",
        where=str(path),
        next_step="check the path and its permissions",
    )


class _Hashing(io.RawIOBase):
    """A raw stream that hashes and counts what is read through it."""

    def __init__(self, raw: Any) -> None:
        self._raw = raw
        self.sha256 = hashlib.sha256()
        self.count = 0

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        count = int(self._raw.readinto(buffer) or 0)
        self.sha256.update(memoryview(buffer)[:count])
        self.count += count
        return count

    def close(self) -> None:
        self._raw.close()
        super().close()
