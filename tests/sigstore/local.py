"""A complete Sigstore instance on loopback, for tests.

It mints OIDC tokens and has Fulcio (with a CT log and embedded SCTs), Rekor v2 and v1 (a real RFC 6962 tree,
signed checkpoints, signed entry timestamps), an RFC 3161 timestamp authority and a TUF repository that serves
`trusted_root.json` and `signing_config.v0.2.json`. Clients meet real HTTP and real signatures; `faults` makes
it misbehave in one way or several, `clock` sets the time of all its parts. No network beyond 127.0.0.1.

    with LocalSigstore() as instance:
        config = instance.trust_config()                 # sigstore.models.ClientTrustConfig
        token = instance.token("trainer@example.com")    # sigstore.oidc.IdentityToken
        instance.write_trust_config(path)                # for commands that take --trust-config

Test code only: keys live in memory, proofs are O(n), nothing is hardened.
"""

from __future__ import annotations

import base64
import contextlib
import datetime as dt
import hashlib
import json
import secrets
import struct
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import jwt
import rfc8785
from asn1crypto import algos, cms, core, tsp  # type: ignore[import-untyped]  # no stubs exist
from asn1crypto import x509 as ax509
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec, ed25519
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID
from securesystemslib.signer import CryptoSigner  # type: ignore[attr-defined]  # its face, without __all__
from sigstore.models import ClientTrustConfig
from sigstore.oidc import IdentityToken
from tuf.api.metadata import (  # type: ignore[attr-defined]  # its face, without __all__
    Metadata,
    MetaFile,
    Root,
    Snapshot,
    TargetFile,
    Targets,
    Timestamp,
)

UTC = dt.UTC
DER = serialization.Encoding.DER
PEM = serialization.Encoding.PEM
SPKI = serialization.PublicFormat.SubjectPublicKeyInfo

FULCIO_OID = "1.3.6.1.4.1.57264.1."
SCT_LIST_OID = x509.ObjectIdentifier("1.3.6.1.4.1.11129.2.4.2")

# OIDC claim -> Fulcio extension (suffix of FULCIO_OID); values are DER UTF8Strings.
# https://github.com/sigstore/fulcio/blob/main/docs/oid-info.md
GITHUB = "https://github.com/"
URL_CLAIMS = {
    "job_workflow_ref",
    "repository",
    "repository_owner",
    "workflow_ref",
}  # Fulcio makes URLs of these
CLAIM_EXTENSIONS = {
    "job_workflow_ref": "9",
    "job_workflow_sha": "10",
    "runner_environment": "11",
    "repository": "12",
    "sha": "13",
    "ref": "14",
    "repository_id": "15",
    "repository_owner": "16",
    "workflow_ref": "18",
    "workflow_sha": "19",
    "event_name": "20",
    "repository_visibility": "22",
}


PublicKey = ec.EllipticCurvePublicKey | ed25519.Ed25519PublicKey


def _new_key() -> ec.EllipticCurvePrivateKey:
    return ec.generate_private_key(ec.SECP256R1())


def b64(raw: bytes) -> str:
    return base64.b64encode(raw).decode()


def spki(key: PublicKey) -> bytes:
    return key.public_bytes(DER, SPKI)


def utf8_der(value: str) -> bytes:
    encoded: bytes = core.UTF8String(value).dump()
    return encoded


# --------------------------------------------------------------------------- Merkle log (RFC 6962)


