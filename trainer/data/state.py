"""Where a run stands in its order: how many samples were consumed, and a digest of which.

The state is JSON under 1 KB, the same on every rank, and enough to go on exactly. A state that does not fit
the run is refused: another seed, length, order or packing, other data or weights before the sample that it
counts, another transcript.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Mapping, Sequence

import numpy as np
import numpy.typing as npt

from supplychain.artifact import SecureTrainError
from trainer.data.order import MAX_SAMPLES, PACKING, Indices
from trainer.data.samples import SPAN, Samples

STATE = "urn:secure-train:loader-state:v1"


class Cursor:
    """A place in the order of `samples`, before sample `end`."""

    def __init__(self, samples: Samples, end: int) -> None:
        self._samples, self._end = samples, end
        self._transcript = Transcript(samples.digests, samples.seq_len, samples.packing)
        self._chain = self._transcript.start  # over the whole spans before `consumed`
        self.consumed = 0

    @property
    def transcript(self) -> str:
        return self._transcript_at(self.consumed, self._chain).hex()

    def advance(self, count: int) -> None:
        before, self.consumed = self.consumed, self.consumed + count
        for number in range(before // SPAN, self.consumed // SPAN):
            self._chain = self._transcript.extend(self._chain, *self._samples.span(number))

    def state_dict(self) -> dict[str, str]:
        return self._identity(self.consumed) | {
            "consumed": str(self.consumed),
            "chain": self._chain.hex(),
            "transcript": self.transcript,
        }

    def load_state_dict(self, state: Mapping[str, str]) -> None:
        """ST-D10 if the state does not fit; nothing has changed then."""
        consumed = _checked_count(state)
        for key, value in self._identity(consumed).items():
            if state[key] != value:
                raise _unfit(f"the loader's state has another {_MEANINGS.get(key, key)}", value, state[key])
        if consumed > self._end:
            raise _unfit("the loader's state is past the end of the run", str(self._end), str(consumed))
        chain = bytes.fromhex(state["chain"])
        found = self._transcript_at(consumed, chain).hex()
        if found != state["transcript"] or (consumed < SPAN and chain != self._transcript.start):
            raise _unfit("the samples that the state counts are not those it saw", found, state["transcript"])
        self.consumed, self._chain = consumed, chain

    def _identity(self, consumed: int) -> dict[str, str]:
        order = self._samples.order
        return {
            "schema": STATE,
            "order": order.name,
            "packing": self._samples.packing,
            "seed": str(order.seed),
            "seq_len": str(self._samples.seq_len),
            "schedule": order.prefix_digest(consumed),
        }

    def _transcript_at(self, consumed: int, chain: bytes) -> bytes:
        begin = consumed // SPAN * SPAN
        return self._transcript.extend(chain, *self._samples.located(begin, consumed - begin))


class Transcript:
    """The digest of what a run consumed, in order: T(0) = H(packing, length of a sample), and over spans of
    SPAN samples T(n) = H(T(start of n's span) || for each sample: digest of its manifest, its place).

    A manifest binds the digest of every block and the description their sizes, so a place (the number of a
    first token, or of a packed row) stands for its bytes: to name it under the manifest's digest commits to
    the same as listing block digests would. It needs neither data nor block digests of the shards that other
    ranks read, so each rank computes all of it, it depends on neither ranks nor batches, and whoever has
    manifests and schedule can compute it again. That the bytes were those of the manifest is what verified
    reads are for.
    """

    def __init__(self, digests: Sequence[str], seq_len: int, packing: str = PACKING) -> None:
        self._digests = np.frombuffer(bytes.fromhex("".join(digests)), np.uint8).reshape(-1, 32)
        self.start = hashlib.sha256(f"secure-train transcript/v1 {packing} {seq_len}".encode()).digest()

    def extend(self, chain: bytes, sources: Indices, places: Indices) -> bytes:
        if not len(sources):
            return chain
        records: npt.NDArray[np.uint8] = np.concatenate(
            [self._digests[sources], places.astype("<u8").view(np.uint8).reshape(-1, 8)], axis=1
        )
        return hashlib.sha256(chain + records.tobytes()).digest()


_MEANINGS = {
    "order": "algorithm",
    "schedule": "history: datasets, weights or stages differ before the sample that it counts",
    "seq_len": "sequence length",
}
_FORMS = {
    "schema": STATE,
    "order": "[a-z0-9/]{1,60}",
    "packing": "[a-z0-9/]{1,40}",
    "seed": "0|[1-9][0-9]{0,19}",
    "seq_len": "[1-9][0-9]{0,9}",
    "schedule": "[0-9a-f]{64}",
    "consumed": "0|[1-9][0-9]{0,18}",
    "chain": "[0-9a-f]{64}",
    "transcript": "[0-9a-f]{64}",
}


def _checked_count(state: Mapping[str, str]) -> int:
    """`consumed` of a foreign state that has just the fields it should, each of the right form."""
    if set(state) != set(_FORMS):
        raise _unfit(
            "the loader's state has other fields than it should", ", ".join(_FORMS), ", ".join(state)
        )
    for key, form in _FORMS.items():
        if not isinstance(state[key], str) or not re.fullmatch(form, state[key]):
            raise _unfit(f"the field {key!r} of the loader's state is malformed", form, f"{state[key]!r:.80}")
    consumed = int(state["consumed"])
    if consumed >= MAX_SAMPLES:
        raise _unfit("the loader's state counts too many samples", f"below {MAX_SAMPLES}", str(consumed))
    return consumed


def _unfit(what: str, expected: str, found: str) -> SecureTrainError:
    return SecureTrainError(
        "ST-D10",
        what,
        expected=expected,
        found=found,
        next_step="resume with the run's own data, seed and schedule; changes belong in a new stage",
    )
