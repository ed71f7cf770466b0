"""Keys in a hardware module, by PKCS #11: the private key never leaves it.

A key is named by its RFC 7512 URI, `pkcs11:token=T;object=K?module-path=/usr/lib/M.so`. Needs the extra
`hsm`. The module's shared library is code that runs in this process: name one that you trust. ECDSA on P-256,
P-384 and P-521.
"""

from __future__ import annotations

import hashlib
import importlib
from collections.abc import Callable
from dataclasses import dataclass
from types import ModuleType
from typing import Any
from urllib.parse import parse_qsl, unquote, unquote_to_bytes

from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric import ec

from supplychain.errors import SecureTrainError
from supplychain.trust.keys import SUPPORTED_CURVES, VerifyingKey

SCHEME = "pkcs11:"
_HASH = {"secp256r1": hashlib.sha256, "secp384r1": hashlib.sha384, "secp521r1": hashlib.sha512}


@dataclass(frozen=True)
class Address:
    """What a PKCS #11 URI says."""

    module: str
    token: str
    label: str | None
    identifier: bytes | None

    @property
    def name(self) -> str:
        return self.label or (self.identifier or b"").hex()


def parse(uri: str) -> Address:
    """ST-U03 unless the URI names a module, a token and a key."""
    path, _, query = uri.removeprefix(SCHEME).partition("?")
    parts = dict(part.partition("=")[::2] for part in path.split(";"))
    asked = dict(parse_qsl(query))
    label = unquote(parts["object"]) if "object" in parts else None
    identifier = unquote_to_bytes(parts["id"]) if "id" in parts else None
    if "token" not in parts or not (label or identifier) or "module-path" not in asked:
        raise SecureTrainError(
            "ST-U03",
            "this is no address of a key in a hardware module",
            expected="pkcs11:token=TOKEN;object=KEY?module-path=/path/of/module.so",
            found=uri.partition("?")[0][:200],  # what stands behind may hold a PIN
        )
    if "pin-value" in asked:
        raise SecureTrainError(
            "ST-U03",
            "a PIN on the command line can be read by every user of the machine",
            next_step="put it in a file of your own and name that in SECURE_TRAIN_PASSPHRASE_FILE",
        )
    return Address(asked["module-path"], unquote(parts["token"]), label, identifier)


class HardwareKey:
    """A private key in a module, in a session that was logged in. It has no repr that shows anything."""

    def __init__(self, uri: str, pin: Callable[[], bytes]) -> None:
        address = parse(uri)
        self._pkcs11, self._encodings = _library()
        self._where = f"token {address.token!r}, key {address.name!r}"
        selected = {"label": address.label, "id": address.identifier}
        chosen = {name: value for name, value in selected.items() if value is not None}
        key = self._asked(lambda: self._open(address, pin(), chosen))
        if not isinstance(key, ec.EllipticCurvePublicKey) or key.curve.name not in SUPPORTED_CURVES:
            raise SecureTrainError(
                "ST-S06",
                "the key is of a type that is not supported",
                where=self._where,
                expected=", ".join(SUPPORTED_CURVES),
            )
        self._curve = key.curve.name
        self._public = VerifyingKey(address.name, key)

    def _open(self, address: Address, pin: bytes, chosen: dict[str, Any]) -> Any:
        classes = self._pkcs11.ObjectClass
        token = self._pkcs11.lib(address.module).get_token(token_label=address.token)
        session = token.open(user_pin=pin.decode("utf-8"))
        self._private = session.get_key(object_class=classes.PRIVATE_KEY, **chosen)
        public = session.get_key(object_class=classes.PUBLIC_KEY, **chosen)
        return serialization.load_der_public_key(self._encodings.encode_ec_public_key(public))

    @property
    def public(self) -> VerifyingKey:
        return self._public

    def sign(self, message: bytes) -> bytes:
        digest = _HASH[self._curve](message).digest()
        ecdsa = self._pkcs11.Mechanism.ECDSA
        raw = self._asked(lambda: self._private.sign(digest, mechanism=ecdsa))
        signature: bytes = self._encodings.encode_ecdsa_signature(raw)
        if not self._public.accepts(message, signature):
            raise SecureTrainError(
                "ST-S11", "the module gave a signature that its own public key refuses", where=self._where
            )
        return signature

    def _asked(self, action: Callable[[], Any]) -> Any:
        """The module's answer; its errors become ours, without what they quote."""
        try:
            return action()
        except (self._pkcs11.exceptions.PKCS11Error, RuntimeError, ValueError, OSError) as error:
            raise SecureTrainError(
                "ST-S11",
                f"the hardware module did not do it ({type(error).__name__})",
                where=self._where,
                next_step="check the module's path, the token's and the key's name, and the PIN",
            ) from None


def _library() -> tuple[ModuleType, ModuleType]:
    """python-pkcs11, imported by name: who has no module need not have it."""
    try:
        return importlib.import_module("pkcs11"), importlib.import_module("pkcs11.util.ec")
    except ImportError:
        raise SecureTrainError(
            "ST-S06",
            "keys in hardware modules need the extra `hsm`",
            next_step="install secure-train[hsm]",
        ) from None
