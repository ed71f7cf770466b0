"""Certificates with a full chain, and timestamps: every flaw that a chain can have, at a trusted time."""

from __future__ import annotations

import dataclasses
import datetime as dt
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from cryptography.hazmat.primitives import serialization
from cryptography.x509.oid import ExtendedKeyUsageOID

from supplychain.artifact import build_manifest
from supplychain.errors import SecureTrainError
from supplychain.trust import bundle
from supplychain.trust.roots import Authority, Holder, Revocation, Role, Trust, Window
from supplychain.trust.signers import CertificateSigner, LocalSigner, add_signature
from supplychain.trust.verify import verify_artifact, verify_statement
from tests.artifact.support import make_tree, refused
from tests.sigstore.local import LocalSigstore
from tests.trust.authority import CODE, DAY, NOW, Issued, issue
from tests.trust.support import STATEMENT, TYPE, key

WHO = "release@acme.test"
PAYLOAD = json.dumps(STATEMENT).encode()


def trust(root: Issued, **changes: Any) -> Trust:
    holder = Holder("release", WHO, Authority("acme", root.pem))
    made = dataclasses.replace(Trust.of("data", holder), now=NOW)
    return dataclasses.replace(made, **changes)


def signed(leaf: Issued, *above: Issued) -> bytes:
    chain = b"".join(item.pem for item in (leaf, *above))
    return CertificateSigner(leaf.signing_key(), chain, where="it.crt").sign_payload(PAYLOAD).data


def check(data: bytes, believed: Trust) -> str:
    return verify_statement(data, believed, "data", TYPE, subject="a" * 64, where="it.json").signer.name


ROOT = issue("root", ca=True)
MIDDLE = issue("intermediate", ROOT, ca=True)
LEAF = issue("leaf", MIDDLE, san=WHO, eku=CODE)


@pytest.mark.parametrize("with_root", [True, False])
def test_a_full_chain_is_valid(with_root: bool) -> None:
    assert check(signed(LEAF, MIDDLE, *([ROOT] if with_root else [])), trust(ROOT)) == "release"
    direct = issue("leaf", ROOT, san=WHO, eku=CODE)
    assert check(signed(direct), trust(ROOT)) == "release"


PAST, FUTURE = (-30, -1), (1, 30)


@pytest.mark.parametrize("days", [PAST, FUTURE], ids=["expired", "not yet valid"])
@pytest.mark.parametrize("which", ["root", "intermediate", "leaf"])
def test_v8_each_certificate_of_the_chain_is_valid_at_the_time(which: str, days: tuple[int, int]) -> None:
    """model-signing takes the time from the certificate itself, and so accepts each of these."""

    def at(name: str) -> tuple[int, int]:
        return days if name == which else (-30, 30)

    root = issue("root", ca=True, days=at("root"))
    middle = issue("intermediate", root, ca=True, days=at("intermediate"))
    leaf = issue("leaf", middle, san=WHO, eku=CODE, days=at("leaf"))
    with pytest.raises(SecureTrainError) as caught:
        check(signed(leaf, middle, root), trust(root))
    assert caught.value.code == "ST-S07", caught.value
    with pytest.raises(SecureTrainError) as caught:
        check(signed(leaf, middle), trust(root))  # the root left out: it still has to be valid
    assert caught.value.code == ("ST-S01" if which == "root" else "ST-S07")


def test_v3_flaws_of_a_chain() -> None:
    server = (ExtendedKeyUsageOID.SERVER_AUTH,)
    other = issue("root", ca=True)  # the same name, another key
    twisted = issue("intermediate", ROOT, ca=False)
    server_only = issue("intermediate", ROOT, ca=True, eku=server)
    cases: dict[str, tuple[Issued, ...]] = {
        "another root of the same name": (issue("leaf", other, san=WHO, eku=CODE), other),
        "self-signed": (issue("leaf", san=WHO, eku=CODE),),
        "no intermediate": (LEAF,),
        "an intermediate that is no issuer": (issue("leaf", twisted, san=WHO, eku=CODE), twisted),
        "an intermediate for servers": (issue("leaf", server_only, san=WHO, eku=CODE), server_only),
        "a leaf for servers": (issue("leaf", MIDDLE, san=WHO, eku=server), MIDDLE),
        "a leaf without a stated use": (issue("leaf", MIDDLE, san=WHO), MIDDLE),
        "a leaf that may not sign": (issue("leaf", MIDDLE, san=WHO, eku=CODE, usage=False), MIDDLE),
        "an issuer in place of a signer": (issue("leaf", ROOT, ca=True, san=WHO, eku=CODE),),
    }
    for title, chain in cases.items():
        with pytest.raises(SecureTrainError) as caught:
            check(signed(*chain), trust(ROOT))
        assert caught.value.code == "ST-S01", (title, str(caught.value))


