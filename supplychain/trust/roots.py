"""What this host believes: keys, and the roles that keys may fill.

A `Trust` comes from a policy that was itself verified, or from keys that the caller names. `config_folder` is
where a user's own keys and the keys that he trusts for policies live.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import platformdirs

from supplychain.errors import SecureTrainError
from supplychain.trust.keys import KeyStore, VerifyingKey


@dataclass(frozen=True)
class Role:
    """Who may vouch for something: at least `threshold` of the keys (by identifier)."""

    name: str
    keys: tuple[str, ...]
    threshold: int = 1

    def __post_init__(self) -> None:
        if not 1 <= self.threshold <= max(1, len(set(self.keys))):
            raise SecureTrainError(
                "ST-P03",
                f"the role {self.name!r} cannot be filled",
                expected=f"a threshold from 1 to {len(set(self.keys))}, its number of keys",
                found=str(self.threshold),
            )


@dataclass(frozen=True)
class Trust:
    """Trusted keys by identifier, and roles by name."""

    keys: Mapping[str, VerifyingKey]
    roles: Mapping[str, Role]

    @staticmethod
    def of(role: str, *keys: VerifyingKey) -> Trust:
        """Trust exactly these keys, any one of them, for one role."""
        return Trust(
            {key.identifier: key for key in keys}, {role: Role(role, tuple(key.identifier for key in keys))}
        )

    def describe(self, role: str) -> str:
        """The role's keys by name, for messages."""
        rule = self.roles[role]
        names = [f"{self.keys[key].name} ({key[:12]})" for key in rule.keys if key in self.keys]
        return (f"{rule.threshold} of " if rule.threshold > 1 else "") + (", ".join(names) or "nobody")


def config_folder() -> Path:
    """SECURE_TRAIN_CONFIG, or the user's configuration folder."""
    explicit = os.environ.get("SECURE_TRAIN_CONFIG")
    return Path(explicit) if explicit else platformdirs.user_config_path("secure-train")


def key_store() -> KeyStore:
    """The user's own key pairs."""
    return KeyStore(config_folder() / "keys")


def policy_keys() -> KeyStore:
    """Public keys that this host trusts to sign policies: the first trust, put there by hand or by `keys new
    --trust`.
    """
    return KeyStore(config_folder() / "trusted")
