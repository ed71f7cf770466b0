"""Documents to a dataset: `python -m trainer.data.prepare --source PATH... --out DIR --tokenizer FILE`.

Reads documents (sources.py), turns them into tokens (tokenization.py) and writes shards (shards.py).
Promises that the result depends on the sources, the tokenizer and the parameters only, to the byte,
whatever the number of workers; that it appears under its name whole or not at all; and that
`preparation.json` in it says what it was made from. Signing is done by whoever calls this, afterwards: no
key is ever near code that reads foreign text.

stdout: one JSON object of counts. stderr: progress and errors; with --failure FILE the error goes there, as
JSON.
"""

from __future__ import annotations

import argparse
import contextlib
import fcntl
import hashlib
import json
import os
import shutil
import signal
import sys
import time
from collections import deque
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from fractions import Fraction
from importlib import metadata
from pathlib import Path
from types import FrameType
from typing import NoReturn, Protocol

from supplychain.artifact import SecureTrainError, canonical_json, sync_folder, write_durably
from trainer.data import tokenization
from trainer.data.shards import PREPARATION, TOKENIZER, Description, Writer
from trainer.data.sources import Corpus, Opened, Options, find

SCHEMA = "urn:secure-train:preparation:v1"
BATCH = 1 << 20  # characters of text that a worker is given at a time
TRAINING_TEXT = 256 << 20  # characters that a tokenizer is trained on, from the start of the sources
TRAIN, VALIDATION = "train", "validation"


@dataclass(frozen=True)
class Request:
    """What to prepare. Everything but `workers` and the paths decides the result, and is recorded in it."""

    sources: tuple[Path, ...]
    out: Path
    corpus: bool = False
    tokenizer: Path | None = None
    train_tokenizer: int | None = None
    tokenizer_out: Path | None = None
    end_of_document: str | None = None
    options: Options = field(default_factory=Options)
    validation_fraction: Fraction = Fraction(0)
    seed: int = 0
    shard_tokens: int = 1 << 28
    workers: int = 1


class AnySource(Protocol):
    @property
    def name(self) -> str: ...

    @property
    def size(self) -> int: ...

    def open(self, options: Options) -> Opened: ...


def prepare(request: Request) -> dict[str, object]:
    """Write the dataset (and the tokenizer, if one is trained). Returns the counts that are printed."""
    tokenization.use_cores(request.workers)
    targets = [request.out] + ([request.tokenizer_out] if request.tokenizer_out else [])
    for target in targets:
        if os.path.lexists(target):
            raise SecureTrainError(
                "ST-U05",
                "the folder to write exists already",
                where=str(target),
                next_step="choose another name, or remove it",
            )
    sources: list[AnySource] = [Corpus()] if request.corpus else []
    sources += find(list(request.sources))
    with contextlib.ExitStack() as stack:
        folders = [stack.enter_context(appearing(target)) for target in targets]
        trained = _Pass(sources, request, "reading for the tokenizer") if request.train_tokenizer else None
        tokenizer = _tokenizer(request, trained)
        for folder in folders:
            write_durably(folder / TOKENIZER, tokenizer)
        counts = _write(request, sources, tokenizer, folders[0], trained)
    return {"out": str(request.out), **counts}