class MerkleLog:
    """Append-only log. O(n) proofs: fine for tests."""

    def __init__(self) -> None:
        self.leaves: list[bytes] = []

    def append(self, body: bytes) -> int:
        self.leaves.append(hashlib.sha256(b"\x00" + body).digest())
        return len(self.leaves) - 1

    @staticmethod
    def _split(n: int) -> int:
        return 1 << ((n - 1).bit_length() - 1)

    def _root(self, nodes: list[bytes]) -> bytes:
        if not nodes:
            return hashlib.sha256(b"").digest()
        if len(nodes) == 1:
            return nodes[0]
        k = self._split(len(nodes))
        return hashlib.sha256(b"\x01" + self._root(nodes[:k]) + self._root(nodes[k:])).digest()

    def _path(self, index: int, nodes: list[bytes]) -> list[bytes]:
        if len(nodes) <= 1:
            return []
        k = self._split(len(nodes))
        if index < k:
            return [*self._path(index, nodes[:k]), self._root(nodes[k:])]
        return [*self._path(index - k, nodes[k:]), self._root(nodes[:k])]

    def proof(self, index: int) -> tuple[bytes, int, list[bytes]]:
        return self._root(self.leaves), len(self.leaves), self._path(index, self.leaves)


# --------------------------------------------------------------------------- the instance