def test_v4_any_other_leaf_of_the_authority_is_refused() -> None:
    for san in ("mallory@acme.test", "https://acme.test/release", None):
        with refused("ST-S02", WHO, san or "nobody"):
            check(signed(issue("leaf", MIDDLE, san=san, eku=CODE), MIDDLE), trust(ROOT))


def test_v3_the_signature_is_of_the_certificates_key() -> None:
    document = json.loads(signed(LEAF, MIDDLE))
    other = json.loads(signed(issue("leaf", MIDDLE, san=WHO, eku=CODE), MIDDLE))
    document["dsseEnvelope"]["signatures"] = other["dsseEnvelope"]["signatures"]
    with refused("ST-S01", "release"):
        check(json.dumps(document).encode(), trust(ROOT))


def test_a_certificate_of_another_key_cannot_sign() -> None:
    with refused("ST-S06", "another key"):
        CertificateSigner(key("alice"), LEAF.pem, where="it.crt")
    with refused("ST-S06", "PEM"):
        CertificateSigner(key("alice"), b"x", where="it.crt")


def test_v4_one_private_key_counts_once_as_key_and_as_holder(tmp_path: Path) -> None:
    manifest = build_manifest(make_tree(tmp_path), "dataset")
    own = LEAF.signing_key("own")
    add_signature(tmp_path, manifest, LocalSigner(own))
    add_signature(
        tmp_path, manifest, CertificateSigner(LEAF.signing_key("cert"), LEAF.pem + MIDDLE.pem, where="c")
    )
    holder = Holder("release", WHO, Authority("acme", ROOT.pem))
    members = (own.public.identifier, holder.identifier)
    believed = Trust({members[0]: own.public}, {"data": Role("data", members, 2)}, (), (holder,), now=NOW)
    with refused("ST-S02", "too few"):
        verify_artifact(tmp_path, believed, "data")


# --- times --------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def stamps() -> Iterator[LocalSigstore]:
    """A timestamp authority whose clock the tests set."""
    with LocalSigstore(clock=lambda: NOW) as running:
        yield running


def authority(running: LocalSigstore) -> Authority:
    chain = (running.tsa_cert, running.tsa_root_cert)
    return Authority("tsa", b"".join(item.public_bytes(serialization.Encoding.PEM) for item in chain))


def stamped(running: LocalSigstore, leaf: Issued, *above: Issued) -> bytes:
    chain = b"".join(item.pem for item in (leaf, *above))
    url = f"{running.url}/api/v1/timestamp"
    return CertificateSigner(leaf.signing_key(), chain, url, where="c").sign_payload(PAYLOAD).data


def test_v8_a_timestamp_keeps_a_signature_alive(stamps: LocalSigstore) -> None:
    data = stamped(stamps, LEAF, MIDDLE)
    later = NOW + 90 * DAY
    with refused("ST-S07"):
        check(data, trust(ROOT, now=later))  # nobody trusted says when it was made
    assert check(data, trust(ROOT, now=later, stamps=(authority(stamps),))) == "release"


def test_v8_a_timestamp_of_nobody_trusted_proves_nothing(stamps: LocalSigstore) -> None:
    data = stamped(stamps, LEAF, MIDDLE)
    with LocalSigstore(clock=lambda: NOW) as other, refused("ST-S07"):
        check(data, trust(ROOT, now=NOW + 90 * DAY, stamps=(authority(other),)))


def test_v8_a_timestamp_of_another_signature_proves_nothing(stamps: LocalSigstore) -> None:
    later = trust(ROOT, now=NOW + 90 * DAY, stamps=(authority(stamps),))
    one, two = json.loads(stamped(stamps, LEAF, MIDDLE)), json.loads(signed(LEAF, MIDDLE))
    name = "timestampVerificationData"
    two["verificationMaterial"][name] = one["verificationMaterial"][name]
    with refused("ST-S07"):
        check(json.dumps(two).encode(), later)
    with stamps.fault("tsa-wrong-message"), refused("ST-S07"):
        check(stamped(stamps, LEAF, MIDDLE), later)
    two["verificationMaterial"][name] = {"rfc3161Timestamps": [{"signedTimestamp": "AAAA"}]}
    with refused("ST-S03", "timestamp"):
        check(json.dumps(two).encode(), later)


