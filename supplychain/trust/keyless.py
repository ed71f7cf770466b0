"""Sigstore: signatures by an identity in place of a key.

Owns the whole contact with the sigstore library, its public interface only, imported when a keyless bundle is
at hand and not before. Verifying is offline, always: the one source of trust is a `trusted_root.json` whose
bytes were pinned by digest; no cache is read and nothing is fetched. Signing talks to the instance that a
trust configuration names, or to the public one.
"""

from __future__ import annotations

import datetime as dt
import functools
import json
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from cryptography import x509
from cryptography.hazmat import asn1

from supplychain.artifact import parse_json
from supplychain.errors import SecureTrainError
from supplychain.trust import bundle
from supplychain.trust.bundle import Bundle
from supplychain.trust.roots import CLAIMS, Identity, Instance

if TYPE_CHECKING:
    from sigstore.models import ClientTrustConfig
    from sigstore.sign import Signer as SigstoreSigner
    from sigstore.verify import Verifier

MAX_ROOT = 1 << 20  # bytes of a trusted root or a trust configuration
_FULCIO = "1.3.6.1.4.1.57264.1."
_ROOT_TYPE = "application/vnd.dev.sigstore.trustedroot+json;version=0.1"
_CONFIG_TYPE = "application/vnd.dev.sigstore.clienttrustconfig.v0.1+json"
_SIGNING_TYPE = "application/vnd.dev.sigstore.signingconfig.v0.2+json"


@dataclass(frozen=True)
class Claimed:
    """What a Sigstore certificate says about its holder; nothing of it is verified yet."""

    issuer: str
    subject: str
    claims: dict[str, str]

    def is_(self, identity: Identity) -> bool:
        return (self.issuer, self.subject) == (identity.issuer, identity.subject) and all(
            self.claims.get(name) == value for name, value in identity.claims
        )


def claimed(found: Bundle, *, where: str) -> Claimed:
    """Whom the bundle's certificate names; ST-S03 if it is no certificate of the kind."""
    try:
        certificate = x509.load_der_x509_certificate(found.certificates[0])
        issuer = _extension(certificate, "8")
        names = certificate.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
        (subject,) = [
            *names.get_values_for_type(x509.RFC822Name),
            *names.get_values_for_type(x509.UniformResourceIdentifier),
        ]
        claims = {name: _extension(certificate, suffix) for name, suffix in CLAIMS.items()}
        if issuer is None:
            raise ValueError("it names no issuer")
    except (ValueError, TypeError, x509.ExtensionNotFound, x509.UnsupportedGeneralNameType) as error:
        raise SecureTrainError(
            "ST-S03",
            f"the bundle's certificate is not one of Sigstore: {error}",
            where=where,
            next_step="sign again",
        ) from None
    return Claimed(issuer, subject, {name: value for name, value in claims.items() if value is not None})


def _extension(certificate: x509.Certificate, suffix: str) -> str | None:
    try:
        found = certificate.extensions.get_extension_for_oid(x509.ObjectIdentifier(_FULCIO + suffix))
    except x509.ExtensionNotFound:
        return None
    if not isinstance(found.value, x509.UnrecognizedExtension):
        return None
    return asn1.decode_der(str, found.value.value)


def verify(found: Bundle, identity: Identity, *, where: str) -> dt.datetime:
    """Check the bundle's certificate, log entry, times and signature against the identity and the root of its
    instance; ST-S01 with the reason.

    The answer is the last moment at which it can have been signed: the end of the certificate's few minutes,
    within which the signature was proven to be made.
    """
    proven = _prove(found.data, identity, None, where)
    if proven != x509.load_der_x509_certificate(found.certificates[0]):  # whose claims the caller compared
        raise _refused("it was read in two ways", identity, found.data, where)
    return proven.not_valid_after_utc


def verify_message(data: bytes, identity: Identity, sha256: bytes, *, where: str) -> None:
    """The same for a Sigstore bundle of any version that signs, or makes a statement about, one file."""
    _prove(data, identity, sha256, where)


