"""Sigstore bundles v0.3 with a DSSE envelope: writing ours and parsing foreign ones.

Owns the shape. A signer shows itself in one of three ways: a key by its digest, a certificate with its chain,
or a Sigstore certificate with its entry in a transparency log; RFC 3161 timestamps may stand beside each.
Parsing is strict: one media type, one signature, one payload type, bounded size; what is not understood is
refused. It says nothing about validity: that is `verify.py`'s word alone.
"""

from __future__ import annotations

import base64
import hashlib
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

from supplychain.artifact import canonical_json, parse_json
from supplychain.errors import SecureTrainError

MEDIA_TYPE = "application/vnd.dev.sigstore.bundle.v0.3+json"
PAYLOAD_TYPE = "application/vnd.in-toto+json"
MAX_BUNDLE = 64 << 20  # bytes
MAX_CERTIFICATES = 10
MAX_TIMESTAMPS = 8
_HINT = re.compile(r"[0-9a-f]{64}")
_STAMPS = "timestampVerificationData"

Method = Literal["key", "certificate", "keyless"]


@dataclass(frozen=True)
class Bundle:
    """A parsed bundle: the signed statement's bytes, the signature, and how the signer shows itself.

    `key_hint` is the sha256 (hex) of the key's PEM for the method "key", else empty; `certificates` are DER,
    the signer's first; `timestamps` are DER responses of RFC 3161.
    """

    payload: bytes
    signature: bytes
    key_hint: str
    data: bytes
    method: Method = "key"
    certificates: tuple[bytes, ...] = ()
    timestamps: tuple[bytes, ...] = ()

    @property
    def digest(self) -> str:
        """sha256 (hex) of the bundle's bytes: how later statements refer to this one."""
        return hashlib.sha256(self.data).hexdigest()


def pae(payload: bytes) -> bytes:
    """DSSE v1 pre-authentication encoding: what is actually signed."""
    kind = PAYLOAD_TYPE.encode()
    return b"DSSEv1 %d %s %d %s" % (len(kind), kind, len(payload), payload)


def emit(
    payload: bytes,
    signature: bytes,
    key_hint: str,
    *,
    certificates: Sequence[bytes] = (),
    timestamps: Sequence[bytes] = (),
) -> Bundle:
    """The bundle of a key's signature, or with `certificates` (DER, the signer's first) of a holder's."""
    material: dict[str, Any] = {"publicKey": {"hint": key_hint}}
    if certificates:
        chain = [{"rawBytes": _encode(item)} for item in certificates]
        material = {"x509CertificateChain": {"certificates": chain}}
    material["tlogEntries"] = []
    if timestamps:
        material[_STAMPS] = {"rfc3161Timestamps": [{"signedTimestamp": _encode(item)} for item in timestamps]}
    data = canonical_json(
        {
            "mediaType": MEDIA_TYPE,
            "verificationMaterial": material,
            "dsseEnvelope": {
                "payload": "",
                "payloadType": PAYLOAD_TYPE,
                "signatures": [{"sig": _encode(signature), "keyid": ""}],
            },
        }
    )
    # The payload is put in as bytes: it may be large, and needs no escapes.
    first = data.index(b'"payload":"') + len(b'"payload":"')
    data = b"".join((data[:first], base64.b64encode(payload), data[first:]))
    method: Method = "certificate" if certificates else "key"
    hint = "" if certificates else key_hint
    return Bundle(payload, signature, hint, data, method, tuple(certificates), tuple(timestamps))


def parse(data: bytes, *, where: str) -> Bundle:
    """Parse foreign bytes; ST-S03 for everything that is not exactly a bundle of one signed in-toto
    statement. The log entry of a Sigstore bundle is read by `keyless`.
    """
    return _Parser(where).bundle(data)


