"""What a security engineer has on the table: a key, a policy, and small signed artifacts. All real, all made
by the test.
"""

from __future__ import annotations

import datetime as dt
from dataclasses import dataclass
from pathlib import Path

from supplychain import policy
from supplychain.policy import Policy
from supplychain.trust.keys import KeyStore, SigningKey
from supplychain.trust.signers import LocalSigner

NOW = dt.datetime(2026, 12, 1, 12, tzinfo=dt.UTC)


@dataclass
class Workshop:
    """A folder with keys by name and a signed policy."""

    folder: Path
    keys: KeyStore

    @staticmethod
    def create(folder: Path) -> Workshop:
        shop = Workshop(folder, KeyStore(folder / "keys"))
        shop.key("owner")
        policy.new(shop.policy, "development", shop.signer("owner"), now=NOW)
        return shop

    @property
    def policy(self) -> Path:
        return self.folder / "policy.toml"

    def key(self, name: str) -> SigningKey:
        return self.keys.new(name)

    def signer(self, name: str) -> LocalSigner:
        return LocalSigner(self.keys.load(name))

    def load(self, *, now: dt.datetime = NOW, pinned: str | None = None) -> Policy:
        return policy.load(self.policy, trusted=[self.keys.public("owner")], now=now, pinned=pinned)

    def rewrite(self, old: str, new: str) -> None:
        """Edit the policy and sign it again."""
        text = self.policy.read_text()
        assert old in text
        self.policy.write_text(text.replace(old, new))
        policy.sign(self.policy, self.signer("owner"))
