"""The embedded corpus: the 42 works of William Shakespeare, five megabytes of plain ASCII in the public
domain.

Owns `shakespeare.txt.xz` and the digests that `manifest.json` states for it. Promises that every byte it
hands out was checked: a changed package file is an error, never a slightly different text. `ORIGIN.md` says
where the text comes from, `python -m trainer.corpus.build` makes it again.
"""

from __future__ import annotations

import hashlib
import lzma
import re
from functools import cache
from importlib import resources

from supplychain.artifact import SecureTrainError, parse_json

NAME = "shakespeare"

# Where a document begins. An act is one document with its first scene; prologues and lists of persons
# belong to what stands before them.
_NUMBER = r"(?:[IVX]+|[0-9]+|FIRST|SECOND|THIRD|FOURTH|FIFTH)\b"
_HEADING = re.compile(
    rf"""
      ^[^\n]+\n\n?by\ William\ Shakespeare$                                      # the title of a work
    | ^(?:ACT|Act)\ +{_NUMBER}[^\n]*(?:\s+(?:SCENE|Scene)\ +{_NUMBER})?
    | ^(?:SCENE|Scene)\ +{_NUMBER}
    | ^[IVXLC]+\.?$                                                              # the number of a sonnet
    """,
    re.MULTILINE | re.VERBOSE,
)


@cache
def text() -> str:
    """The whole text. ST-D01 if the packaged file, or what it unpacks to, is not the one that was
    released."""
    folder = resources.files(__name__)
    manifest = parse_json(folder.joinpath("manifest.json").read_bytes(), what="the corpus manifest")
    compressed = folder.joinpath(manifest["compressed"]["name"]).read_bytes()
    _check(compressed, manifest["compressed"])
    plain = lzma.LZMADecompressor(memlimit=256 << 20).decompress(compressed, manifest["text"]["size"] + 1)
    _check(plain, manifest["text"])
    return plain.decode("ascii")


def documents() -> list[str]:
    """The text cut into its scenes, sonnets and poems, in order; joined, they are the text again."""
    whole = text()
    starts = [match.start() for match in _HEADING.finditer(whole)]
    return [whole[start:end] for start, end in zip(starts, [*starts[1:], len(whole)], strict=True)]


def _check(data: bytes, expected: dict[str, str | int]) -> None:
    found = hashlib.sha256(data).hexdigest()
    if (len(data), found) != (expected["size"], expected["sha256"]):
        raise SecureTrainError(
            "ST-D01",
            "the embedded corpus is not the one that was released",
            where=str(expected["name"]),
            expected=f"sha256:{expected['sha256']}",
            found=f"sha256:{found}",
            next_step="install secure-train again, and find out what changed its files",
        )