@dataclass(frozen=True)
class _Parser:
    where: str

    def refuse(self, what: str, expected: str | None = None, found: object = None) -> SecureTrainError:
        text = None if found is None else str(found)[:200]
        return SecureTrainError(
            "ST-S03",
            what,
            where=self.where,
            expected=expected,
            found=text,
            next_step="restore the signature, or sign again",
        )

    def only(self, value: Any, required: set[str], optional: set[str], name: str) -> dict[str, Any]:
        if not isinstance(value, dict):
            raise self.refuse(f"{name} is no object")
        if not required <= set(value) <= required | optional:
            raise self.refuse(
                f"{name} has other fields", ", ".join(sorted(required)), ", ".join(sorted(value))
            )
        return value

    def several(self, value: Any, least: int, most: int, name: str) -> list[Any]:
        if not isinstance(value, list) or not least <= len(value) <= most:
            found = len(value) if isinstance(value, list) else None
            expected = str(least) if least == most else f"{least} to {most}"
            raise self.refuse(f"the bundle does not hold the {name} that it must", expected, found)
        return value

    def bundle(self, data: bytes) -> Bundle:
        document = parse_json(data, what="the bundle", where=self.where, code="ST-S03", limit=MAX_BUNDLE)
        if not isinstance(document, dict) or document.get("mediaType") != MEDIA_TYPE:
            found = document.get("mediaType") if isinstance(document, dict) else None
            raise self.refuse(
                "this is not a Sigstore bundle of the version that is accepted", MEDIA_TYPE, found
            )
        self.only(document, {"mediaType", "verificationMaterial", "dsseEnvelope"}, set(), "the bundle")
        envelope = self.only(
            document["dsseEnvelope"], {"payload", "payloadType", "signatures"}, set(), "the envelope"
        )
        if envelope["payloadType"] != PAYLOAD_TYPE:
            raise self.refuse(
                "the bundle signs another kind of payload", PAYLOAD_TYPE, envelope["payloadType"]
            )
        (item,) = self.several(envelope["signatures"], 1, 1, "one signature")
        signature = self.only(item, {"sig"}, {"keyid"}, "the signature")
        method, hint, certificates, timestamps = self.material(document["verificationMaterial"])
        payload = self.decode(envelope["payload"])
        return Bundle(payload, self.decode(signature["sig"]), hint, data, method, certificates, timestamps)

    def material(self, value: Any) -> tuple[Method, str, tuple[bytes, ...], tuple[bytes, ...]]:
        """How the signer shows itself: exactly one of the three ways, and the timestamps."""
        ways: dict[str, Method] = {
            "publicKey": "key",
            "x509CertificateChain": "certificate",
            "certificate": "keyless",
        }
        way = next((name for name in ways if isinstance(value, dict) and name in value), "publicKey")
        material = self.only(value, {way}, {"tlogEntries", _STAMPS}, "the verification material")
        method = ways[way]
        entries = material.get("tlogEntries", [])
        if method == "keyless":
            self.several(entries, 1, 1, "log entry")
        elif entries != []:
            raise self.refuse(
                "the bundle has log entries, and nothing here checks those of a key", "none", entries
            )
        timestamps = self.timestamps(material.get(_STAMPS))
        if method == "key":
            hint = self.only(material[way], {"hint"}, set(), "the public key")["hint"]
            if not isinstance(hint, str) or not _HINT.fullmatch(hint):
                raise self.refuse(
                    "the bundle does not name its key by a sha256 digest", "64 hexadecimal digits", hint
                )
            return method, hint, (), timestamps
        chain = [material[way]]
        if method == "certificate":
            inner = self.only(material[way], {"certificates"}, set(), "the chain of certificates")
            chain = self.several(inner["certificates"], 1, MAX_CERTIFICATES, "certificates")
        raw = (self.only(item, {"rawBytes"}, set(), "a certificate")["rawBytes"] for item in chain)
        return method, "", tuple(map(self.decode, raw)), timestamps

    def timestamps(self, value: Any) -> tuple[bytes, ...]:
        if value is None:
            return ()
        inner = self.only(value, set(), {"rfc3161Timestamps"}, "the timestamp data")
        items = self.several(inner.get("rfc3161Timestamps", []), 0, MAX_TIMESTAMPS, "timestamps")
        stamps = [self.only(item, {"signedTimestamp"}, set(), "a timestamp") for item in items]
        raw = (item["signedTimestamp"] for item in stamps)
        return tuple(map(self.decode, raw))

    def decode(self, text: Any) -> bytes:
        try:
            if not isinstance(text, str):
                raise TypeError("base64 text expected")
            return base64.b64decode(text, validate=True)
        except (TypeError, ValueError) as error:
            raise self.refuse(f"the bundle's base64 is malformed: {error}") from None


def _encode(data: bytes) -> str:
    return base64.b64encode(data).decode()
