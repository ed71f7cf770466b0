"""Documents to a dataset: `python -m trainer.data.prepare --source PATH... --out DIR --tokenizer FILE`.

Reads documents (sources.py), leaves some out (rules.py), turns them into tokens (tokenization.py) and writes
shards (shards.py), if asked in another order or in rows (layout.py, pack.py). Promises that the result
depends on the sources, the tokenizer and the parameters only, to the byte, whatever the number of workers,
and however often it was killed and started again (journal.py); that it appears under its name whole or not
at all; and that `preparation.json` in it says what it was made from. Signing is done by whoever calls this,
afterwards: no key is ever near code that reads foreign text.

stdout: one JSON object of counts. stderr: progress and errors; with --failure FILE the error goes there, as
JSON.
"""

from __future__ import annotations

import argparse
import contextlib
import fcntl
import hashlib
import os
import shutil
import sys
import time
from collections import Counter, deque
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from fractions import Fraction
from importlib import metadata
from pathlib import Path
from typing import Protocol

from supplychain.artifact import SecureTrainError, canonical_json, sync_folder, write_durably
from trainer.data import journal, layout, rules, tokenization
from trainer.data.command import run_command
from trainer.data.journal import Entry
from trainer.data.pack import pack_folder
from trainer.data.rules import Rule
from trainer.data.shards import PREPARATION, TOKENIZER, Description, Writer
from trainer.data.sources import Corpus, Opened, Options, find

SCHEMA = "urn:secure-train:preparation:v1"
BATCH = 1 << 20  # characters of text that a worker is given at a time
TRAINING_TEXT = 256 << 20  # characters that a tokenizer is trained on, from the start of the sources
TRAIN, VALIDATION = "train", "validation"
STAGING = "staging"  # where documents wait that will be written in another order


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
    rules: tuple[Rule, ...] = ()
    shuffle: bool = False
    pack: int | None = None  # pack into rows of this many tokens,
    rows: bool = False  # and lay the shards out in these rows
    shard_tokens: int = 1 << 28
    workers: int = 1

    @property
    def staged(self) -> bool:
        return self.shuffle or self.rows

    def parameters(self) -> dict[str, object]:
        """What decides the result beside sources and tokenizer."""
        return {
            "document": self.options.document,
            "text_key": self.options.text_key,
            "validation_fraction": str(self.validation_fraction),
            "seed": str(self.seed),
            "drop": [rule.name for rule in self.rules],
            "shuffle": self.shuffle,
            "pack": None if self.pack is None else str(self.pack),
            "rows": self.rows,
            "shard_tokens": str(self.shard_tokens),
            "train_tokenizer": None if self.train_tokenizer is None else str(self.train_tokenizer),
        }


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
        for folder in folders[1:]:
            write_durably(folder / TOKENIZER, tokenizer)
        counts = _write(request, sources, tokenizer, folders[0], trained)
    return {"out": str(request.out), **counts}


def _write(
    request: Request, sources: list[AnySource], tokenizer: bytes, folder: Path, trained: _Pass | None
) -> dict[str, object]:
    encoder = tokenization.Encoder(tokenizer, end=request.end_of_document)
    work = _Work(request, sources, tokenizer, encoder, folder)
    try:
        reading, writer = work.tokenize(journal.read(folder, work.subject))
    except _StaleError:
        reading, writer = work.tokenize(journal.START)
    if trained is not None and trained.digests != reading.digests:
        raise SecureTrainError(
            "ST-D05",
            "a source changed between training the tokenizer and using it",
            next_step="prepare from a folder that nobody changes",
        )
    _require_splits(request, reading)
    description = work.finish(writer)
    write_durably(folder / TOKENIZER, tokenizer)
    write_durably(folder / PREPARATION, _statement(request, reading, description, encoder))
    return {
        "tokenizer": description.tokenizer,
        "vocab_size": encoder.vocab_size,
        "documents": description.documents,
        "empty_documents": reading.empty,
        "dropped_documents": sum(reading.dropped.values()),
        "tokens": description.tokens,
        "shards": len(description.shards),
        "splits": {split: _totals(description, split) for split in reading.splits()},
    }


