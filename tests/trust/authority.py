"""A private certificate authority for the tests: roots, intermediates and signers, with a flaw on demand."""

from __future__ import annotations

import datetime as dt
from dataclasses import dataclass

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

from supplychain.trust.keys import SigningKey

NOW = dt.datetime(2026, 12, 1, 12, tzinfo=dt.UTC)
DAY = dt.timedelta(days=1)
CODE = (ExtendedKeyUsageOID.CODE_SIGNING,)


@dataclass(frozen=True)
class Issued:
    """A certificate with its private key."""

    certificate: x509.Certificate
    key: ec.EllipticCurvePrivateKey

    @property
    def pem(self) -> bytes:
        return self.certificate.public_bytes(serialization.Encoding.PEM)

    def signing_key(self, name: str = "holder") -> SigningKey:
        return SigningKey(name, self.key)


def issue(
    name: str,
    issuer: Issued | None = None,
    *,
    ca: bool = False,
    days: tuple[int, int] = (-30, 30),
    san: str | None = None,
    eku: tuple[x509.ObjectIdentifier, ...] | None = None,
    usage: bool = True,
    key: ec.EllipticCurvePrivateKey | None = None,
    path: int | None = None,
) -> Issued:
    """A certificate valid on `days` around NOW. `usage`: may sign (a signer), or certificates (an issuer)."""
    key = key or ec.generate_private_key(ec.SECP256R1())
    above = issuer or Issued(None, key)  # type: ignore[arg-type]  # a root has no issuer but itself
    subject = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, name)])
    builder = (
        x509.CertificateBuilder()
        .subject_name(subject)
        .issuer_name(issuer.certificate.subject if issuer else subject)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(NOW + days[0] * DAY)
        .not_valid_after(NOW + days[1] * DAY)
        .add_extension(x509.BasicConstraints(ca=ca, path_length=path), critical=True)
        .add_extension(_usage(ca, usage), critical=True)
        .add_extension(x509.SubjectKeyIdentifier.from_public_key(key.public_key()), critical=False)
        .add_extension(
            x509.AuthorityKeyIdentifier.from_issuer_public_key(above.key.public_key()), critical=False
        )
    )
    if san:
        general = x509.RFC822Name(san) if "@" in san else x509.UniformResourceIdentifier(san)
        builder = builder.add_extension(x509.SubjectAlternativeName([general]), critical=False)
    if eku:
        builder = builder.add_extension(x509.ExtendedKeyUsage(eku), critical=False)
    return Issued(builder.sign(above.key, hashes.SHA256()), key)


def _usage(ca: bool, right: bool) -> x509.KeyUsage:
    return x509.KeyUsage(
        digital_signature=right and not ca,
        content_commitment=False,
        key_encipherment=not right,
        data_encipherment=False,
        key_agreement=False,
        key_cert_sign=right and ca,
        crl_sign=right and ca,
        encipher_only=False,
        decipher_only=False,
    )