def _write(
    request: Request, sources: list[AnySource], tokenizer: bytes, folder: Path, trained: _Pass | None
) -> dict[str, object]:
    encoder = tokenization.Encoder(tokenizer, end=request.end_of_document)
    digest = hashlib.sha256(tokenizer).hexdigest()
    writer = Writer(
        folder, vocab_size=encoder.vocab_size, tokenizer=digest, shard_tokens=request.shard_tokens
    )
    reading = _Pass(sources, request, "tokenizing")
    splits: deque[str] = deque()  # of the batches on their way through the workers

    def texts() -> Iterator[list[str]]:
        for split, batch in _batches(reading.documents()):
            splits.append(split)
            yield batch

    encoded = tokenization.encode_all(texts(), tokenizer, end=encoder.end, workers=request.workers)
    with contextlib.closing(encoded):
        for batch in encoded:
            writer.add(splits.popleft(), batch.tokens, batch.lengths)
    if trained is not None and trained.digests != reading.digests:
        raise SecureTrainError(
            "ST-D05",
            "a source changed between training the tokenizer and using it",
            next_step="prepare from a folder that nobody changes",
        )
    _require_splits(request, reading)
    description = writer.finish()
    write_durably(folder / PREPARATION, _statement(request, reading, description, encoder))
    return {
        "tokenizer": digest,
        "vocab_size": encoder.vocab_size,
        "documents": description.documents,
        "empty_documents": reading.empty,
        "tokens": description.tokens,
        "shards": len(description.shards),
        "splits": {split: _totals(description, split) for split in reading.splits()},
    }


def _totals(description: Description, split: str) -> dict[str, int]:
    shards = [shard for shard in description.shards if shard.split == split]
    return {
        "documents": sum(shard.documents for shard in shards),
        "tokens": sum(shard.tokens for shard in shards),
        "shards": len(shards),
    }


def _require_splits(request: Request, reading: _Pass) -> None:
    wanted = [TRAIN] + ([VALIDATION] if request.validation_fraction else [])
    missing = [split for split in wanted if not reading.counts.get(split)]
    if missing:
        total = sum(reading.counts.values())
        raise SecureTrainError(
            "ST-D03",
            f"no document falls into the split {missing[0]!r}",
            expected="at least one",
            found=f"{total} documents in all, {reading.empty} more that are empty",
            next_step="give more documents, or another --validation-fraction",
        )


def _tokenizer(request: Request, trained: _Pass | None) -> bytes:
    """The bytes of the tokenizer.json that is given, or of a new one made from the training split."""
    if trained is not None and request.train_tokenizer is not None:
        return tokenization.train(_first(trained.documents(), TRAINING_TEXT), request.train_tokenizer)
    if request.tokenizer is None:
        raise SecureTrainError("ST-U03", "no tokenizer: give --tokenizer or --train-tokenizer")
    try:
        return request.tokenizer.read_bytes()
    except OSError as error:
        raise SecureTrainError(
            "ST-U01", f"the tokenizer cannot be read: {error.strerror}", where=str(request.tokenizer)
        ) from None


def _first(documents: Iterator[tuple[str, str]], limit: int) -> Iterator[str]:
    """The training documents of the first `limit` characters. The rest is read too, for its digest."""
    for split, text in documents:
        if split == TRAIN and limit > 0:
            limit -= len(text)
            yield text


def _batches(documents: Iterable[tuple[str, str]]) -> Iterator[tuple[str, list[str]]]:
    """Documents in batches of one split each, of about BATCH characters."""
    waiting: dict[str, list[str]] = {}
    sizes: dict[str, int] = {}
    for split, text in documents:
        waiting.setdefault(split, []).append(text)
        sizes[split] = sizes.get(split, 0) + len(text)
        if sizes[split] >= BATCH:
            yield split, waiting.pop(split)
            del sizes[split]
    yield from waiting.items()


def split_of(number: int, seed: int, fraction: Fraction) -> str:
    """The split of document `number` (counted over all sources): a hash, so it does not depend on its
    neighbours."""
    word = hashlib.sha256(f"secure-train split/v1 {seed} {number}".encode()).digest()[:8]
    return VALIDATION if int.from_bytes(word, "big") < fraction * 2**64 else TRAIN


