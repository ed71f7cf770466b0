"""Text to tokens: training a tokenizer, loading one, and encoding documents in parallel processes.

Promises that the tokens of a document depend on the tokenizer file and the text alone, whatever the number
of workers; that text which spells a special token is encoded as text, so that no document can forge the end
of one; and that workers end with their parent, however that ends.

A worker is this module run as a program. It is given the tokenizer and then lists of documents as framed
JSON on its standard input, and answers with arrays; nothing is pickled, nothing is inherited but the
interpreter's own flags.
"""

from __future__ import annotations

import contextlib
import json
import os
import queue
import signal
import struct
import subprocess
import sys
from collections import deque
from collections.abc import Generator, Iterable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, BinaryIO, cast

import numpy as np
import numpy.typing as npt
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

from supplychain.artifact import SecureTrainError

END_OF_DOCUMENT = "<|endoftext|>"
KNOWN_ENDS = (END_OF_DOCUMENT, "<|end_of_text|>", "</s>", "<eos>")
SMALLEST_VOCABULARY = 256 + 1  # every byte, and the end of a document

_LENGTH = struct.Struct("<Q")
_LENGTHS = np.dtype("<i8")


@dataclass(frozen=True)
class Encoded:
    """Documents as tokens, each with its end-of-document token: one after another, and the length of each."""

    tokens: npt.NDArray[Any]
    lengths: npt.NDArray[np.int64]


def train(texts: Iterable[str], vocab_size: int) -> bytes:
    """A byte-level BPE tokenizer (the bytes of tokenizer.json) of at most `vocab_size` tokens.
    Deterministic."""
    if vocab_size < SMALLEST_VOCABULARY:
        raise _unusable("the vocabulary is too small", f"at least {SMALLEST_VOCABULARY}", str(vocab_size))
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.train_from_iterator(
        texts,
        trainers.BpeTrainer(
            vocab_size=vocab_size,
            special_tokens=[END_OF_DOCUMENT],
            initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
            show_progress=False,
        ),
    )
    return tokenizer.to_str().encode()


class Encoder:
    """A tokenizer, ready to encode documents on one core."""

    def __init__(self, data: bytes, *, end: str | None = None) -> None:
        """`data` is a tokenizer.json; `end` names the token that ends a document, else a known one is
        used."""
        try:
            self._tokenizer = Tokenizer.from_str(data.decode("utf-8"))
        except Exception as error:  # the library raises bare Exception
            raise _unusable("the tokenizer cannot be loaded", "a tokenizer.json", f"{error!s:.200}") from None
        self._tokenizer.encode_special_tokens = True  # in text they are text
        self._tokenizer.no_truncation()
        self._tokenizer.no_padding()
        vocabulary = self._tokenizer.get_vocab(with_added_tokens=True)
        self.vocab_size = max(vocabulary.values(), default=-1) + 1
        self.end = end or next((token for token in KNOWN_ENDS if token in vocabulary), KNOWN_ENDS[0])
        if self.end not in vocabulary:
            raise _unusable(
                "the tokenizer has no token that ends a document",
                end or f"one of {', '.join(KNOWN_ENDS)}",
                "no such token",
                "name it with --end-of-document",
            )
        self.end_id = int(vocabulary[self.end])
        self._dtype = np.dtype("<u2") if self.vocab_size <= 2**16 else np.dtype("<u4")

    def encode(self, texts: list[str]) -> Encoded:
        parts = [
            np.array([*encoding.ids, self.end_id], self._dtype)
            for encoding in self._tokenizer.encode_batch_fast(texts, add_special_tokens=False)
        ]
        lengths = np.array([len(part) for part in parts], _LENGTHS)
        return Encoded(np.concatenate([np.empty(0, self._dtype), *parts]), lengths)


