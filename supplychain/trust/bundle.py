"""Sigstore bundles v0.3 with a DSSE envelope: writing ours and parsing foreign ones.

Owns the shape. Parsing is strict: one media type, one signature, one payload type, bounded size; what is not
understood is refused. It says nothing about validity: that is `verify.py`'s word alone.
"""

from __future__ import annotations

import base64
import hashlib
import re
from dataclasses import dataclass
from typing import Any

from supplychain.artifact import canonical_json, parse_json
from supplychain.errors import SecureTrainError

MEDIA_TYPE = "application/vnd.dev.sigstore.bundle.v0.3+json"
PAYLOAD_TYPE = "application/vnd.in-toto+json"
MAX_BUNDLE = 64 << 20  # bytes
_HINT = re.compile(r"[0-9a-f]{64}")


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

    def only(value: Any, required: set[str], optional: set[str], name: str) -> dict[str, Any]:
        if not isinstance(value, dict):
            raise refuse(f"{name} is no object")
        if not required <= set(value) <= required | optional:
            raise refuse(f"{name} has other fields", ", ".join(sorted(required)), ", ".join(sorted(value)))
        return value

    document = parse_json(data, what="the bundle", where=where, code="ST-S03", limit=MAX_BUNDLE)
    if not isinstance(document, dict) or document.get("mediaType") != MEDIA_TYPE:
        found = document.get("mediaType") if isinstance(document, dict) else None
        raise refuse("this is not a Sigstore bundle of the version that is accepted", MEDIA_TYPE, found)
    only(document, {"mediaType", "verificationMaterial", "dsseEnvelope"}, set(), "the bundle")
    material = only(
        document["verificationMaterial"], {"publicKey"}, {"tlogEntries"}, "the verification material"
    )
    if material.get("tlogEntries", []) != []:
        raise refuse("the bundle has log entries, and nothing here checks those of a key", "none")
    hint = only(material["publicKey"], {"hint"}, set(), "the public key")["hint"]
    if not isinstance(hint, str) or not _HINT.fullmatch(hint):
        raise refuse("the bundle does not name its key by a sha256 digest", "64 hexadecimal digits", hint)
    envelope = only(document["dsseEnvelope"], {"payload", "payloadType", "signatures"}, set(), "the envelope")
    if envelope["payloadType"] != PAYLOAD_TYPE:
        raise refuse("the bundle signs another kind of payload", PAYLOAD_TYPE, envelope["payloadType"])
    signatures = envelope["signatures"]
    if not isinstance(signatures, list) or len(signatures) != 1:
        found = len(signatures) if isinstance(signatures, list) else None
        raise refuse("the bundle must hold exactly one signature", "1", found)
    signature = only(signatures[0], {"sig"}, {"keyid"}, "the signature")
    try:
        return Bundle(_decode(envelope["payload"]), _decode(signature["sig"]), hint, data)
    except (TypeError, ValueError) as error:
        raise refuse(f"the bundle's base64 is malformed: {error}") from None


def _decode(text: Any) -> bytes:
    if not isinstance(text, str):
        raise TypeError("base64 text expected")
    return base64.b64decode(text, validate=True)
