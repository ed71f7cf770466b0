"""Rules that leave documents out of a dataset: plain functions of a document's text.

A rule is known by its name, which is recorded with the number of documents that it dropped. Since it may
remember what it saw (a duplicate is one only the second time), it is started anew for each reading.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from dataclasses import dataclass

Keep = Callable[[str], bool]


@dataclass(frozen=True)
class Rule:
    name: str
    start: Callable[[], Keep]


def at_least(characters: int) -> Rule:
    return Rule(f"shorter than {characters} characters", lambda: lambda text: len(text) >= characters)


def at_most(characters: int) -> Rule:
    return Rule(f"longer than {characters} characters", lambda: lambda text: len(text) <= characters)


def unique() -> Rule:
    """Drops exact repetitions. Needs about 100 bytes of memory for each document that it keeps."""

    def start() -> Keep:
        seen: set[bytes] = set()

        def keep(text: str) -> bool:
            digest = hashlib.sha256(text.encode()).digest()[:16]
            known = len(seen)
            seen.add(digest)
            return len(seen) > known

        return keep

    return Rule("exact duplicates", start)