def _prove(data: bytes, identity: Identity, sha256: bytes | None, where: str) -> x509.Certificate:
    # Late: it costs 0.4 s, and most signatures are by keys.
    from sigstore.errors import Error
    from sigstore.hashes import Hashed
    from sigstore.models import Bundle as SigstoreBundle
    from sigstore.models import InvalidBundle
    from sigstore.verify import policy
    from sigstore_models.common.v1 import HashAlgorithm

    verifier = _verifier(identity.instance)
    expected = policy.Identity(identity=identity.subject, issuer=identity.issuer)
    try:
        parsed = SigstoreBundle.from_json(data)
        if sha256 is None or b'"dsseEnvelope"' in data:
            kind, payload = verifier.verify_dsse(parsed, expected)
            _check_payload(kind, payload, sha256, where)
        else:
            hashed = Hashed(algorithm=HashAlgorithm.SHA2_256, digest=sha256)
            verifier.verify_artifact(hashed, parsed, expected)
        return parsed.signing_certificate
    except SecureTrainError:
        raise
    except InvalidBundle as error:
        reason = " ".join(str(error).split())[:300]
        raise SecureTrainError(
            "ST-S03", f"the Sigstore bundle is malformed: {reason}", where=where, next_step="sign again"
        ) from None
    except Error as error:
        raise _refused(str(error) or type(error).__name__, identity, data, where) from None
    except Exception as error:
        # The library is not ours and the bytes are foreign: whatever it trips over is no valid signature.
        raise _refused(f"{type(error).__name__}: {error}", identity, data, where) from None


def _check_payload(kind: str, payload: bytes, sha256: bytes | None, where: str) -> None:
    """The envelope's type, and that the statement is about the file, if one was given."""
    if kind != bundle.PAYLOAD_TYPE:
        raise SecureTrainError(
            "ST-S03",
            "the bundle signs another kind of payload",
            where=where,
            expected=bundle.PAYLOAD_TYPE,
            found=kind,
        )
    if sha256 is None:
        return
    statement = parse_json(payload, what="the statement", where=where, code="ST-S03")
    try:
        digests = [subject["digest"].get("sha256") for subject in statement["subject"]]
    except (KeyError, TypeError, AttributeError):
        raise SecureTrainError("ST-S03", "the statement's subjects are malformed", where=where) from None
    if sha256.hex() not in digests:
        raise SecureTrainError(
            "ST-S04", "the signed statement is about something else", where=where, expected=sha256.hex()
        )


def _refused(reason: str, identity: Identity, data: bytes, where: str) -> SecureTrainError:
    return SecureTrainError(
        "ST-S01",
        f"the Sigstore signature is not valid: {reason[:300]}",
        where=where,
        expected=f"{identity.subject} of {identity.issuer}, in a log of the instance {identity.instance.name}"
        f" ({', '.join(_logs(identity.instance).values()) or 'none'})",
        found=_log_of(data, identity.instance),
        next_step="restore the signature, or name the trusted root of the instance that it was made with",
    )


def _logs(instance: Instance) -> dict[str, str]:
    """The transparency logs of an instance: address by identifier (base64)."""
    try:
        document = json.loads(instance.trusted_root)
        return {str(log["logId"]["keyId"]): str(log.get("baseUrl", "")) for log in document["tlogs"]}
    except (ValueError, KeyError, TypeError):
        return {}


def _log_of(data: bytes, instance: Instance) -> str:
    """Which log the bundle says it is in: the most common reason of a refusal is another instance."""
    try:
        entry = json.loads(data)["verificationMaterial"]["tlogEntries"][0]
        log = str(entry["logId"]["keyId"])
    except (ValueError, KeyError, TypeError, IndexError):
        return "a bundle without a readable log entry"
    known = _logs(instance).get(log)
    return f"an entry of {known}" if known else f"an entry of another instance's log ({log[:60]})"