def encode_all(
    batches: Iterable[list[str]], tokenizer: bytes, *, end: str, workers: int
) -> Generator[Encoded, None, None]:
    """Encode each batch, in order. Memory is bounded by two batches a worker."""
    if workers == 1:
        yield from map(Encoder(tokenizer, end=end).encode, batches)
        return
    idle: queue.SimpleQueue[_Worker] = queue.SimpleQueue()
    started = [_Worker(tokenizer, end) for _ in range(workers)]
    for worker in started:
        idle.put(worker)

    def encode(texts: list[str]) -> Encoded:
        worker = idle.get()
        try:
            return worker.encode(texts)
        finally:
            idle.put(worker)

    pending: deque[Future[Encoded]] = deque()
    pool = ThreadPoolExecutor(workers)
    try:
        for batch in batches:
            pending.append(pool.submit(encode, batch))
            if len(pending) > 2 * workers:
                yield pending.popleft().result()
        while pending:
            yield pending.popleft().result()
    finally:
        for worker in started:
            worker.kill()
        pool.shutdown(cancel_futures=True)
        for worker in started:
            worker.close()


class _Worker:
    """A process that encodes; used by one thread at a time."""

    def __init__(self, tokenizer: bytes, end: str) -> None:
        flags = ["-I"] if sys.flags.isolated else []
        if sys.pycache_prefix:
            flags += ["-X", f"pycache_prefix={sys.pycache_prefix}"]
        self._process = subprocess.Popen(
            [sys.executable, *flags, "-m", __name__], stdin=subprocess.PIPE, stdout=subprocess.PIPE
        )
        self._greeting: tuple[bytes, ...] = (tokenizer, end.encode())  # sent with the first request

    def encode(self, texts: list[str]) -> Encoded:
        try:
            return self._ask(json.dumps(texts, ensure_ascii=False).encode())
        except (OSError, EOFError):
            raise SecureTrainError(
                "ST-D13",
                "a worker process of the preparation died",
                found=f"exit status {self._process.poll()}",
                next_step="look for the kernel's out-of-memory killer; use fewer --workers",
            ) from None

    def _ask(self, request: bytes) -> Encoded:
        requests, answers = cast(BinaryIO, self._process.stdin), cast(BinaryIO, self._process.stdout)
        for frame in (*self._greeting, request):
            _send(requests, frame)
        self._greeting = ()
        requests.flush()
        lengths = np.frombuffer(_receive(answers), _LENGTHS)
        dtype = np.dtype(_receive(answers).decode())
        return Encoded(np.frombuffer(_receive(answers), dtype), lengths)

    def kill(self) -> None:
        self._process.kill()
        self._process.wait()

    def close(self) -> None:
        for pipe in (self._process.stdin, self._process.stdout):
            with contextlib.suppress(OSError):  # what was not yet written is not needed
                cast(BinaryIO, pipe).close()


def _serve(requests: BinaryIO, answers: BinaryIO) -> None:
    """The worker: tokenizer and end token, then documents, until the parent is gone."""
    encoder = Encoder(_receive(requests), end=_receive(requests).decode())
    while True:
        encoded = encoder.encode(json.loads(_receive(requests)))
        _send(answers, encoded.lengths.tobytes())
        _send(answers, encoded.tokens.dtype.str.encode())
        _send(answers, encoded.tokens.tobytes())
        answers.flush()


def _send(stream: BinaryIO, frame: bytes) -> None:
    stream.write(_LENGTH.pack(len(frame)))
    stream.write(frame)


def _receive(stream: BinaryIO) -> bytes:
    (length,) = _LENGTH.unpack(_exactly(stream, _LENGTH.size))
    return _exactly(stream, length)


def _exactly(stream: BinaryIO, length: int) -> bytes:
    data = stream.read(length)
    if len(data) != length:
        raise EOFError
    return data


def _unusable(what: str, expected: str, found: str, next_step: str | None = None) -> SecureTrainError:
    return SecureTrainError("ST-D04", what, expected=expected, found=found, next_step=next_step)


def use_cores(count: int) -> None:
    """How many threads the tokenizer library may use in this process; before its first use."""
    os.environ["TOKENIZERS_PARALLELISM"] = "true" if count > 1 else "false"
    os.environ["RAYON_NUM_THREADS"] = str(count)


if __name__ == "__main__":
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches the parent, whose end ends us
    use_cores(1)
    try:
        _serve(sys.stdin.buffer, sys.stdout.buffer)
    except (EOFError, BrokenPipeError):
        os._exit(0)
