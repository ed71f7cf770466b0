"""Policies: whose word they are, until when, and that nothing half-understood is applied."""

from __future__ import annotations

import datetime as dt
import hashlib
import os
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from supplychain import policy
from supplychain.errors import SecureTrainError
from tests.gate.workshop import NOW, Workshop


@pytest.fixture
def shop(tmp_path: Path) -> Workshop:
    return Workshop.create(tmp_path)


def refusal(action: object) -> str:
    with pytest.raises(SecureTrainError) as caught:
        action()  # type: ignore[operator]  # a callable, whatever it returns
    return caught.value.code


def test_a_new_policy_trusts_its_key_in_every_role(shop: Workshop) -> None:
    found = shop.load()
    owner = shop.keys.public("owner").identifier
    assert {name: role.members for name, role in found.trust.roles.items()} == {
        "data": (owner,),
        "builder": (owner,),
        "checkpoint": (owner,),
    }
    assert found.rule("dataset").coverage == "lazy"


def test_an_edited_policy_is_refused(shop: Workshop) -> None:
    shop.policy.write_text(shop.policy.read_text().replace('reads = ["always"]', 'reads = ["off"]'))
    assert refusal(shop.load) == "ST-S04"


def test_a_policy_without_signature_cannot_decide(shop: Workshop) -> None:
    policy.signature_path(shop.policy).unlink()
    assert refusal(shop.load) == "ST-P02"


def test_a_policy_of_a_stranger_cannot_decide(shop: Workshop) -> None:
    shop.key("stranger")
    policy.sign(shop.policy, shop.signer("stranger"))
    assert refusal(shop.load) == "ST-P02"


def test_a_pinned_digest_replaces_the_signature(shop: Workshop) -> None:
    policy.signature_path(shop.policy).unlink()
    digest = hashlib.sha256(shop.policy.read_bytes()).hexdigest()
    assert shop.load(pinned=digest).digest == digest
    assert shop.load(pinned=f"sha256:{digest}").digest == digest
    assert refusal(lambda: shop.load(pinned="0" * 64)) == "ST-P02"


def test_an_expired_policy_is_refused(shop: Workshop) -> None:
    last = NOW + policy.LIFETIME
    assert shop.load(now=last - dt.timedelta(days=1)).id == "development"
    assert refusal(lambda: shop.load(now=last)) == "ST-P01"


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("[run]", "[rum]"),
        ("threshold = 1", "treshold = 1"),
        ("threshold = 1", "threshold = 2"),
        ("threshold = 1", "threshold = 0"),
        ("threshold = 1", 'threshold = "1"'),
        ("version = 1", "version = 2"),
        ('signed_by = "data"', 'signed_by = "nobody"'),
        ('keys = ["owner"]', 'keys = ["somebody"]'),
        ('keys = ["owner"]', "keys = []"),
        ('coverage = "full"', 'coverage = "some"'),
        ('reads = ["always"]', "reads = []"),
        ("[keys.owner]", "[keys.owner]\nname = 1"),
        ("version = 1", "version = 1\nversion = 1"),
        ("version = 1", "version = "),
    ],
)
def test_what_is_not_understood_is_not_applied(shop: Workshop, old: str, new: str) -> None:
    data = shop.policy.read_bytes().replace(old.encode(), new.encode(), 1)
    assert refusal(lambda: policy.parse(data, where="policy.toml")) == "ST-P03"


def test_an_unknown_key_gets_the_nearest_name(shop: Workshop) -> None:
    data = shop.policy.read_bytes().replace(b"threshold", b"treshold")
    with pytest.raises(SecureTrainError, match="did you mean 'threshold'"):
        policy.parse(data, where="policy.toml")


def test_a_date_without_zone_is_refused(shop: Workshop) -> None:
    text = shop.policy.read_text()
    line = next(line for line in text.splitlines() if line.startswith("expires"))
    shop.rewrite(line, 'expires = "2027-01-01"')
    assert refusal(shop.load) == "ST-P03"


def test_a_key_that_is_none_is_refused(shop: Workshop) -> None:
    shop.rewrite("BEGIN PUBLIC KEY", "BEGIN PRIVATE KEY")
    assert refusal(shop.load) == "ST-S06"


def test_a_policy_is_never_overwritten(shop: Workshop) -> None:
    assert refusal(lambda: policy.new(shop.policy, "development", shop.signer("owner"), now=NOW)) == "ST-U05"


def test_unknown_profile_and_absent_file(shop: Workshop, tmp_path: Path) -> None:
    assert (
        refusal(lambda: policy.new(tmp_path / "p.toml", "relaxed", shop.signer("owner"), now=NOW)) == "ST-U03"
    )
    assert refusal(lambda: policy.load(tmp_path / "none.toml", trusted=[])) == "ST-U01"


@given(st.binary(max_size=300))
@settings(max_examples=200, deadline=None)
def test_foreign_bytes_never_give_a_traceback(data: bytes) -> None:
    with pytest.raises(SecureTrainError) as caught:
        policy.parse(data, where="fuzz")
    assert caught.value.code == "ST-P03"


@pytest.mark.parametrize("profile", ["development", "production"])
def test_every_shipped_policy_can_be_used(shop: Workshop, tmp_path: Path, profile: str) -> None:
    path = tmp_path / f"{profile}.toml"
    policy.new(path, profile, shop.signer("owner"), now=NOW)
    found = policy.load(path, trusted=[shop.keys.public("owner")], now=NOW)
    assert found.id == profile
    assert found.document.environment.require_sealed == (profile == "production")


def test_the_launcher_signs_alone(shop: Workshop) -> None:
    """A threshold that its statements could never meet would only look strict."""
    shop.key("second")
    pem = shop.keys.public("second").pem.decode()
    text = shop.policy.read_text() + f'[keys.second]\npem = """\n{pem}"""\n'
    head, _, tail = text.partition("[roles.checkpoint]")
    tail = tail.replace('keys = ["owner"]\nthreshold = 1', 'keys = ["owner", "second"]\nthreshold = 2', 1)
    data = f"{head}[roles.checkpoint]{tail}".encode()
    assert refusal(lambda: policy.parse(data, where="policy.toml")) == "ST-P03"


def test_numbers_that_python_does_not_convert_are_refused(shop: Workshop) -> None:
    data = shop.policy.read_bytes().replace(b"threshold = 1", b"threshold = " + b"1" * 5000, 1)
    assert refusal(lambda: policy.parse(data, where="policy.toml")) == "ST-P03"


def test_a_pipe_in_place_of_a_policy_does_not_hang(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "policy.toml")
    assert refusal(lambda: policy.load(tmp_path / "policy.toml", trusted=[])) == "ST-U01"