class _Pass:
    """One reading of all sources, with its counts, its digests and its progress."""

    def __init__(self, sources: list[AnySource], request: Request, what: str) -> None:
        self._sources = sources
        self._request = request
        self._progress = _Progress(what, sum(source.size for source in sources))
        self.records: list[dict[str, str]] = []
        self.counts: dict[str, int] = {}
        self.empty = 0

    @property
    def digests(self) -> list[str]:
        return [record["sha256"] for record in self.records]

    def splits(self) -> list[str]:
        return sorted(self.counts)

    def documents(self) -> Iterator[tuple[str, str]]:
        """(split, text) of every document that is not empty."""
        number = done = 0
        for source in self._sources:
            opened, before = source.open(self._request.options), number
            for text in opened.documents:
                if text:
                    split = split_of(number, self._request.seed, self._request.validation_fraction)
                    self.counts[split] = self.counts.get(split, 0) + 1
                    number += 1
                    yield split, text
                else:
                    self.empty += 1
                self._progress.at(done + opened.read)
            done += opened.read
            self.records.append(
                {
                    "name": source.name,
                    "sha256": opened.sha256,
                    "size": str(opened.read),
                    "documents": str(number - before),
                }
            )
        self._progress.end()


def _statement(
    request: Request, reading: _Pass, description: Description, encoder: tokenization.Encoder
) -> bytes:
    """preparation.json: what the dataset was made from, with what, and how."""
    return canonical_json(
        {
            "schema": SCHEMA,
            "sources": reading.records,
            "tokenizer": {
                "sha256": description.tokenizer,
                "trained_here": request.train_tokenizer is not None,
                "end_of_document": encoder.end,
                "end_of_document_id": str(encoder.end_id),
            },
            "parameters": {
                "document": request.options.document,
                "text_key": request.options.text_key,
                "validation_fraction": str(request.validation_fraction),
                "seed": str(request.seed),
                "shard_tokens": str(request.shard_tokens),
                "train_tokenizer": None if request.train_tokenizer is None else str(request.train_tokenizer),
            },
            "counts": {
                "documents": str(description.documents),
                "empty_documents": str(reading.empty),
                "tokens": str(description.tokens),
            },
            "versions": {"tokenizers": metadata.version("tokenizers")},
        }
    )


