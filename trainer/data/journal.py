"""How far a preparation got, so that one that was killed goes on there.

Beside the unfinished shards lies a journal: what is prepared (a digest of everything that decides the
result), how many batches of documents are durably written, a digest of their text, and the sizes of the
shards then. Who goes on reads all sources again, which is cheap beside tokenizing, and skips these batches
if their text is still the same.
"""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass
from pathlib import Path

from supplychain.artifact import SecureTrainError, canonical_json, parse_json, write_durably

NAME = "journal.json"
EVERY = 32  # batches between two entries: about half a minute of one core

Shards = dict[str, list[list[int]]]  # of each split: [tokens, documents] of each shard


@dataclass(frozen=True)
class Entry:
    batches: int
    chain: str  # over the text of these batches, hex
    shards: Shards


START = Entry(0, "", {})


def extend(chain: str, split: str, texts: list[str]) -> str:
    batch = json.dumps([chain, split, texts], ensure_ascii=False)
    return hashlib.sha256(batch.encode()).hexdigest()


def read(folder: Path, subject: str) -> Entry:
    """The newest entry about `subject`; START if there is none, whatever the reason."""
    try:
        document = parse_json((folder / NAME).read_bytes(), what=NAME)
        if document["subject"] != subject:
            return START
        return Entry(int(document["batches"]), str(document["chain"]), document["shards"])
    except (OSError, SecureTrainError, KeyError, TypeError, ValueError):
        return START


def write(folder: Path, subject: str, entry: Entry) -> None:
    document = {
        "subject": subject,
        "batches": str(entry.batches),
        "chain": entry.chain,
        "shards": entry.shards,
    }
    write_durably(folder / NAME, canonical_json(document))
