"""Artifacts: folders with a manifest, block digests and signatures; and verified reads of them.

Standard library only, no torch, no network: this package is imported by the gate and, for reading what was
verified, by the trainer.
"""

from supplychain.artifact.canonical import canonical_json, parse_json
from supplychain.artifact.check import differences
from supplychain.artifact.digest import BLOCK_SIZE
from supplychain.artifact.manifest import (
    BLOCKS,
    MANIFEST,
    SIGNATURES,
    FileEntry,
    Manifest,
    build_manifest,
    claimed_kind,
    sync_folder,
    write_durably,
)
from supplychain.artifact.reads import VerifiedArtifact, VerifiedFile, read_manifest
from supplychain.errors import SecureTrainError

__all__ = [
    "BLOCKS",
    "BLOCK_SIZE",
    "MANIFEST",
    "SIGNATURES",
    "FileEntry",
    "Manifest",
    "SecureTrainError",
    "VerifiedArtifact",
    "VerifiedFile",
    "build_manifest",
    "canonical_json",
    "claimed_kind",
    "differences",
    "parse_json",
    "read_manifest",
    "sync_folder",
    "write_durably",
]