def test_an_authority_that_is_gone(stamps: LocalSigstore) -> None:
    with stamps.fault("no-timestamp"), refused("ST-S11", "timestamp authority"):
        stamped(stamps, LEAF, MIDDLE)
    with refused("ST-S11", "127.0.0.1:9"):
        LocalSigner(key("alice"), "http://127.0.0.1:9/").sign_payload(PAYLOAD)


H = dt.timedelta(hours=1)


@pytest.mark.parametrize(
    ("start", "end", "timestamp", "now", "valid"),
    [
        (None, None, False, 0, True),
        (-1, 1, False, 0, True),
        (0, None, False, 0, True),  # from its first moment on
        (None, 0, False, 0, False),  # and before its last
        (1, None, False, 0, False),
        (-9, -1, False, 0, False),
        (-1, 1, False, 5, False),  # nothing proves that it is not from today
        (-1, 1, True, 5, True),  # the timestamp does
        (1, 9, True, 5, False),  # and it says that the key was not yet valid
    ],
)
def test_v8_a_key_has_its_time(
    stamps: LocalSigstore, start: int | None, end: int | None, timestamp: bool, now: int, valid: bool
) -> None:
    alice = key("alice")
    url = f"{stamps.url}/api/v1/timestamp" if timestamp else None
    data = LocalSigner(alice, url).sign_payload(PAYLOAD).data
    window = Window(None if start is None else NOW + start * H, None if end is None else NOW + end * H)
    believed = dataclasses.replace(
        Trust.of("data", alice.public),
        windows={alice.public.identifier: window},
        stamps=(authority(stamps),),
        now=NOW + now * H,
    )
    if valid:
        assert check(data, believed) == "alice"
    else:
        with refused("ST-S07", "alice"):
            check(data, believed)


@pytest.mark.parametrize(
    ("kind", "since", "timestamp", "valid"),
    [
        ("key", None, False, False),
        ("key", None, True, False),
        ("key", 1, True, True),  # provably before
        ("key", 1, False, False),  # said to be before, by nobody
        ("key", 0, True, False),
        ("key", -1, True, False),
        ("identity", None, True, True),  # a key is no identity
        ("digest", None, True, False),
    ],
)
def test_v9_what_is_revoked_is_refused(
    stamps: LocalSigstore, kind: Any, since: int | None, timestamp: bool, valid: bool
) -> None:
    alice = key("alice")
    url = f"{stamps.url}/api/v1/timestamp" if timestamp else None
    made = LocalSigner(alice, url).sign_payload(PAYLOAD)
    start = None if since is None else NOW + since * H
    what = "a" * 64 if kind == "digest" else alice.public.identifier
    believed = dataclasses.replace(
        Trust.of("data", alice.public),
        stamps=(authority(stamps),),
        revocations=(Revocation(kind, what, "lost laptop", start),),
        now=NOW,
    )
    if valid:
        assert check(made.data, believed) == "alice"
    else:
        with refused("ST-S08", "lost laptop"):
            check(made.data, believed)


def test_v9_a_revoked_manifest_bundle_or_holder(tmp_path: Path) -> None:
    manifest = build_manifest(make_tree(tmp_path), "dataset")
    path = add_signature(tmp_path, manifest, LocalSigner(key("alice")))
    believed = dataclasses.replace(Trust.of("data", key("alice").public), now=NOW)
    verify_artifact(tmp_path, believed, "data")
    signature = bundle.parse(path.read_bytes(), where="it").digest
    for digest in (manifest.digest, signature):
        with refused("ST-S08", digest):
            verify_artifact(
                tmp_path,
                dataclasses.replace(believed, revocations=(Revocation("digest", digest, "bad data"),)),
                "data",
            )
    data = signed(LEAF, MIDDLE)
    own = LEAF.signing_key().public.identifier
    for entry in (Revocation("identity", WHO, "left"), Revocation("key", own, "left")):
        with refused("ST-S08", "left"):
            check(data, trust(ROOT, revocations=(entry,)))
