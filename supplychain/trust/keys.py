"""Key pairs on disk: making, storing, loading and naming them.

A key's identifier is the sha256 of its public PEM, the same value that a bundle carries as its hint. Private
keys are PKCS#8 PEM files readable by their owner only. Supported: ECDSA P-256, P-384, P-521 and Ed25519.
"""

from __future__ import annotations

import hashlib
import os
import re
import stat
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from cryptography.exceptions import InvalidSignature, UnsupportedAlgorithm
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec, ed25519

from supplychain.artifact import write_durably
from supplychain.errors import SecureTrainError

PublicKey = ec.EllipticCurvePublicKey | ed25519.Ed25519PublicKey
PrivateKey = ec.EllipticCurvePrivateKey | ed25519.Ed25519PrivateKey

# Name -> how to make one. The digest of an ECDSA signature follows the curve (FIPS 186-5).
ALGORITHMS: dict[str, Callable[[], PrivateKey]] = {
    "ecdsa-p256": lambda: ec.generate_private_key(ec.SECP256R1()),
    "ecdsa-p384": lambda: ec.generate_private_key(ec.SECP384R1()),
    "ecdsa-p521": lambda: ec.generate_private_key(ec.SECP521R1()),
    "ed25519": ed25519.Ed25519PrivateKey.generate,
}
_CURVE_HASH: dict[str, hashes.HashAlgorithm] = {
    "secp256r1": hashes.SHA256(),
    "secp384r1": hashes.SHA384(),
    "secp521r1": hashes.SHA512(),
}
SUPPORTED_CURVES = tuple(_CURVE_HASH)
MAX_KEY = 1 << 16  # bytes of a key file
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")


@dataclass(frozen=True)
class VerifyingKey:
    """A public key with the name that people know it by."""

    name: str
    key: PublicKey

    @property
    def pem(self) -> bytes:
        return self.key.public_bytes(
            serialization.Encoding.PEM, serialization.PublicFormat.SubjectPublicKeyInfo
        )

    @property
    def identifier(self) -> str:
        return hashlib.sha256(self.pem).hexdigest()

    @property
    def algorithm(self) -> str:
        return (
            "ed25519"
            if isinstance(self.key, ed25519.Ed25519PublicKey)
            else f"ecdsa-p{self.key.curve.key_size}"
        )

    def accepts(self, message: bytes, signature: bytes) -> bool:
        try:
            if isinstance(self.key, ed25519.Ed25519PublicKey):
                self.key.verify(signature, message)
            else:
                self.key.verify(signature, message, ec.ECDSA(_CURVE_HASH[self.key.curve.name]))
        except InvalidSignature:
            return False
        return True


@dataclass(frozen=True, repr=False)
class SigningKey:
    """A private key. It has no repr, so that it cannot slip into a log."""

    name: str
    _key: PrivateKey

    @property
    def public(self) -> VerifyingKey:
        return VerifyingKey(self.name, self._key.public_key())

    def sign(self, message: bytes) -> bytes:
        if isinstance(self._key, ed25519.Ed25519PrivateKey):
            return self._key.sign(message)
        return self._key.sign(message, ec.ECDSA(_CURVE_HASH[self._key.curve.name]))


def parse_public(name: str, pem: bytes, *, where: str) -> VerifyingKey:
    try:
        key = serialization.load_pem_public_key(pem)
    except (ValueError, UnsupportedAlgorithm):
        raise SecureTrainError(
            "ST-S06", "this is not a public key in PEM form", where=where, next_step="secure-train keys list"
        ) from None
    if isinstance(key, ed25519.Ed25519PublicKey) or (
        isinstance(key, ec.EllipticCurvePublicKey) and key.curve.name in _CURVE_HASH
    ):
        return VerifyingKey(name, key)
    raise SecureTrainError(
        "ST-S06",
        "the key is of a type that is not supported",
        where=where,
        expected=", ".join(ALGORITHMS),
        found=type(key).__name__,
    )


def _write_private(path: Path, pem: bytes) -> None:
    """Readable by its owner from the first byte on, whole or absent, and never in place of another.
    FileExistsError.
    """
    temporary = path.with_name(f".{path.name}.{os.getpid()}.partial")
    try:
        with open(
            os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600), "wb"
        ) as file:
            file.write(pem)
            file.flush()
            os.fsync(file.fileno())
        os.link(temporary, path)  # unlike a rename, it fails if the name is taken
    finally:
        temporary.unlink(missing_ok=True)


