"""Identities, instances, authorities, times and revocations as a policy states them."""

from __future__ import annotations

import hashlib
from pathlib import Path

import pytest

from supplychain import policy
from supplychain.trust.roots import Identity
from tests.artifact.support import refused
from tests.gate.workshop import Workshop

ROOT = b'{"mediaType":"application/vnd.dev.sigstore.trustedroot+json;version=0.1"}'
PIN = hashlib.sha256(ROOT).hexdigest()
TABLES = f"""
[sigstore.public]
trusted_root = "trusted_root.json"
sha256 = "{PIN}"

[identities.robot]
instance = "public"
issuer = "https://token.actions.githubusercontent.com"
san = "https://github.com/acme/data/.github/workflows/publish.yml@refs/heads/main"
claims = {{ runner_environment = "github-hosted" }}
valid_until = "2027-06-01T00:00:00Z"

[[revoked]]
kind = "digest"
what = "{"a" * 64}"
reason = "poisoned"
since = "2026-01-01T00:00:00Z"
"""


@pytest.fixture
def shop(tmp_path: Path) -> Workshop:
    made = Workshop.create(tmp_path)
    (tmp_path / "trusted_root.json").write_bytes(ROOT)
    made.rewrite("[roles.data]", TABLES + '\n[roles.data]\nidentities = ["robot"]')
    return made


def test_an_identity_fills_a_role(shop: Workshop) -> None:
    trust = shop.load().trust
    (robot,) = trust.identities
    assert isinstance(robot, Identity)
    assert robot.identifier in trust.roles["data"].members
    assert robot.identifier not in trust.roles["checkpoint"].members
    assert (robot.claims, robot.instance.sha256) == ((("runner_environment", "github-hosted"),), PIN)
    assert str(trust.windows[robot.identifier]) == "before 2027-06-01T00:00:00Z"
    assert trust.revocations[0].reason == "poisoned"
    assert "publish.yml" in trust.describe("data")


def test_a_trusted_root_is_the_pinned_one(shop: Workshop) -> None:
    (shop.folder / "trusted_root.json").write_bytes(ROOT + b" ")
    with refused("ST-S09", PIN, "trusted_root.json"):
        shop.load()
    (shop.folder / "trusted_root.json").unlink()
    with refused("ST-U01"):
        shop.load()


@pytest.mark.parametrize(
    ("old", "new", "text"),
    [
        ('instance = "public"', 'instance = "privat"', "[sigstore] does not have"),
        ('instance = "public"', "", "instance"),
        ('instance = "public"', 'instance = "public"\nauthority = "corp"', "either"),
        ('issuer = "https://token.actions.githubusercontent.com"', "", "issuer"),
        ("runner_environment =", "runner =", "no claim"),
        ('identities = ["robot"]', 'identities = ["robots"]', "[identities] does not have"),
        ('kind = "digest"', 'kind = "name"', "kind"),
        ('reason = "poisoned"', "", "reason"),
        (PIN, "abc", "sha256"),
        ('valid_until = "2027', 'valid_till = "2027', "valid_until"),
        ("threshold = 1", "threshold = 3", "3 signatures and has 2 members"),
    ],
)
def test_a_policy_that_is_not_understood_whole(shop: Workshop, old: str, new: str, text: str) -> None:
    with refused("ST-P03", text):
        shop.rewrite(old, new)
        shop.load()


def test_one_person_cannot_be_two_members(shop: Workshop) -> None:
    again = TABLES.split("[identities.robot]")[1].split("[[revoked]]")[0]
    with refused("ST-P03", "count twice"):
        shop.rewrite("[[revoked]]", f"[identities.twin]{again}\n[[revoked]]")


def test_a_date_has_a_time_zone(shop: Workshop) -> None:
    shop.rewrite("2027-06-01T00:00:00Z", "2027-06-01")
    with refused("ST-P03", "time zone"):
        shop.load()


def test_the_schema_knows_the_new_tables() -> None:
    fields = set(policy.Document.model_fields)
    assert {"sigstore", "identities", "authorities", "timestamps", "revoked"} <= fields
