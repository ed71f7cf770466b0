"""Signing: artifacts and statements, by a local key.

A signer turns a payload into a bundle. The launcher holds it; nothing that trains ever does.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Protocol

from supplychain.artifact import SIGNATURES, Manifest, build_manifest, oms, tree, write_durably
from supplychain.artifact.check import BUNDLE_SUFFIX
from supplychain.artifact.digest import Progress
from supplychain.errors import SecureTrainError
from supplychain.trust import bundle
from supplychain.trust.bundle import Bundle
from supplychain.trust.keys import SigningKey, VerifyingKey


class Signer(Protocol):
    """Whoever can sign: a key on disk here; HSM and keyless signers have the same face."""

    @property
    def public(self) -> VerifyingKey: ...

    def sign_payload(self, payload: bytes) -> Bundle: ...


class LocalSigner:
    """Signs with a private key held in this process."""

    def __init__(self, key: SigningKey) -> None:
        self._key = key

    @property
    def public(self) -> VerifyingKey:
        return self._key.public

    def sign_payload(self, payload: bytes) -> Bundle:
        return bundle.emit(payload, self._key.sign(bundle.pae(payload)), self._key.public.identifier)


def sign_artifact(
    root: Path, kind: str, signer: Signer, *, blocks: bool = True, progress: Progress | None = None
) -> Manifest:
    """Build the manifest of `root` and sign it. Earlier signatures, which cover another manifest, are
    replaced.
    """
    manifest = build_manifest(root, kind, blocks=blocks, progress=progress)
    add_signature(root, manifest, signer)
    return manifest


def add_signature(root: Path, manifest: Manifest, signer: Signer) -> Path:
    """Sign `manifest` as it stands, beside the signatures of others: an artifact may need several."""
    name = os.fsencode(root.resolve().name).decode("utf-8", "replace")
    signed = signer.sign_payload(oms.payload(root, name, manifest))
    path = root / SIGNATURES / f"{signer.public.name}{BUNDLE_SUFFIX}"
    try:
        _refuse_namesake(root, path, signer.public)
        path.parent.mkdir(exist_ok=True)
        write_durably(path, signed.data)
    except OSError as error:
        raise SecureTrainError(
            "ST-U04", f"the signature cannot be written: {error.strerror}", where=str(path)
        ) from None
    return path


def _refuse_namesake(root: Path, path: Path, key: VerifyingKey) -> None:
    """Another key of the same name may have signed: its signature must not be overwritten."""
    try:
        data = tree.read_file(root, f"{SIGNATURES}/{path.name}", limit=bundle.MAX_BUNDLE, code="ST-S03")
    except FileNotFoundError:
        return
    other = bundle.parse(data, where=str(path)).key_hint
    if other != key.identifier:
        raise SecureTrainError(
            "ST-U05",
            f"another key called {key.name!r} has signed already",
            where=str(path),
            expected=f"sha256:{key.identifier}",
            found=f"sha256:{other}",
            next_step="give one of the two keys another name",
        )