@contextlib.contextmanager
def appearing(target: Path) -> Iterator[Path]:
    """A folder to fill, which takes the name `target` when all went well, and is removed otherwise. What a
    killed run left is thrown away; a run that still lives is respected (ST-D12).
    """
    partial = target.absolute().with_name(f".{target.name}.partial")
    try:
        partial.mkdir(parents=True, exist_ok=True)
        descriptor = os.open(partial, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
    except OSError as error:
        raise SecureTrainError(
            "ST-U04", f"the folder cannot be made: {error.strerror}", where=str(target)
        ) from None
    try:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise SecureTrainError(
                "ST-D12",
                "another process prepares this dataset",
                where=str(target),
                next_step="wait for it, or choose another name",
            ) from None
        _empty(partial)
        try:
            yield partial
            for path in partial.iterdir():
                path.chmod(0o644)
            partial.chmod(0o755)
            sync_folder(partial)
            partial.rename(target)
            sync_folder(target.absolute().parent)
        except BaseException:
            shutil.rmtree(partial, ignore_errors=True)
            raise
    finally:
        os.close(descriptor)


def _empty(folder: Path) -> None:
    for path in folder.iterdir():
        path.unlink()


class _Progress:
    """A line on stderr every tenth of the way, and every 30 seconds."""

    def __init__(self, what: str, total: int) -> None:
        self._what, self._total = what, max(total, 1)
        self._tenths, self._said = 0, time.monotonic()

    def at(self, done: int) -> None:
        tenths = min(done * 10 // self._total, 10)
        if tenths > self._tenths or time.monotonic() - self._said > 30:
            self._tenths, self._said = tenths, time.monotonic()
            print(
                f"{self._what}: {tenths * 10:3d} % of {_size(self._total)}",
                file=sys.stderr,
                flush=True,
            )

    def end(self) -> None:
        self.at(self._total)


def _size(count: int) -> str:
    return f"{count / 1e6:.1f} MB" if count >= 10**6 else f"{count / 1e3:.1f} kB"


# --- the command ---------------------------------------------------------------------------------------


def _parse(arguments: list[str]) -> tuple[Request, Path | None]:
    parser = argparse.ArgumentParser(
        prog="python -m trainer.data.prepare", description=__doc__.split("\n")[0]
    )
    take = parser.add_argument
    take("--source", type=Path, nargs="+", action="extend", default=[], metavar="PATH",
         help="files and folders of .txt, .md and .jsonl, each also with .gz")  # fmt: skip
    take("--corpus", choices=["shakespeare"], help="the embedded corpus, as a source")
    take("--out", type=Path, required=True, metavar="DIR", help="the dataset's folder; must not exist")
    take("--tokenizer", type=Path, metavar="FILE", help="a tokenizer.json")
    take("--train-tokenizer", type=int, metavar="SIZE", help="train a byte-level BPE of SIZE tokens instead")
    take(
        "--tokenizer-out", type=Path, metavar="DIR", help="a folder for the trained tokenizer; must not exist"
    )
    take("--end-of-document", metavar="TOKEN", help="the token after each document (default: a known one)")
    take("--workers", type=_positive, default=_cores(), help="processes that tokenize (default: the cores)")
    take("--validation-fraction", type=_fraction, default=Fraction(0), metavar="F",
         help="part of the documents that is kept for validation, as 0.01 (default: none)")  # fmt: skip
    take("--seed", type=int, default=0, help="decides which documents these are")
    take("--shard-tokens", type=_positive, default=1 << 28, metavar="N", help="tokens of a shard, at most")
    take("--document", choices=["file", "paragraph", "line"], default="file",
         help="what of a text file is a document (default: all of it)")  # fmt: skip
    take("--text-key", default="text", metavar="KEY", help="where the text stands in a JSON record")
    take("--failure", type=Path, metavar="FILE", help="on an error, write it here as JSON instead")
    given = parser.parse_args(arguments)
    if not given.source and not given.corpus:
        parser.error("nothing to read: give --source or --corpus")
    if (given.tokenizer is None) == (given.train_tokenizer is None):
        parser.error("give either --tokenizer or --train-tokenizer")
    if given.tokenizer_out and given.train_tokenizer is None:
        parser.error("--tokenizer-out is for a tokenizer that is trained here")
    request = Request(
        sources=tuple(given.source),
        out=given.out,
        corpus=given.corpus is not None,
        tokenizer=given.tokenizer,
        train_tokenizer=given.train_tokenizer,
        tokenizer_out=given.tokenizer_out,
        end_of_document=given.end_of_document,
        options=Options(given.text_key, given.document),
        validation_fraction=given.validation_fraction,
        seed=given.seed,
        shard_tokens=given.shard_tokens,
        workers=given.workers,
    )
    return request, given.failure


def _positive(text: str) -> int:
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError("must be at least 1")
    return value


def _fraction(text: str) -> Fraction:
    value = Fraction(text)
    if not 0 <= value < 1:
        raise argparse.ArgumentTypeError("must be at least 0 and below 1")
    return value


def _cores() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def _terminated(number: int, frame: FrameType | None) -> NoReturn:
    raise SystemExit(128 + number)  # runs the clean-up on its way out


def main(arguments: list[str]) -> int:
    request, failure = _parse(arguments)
    signal.signal(signal.SIGTERM, _terminated)
    try:
        print(json.dumps(prepare(request)))
        return 0
    except SecureTrainError as error:
        problem = error
    except OSError as error:
        problem = SecureTrainError(
            "ST-U04",
            f"the dataset cannot be written: {error.strerror}",
            where=str(error.filename or request.out),
        )
    except KeyboardInterrupt:
        print("interrupted; nothing was written", file=sys.stderr)
        return 128 + signal.SIGINT
    if failure:  # the caller shows it
        write_durably(failure, canonical_json(problem.as_dict()))
    else:
        print(problem, file=sys.stderr)
    return problem.exit_code


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