@functools.lru_cache(maxsize=8)
def _verifier(instance: Instance) -> Verifier:
    from sigstore.errors import Error
    from sigstore.models import ClientTrustConfig
    from sigstore.verify import Verifier

    where = f"the trusted root of {instance.name}"
    root = parse_json(instance.trusted_root, what=where, where=where, limit=MAX_ROOT)
    if not isinstance(root, dict) or root.get("mediaType") != _ROOT_TYPE:
        raise SecureTrainError(
            "ST-S09", f"{where} is no trusted root of Sigstore", where=where, expected=_ROOT_TYPE
        )
    # The library takes bytes only as a whole configuration; the part for signing is empty and unused.
    empty: dict[str, Any] = {"mediaType": _SIGNING_TYPE, "caUrls": [], "rekorTlogUrls": []}
    config = {"mediaType": _CONFIG_TYPE, "trustedRoot": root, "signingConfig": empty}
    try:
        return Verifier(trusted_root=ClientTrustConfig.from_json(json.dumps(config)).trusted_root)
    except (Error, ValueError) as error:
        raise SecureTrainError(
            "ST-S09", f"{where} cannot be used: {str(error)[:300]}", where=where, expected=_ROOT_TYPE
        ) from None


class KeylessSigner:
    """Signs as the identity of an OpenID token, with a key that lives for minutes in this process.

    `token` gives a fresh token when one is needed; `config` is the trust configuration of a private instance,
    None the public one, whose configuration is then fetched and verified by TUF.
    """

    def __init__(self, token: Callable[[], str], config: bytes | None) -> None:
        self._token = token
        self._config = config
        self._signer: SigstoreSigner | None = None
        self._until = dt.datetime.min.replace(tzinfo=dt.UTC)
        self._identity = self._read_identity(token())

    @property
    def public(self) -> Identity:
        return self._identity

    def sign_payload(self, payload: bytes) -> Bundle:
        from sigstore.dsse import Statement
        from sigstore.sign import SigningContext

        def start() -> SigstoreSigner:
            context = SigningContext.from_trust_config(self._trust())
            with context.signer(self._parse(self._token())) as signer:
                return signer

        if dt.datetime.now(dt.UTC) + dt.timedelta(minutes=1) > self._until:
            self._signer = self._service(start)
        signer = self._signer
        assert signer is not None
        made = self._service(lambda: signer.sign_dsse(Statement(payload)))
        self._until = made.signing_certificate.not_valid_after_utc
        result = bundle.parse(made.to_json().encode(), where="the new signature")
        if result.payload != payload:
            raise SecureTrainError("ST-S04", "the service signed something else", where=self._instance())
        return result

    def _trust(self) -> ClientTrustConfig:
        from sigstore.models import ClientTrustConfig

        if self._config is None:
            return ClientTrustConfig.production()
        return ClientTrustConfig.from_json(self._config.decode())

    def _read_identity(self, raw: str) -> Identity:
        token = self._parse(raw)
        root = b""
        if self._config is not None:
            document = parse_json(self._config, what="the trust configuration", limit=MAX_ROOT)
            root = json.dumps(document.get("trustedRoot") if isinstance(document, dict) else None).encode()
        subject = str(token.identity)
        return Identity(subject, str(token.federated_issuer), subject, Instance(self._instance(), root))

    def _parse(self, raw: str) -> Any:
        from sigstore.errors import Error
        from sigstore.oidc import ExpiredIdentity, IdentityToken

        try:
            return IdentityToken(raw.strip())
        except (Error, ExpiredIdentity) as error:
            raise SecureTrainError(
                "ST-S06",
                f"the identity token cannot be used: {str(error) or type(error).__name__}",
                expected="a current OpenID token for the audience `sigstore`",
                next_step="get a fresh token from your issuer",
            ) from None

    def _instance(self) -> str:
        return "private" if self._config is not None else "public"

    def _service(self, action: Callable[[], Any]) -> Any:
        try:
            return action()
        except SecureTrainError:
            raise
        except Exception as error:  # its own errors, those of HTTP, and those of whatever the server answers
            # Never the error's whole text: it may quote a request, and a request holds the token.
            raise SecureTrainError(
                "ST-S11",
                f"the {self._instance()} Sigstore instance did not sign ({type(error).__name__})",
                where=self._instance(),
                next_step="check that it can be reached and that the token is for it, then sign again",
            ) from None