class _StaleError(Exception):
    """What an interrupted preparation left is not the beginning of this one."""


@dataclass(frozen=True)
class _Work:
    """The writing of one dataset into one folder."""

    request: Request
    sources: list[AnySource]
    tokenizer: bytes
    encoder: tokenization.Encoder
    folder: Path

    @property
    def subject(self) -> str:
        """Digest of everything that decides the result, but for the text in the sources."""
        document = {
            "parameters": self.request.parameters(),
            "tokenizer": hashlib.sha256(self.tokenizer).hexdigest(),
            "end": self.encoder.end,
            "sources": [[source.name, str(source.size)] for source in self.sources],
            "versions": _versions(),
        }
        return hashlib.sha256(canonical_json(document)).hexdigest()

    @property
    def place(self) -> Path:
        """Where documents are written as they come."""
        return self.folder / STAGING if self.request.staged else self.folder

    def writer(self, folder: Path, rows: int | None = None) -> Writer:
        return Writer(
            folder,
            vocab_size=self.encoder.vocab_size,
            tokenizer=hashlib.sha256(self.tokenizer).hexdigest(),
            shard_tokens=self.request.shard_tokens,
            rows=rows,
        )

    def tokenize(self, done: Entry) -> tuple[_Pass, Writer]:
        """Read all sources and write the tokens of what comes after `done`."""
        if done is journal.START:
            empty(self.folder)
        self.place.mkdir(exist_ok=True)
        writer = self.writer(self.place)
        try:
            writer.resume(done.shards)
        except (OSError, TypeError, ValueError):
            raise _StaleError from None
        reading = _Pass(self.sources, self.request, "tokenizing")
        marks: deque[tuple[str, str]] = deque()  # of the batches on their way through the workers
        count = done.batches

        def texts() -> Iterator[list[str]]:
            chain, number = "", 0
            for split, batch in _batches(reading.documents()):
                chain, number = journal.extend(chain, split, batch), number + 1
                if number > done.batches:
                    marks.append((split, chain))
                    yield batch
                elif number == done.batches and chain != done.chain:
                    raise _StaleError
            if number < done.batches:
                raise _StaleError

        workers = self.request.workers
        encoded = tokenization.encode_all(texts(), self.tokenizer, end=self.encoder.end, workers=workers)
        with contextlib.closing(encoded):
            for batch in encoded:
                split, chain = marks.popleft()
                writer.add(split, batch.tokens, batch.lengths)
                count += 1
                if count % journal.EVERY == 0:
                    journal.write(self.folder, self.subject, Entry(count, chain, writer.flush()))
        return reading, writer

    def finish(self, writer: Writer) -> Description:
        """The shards in their final form, and dataset.json."""
        request = self.request
        if request.staged:
            description = self._lay_out(writer)
            shutil.rmtree(self.place)
        else:
            description = writer.finish()
        (self.folder / journal.NAME).unlink(missing_ok=True)
        if request.pack and not request.rows:
            description = pack_folder(self.folder, description, request.pack)
        return description

    def _lay_out(self, staging: Writer) -> Description:
        request, shards = self.request, staging.flush()
        final = self.writer(self.folder, request.pack if request.rows else None)
        final.resume({})  # removes what a killed attempt left
        for split in shards:
            staged = layout.Staged(self.place, split, shards[split], staging.dtype)
            shuffle = layout.Shuffle(request.seed, split) if request.shuffle else None
            if request.rows and request.pack:
                end = self.encoder.end_id
                layout.write_rows(
                    staged, split, final, shuffle, seq_len=request.pack, seed=request.seed, end=end
                )
            else:
                layout.write_documents(staged, split, final, shuffle)
        return final.finish()


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
        self.dropped: Counter[str] = Counter()  # by the name of the rule

    @property
    def digests(self) -> list[str]:
        return [record["sha256"] for record in self.records]

    def splits(self) -> list[str]:
        return sorted(self.counts)

    def documents(self) -> Iterator[tuple[str, str]]:
        """(split, text) of every document that is not empty, nor dropped by a rule."""
        number = done = kept = 0
        keeps = [(rule.name, rule.start()) for rule in self._request.rules]
        for source in self._sources:
            opened, before = source.open(self._request.options), kept
            for text in opened.documents:
                if not text:
                    self.empty += 1
                elif dropped := next((name for name, keep in keeps if not keep(text)), None):
                    self.dropped[dropped] += 1
                    number += 1  # so that the split of a document does not depend on the rules
                else:
                    split = split_of(number, self._request.seed, self._request.validation_fraction)
                    self.counts[split] = self.counts.get(split, 0) + 1
                    number += 1
                    kept += 1
                    yield split, text
                self._progress.at(done + opened.read)
            done += opened.read
            self.records.append(
                {
                    "name": source.name,
                    "sha256": opened.sha256,
                    "size": str(opened.read),
                    "documents": str(kept - before),
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
            "parameters": request.parameters(),
            "counts": {
                "documents": str(description.documents),
                "empty_documents": str(reading.empty),
                "dropped": {name: str(count) for name, count in reading.dropped.items()},
                "tokens": str(description.tokens),
            },
            "versions": _versions(),
        }
    )


