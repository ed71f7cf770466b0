"""What files may be, judged by their content: token shards, safetensors, JSON.

An allow-list, because loaders and scanners disagree about what is harmful. A pickle is refused whatever it is
called. Only the head of a large file is read, through verified reads.
"""

from __future__ import annotations

import json
from collections.abc import Collection
from pathlib import Path

from supplychain.artifact import FileEntry, Manifest, VerifiedArtifact
from supplychain.errors import SecureTrainError

MAX_HEADER = 100_000_000  # bytes of a safetensors header: the limit of the reference implementation
_SIDE_FILES = (".md", ".txt")  # documentation may travel along: nothing loads it


def problems(root: Path, manifest: Manifest, allowed: Collection[str] | None) -> list[SecureTrainError]:
    """A ST-P05 error for each file whose content is of no allowed format. `allowed` None: anything goes."""
    if allowed is None:
        return []
    artifact = VerifiedArtifact(root, manifest)
    found: list[SecureTrainError] = []
    for entry in manifest.files:
        try:
            kind = _format(artifact, entry)
        except SecureTrainError as error:
            found.append(error)
            continue
        if kind not in allowed and not entry.path.endswith(_SIDE_FILES):
            found.append(
                SecureTrainError(
                    "ST-P05",
                    "the file is of no format that the policy allows",
                    where=str(root / entry.path),
                    expected=", ".join(sorted(allowed)),
                    found=kind or "another format, or content that does not fit its name",
                    next_step=(
                        "remove the file, convert it (safetensors, JSON), or allow its format in the policy"
                    ),
                )
            )
    return found


def _format(artifact: VerifiedArtifact, entry: FileEntry) -> str | None:
    """The format that name and content agree on, or None."""
    suffix = Path(entry.path).suffix
    if suffix in (".bin", ".idx"):
        # Raw integers have no magic number; the dataset's own reader checks sizes and ranges, and nothing
        # else ever opens them.
        return (
            "shards"
            if artifact.manifest.has(
                str(Path(entry.path).with_suffix(".idx" if suffix == ".bin" else ".bin"))
            )
            else None
        )
    if suffix == ".safetensors":
        return "safetensors" if _is_safetensors(artifact, entry) else None
    if suffix in (".json", ".jsonl"):
        return "json" if _is_json(artifact, entry) else None
    return None


def _is_safetensors(artifact: VerifiedArtifact, entry: FileEntry) -> bool:
    """The header is a JSON object of the stated length, and the tensors fill the rest of the file exactly."""
    if entry.size < 8:
        return False
    with artifact.open_file(entry.path) as file:
        length = int.from_bytes(file.read(0, 8), "little")
        if length > min(MAX_HEADER, entry.size - 8):
            return False
        try:
            header = json.loads(bytes(file.read(8, length)))
            ranges = sorted(
                tuple(tensor["data_offsets"]) for name, tensor in header.items() if name != "__metadata__"
            )
        except (ValueError, RecursionError, TypeError, KeyError, AttributeError):
            return False
    position = 0
    for item in ranges:
        if (
            len(item) != 2
            or not all(isinstance(offset, int) for offset in item)
            or item[0] != position
            or item[1] < position
        ):
            return False
        position = item[1]
    return position == entry.size - 8 - length


def _is_json(artifact: VerifiedArtifact, entry: FileEntry) -> bool:
    data = artifact.read_bytes(entry.path)
    documents = [data] if entry.path.endswith(".json") else data.splitlines()
    try:
        for document in documents:
            json.loads(document)
    except (ValueError, RecursionError):
        return False
    return True
