"""Certificates of a private authority: reading them, and what makes a chain valid.

The obligations, checked at the moment that the caller trusts: each certificate of the chain, the root among
them, is valid then; the chain ends in a root of the authority that the policy names; the signer's certificate
is for signing (digitalSignature) and for code (codeSigning), and no issuer above it is restricted to another
use; it names the expected subject. Web roots are never consulted.
"""

from __future__ import annotations

import datetime as dt
from collections.abc import Sequence

from cryptography import x509
from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric import ec, ed25519
from cryptography.x509.oid import ExtendedKeyUsageOID
from cryptography.x509.verification import (
    Criticality,
    ExtensionPolicy,
    Policy,
    PolicyBuilder,
    Store,
    VerificationError,
)

from supplychain.errors import SecureTrainError
from supplychain.trust.keys import SUPPORTED_CURVES, PublicKey, VerifyingKey
from supplychain.trust.roots import Authority, Holder

MAX_DEPTH = 4  # issuers between the signer's certificate and the root


def load(raw: Sequence[bytes], *, where: str) -> list[x509.Certificate]:
    """Parse a bundle's chain; ST-S03 if one is no certificate."""
    try:
        return [x509.load_der_x509_certificate(item) for item in raw]
    except ValueError:
        raise SecureTrainError(
            "ST-S03", "the bundle's certificate cannot be read", where=where, next_step="sign again"
        ) from None


def load_pem(pem: bytes, *, where: str, code: str = "ST-S06") -> list[x509.Certificate]:
    """Certificates from a PEM file, the signer's first."""
    try:
        return x509.load_pem_x509_certificates(pem)
    except ValueError:
        raise SecureTrainError(code, "these are no certificates in PEM form", where=where) from None


def subjects(certificate: x509.Certificate, *, where: str) -> list[str]:
    """Whom the certificate names: addresses, URIs and host names of its subject alternative name."""
    try:
        names = certificate.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
        return [
            *names.get_values_for_type(x509.RFC822Name),
            *names.get_values_for_type(x509.UniformResourceIdentifier),
            *names.get_values_for_type(x509.DNSName),
        ]
    except x509.ExtensionNotFound:
        return []
    except (ValueError, x509.UnsupportedGeneralNameType):
        raise SecureTrainError("ST-S03", "the certificate's names cannot be read", where=where) from None


def verify(
    chain: Sequence[x509.Certificate], holder: Holder, moment: dt.datetime, *, where: str
) -> VerifyingKey:
    """The holder's key, if the chain is valid at `moment` and ends in the holder's authority; ST-S07 outside
    its time, ST-S01 for every other flaw.
    """
    leaf, *others = chain
    outside = next((item for item in chain if not _valid(item, moment)), None)
    if outside is not None:
        raise SecureTrainError(
            "ST-S07",
            "a certificate was not valid when the signature was made, as far as can be proven",
            where=where,
            expected=f"{outside.not_valid_before_utc:%Y-%m-%dT%H:%M:%SZ} to "
            f"{outside.not_valid_after_utc:%Y-%m-%dT%H:%M:%SZ}, for {_name(outside.subject)}",
            found=f"{moment:%Y-%m-%dT%H:%M:%SZ}",
            next_step="sign again with a current certificate, and have signatures timestamped",
        )
    roots = load_pem(holder.authority.pem, where=f"the authority {holder.authority.name}", code="ST-P03")
    verifier = (
        PolicyBuilder()
        .store(Store(roots))
        .time(moment.replace(tzinfo=None))
        .max_chain_depth(MAX_DEPTH)
        .extension_policies(ca_policy=_issuers(), ee_policy=_signers())
        .build_client_verifier()
    )
    try:
        verifier.verify(leaf, others)
    except (VerificationError, ValueError, x509.UnsupportedGeneralNameType) as error:
        raise SecureTrainError(
            "ST-S01",
            f"the certificate does not come from the authority, or is not for signing: {str(error)[:200]}",
            where=where,
            expected=f"a chain to the authority {holder.authority.name}",
            found=_name(leaf.issuer),
            next_step="sign with a certificate of that authority",
        ) from None
    return VerifyingKey(holder.name, _key(leaf, where))


def _name(name: x509.Name) -> str:
    return repr(name.rfc4514_string())[:150]


def _valid(certificate: x509.Certificate, moment: dt.datetime) -> bool:
    return certificate.not_valid_before_utc <= moment <= certificate.not_valid_after_utc


def _key(certificate: x509.Certificate, where: str) -> PublicKey:
    key = certificate.public_key()
    if isinstance(key, ed25519.Ed25519PublicKey):
        return key
    if isinstance(key, ec.EllipticCurvePublicKey) and key.curve.name in SUPPORTED_CURVES:
        return key
    raise SecureTrainError(
        "ST-S01",
        "the certificate's key is of a type that is not supported",
        where=where,
        expected=", ".join(SUPPORTED_CURVES),
        found=type(key).__name__,
    )


def public_key(certificate: x509.Certificate) -> bytes:
    """The certificate's key in PEM form, to compare it with a private one."""
    return certificate.public_key().public_bytes(
        serialization.Encoding.PEM, serialization.PublicFormat.SubjectPublicKeyInfo
    )


def _signers() -> ExtensionPolicy:
    return (
        ExtensionPolicy.webpki_defaults_ee()
        .require_present(x509.KeyUsage, Criticality.AGNOSTIC, _may_sign)
        .require_present(x509.ExtendedKeyUsage, Criticality.AGNOSTIC, _for_code)
    )


def _issuers() -> ExtensionPolicy:
    return ExtensionPolicy.webpki_defaults_ca().may_be_present(
        x509.ExtendedKeyUsage, Criticality.AGNOSTIC, _not_for_another_use
    )


def _may_sign(_: Policy, __: x509.Certificate, usage: x509.KeyUsage) -> None:
    if not usage.digital_signature:
        raise ValueError("its key usage is not digitalSignature")


def _for_code(_: Policy, __: x509.Certificate, usage: x509.ExtendedKeyUsage) -> None:
    if ExtendedKeyUsageOID.CODE_SIGNING not in usage:
        raise ValueError("its extended key usage is not codeSigning")


def _not_for_another_use(_: Policy, __: x509.Certificate, usage: x509.ExtendedKeyUsage | None) -> None:
    if usage is not None and ExtendedKeyUsageOID.CODE_SIGNING not in usage:
        raise ValueError("an issuer's certificate is restricted to another use than codeSigning")


def check_authority(authority: Authority, *, where: str) -> None:
    """ST-P03 unless the authority's certificates can be read and are of issuers."""
    for certificate in load_pem(authority.pem, where=where, code="ST-P03"):
        try:
            constraints = certificate.extensions.get_extension_for_class(x509.BasicConstraints).value
        except (x509.ExtensionNotFound, ValueError):
            constraints = None
        if constraints is None or not constraints.ca:
            raise SecureTrainError(
                "ST-P03",
                "a certificate of the authority is not that of an issuer",
                where=where,
                expected="basicConstraints CA:TRUE",
                found=_name(certificate.subject),
            )
