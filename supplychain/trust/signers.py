"""Signing: artifacts and statements, by a key or a certificate; keyless signers are `keyless.py`'s.

A signer turns a payload into a bundle. The launcher holds it; nothing that trains ever does.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Protocol

from cryptography.hazmat.primitives import serialization

from supplychain.artifact import SIGNATURES, FileEntry, Manifest, build_manifest, oms, tree, write_durably
from supplychain.artifact.check import BUNDLE_SUFFIX
from supplychain.artifact.digest import Progress
from supplychain.errors import SecureTrainError
from supplychain.trust import bundle
from supplychain.trust.bundle import Bundle
from supplychain.trust.keys import VerifyingKey
from supplychain.trust.roots import Authority, Holder, Signatory


class Signer(Protocol):
    """Whoever can sign: a key on disk, a certificate's holder, a hardware module, a Sigstore identity."""

    @property
    def public(self) -> Signatory: ...

    def sign_payload(self, payload: bytes) -> Bundle: ...


class PrivateKey(Protocol):
    """A private key that signs without showing itself: in this process, or in a hardware module."""

    @property
    def public(self) -> VerifyingKey: ...

    def sign(self, message: bytes) -> bytes: ...


class LocalSigner:
    """Signs with a private key. With `authority` (a URL) each signature gets an RFC 3161 timestamp."""

    def __init__(self, key: PrivateKey, authority: str | None = None) -> None:
        self._key = key
        self._authority = authority

    @property
    def public(self) -> VerifyingKey:
        return self._key.public

    def sign_payload(self, payload: bytes) -> Bundle:
        signature = self._key.sign(bundle.pae(payload))
        return bundle.emit(
            payload, signature, self._key.public.identifier, timestamps=_stamps(self._authority, signature)
        )


class CertificateSigner:
    """Signs as the holder of a certificate: `chain` is PEM, his own first, the root may be left out."""

    def __init__(self, key: PrivateKey, chain: bytes, authority: str | None = None, *, where: str) -> None:
        from supplychain.trust import certificates  # late: most signatures are by keys

        self._key = key
        self._authority = authority
        parsed = certificates.load_pem(chain, where=where)
        if certificates.public_key(parsed[0]) != key.public.pem:
            raise SecureTrainError(
                "ST-S06",
                "the certificate is of another key",
                where=where,
                expected=f"a certificate of {key.public.name} (sha256:{key.public.identifier[:12]}...)",
                next_step="put the certificate of this key first in the file",
            )
        self._chain = [item.public_bytes(serialization.Encoding.DER) for item in parsed]
        names = certificates.subjects(parsed[0], where=where)
        self._holder = Holder(key.public.name, names[0] if names else "", Authority("", b""))

    @property
    def public(self) -> Holder:
        return self._holder

    def sign_payload(self, payload: bytes) -> Bundle:
        signature = self._key.sign(bundle.pae(payload))
        return bundle.emit(
            payload, signature, "", certificates=self._chain, timestamps=_stamps(self._authority, signature)
        )


def _stamps(authority: str | None, signature: bytes) -> list[bytes]:
    if authority is None:
        return []
    from supplychain.trust import timestamps  # late: it talks to the network, and few ask for it

    return [timestamps.request(authority, signature)]


def sign_artifact(
    root: Path,
    kind: str,
    signer: Signer,
    *,
    blocks: bool = True,
    known: Mapping[str, FileEntry] | None = None,
    progress: Progress | None = None,
) -> Manifest:
    """Build the manifest of `root` and sign it. Earlier signatures, which cover another manifest, are
    replaced. `known` entries are not hashed again: see `again`.
    """
    manifest = build_manifest(root, kind, blocks=blocks, known=known, progress=progress)
    add_signature(root, manifest, signer)
    return manifest


def add_signature(root: Path, manifest: Manifest, signer: Signer) -> Path:
    """Sign `manifest` as it stands, beside the signatures of others: an artifact may need several."""
    name = os.fsencode(root.resolve().name).decode("utf-8", "replace")
    signed = signer.sign_payload(oms.payload(root, name, manifest))
    path = root / SIGNATURES / f"{_file_name(signer.public.name)}{BUNDLE_SUFFIX}"
    try:
        path = _beside_namesakes(root, path, signed)
        path.parent.mkdir(exist_ok=True)
        write_durably(path, signed.data)
    except OSError as error:
        raise SecureTrainError(
            "ST-U04", f"the signature cannot be written: {error.strerror}", where=str(path)
        ) from None
    return path


def _file_name(name: str) -> str:
    """A signer's name as that of a file: identities are addresses and URIs."""
    return re.sub(r"[^A-Za-z0-9@._-]+", "-", name).strip(".-")[-120:] or "signer"


def _beside_namesakes(root: Path, path: Path, ours: Bundle) -> Path:
    """Another signer of the same name may have signed: his signature stays, ours gets a name with its key's
    digest.
    """
    try:
        data = tree.read_file(root, f"{SIGNATURES}/{path.name}", limit=bundle.MAX_BUNDLE, code="ST-S03")
    except FileNotFoundError:
        return path
    other = bundle.parse(data, where=str(path))
    if (other.method, other.key_hint) == (ours.method, ours.key_hint):
        return path
    name = path.name.removesuffix(BUNDLE_SUFFIX)
    return path.with_name(f"{name}-{(ours.key_hint or ours.digest)[:12]}{BUNDLE_SUFFIX}")
