"""Sigstore bundles v0.3 with a DSSE envelope: writing ours and parsing foreign ones.

Owns the shape. Parsing is strict: one media type, one signature, one payload type, bounded size; what is not
understood is refused. It says nothing about validity: that is `verify.py`'s word alone.
"""

from __future__ import annotations

import base64
import binascii
import hashlib
from dataclasses import dataclass
from typing import Any

from supplychain.artifact import canonical_json, parse_json
from supplychain.errors import SecureTrainError

MEDIA_TYPE = "application/vnd.dev.sigstore.bundle.v0.3+json"
PAYLOAD_TYPE = "application/vnd.in-toto+json"
MAX_BUNDLE = 64 << 20  # bytes


@dataclass(frozen=True)
class Bundle:
    """A parsed bundle: the signed statement's bytes, the signature, and the hint that names the key (sha256
    of its PEM).
    """

    payload: bytes
    signature: bytes
    key_hint: str
    data: bytes

    @property
    def digest(self) -> str:
        """sha256 (hex) of the bundle's bytes: how later statements refer to this one."""
        return hashlib.sha256(self.data).hexdigest()


def pae(payload: bytes) -> bytes:
    """DSSE v1 pre-authentication encoding: what is actually signed."""
    kind = PAYLOAD_TYPE.encode()
    return b"DSSEv1 %d %s %d %s" % (len(kind), kind, len(payload), payload)


def emit(payload: bytes, signature: bytes, key_hint: str) -> Bundle:
    data = canonical_json(
        {
            "mediaType": MEDIA_TYPE,
            "verificationMaterial": {"publicKey": {"hint": key_hint}, "tlogEntries": []},
            "dsseEnvelope": {
                "payload": base64.b64encode(payload).decode(),
                "payloadType": PAYLOAD_TYPE,
                "signatures": [{"sig": base64.b64encode(signature).decode(), "keyid": ""}],
            },
        }
    )
    return Bundle(payload, signature, key_hint, data)


def parse(data: bytes, *, where: str) -> Bundle:
    """Parse foreign bytes; ST-S03 for everything that is not exactly a key-signed bundle of an in-toto
    statement.
    """

    def refuse(what: str, expected: str | None = None, found: object = None) -> SecureTrainError:
        text = None if found is None else str(found)[:200]
        return SecureTrainError(
            "ST-S03",
            what,
            where=where,
            expected=expected,
            found=text,
            next_step="restore the signature, or sign again",
        )

    document = parse_json(data, what=f"the bundle {where}", code="ST-S03", limit=MAX_BUNDLE)
    if not isinstance(document, dict) or document.get("mediaType") != MEDIA_TYPE:
        raise refuse(
            "this is not a Sigstore bundle of the version that is accepted",
            MEDIA_TYPE,
            document.get("mediaType") if isinstance(document, dict) else None,
        )
    try:
        material, envelope = document["verificationMaterial"], document["dsseEnvelope"]
        signatures = envelope["signatures"]
        if envelope["payloadType"] != PAYLOAD_TYPE:
            raise refuse("the bundle signs another kind of payload", PAYLOAD_TYPE, envelope["payloadType"])
        if not isinstance(signatures, list) or len(signatures) != 1:
            raise refuse("the bundle must hold exactly one signature", "1", len(signatures))
        if "publicKey" not in material:
            raise refuse("the bundle is not signed by a key", "publicKey", ", ".join(sorted(material)))
        hint = material["publicKey"]["hint"]
        if not isinstance(hint, str) or len(hint) != 64:
            raise refuse("the bundle does not name its key by a sha256 digest")
        return Bundle(_decode(envelope["payload"]), _decode(signatures[0]["sig"]), hint, data)
    except (KeyError, TypeError, AttributeError, binascii.Error, ValueError) as error:
        raise refuse(f"the bundle is malformed ({type(error).__name__}: {error})") from None


def _decode(text: Any) -> bytes:
    if not isinstance(text, str):
        raise TypeError("base64 text expected")
    return base64.b64decode(text, validate=True)