@dataclass
class LocalSigstore:
    """`faults` switches on misbehaviour, so that a client's negative paths can be tested:

    bad-sct, no-sct, expired-cert, bad-checkpoint, wrong-root, wrong-body, bad-set, no-timestamp,
    tsa-wrong-message, tsa-late, rekor-500, fulcio-500.
    """

    issuer: str = "https://issuer.localsigstore.test"
    rekor_version: int = 2
    clock: Callable[[], dt.datetime] = lambda: dt.datetime.now(UTC)
    faults: set[str] = field(default_factory=set)
    host: str = "127.0.0.1"
    port: int = 0

    def __post_init__(self) -> None:
        now = self.clock()
        self.start = now - dt.timedelta(days=1)
        self.end = now + dt.timedelta(days=3650)
        self._oidc_key = _new_key()
        self._root_key, self._int_key, self._ct_key = _new_key(), _new_key(), _new_key()
        self._tsa_root_key, self._tsa_key = _new_key(), _new_key()
        self._rekor_v1_key = _new_key()
        self._rekor_v2_key = ed25519.Ed25519PrivateKey.generate()
        self._rekor_v1_log, self._rekor_v2_log = MerkleLog(), MerkleLog()
        self._lock = threading.Lock()

        self.root_cert = self._ca_cert("localsigstore root", self._root_key, None, None)
        self.int_cert = self._ca_cert(
            "localsigstore intermediate", self._int_key, self.root_cert, self._root_key, eku=True
        )
        self.tsa_root_cert = self._ca_cert("localsigstore tsa root", self._tsa_root_key, None, None)
        self.tsa_cert = self._tsa_leaf()

        self._server = ThreadingHTTPServer((self.host, self.port), self._handler())
        self._server.daemon_threads = True
        self.url = f"http://{self.host}:{self._server.server_address[1]}"
        self.origin = self.url.removeprefix("http://")  # checkpoint origin
        self._tuf = self._build_tuf()

    # ---- lifecycle

    def start_server(self) -> None:
        threading.Thread(target=self._server.serve_forever, args=(0.05,), daemon=True).start()

    def stop(self) -> None:
        self._server.shutdown()
        self._server.server_close()

    def __enter__(self) -> LocalSigstore:
        self.start_server()
        return self

    def __exit__(self, *exc: object) -> None:
        self.stop()

    @contextlib.contextmanager
    def fault(self, *names: str) -> Iterator[None]:
        self.faults |= set(names)
        try:
            yield
        finally:
            self.faults -= set(names)

    # ---- client side helpers

    def raw_token(
        self, identity: str, *, lifetime: int = 600, issuer: str | None = None, **claims: Any
    ) -> str:
        now = int(self.clock().timestamp())
        body = {
            "iss": issuer or self.issuer,
            "sub": identity,
            "aud": "sigstore",
            "iat": now,
            "nbf": now - 5,
            "exp": now + lifetime,
            **claims,
        }
        if "@" in identity and not identity.startswith("http"):
            body.setdefault("email", identity)
            body.setdefault("email_verified", True)
        return jwt.encode(body, self._oidc_key, algorithm="ES256")

    def token(self, identity: str, **kw: Any) -> IdentityToken:
        return IdentityToken(self.raw_token(identity, **kw))

    def trusted_root_dict(self) -> dict[str, Any]:
        valid = {"start": self._ts(self.start)}

        def authority(certs: list[x509.Certificate]) -> dict[str, Any]:
            return {
                "subject": {"organization": "localsigstore", "commonName": "localsigstore"},
                "uri": self.url,
                "certChain": {"certificates": [{"rawBytes": b64(c.public_bytes(DER))} for c in certs]},
                "validFor": valid,
            }

        def log(key: bytes, details: str, key_id: bytes) -> dict[str, Any]:
            return {
                "baseUrl": self.url,
                "hashAlgorithm": "SHA2_256",
                "publicKey": {"rawBytes": b64(key), "keyDetails": details, "validFor": valid},
                "logId": {"keyId": b64(key_id)},
            }

        ct, r1 = spki(self._ct_key.public_key()), spki(self._rekor_v1_key.public_key())
        r2 = spki(self._rekor_v2_key.public_key())
        return {
            "mediaType": "application/vnd.dev.sigstore.trustedroot+json;version=0.1",
            "tlogs": [
                log(r1, "PKIX_ECDSA_P256_SHA_256", hashlib.sha256(r1).digest()),
                log(r2, "PKIX_ED25519", self._rekor_v2_key_id()),
            ],
            "certificateAuthorities": [authority([self.int_cert, self.root_cert])],
            "ctlogs": [log(ct, "PKIX_ECDSA_P256_SHA_256", hashlib.sha256(ct).digest())],
            "timestampAuthorities": [authority([self.tsa_cert, self.tsa_root_cert])],
        }

    def signing_config_dict(self) -> dict[str, Any]:
        def svc(path: str, version: int = 1) -> dict[str, Any]:
            return {
                "url": self.url + path,
                "majorApiVersion": version,
                "operator": "localsigstore",
                "validFor": {"start": self._ts(self.start)},
            }

        return {
            "mediaType": "application/vnd.dev.sigstore.signingconfig.v0.2+json",
            "caUrls": [svc("")],
            "oidcUrls": [svc("/oidc")],
            "rekorTlogUrls": [svc("", self.rekor_version)],
            "rekorTlogConfig": {"selector": "ANY"},
            "tsaUrls": [svc("/api/v1/timestamp")],
            "tsaConfig": {"selector": "ANY"},
        }

    def trust_config_dict(self) -> dict[str, Any]:
        return {
            "mediaType": "application/vnd.dev.sigstore.clienttrustconfig.v0.1+json",
            "trustedRoot": self.trusted_root_dict(),
            "signingConfig": self.signing_config_dict(),
        }

    def trust_config(self) -> ClientTrustConfig:
        return ClientTrustConfig.from_json(json.dumps(self.trust_config_dict()))

    def write_trust_config(self, path: Path) -> Path:
        path.write_text(json.dumps(self.trust_config_dict()))
        return path

    @property
    def tuf_root(self) -> bytes:
        """Bootstrap root for ClientTrustConfig.from_tuf(sig.url + "/tuf", bootstrap_root=...)."""
        return self._tuf["1.root.json"]

    # ---- certificates

    @staticmethod
    def _ts(when: dt.datetime) -> str:
        return when.strftime("%Y-%m-%dT%H:%M:%SZ")

    def _ca_cert(
        self,
        common_name: str,
        key: ec.EllipticCurvePrivateKey,
        issuer: x509.Certificate | None,
        issuer_key: ec.EllipticCurvePrivateKey | None,
        *,
        eku: bool = False,
    ) -> x509.Certificate:
        name = x509.Name(
            [
                x509.NameAttribute(NameOID.ORGANIZATION_NAME, "localsigstore"),
                x509.NameAttribute(NameOID.COMMON_NAME, common_name),
            ]
        )
        signer = issuer_key or key
        b = (
            x509.CertificateBuilder()
            .subject_name(name)
            .issuer_name(issuer.subject if issuer else name)
            .public_key(key.public_key())
            .serial_number(x509.random_serial_number())
            .not_valid_before(self.start)
            .not_valid_after(self.end)
            .add_extension(x509.BasicConstraints(ca=True, path_length=0 if issuer else 1), critical=True)
            .add_extension(_key_usage(cert_sign=True), critical=True)
            .add_extension(x509.SubjectKeyIdentifier.from_public_key(key.public_key()), critical=False)
            .add_extension(
                x509.AuthorityKeyIdentifier.from_issuer_public_key(signer.public_key()), critical=False
            )
        )
        if eku:
            b = b.add_extension(x509.ExtendedKeyUsage([ExtendedKeyUsageOID.CODE_SIGNING]), critical=False)
        return b.sign(signer, hashes.SHA256())

    def _tsa_leaf(self) -> x509.Certificate:
        return (
            x509.CertificateBuilder()
            .subject_name(x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "localsigstore tsa")]))
            .issuer_name(self.tsa_root_cert.subject)
            .public_key(self._tsa_key.public_key())
            .serial_number(x509.random_serial_number())
            .not_valid_before(self.start)
            .not_valid_after(self.end)
            .add_extension(x509.BasicConstraints(ca=False, path_length=None), critical=True)
            .add_extension(_key_usage(), critical=True)
            .add_extension(x509.ExtendedKeyUsage([ExtendedKeyUsageOID.TIME_STAMPING]), critical=True)
            .add_extension(
                x509.SubjectKeyIdentifier.from_public_key(self._tsa_key.public_key()), critical=False
            )
            .add_extension(
                x509.AuthorityKeyIdentifier.from_issuer_public_key(self._tsa_root_key.public_key()),
                critical=False,
            )
            .sign(self._tsa_root_key, hashes.SHA256())
        )

    def issue(self, public_key: Any, claims: dict[str, Any]) -> x509.Certificate:
        """What Fulcio does: a 10 minute certificate with the OIDC identity and an embedded SCT."""
        now = self.clock().replace(microsecond=0)
        start, end = now - dt.timedelta(seconds=1), now + dt.timedelta(minutes=10)
        if "expired-cert" in self.faults:
            start, end = now - dt.timedelta(hours=2), now - dt.timedelta(hours=1)
        identity = claims["sub"]
        if claims.get("email_verified") and claims.get("email"):
            san: x509.GeneralName = x509.RFC822Name(claims["email"])
        else:
            san = x509.UniformResourceIdentifier(identity)
        raw = x509.UnrecognizedExtension

        def oid(suffix: str) -> x509.ObjectIdentifier:
            return x509.ObjectIdentifier(FULCIO_OID + suffix)

        b = (
            x509.CertificateBuilder()
            .subject_name(x509.Name([]))
            .issuer_name(self.int_cert.subject)
            .public_key(public_key)
            .serial_number(x509.random_serial_number())
            .not_valid_before(start)
            .not_valid_after(end)
            .add_extension(_key_usage(), critical=True)
            .add_extension(x509.ExtendedKeyUsage([ExtendedKeyUsageOID.CODE_SIGNING]), critical=False)
            .add_extension(x509.SubjectKeyIdentifier.from_public_key(public_key), critical=False)
            .add_extension(
                x509.AuthorityKeyIdentifier.from_issuer_public_key(self._int_key.public_key()), critical=False
            )
            .add_extension(x509.SubjectAlternativeName([san]), critical=True)
            .add_extension(raw(oid("1"), claims["iss"].encode()), critical=False)
            .add_extension(raw(oid("8"), utf8_der(claims["iss"])), critical=False)
        )
        for claim, suffix in CLAIM_EXTENSIONS.items():
            if value := claims.get(claim):
                text = GITHUB + value if claim in URL_CLAIMS else str(value)
                b = b.add_extension(raw(oid(suffix), utf8_der(text)), critical=False)
        if "no-sct" in self.faults:
            return b.sign(self._int_key, hashes.SHA256())
        # RFC 6962 3.2: the SCT covers the TBSCertificate *without* the SCT extension.
        tbs = b.sign(self._int_key, hashes.SHA256()).tbs_certificate_bytes
        b = b.add_extension(raw(SCT_LIST_OID, self._sct_list(tbs, now)), critical=False)
        return b.sign(self._int_key, hashes.SHA256())

    def _sct_list(self, tbs: bytes, when: dt.datetime) -> bytes:
        millis = int(when.timestamp() * 1000)
        issuer_key_hash = hashlib.sha256(spki(self._int_key.public_key())).digest()
        signed = (
            struct.pack("!BBQH", 0, 0, millis, 1)
            + issuer_key_hash
            + len(tbs).to_bytes(3, "big")
            + tbs
            + b"\0\0"
        )
        if "bad-sct" in self.faults:
            signed += b"x"
        sig = self._ct_key.sign(signed, ec.ECDSA(hashes.SHA256()))
        log_id = hashlib.sha256(spki(self._ct_key.public_key())).digest()
        sct = struct.pack("!B32sQH", 0, log_id, millis, 0) + struct.pack("!BBH", 4, 3, len(sig)) + sig
        entry = struct.pack("!H", len(sct)) + sct
        encoded: bytes = core.OctetString(struct.pack("!H", len(entry)) + entry).dump()
        return encoded

    # ---- HTTP

    def _handler(outer) -> type[BaseHTTPRequestHandler]:
        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"
            disable_nagle_algorithm = True  # without it: ~40 ms per request (delayed ACK)
            wbufsize = -1

            def log_message(self, *args: Any) -> None:
                pass

            def _send(self, status: int, body: bytes, ctype: str = "application/json") -> None:
                self.send_response(status)
                self.send_header("Content-Type", ctype)
                self.send_header("Content-Length", str(len(body)))
                self.end_headers()
                self.wfile.write(body)

            def do_GET(self) -> None:
                if self.path.startswith("/tuf/"):
                    data = outer._tuf.get(self.path.removeprefix("/tuf/"))
                    return self._send(404, b"{}") if data is None else self._send(200, data)
                if self.path == "/api/v2/trustBundle":
                    pems = [c.public_bytes(PEM).decode() for c in (outer.int_cert, outer.root_cert)]
                    return self._send(200, json.dumps({"chains": [{"certificates": pems}]}).encode())
                if (
                    self.path == "/oidc/.well-known/openid-configuration"
                ):  # model-signing 1.1.1 asks even with a token
                    conf = {"issuer": outer.issuer} | {
                        k: f"{outer.url}/oidc/{k}"
                        for k in ("authorization_endpoint", "token_endpoint", "jwks_uri")
                    }
                    return self._send(200, json.dumps(conf).encode())
                return self._send(404, b'{"code":5,"message":"not found"}')

            def do_POST(self) -> None:
                body = self.rfile.read(int(self.headers.get("Content-Length", 0)))
                route = {
                    "/api/v2/signingCert": outer._post_fulcio,
                    "/api/v2/log/entries": outer._post_rekor_v2,
                    "/api/v1/log/entries": outer._post_rekor_v1,
                    "/api/v1/timestamp": outer._post_tsa,
                }.get(self.path)
                if route is None:
                    return self._send(404, b"{}")
                try:
                    status, out, ctype = route(body, self.headers)
                except Exception as exc:  # a client error as far as the tests are concerned
                    status, ctype = 400, "application/json"
                    out = json.dumps({"code": 3, "message": f"{type(exc).__name__}: {exc}"}).encode()
                return self._send(status, out, ctype)

        return Handler

    def _post_fulcio(self, body: bytes, headers: Any) -> tuple[int, bytes, str]:
        if "fulcio-500" in self.faults:
            return 500, b'{"code":13,"message":"injected"}', "application/json"
        token = headers.get("Authorization", "").removeprefix("Bearer ")
        claims = jwt.decode(
            token,
            self._oidc_key.public_key(),
            algorithms=["ES256"],
            audience="sigstore",
            options={"verify_exp": False, "verify_nbf": False, "verify_iat": False},
        )
        if claims["exp"] < self.clock().timestamp():
            raise ValueError("token expired")
        csr = x509.load_pem_x509_csr(base64.b64decode(json.loads(body)["certificateSigningRequest"]))
        if not csr.is_signature_valid:
            raise ValueError("CSR: no proof of possession")
        leaf = self.issue(csr.public_key(), claims)
        chain = [c.public_bytes(PEM).decode() for c in (leaf, self.int_cert, self.root_cert)]
        out = {"signedCertificateEmbeddedSct": {"chain": {"certificates": chain}}}
        return 201, json.dumps(out).encode(), "application/json"

    # ---- Rekor

    def _rekor_v2_key_id(self) -> bytes:
        raw = self._rekor_v2_key.public_key().public_bytes_raw()
        return hashlib.sha256(self.origin.encode() + b"\n\x01" + raw).digest()  # C2SP signed-note

    def _checkpoint(
        self, root: bytes, size: int, key_id: bytes, sign: Callable[[bytes], bytes], origin: str
    ) -> str:
        if "wrong-root" in self.faults:
            root = secrets.token_bytes(32)
        note = f"{origin}\n{size}\n{b64(root)}\n"
        sig = sign(note.encode())
        if "bad-checkpoint" in self.faults:
            sig = sig[:-1] + bytes([sig[-1] ^ 1])
        return f"{note}\n\u2014 {self.origin} {b64(key_id[:4] + sig)}\n"

    def _post_rekor_v2(self, body: bytes, _: Any) -> tuple[int, bytes, str]:
        if "rekor-500" in self.faults:
            return 500, b'{"code":13,"message":"injected"}', "application/json"
        req = json.loads(body)["hashedRekordRequestV002"]
        algorithm = {
            "PKIX_ECDSA_P256_SHA_256": "SHA2_256",
            "PKIX_ECDSA_P384_SHA_384": "SHA2_384",
            "PKIX_ECDSA_P521_SHA_512": "SHA2_512",
        }[req["signature"]["verifier"]["keyDetails"]]
        digest = req["digest"]
        if "wrong-body" in self.faults:
            digest = b64(hashlib.sha256(b"something else").digest())
        entry: dict[str, Any] = {
            "apiVersion": "0.0.2",
            "kind": "hashedrekord",
            "spec": {
                "hashedRekordV002": {
                    "data": {"algorithm": algorithm, "digest": digest},
                    "signature": req["signature"],
                }
            },
        }
        canonical = rfc8785.dumps(entry)
        with self._lock:
            index = self._rekor_v2_log.append(canonical)
            root, size, path = self._rekor_v2_log.proof(index)
        key_id = self._rekor_v2_key_id()
        out = {
            "logIndex": str(index),
            "logId": {"keyId": b64(key_id)},
            "kindVersion": {"kind": "hashedrekord", "version": "0.0.2"},
            "inclusionProof": {
                "logIndex": str(index),
                "treeSize": str(size),
                "rootHash": b64(root),
                "hashes": [b64(h) for h in path],
                "checkpoint": {
                    "envelope": self._checkpoint(root, size, key_id, self._rekor_v2_key.sign, self.origin)
                },
            },
            "canonicalizedBody": b64(canonical),
        }
        return 201, json.dumps(out).encode(), "application/json"

    def _post_rekor_v1(self, body: bytes, _: Any) -> tuple[int, bytes, str]:
        if "rekor-500" in self.faults:
            return 500, b'{"code":500,"message":"injected"}', "application/json"
        entry = json.loads(body)
        if entry["kind"] == "dsse":
            proposed = entry["spec"]["proposedContent"]
            envelope = json.loads(proposed["envelope"])
            payload = base64.b64decode(envelope["payload"])
            entry["spec"] = {
                "envelopeHash": {
                    "algorithm": "sha256",
                    "value": hashlib.sha256(proposed["envelope"].encode()).hexdigest(),
                },
                "payloadHash": {"algorithm": "sha256", "value": hashlib.sha256(payload).hexdigest()},
                "signatures": [
                    {"signature": s["sig"], "verifier": proposed["verifiers"][i]}
                    for i, s in enumerate(envelope["signatures"])
                ],
            }
        if "wrong-body" in self.faults and entry["kind"] == "hashedrekord":
            entry["spec"]["data"]["hash"]["value"] = "0" * 64
        canonical = rfc8785.dumps(_strip_none(entry))
        with self._lock:
            index = self._rekor_v1_log.append(canonical)
            root, size, path = self._rekor_v1_log.proof(index)
        key = spki(self._rekor_v1_key.public_key())
        log_id = hashlib.sha256(key).digest()

        def sign(data: bytes) -> bytes:
            return self._rekor_v1_key.sign(data, ec.ECDSA(hashes.SHA256()))

        integrated = int(self.clock().timestamp())
        set_payload: dict[str, Any] = {
            "body": b64(canonical),
            "integratedTime": integrated,
            "logID": log_id.hex(),
            "logIndex": index,
        }
        signed_entry_timestamp = sign(
            rfc8785.dumps(set_payload) + (b"x" if "bad-set" in self.faults else b"")
        )
        out = {
            secrets.token_hex(40): {
                "body": b64(canonical),
                "integratedTime": integrated,
                "logID": log_id.hex(),
                "logIndex": index,
                "verification": {
                    "inclusionProof": {
                        "logIndex": index,
                        "treeSize": size,
                        "rootHash": root.hex(),
                        "hashes": [h.hex() for h in path],
                        "checkpoint": self._checkpoint(root, size, log_id, sign, f"{self.origin} - 1"),
                    },
                    "signedEntryTimestamp": b64(signed_entry_timestamp),
                },
            }
        }
        return 201, json.dumps(out).encode(), "application/json"

    # ---- TSA (RFC 3161)

    def _post_tsa(self, body: bytes, _: Any) -> tuple[int, bytes, str]:
        if "no-timestamp" in self.faults:
            return 500, b"injected", "text/plain"
        req = tsp.TimeStampReq.load(body)
        imprint = req["message_imprint"]
        if "tsa-wrong-message" in self.faults:
            imprint = tsp.MessageImprint(
                {
                    "hash_algorithm": imprint["hash_algorithm"],
                    "hashed_message": hashlib.sha256(b"other").digest(),
                }
            )
        when = self.clock().replace(microsecond=0)
        if "tsa-late" in self.faults:
            when += dt.timedelta(hours=3)
        info = {
            "version": "v1",
            "policy": "1.3.6.1.4.1.57264.2",
            "message_imprint": imprint,
            "serial_number": secrets.randbits(63),
            "gen_time": when,
        }
        if req["nonce"].native is not None:
            info["nonce"] = req["nonce"].native
        tst_info = tsp.TSTInfo(info).dump()
        cert = ax509.Certificate.load(self.tsa_cert.public_bytes(DER))
        attrs = cms.CMSAttributes(
            [
                {"type": "content_type", "values": ["tst_info"]},
                {"type": "message_digest", "values": [hashlib.sha256(tst_info).digest()]},
                {
                    "type": "signing_certificate_v2",
                    "values": [
                        tsp.SigningCertificateV2(
                            {"certs": [{"cert_hash": hashlib.sha256(cert.dump()).digest()}]}
                        )
                    ],
                },
            ]
        )
        sig = self._tsa_key.sign(attrs.dump(), ec.ECDSA(hashes.SHA256()))
        sha256 = algos.DigestAlgorithm({"algorithm": "sha256"})
        signed = cms.SignedData(
            {
                "version": "v3",
                "digest_algorithms": [sha256],
                "encap_content_info": {
                    "content_type": "tst_info",
                    "content": core.ParsableOctetString(tst_info),
                },
                "certificates": [cms.CertificateChoices("certificate", cert)]
                if req["cert_req"].native
                else None,
                "signer_infos": [
                    {
                        "version": "v1",
                        "sid": cms.SignerIdentifier(
                            "issuer_and_serial_number",
                            {"issuer": cert.issuer, "serial_number": cert.serial_number},
                        ),
                        "digest_algorithm": sha256,
                        "signed_attrs": attrs,
                        "signature_algorithm": {"algorithm": "sha256_ecdsa"},
                        "signature": sig,
                    }
                ],
            }
        )
        token = cms.ContentInfo({"content_type": "signed_data", "content": signed})
        out = tsp.TimeStampResp({"status": {"status": "granted"}, "time_stamp_token": token}).dump()
        return 200, out, "application/timestamp-reply"

    # ---- TUF

    def _build_tuf(self) -> dict[str, bytes]:
        expires = self.clock().replace(microsecond=0) + dt.timedelta(days=365)
        targets_raw = {
            "trusted_root.json": json.dumps(self.trusted_root_dict()).encode(),
            "signing_config.v0.2.json": json.dumps(self.signing_config_dict()).encode(),
        }
        signers = {r: CryptoSigner.generate_ecdsa() for r in ("root", "targets", "snapshot", "timestamp")}
        root = Root(expires=expires, consistent_snapshot=True)
        for role, signer in signers.items():
            root.add_key(signer.public_key, role)
        targets = Targets(expires=expires)
        out: dict[str, bytes] = {}
        for name, data in targets_raw.items():
            target = TargetFile.from_data(name, data)
            targets.targets[name] = target
            out[f"targets/{target.hashes['sha256']}.{name}"] = data
        snapshot = Snapshot(expires=expires, meta={"targets.json": MetaFile(1)})
        timestamp = Timestamp(expires=expires, snapshot_meta=MetaFile(1))
        files: dict[str, Metadata[Any]] = {
            "1.root.json": Metadata(root),
            "1.targets.json": Metadata(targets),
            "1.snapshot.json": Metadata(snapshot),
            "timestamp.json": Metadata(timestamp),
        }
        for name, metadata in files.items():
            metadata.sign(signers[metadata.signed.type])
            out[name] = metadata.to_bytes()
        return out


