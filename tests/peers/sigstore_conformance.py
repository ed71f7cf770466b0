"""The entry point that sigstore-conformance starts: `verify-bundle`, by our own verification.

    pytest --entrypoint="python -m tests.peers.sigstore_conformance" --skip-signing  (in its checkout)

Identities go the way of every keyless bundle (`supplychain.trust.keyless`). A managed key goes the way of our
keys; its log entry, which our own bundles never have, is compared and proven here. Without a trusted root the
suite means the public instance, whose root the sigstore package ships.
"""

from __future__ import annotations

import argparse
import base64
import hashlib
import json
import re
import sys
from importlib import resources
from pathlib import Path
from typing import Any
from urllib.parse import quote

from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.asymmetric import ec, utils

from supplychain.artifact import parse_json
from supplychain.errors import BUG, SecureTrainError
from supplychain.trust import keyless
from supplychain.trust.keys import VerifyingKey, parse_public
from supplychain.trust.roots import Identity, Instance


def verify(
    bundle: Path,
    target: str,
    *,
    identity: str,
    issuer: str,
    key: Path | None,
    root: Path | None,
    staging: bool,
) -> None:
    """Raises SecureTrainError unless the bundle is a valid signature of the target."""
    data = bundle.read_bytes()
    where = str(bundle)
    digest = _digest(target)
    instance = Instance("staging" if staging else "public", root.read_bytes() if root else _shipped(staging))
    parse_json(data, what="the bundle", where=where, code="ST-S03")  # strict before anybody else reads it
    if key is not None:
        _managed(data, parse_public("key", key.read_bytes(), where=str(key)), digest, instance, where)
    else:
        keyless.verify_message(data, Identity("it", issuer, identity, instance), digest, where=where)


def _digest(target: str) -> bytes:
    if re.fullmatch(r"sha256:[0-9a-f]{64}", target) and not Path(target).exists():
        return bytes.fromhex(target.removeprefix("sha256:"))
    return hashlib.sha256(Path(target).read_bytes()).digest()


def _shipped(staging: bool) -> bytes:
    host = "sigstage.dev" if staging else "sigstore.dev"
    place = resources.files("sigstore._store") / quote(f"https://tuf-repo-cdn.{host}", safe="")
    return (place / "trusted_root.json").read_bytes()


def _managed(data: bytes, key: VerifyingKey, digest: bytes, instance: Instance, where: str) -> None:
    """A signature of a file by a key, and its entry in the log."""
    from sigstore_models.bundle.v1 import Bundle

    def refuse(code: str, what: str) -> SecureTrainError:
        return SecureTrainError(code, what, where=where)

    try:
        inner = Bundle.from_json(data)
    except ValueError as error:
        raise refuse("ST-S03", f"the bundle is malformed: {error}") from None
    message = inner.message_signature
    if message is None or inner.verification_material.public_key is None:
        raise refuse("ST-S03", "a bundle with a key's signature of a file is needed")
    assert isinstance(key.key, ec.EllipticCurvePublicKey)
    try:
        key.key.verify(message.signature, digest, ec.ECDSA(utils.Prehashed(hashes.SHA256())))
    except InvalidSignature:
        raise refuse("ST-S01", "the signature is not valid") from None
    for entry in inner.verification_material.tlog_entries:
        _logged(entry, key, message.signature, digest, instance, where)


def _logged(
    entry: Any, key: VerifyingKey, signature: bytes, digest: bytes, instance: Instance, where: str
) -> None:
    from sigstore._internal.trust import KeyringPurpose
    from sigstore.errors import Error
    from sigstore.models import TransparencyLogEntry

    body = json.loads(entry.canonicalized_body)["spec"]
    expected = (
        digest.hex(),
        base64.b64encode(signature).decode(),
        base64.b64encode(key.pem).decode(),
    )
    found = (
        body["data"]["hash"]["value"],
        body["signature"]["content"],
        body["signature"]["publicKey"]["content"],
    )
    if found != expected:
        raise SecureTrainError("ST-S01", "the log entry is of something else", where=where)
    root = keyless._verifier(instance)._trusted_root
    try:
        TransparencyLogEntry(entry)._verify(root.rekor_keyring(KeyringPurpose.VERIFY))
    except Error as error:
        raise SecureTrainError("ST-S01", f"the log entry is not valid: {error}", where=where) from None


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("verb", choices=["verify-bundle"])
    parser.add_argument("--staging", action="store_true")
    parser.add_argument("--bundle", type=Path, required=True)
    parser.add_argument("--certificate-identity", default="")
    parser.add_argument("--certificate-oidc-issuer", default="")
    parser.add_argument("--key", type=Path)
    parser.add_argument("--trusted-root", type=Path)
    parser.add_argument("target", metavar="FILE_OR_DIGEST")
    chosen = parser.parse_args()
    try:
        verify(
            chosen.bundle,
            chosen.target,
            identity=chosen.certificate_identity,
            issuer=chosen.certificate_oidc_issuer,
            key=chosen.key,
            root=chosen.trusted_root,
            staging=chosen.staging,
        )
    except SecureTrainError as error:
        print(error, file=sys.stderr)
        return error.exit_code or BUG
    return 0


if __name__ == "__main__":
    sys.exit(main())
