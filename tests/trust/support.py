"""What the tests of trust share: keys, signed artifacts, and bundles with one thing wrong."""

from __future__ import annotations

import base64
import functools
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

from supplychain.artifact import SIGNATURES, Manifest
from supplychain.trust.keys import ALGORITHMS, SigningKey
from supplychain.trust.roots import Role, Trust
from supplychain.trust.signers import LocalSigner, sign_artifact
from supplychain.trust.verify import SignedArtifact, verify_artifact
from tests.artifact.support import make_tree

STATEMENT: dict[str, Any] = {
    "_type": "https://in-toto.io/Statement/v1",
    "subject": [{"name": "it", "digest": {"sha256": "a" * 64}}],
    "predicateType": "urn:secure-train:test:v1",
    "predicate": {"answer": "42"},
}
TYPE = "urn:secure-train:test:v1"


@functools.cache
def key(name: str, algorithm: str = "ecdsa-p256") -> SigningKey:
    """The same key for the same name, throughout the tests."""
    return SigningKey(name, ALGORITHMS[algorithm]())


def trust(*keys: SigningKey, role: str = "data", threshold: int = 1) -> Trust:
    identifiers = tuple(item.public.identifier for item in keys)
    return Trust(
        {item.public.identifier: item.public for item in keys}, {role: Role(role, identifiers, threshold)}
    )


def signed(root: Path, signer: SigningKey | None = None, files: dict[str, bytes] | None = None) -> Manifest:
    return sign_artifact(make_tree(root, files), "dataset", LocalSigner(signer or key("alice")))


def check(root: Path, *keys: SigningKey, threshold: int = 1, kind: str = "dataset") -> SignedArtifact:
    return verify_artifact(root, trust(*(keys or (key("alice"),)), threshold=threshold), "data", kinds={kind})


def bundle_path(root: Path, name: str = "alice") -> Path:
    return root / SIGNATURES / f"{name}.sigstore.json"


def document(path: Path) -> dict[str, Any]:
    value: dict[str, Any] = json.loads(path.read_bytes())
    return value


def edit(path: Path, change: Callable[[dict[str, Any]], object]) -> None:
    """Change the stored bundle's document in place."""
    value = document(path)
    change(value)
    path.write_text(json.dumps(value))


def payload(path: Path) -> dict[str, Any]:
    value: dict[str, Any] = json.loads(base64.b64decode(document(path)["dsseEnvelope"]["payload"]))
    return value


def sign_bytes(data: bytes, signer: SigningKey | None = None) -> bytes:
    """A bundle over any payload, rightly signed: for statements that say something wrong."""
    return LocalSigner(signer or key("alice")).sign_payload(data).data


def resign(path: Path, change: Callable[[dict[str, Any]], object], signer: SigningKey | None = None) -> None:
    """Change the signed statement and sign it again: a trusted signer's own mistake, or malice."""
    statement = payload(path)
    change(statement)
    path.write_bytes(sign_bytes(json.dumps(statement).encode(), signer))


def statement_bundle(signer: SigningKey | None = None, **changes: Any) -> bytes:
    return sign_bytes(json.dumps(STATEMENT | changes).encode(), signer)