class KeyStore:
    """A folder of key pairs: NAME.key (0600), NAME.pub, and NAME.crt if the key has a certificate."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def new(self, name: str, algorithm: str = "ecdsa-p256") -> SigningKey:
        """Make a key pair. ST-U03 for a bad name or algorithm, ST-U05 if the name is taken."""
        if not _NAME.fullmatch(name):
            raise SecureTrainError(
                "ST-U03", f"{name!r} is no name for a key", expected="letters, digits, `.`, `_`, `-`"
            )
        if algorithm not in ALGORITHMS:
            raise SecureTrainError("ST-U03", f"{algorithm!r} is no key type", expected=", ".join(ALGORITHMS))
        private, public = self._paths(name)
        key = SigningKey(name, ALGORITHMS[algorithm]())
        pem = key._key.private_bytes(
            serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
        )
        try:
            self.folder.mkdir(parents=True, exist_ok=True, mode=0o700)
            _write_private(private, pem)
            write_durably(public, key.public.pem)
        except FileExistsError:
            raise SecureTrainError(
                "ST-U05",
                f"there is a key {name!r} already",
                where=str(private),
                next_step="choose another name: secure-train keys list",
            ) from None
        except OSError as error:
            raise SecureTrainError(
                "ST-U04", f"the folder for keys cannot be written: {error.strerror}", where=str(self.folder)
            ) from None
        return key

    def load(self, name: str, passphrase: Callable[[], bytes] | None = None) -> SigningKey:
        """The private key `name`, or the one in the file `name` if that is a path. Encrypted ones ask
        `passphrase`.
        """
        path = Path(name) if "/" in name else self._paths(name)[0]
        try:
            with open(path, "rb") as file:
                if stat.S_IMODE(os.fstat(file.fileno()).st_mode) & 0o077:
                    raise SecureTrainError(
                        "ST-S06",
                        "other users may read this private key",
                        where=str(path),
                        next_step=f"chmod 600 {path}",
                    )
                pem = file.read(MAX_KEY)
        except OSError as error:
            raise SecureTrainError(
                "ST-S06",
                f"there is no key {name!r} to sign with: {error.strerror}",
                where=str(path),
                next_step=f"secure-train keys new {name}",
            ) from None
        secret = passphrase() if b"ENCRYPTED" in pem and passphrase else None
        try:
            key = serialization.load_pem_private_key(pem, secret)
        except (ValueError, TypeError, UnsupportedAlgorithm):
            raise SecureTrainError(
                "ST-S06",
                "the private key cannot be read: damaged, or another passphrase is needed",
                where=str(path),
            ) from None
        if not isinstance(key, (ec.EllipticCurvePrivateKey, ed25519.Ed25519PrivateKey)):
            raise SecureTrainError(
                "ST-S06",
                "the key is of a type that is not supported",
                where=str(path),
                expected=", ".join(ALGORITHMS),
                found=type(key).__name__,
            )
        parse_public(path.stem, SigningKey(path.stem, key).public.pem, where=str(path))  # one rule for curves
        return SigningKey(path.stem, key)

    def public(self, name: str) -> VerifyingKey:
        """The public key `name`, or the one in the file `name` if that is a path."""
        path = Path(name) if "/" in name or name.endswith((".pub", ".pem")) else self._paths(name)[1]
        try:
            with open(path, "rb") as file:
                pem = file.read(MAX_KEY)
        except OSError as error:
            raise SecureTrainError(
                "ST-S06",
                f"there is no public key {name!r}: {error.strerror}",
                where=str(path),
                next_step="secure-train keys list",
            ) from None
        return parse_public(path.stem, pem, where=str(path))

    def certificate(self, name: str) -> bytes | None:
        """The chain (PEM, the key's own certificate first) that lies beside a private key, if there is one:
        NAME.crt.
        """
        path = (Path(name) if "/" in name else self._paths(name)[0]).with_suffix(".crt")
        try:
            with open(path, "rb") as file:
                return file.read(16 * MAX_KEY)
        except FileNotFoundError:
            return None
        except OSError as error:
            raise SecureTrainError(
                "ST-S06", f"the key's certificate cannot be read: {error.strerror}", where=str(path)
            ) from None

    def list(self) -> list[VerifyingKey]:
        return [self.public(path.stem) for path in sorted(self.folder.glob("*.pub"))]

    def has_private(self, name: str) -> bool:
        return self._paths(name)[0].exists()

    def _paths(self, name: str) -> tuple[Path, Path]:
        return self.folder / f"{name}.key", self.folder / f"{name}.pub"