def _versions() -> dict[str, str]:
    return {"tokenizers": metadata.version("tokenizers")}


@contextlib.contextmanager
def appearing(target: Path) -> Iterator[Path]:
    """A folder to fill, which takes the name `target` when all went well, and is removed after an error. If
    it has a journal it outlives a signal, so that the next run can go on; what a killed run left is found in
    it. A run that still lives is respected (ST-D12).
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
        if not (partial / journal.NAME).exists():
            empty(partial)
        try:
            yield partial
            for path in partial.iterdir():
                path.chmod(0o644)
            partial.chmod(0o755)
            sync_folder(partial)
            partial.rename(target)
            sync_folder(target.absolute().parent)
        except BaseException as error:
            if isinstance(error, Exception) or not (partial / journal.NAME).exists():
                shutil.rmtree(partial, ignore_errors=True)
            raise
    finally:
        os.close(descriptor)


def empty(folder: Path) -> None:
    for path in folder.iterdir():
        if path.is_dir() and not path.is_symlink():
            shutil.rmtree(path)
        else:
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
         help="files and folders of .txt, .md, .jsonl, .parquet, .arrow, also with .gz or .zst")  # fmt: skip
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
    take("--shuffle", action="store_true", help="write the documents in an order that the seed decides")
    take(
        "--pack",
        type=_positive,
        metavar="N",
        help="pack documents into rows of N tokens, cutting none shorter",
    )
    take(
        "--rows",
        action="store_true",
        help="with --pack: lay the shards out in these rows, the fastest to read",
    )
    take("--drop-shorter", type=_positive, metavar="N", help="leave out documents below N characters")
    take("--drop-longer", type=_positive, metavar="N", help="leave out documents above N characters")
    take("--drop-duplicates", action="store_true", help="leave out exact repetitions of a document")
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
    if given.rows and not given.pack:
        parser.error("--rows needs --pack")
    if given.tokenizer_out and given.train_tokenizer is None:
        parser.error("--tokenizer-out is for a tokenizer that is trained here")
    dropping = [
        rules.at_least(given.drop_shorter) if given.drop_shorter else None,
        rules.at_most(given.drop_longer) if given.drop_longer else None,
        rules.unique() if given.drop_duplicates else None,
    ]
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
        rules=tuple(rule for rule in dropping if rule),
        shuffle=given.shuffle,
        pack=given.pack,
        rows=given.rows,
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


def main(arguments: list[str]) -> int:
    request, failure = _parse(arguments)
    return run_command(lambda: prepare(request), failure)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
