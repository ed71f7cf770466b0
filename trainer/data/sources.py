"""Reading what datasets are prepared from: files in, documents out, one at a time.

Owns the formats. Each is one function from a stream of bytes to documents, entered in FORMATS under the
suffix of its files; a compression is one from stream to stream, in COMPRESSIONS. Promises strictness: what
is not exactly what its name says is an error with file and line (ST-D02), nothing is left out; memory is
bounded by the longest document; the digest that is recorded for a file is of the bytes that were read.
"""

from __future__ import annotations

import contextlib
import gzip
import hashlib
import importlib
import io
import json
import os
import shutil
import sys
import tempfile
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


def _parquet(stream: BinaryIO, options: Options, where: str) -> Iterator[str]:
    """The text of each row, in one column."""
    arrow = extra("pyarrow.parquet", "pyarrow")
    with _private_copy(stream) as copy, _damage(where):
        file = arrow.ParquetFile(copy)
        _check_column(file.schema_arrow, options, where)
        for batch in file.iter_batches(_ROWS, columns=[options.text_key]):
            yield from _column(batch.column(0), where)


def _arrow(stream: BinaryIO, options: Options, where: str) -> Iterator[str]:
    """As Parquet; both the file and the stream form of Arrow IPC."""
    ipc = extra("pyarrow.ipc", "pyarrow")
    with _private_copy(stream) as copy, _damage(where):
        if copy.read(len(_ARROW_FILE)) == _ARROW_FILE:
            file = ipc.open_file(copy)
            batches = (file.get_batch(number) for number in range(file.num_record_batches))
        else:
            copy.seek(0)
            file = ipc.open_stream(copy)
            batches = iter(file)
        _check_column(file.schema, options, where)
        for batch in batches:
            yield from _column(batch.column(options.text_key), where)


_ARROW_FILE = b"ARROW1"
_ROWS = 1024  # of a Parquet file, in memory at a time


def _check_column(schema: Any, options: Options, where: str) -> None:
    if options.text_key not in schema.names:
        _refuse(f"there is no column {options.text_key!r}, but {', '.join(schema.names)[:200]}", where)
    kind = str(schema.field(options.text_key).type)
    if kind not in ("string", "large_string", "string_view"):
        _refuse(f"the column {options.text_key!r} holds {kind[:60]}, not text", where)


@contextlib.contextmanager
def _damage(where: str) -> Iterator[None]:
    """What the library raises on a broken file, as one error of ours; most of its exceptions are
    ValueErrors."""
    try:
        yield
    except (ValueError, OSError) as error:
        _refuse(f"the file is damaged or cut off ({error!s:.200})", where)


def _column(column: Any, where: str) -> Iterator[str]:
    column.validate(full=True)  # offsets of a hostile file may lead anywhere
    for text in column:
        value = text.as_py()
        if value is None:
            _refuse("a row has no text", where)
        yield value


def _private_copy(stream: BinaryIO) -> BinaryIO:
    """The rest of a stream as a file without a name: formats that jump about are hashed as they are copied,
    and then read from what was hashed."""
    copy = cast(BinaryIO, tempfile.TemporaryFile())  # noqa: SIM115  # the caller closes it
    shutil.copyfileobj(stream, copy, _BUFFER)
    copy.seek(0)
    return copy


class _Zstandard(io.RawIOBase):
    """Decompresses; damage is an EOFError, as it is for gzip."""

    def __init__(self, stream: BinaryIO) -> None:
        arrow = extra("pyarrow")
        self._damage = (arrow.ArrowException, OSError)
        self._stream = arrow.CompressedInputStream(arrow.PythonFile(_Borrowed(stream), "r"), "zstd")

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        try:
            data = self._stream.read(len(buffer))
        except self._damage as error:
            raise EOFError(str(error)) from None
        buffer[: len(data)] = data
        return len(data)


class _Borrowed:
    """A stream that the library may read, and not close when it is done."""

    closed = False

    def __init__(self, stream: BinaryIO) -> None:
        self.read = stream.read

    def close(self) -> None:
        pass


def extra(module: str, package: str | None = None) -> Any:
    """An optional package; ST-D17 where it is not installed."""
    try:
        return importlib.import_module(module)
    except ImportError:
        raise SecureTrainError(
            "ST-D17",
            f"this needs the package {package or module}, which is not installed",
            where=sys.prefix,
            next_step="build the environment with the extra `data`",
        ) from None


Format = Callable[[BinaryIO, Options, str], Iterator[str]]
FORMATS: dict[str, Format] = {
    ".txt": _text,
    ".text": _text,
    ".md": _text,
    ".jsonl": _json_lines,
    ".parquet": _parquet,
    ".arrow": _arrow,
}
COMPRESSIONS: dict[str, Callable[[BinaryIO], BinaryIO]] = {
    ".gz": lambda stream: cast(BinaryIO, gzip.GzipFile(fileobj=stream)),
    ".zst": lambda stream: cast(BinaryIO, io.BufferedReader(_Zstandard(stream), _BUFFER)),
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