def _key_usage(*, cert_sign: bool = False) -> x509.KeyUsage:
    return x509.KeyUsage(
        digital_signature=not cert_sign,
        content_commitment=False,
        key_encipherment=False,
        data_encipherment=False,
        key_agreement=False,
        key_cert_sign=cert_sign,
        crl_sign=cert_sign,
        encipher_only=False,
        decipher_only=False,
    )


def _strip_none(value: Any) -> Any:
    if isinstance(value, dict):
        return {k: _strip_none(v) for k, v in value.items() if v is not None}
    return value


if __name__ == "__main__":
    import argparse

    parser = argparse.ArgumentParser(description="run a throw-away Sigstore on loopback")
    parser.add_argument("--port", type=int, default=8321)
    parser.add_argument("--out", type=Path, default=Path("."))
    parser.add_argument("--identity", default="trainer@example.com")
    parser.add_argument("--rekor-version", type=int, choices=(1, 2), default=2)
    args = parser.parse_args()
    sig = LocalSigstore(port=args.port, rekor_version=args.rekor_version)
    args.out.mkdir(parents=True, exist_ok=True)
    sig.write_trust_config(args.out / "trust_config.json")
    (args.out / "root.json").write_bytes(sig.tuf_root)
    (args.out / "token.txt").write_text(sig.raw_token(args.identity, lifetime=86400))
    print(
        f"localsigstore on {sig.url}; wrote trust_config.json, root.json, token.txt to {args.out}", flush=True
    )
    sig.start_server()
    threading.Event().wait()
