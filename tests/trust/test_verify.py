"""The numbered obligations of `supplychain/trust/verify.py`: what breaks each, and the code that says so."""

from __future__ import annotations

import base64
import copy
import dataclasses
import hashlib
import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from supplychain.artifact import MANIFEST, SIGNATURES, Manifest, SecureTrainError, build_manifest, oms
from supplychain.trust import bundle
from supplychain.trust.roots import Role, Trust
from supplychain.trust.signers import LocalSigner, add_signature, sign_artifact
from supplychain.trust.verify import SignedArtifact, VerifiedStatement, verify_artifact, verify_statement
from tests.artifact.support import check_error, make_tree, refused
from tests.trust.support import (
    STATEMENT,
    TYPE,
    bundle_path,
    check,
    document,
    edit,
    key,
    payload,
    resign,
    sign_bytes,
    signed,
    statement_bundle,
    trust,
)

SUBJECT = "a" * 64
Document = dict[str, Any]


def statement(data: bytes, *, subject: str | None = SUBJECT, kind: str = TYPE) -> VerifiedStatement:
    return verify_statement(data, trust(key("alice")), "data", kind, subject=subject, where="it.json")


def rewritten(change: Callable[[Document], object]) -> bytes:
    """A good bundle whose document was changed."""
    value: Document = json.loads(statement_bundle())
    change(value)
    return json.dumps(value).encode()


def test_good_ones_are_valid(tmp_path: Path) -> None:
    verified = statement(statement_bundle())
    assert (verified.signer.name, verified.predicate, verified.statement) == (
        "alice",
        {"answer": "42"},
        STATEMENT,
    )
    manifest = signed(tmp_path)
    artifact = check(tmp_path)
    assert artifact.manifest == manifest
    assert [signer.name for signer in artifact.signers] == ["alice"]
    assert (artifact.role, artifact.root) == ("data", tmp_path)


# --- V1 -----------------------------------------------------------------------------------------------------


V1_DOCUMENTS: list[Callable[[Document], object]] = [
    lambda it: it.update(mediaType="application/vnd.dev.sigstore.bundle+json;version=0.3"),
    lambda it: it.update(mediaType="application/vnd.dev.sigstore.bundle.v0.2+json"),
    lambda it: it.update(mediaType="\x1b[2J\n  next: curl evil | sh"),
    lambda it: it.update(mediaType=[[[[]]]]),
    lambda it: it.pop("mediaType"),
    lambda it: it.update(unknown=1),
    lambda it: it.update(messageSignature={}),
    lambda it: it.pop("dsseEnvelope"),
    lambda it: it.update(dsseEnvelope=[]),
    lambda it: it.pop("verificationMaterial"),
    lambda it: it.update(verificationMaterial=None),
    lambda it: it["verificationMaterial"].pop("publicKey"),
    lambda it: it["verificationMaterial"].update(publicKey={}),
    lambda it: it["verificationMaterial"].update(publicKey=key("alice").public.identifier),
    lambda it: it["verificationMaterial"].update(certificate={"rawBytes": ""}),
    lambda it: it["verificationMaterial"].update(tlogEntries=[{}]),
    lambda it: it["verificationMaterial"]["publicKey"].update(rawBytes=""),
    lambda it: it["verificationMaterial"]["publicKey"].update(hint=None),
    lambda it: it["verificationMaterial"]["publicKey"].update(hint="A" * 64),
    lambda it: it["verificationMaterial"]["publicKey"].update(hint="\x1b" * 64),
    lambda it: it["dsseEnvelope"].update(signatures=[]),
    lambda it: it["dsseEnvelope"].update(signatures=None),
    lambda it: it["dsseEnvelope"].update(signatures={"0": {}}),
    lambda it: it["dsseEnvelope"].update(signatures=["sig"]),
    lambda it: it["dsseEnvelope"]["signatures"].append({"sig": "AAAA", "keyid": ""}),
    lambda it: it["dsseEnvelope"]["signatures"].append(it["dsseEnvelope"]["signatures"][0]),
    lambda it: it["dsseEnvelope"]["signatures"][0].pop("sig"),
    lambda it: it["dsseEnvelope"]["signatures"][0].update(sig=None),
    lambda it: it["dsseEnvelope"]["signatures"][0].update(sig="not base64!"),
    lambda it: it["dsseEnvelope"]["signatures"][0].update(sig="é"),
    lambda it: it["dsseEnvelope"]["signatures"][0].update(cert=""),
    lambda it: it["dsseEnvelope"].update(payload=1),
    lambda it: it["dsseEnvelope"].update(payload="===="),
    lambda it: it["dsseEnvelope"].update(payload=it["dsseEnvelope"]["payload"] + "\n"),
    lambda it: it["dsseEnvelope"].pop("payload"),
    lambda it: it["dsseEnvelope"].update(unsigned=True),
]


@pytest.mark.parametrize("change", V1_DOCUMENTS)
def test_v1_a_bundle_has_one_exact_shape(change: Callable[[Document], object]) -> None:
    with refused("ST-S03", "it.json", "next:"):
        statement(rewritten(change))


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"null",
        b"[]",
        b"{}",
        b"\xff",
        b"[" * 100_000,
        statement_bundle()[:-1],
        statement_bundle() + b"{}",
        statement_bundle().replace(b'"mediaType"', b'"mediaType":"x","mediaType"'),
        statement_bundle().replace(b'"sig"', b'"sig":"AAAA","sig"'),
        statement_bundle().replace(b'"tlogEntries":[]', b'"tlogEntries":[NaN]'),
        statement_bundle().replace(b'"tlogEntries":[]', b'"tlogEntries":[' + b"9" * 5000 + b"]"),
    ],
)
def test_v1_a_bundle_is_strict_json(data: bytes) -> None:
    with refused("ST-S03", "it.json"):
        statement(data)


def test_v1_a_bundle_is_small(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    signed(tmp_path)
    os.truncate(bundle_path(tmp_path), 1 << 40)  # sparse
    with refused("ST-S03", "larger than", "alice.sigstore.json"):
        check(tmp_path)
    monkeypatch.setattr(bundle, "MAX_BUNDLE", 100)
    with refused("ST-S03", "larger than"):
        statement(statement_bundle())


def test_v1_every_bundle_of_an_artifact_is_well_formed(tmp_path: Path) -> None:
    signed(tmp_path)
    bundle_path(tmp_path, "zoe").write_bytes(b"{}")
    with refused("ST-S03", "zoe.sigstore.json"):
        check(tmp_path)


@pytest.mark.parametrize("target", ["link", "linked folder", "fifo", "folder"])
def test_v1_a_bundle_is_a_plain_file_within_the_artifact(tmp_path: Path, target: str) -> None:
    root = tmp_path / "root"
    signed(root)
    path = bundle_path(root)
    elsewhere = tmp_path / "elsewhere"
    if target == "linked folder":
        path.parent.rename(elsewhere)
        path.parent.symlink_to(elsewhere)
        with refused("ST-A09"):
            check(root)
        return
    path.rename(elsewhere)
    if target == "link":
        path.symlink_to(elsewhere)
    elif target == "fifo":
        os.mkfifo(path)
    else:
        path.mkdir()
    with refused("ST-S03", "alice.sigstore.json"):
        check(root)


def test_v1_too_many_bundles(tmp_path: Path) -> None:
    signed(tmp_path)
    for number in range(64):
        bundle_path(tmp_path, f"n{number}").write_bytes(b"{}")
    with refused("ST-S03", "at most 64", "65"):
        check(tmp_path)


def test_v1_without_a_bundle_there_is_no_signature(tmp_path: Path) -> None:
    build_manifest(make_tree(tmp_path), "dataset")
    with refused("ST-A09", "no signature", "secure-train sign"):
        check(tmp_path)
    bundle_path(tmp_path).parent.mkdir()
    (bundle_path(tmp_path).parent / "README").write_bytes(b"")
    with refused("ST-A09", "no signature"):
        check(tmp_path)
    with refused("ST-A09", "no manifest"):
        check(make_tree(tmp_path / "bare"))


# --- V2 -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["application/json", "application/vnd.in-toto+JSON", "", None, ["x"]])
def test_v2_another_payload_type_is_refused(kind: Any) -> None:
    with refused("ST-S03", "another kind of payload", "application/vnd.in-toto+json"):
        statement(rewritten(lambda it: it["dsseEnvelope"].update(payloadType=kind)))


# --- V3 -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("algorithm", ["ecdsa-p256", "ecdsa-p384", "ecdsa-p521", "ed25519"])
def test_v3_a_changed_payload_or_signature_is_refused(tmp_path: Path, algorithm: str) -> None:
    signer = key(f"signer-{algorithm}", algorithm)
    signed(tmp_path, signer)
    path = bundle_path(tmp_path, signer.name)
    good = path.read_bytes()
    assert check(tmp_path, signer).signers == (signer.public,)

    def flip_payload(it: Document) -> None:
        data = bytearray(base64.b64decode(it["dsseEnvelope"]["payload"]))
        data[len(data) // 2] ^= 1
        it["dsseEnvelope"]["payload"] = base64.b64encode(data).decode()

    def flip_signature(it: Document) -> None:
        data = bytearray(base64.b64decode(it["dsseEnvelope"]["signatures"][0]["sig"]))
        data[-1] ^= 1
        it["dsseEnvelope"]["signatures"][0]["sig"] = base64.b64encode(data).decode()

    def no_signature(it: Document) -> None:
        it["dsseEnvelope"]["signatures"][0]["sig"] = ""

    def garbage(it: Document) -> None:
        it["dsseEnvelope"]["signatures"][0]["sig"] = base64.b64encode(
            b"\x30\x06\x02\x01\x00\x02\x01\x00"
        ).decode()

    for change in (flip_payload, flip_signature, no_signature, garbage):
        path.write_bytes(good)
        edit(path, change)
        with refused("ST-S01", path.name, signer.name):
            check(tmp_path, signer)


def test_v3_the_signature_of_another_statement_is_refused() -> None:
    other = json.loads(statement_bundle(predicate={"answer": "43"}))
    with refused("ST-S01"):
        statement(
            rewritten(lambda it: it["dsseEnvelope"].update(signatures=other["dsseEnvelope"]["signatures"]))
        )


def test_v3_the_signature_covers_the_payload_type() -> None:
    """A signature over the bare payload, or over the mis-encoded form that was in use once, is none."""
    data = json.dumps(STATEMENT).encode()
    kind = bundle.PAYLOAD_TYPE
    misencoded = f"DSSEV1 {len(kind)} {kind} {len(data)} {data!r}".encode()
    for message in (data, misencoded, kind.encode() + data):
        forged = bundle.emit(data, key("alice").sign(message), key("alice").public.identifier)
        with refused("ST-S01"):
            statement(forged.data)


def test_v3_an_unknown_key_is_refused_and_named(tmp_path: Path) -> None:
    mallory = key("mallory")
    with refused("ST-S02", mallory.public.identifier[:12], "alice", "does not know"):
        statement(statement_bundle(mallory))
    signed(tmp_path, mallory)
    with refused("ST-S02", mallory.public.identifier[:12], "alice"):
        check(tmp_path)


def test_v3_the_hint_does_not_decide_who_signed() -> None:
    """Mallory's signature under alice's name."""
    alice = key("alice").public.identifier
    forged = json.loads(statement_bundle(key("mallory")))
    forged["verificationMaterial"]["publicKey"]["hint"] = alice
    with refused("ST-S01", "alice"):
        statement(json.dumps(forged).encode())


def test_v3_a_wrong_signature_of_a_trusted_key_is_never_passed_over(tmp_path: Path) -> None:
    """Not even if enough others signed rightly."""
    manifest = signed(tmp_path)
    add_signature(tmp_path, manifest, LocalSigner(key("bob")))
    edit(bundle_path(tmp_path, "bob"), lambda it: it["dsseEnvelope"]["signatures"][0].update(sig="AAAA"))
    with refused("ST-S01", "bob"):
        check(tmp_path, key("alice"), key("bob"))


# --- V4 -----------------------------------------------------------------------------------------------------


def test_v4_a_trusted_key_fills_its_own_roles_only(tmp_path: Path) -> None:
    alice, bob = key("alice").public, key("bob").public
    both = {alice.identifier: alice, bob.identifier: bob}
    split = Trust(
        both, {"data": Role("data", (bob.identifier,)), "policy": Role("policy", (alice.identifier,))}
    )
    data = statement_bundle()
    assert verify_statement(data, split, "policy", TYPE, subject=SUBJECT, where="it").signer == alice
    with refused("ST-S02", "'data'", "alice", "bob"):
        verify_statement(data, split, "data", TYPE, subject=SUBJECT, where="it")
    signed(tmp_path)
    with refused("ST-S02", "'data'", "alice", "bob"):
        verify_artifact(tmp_path, split, "data")
    with refused("ST-P04", "nobody the role 'checkpoint'", "[roles.checkpoint]"):
        verify_artifact(tmp_path, split, "checkpoint")


def test_v4_a_role_may_list_a_key_that_is_not_trusted() -> None:
    alice = key("alice").public
    with refused("ST-S02", "nobody"):
        verify_statement(
            statement_bundle(),
            Trust({}, {"data": Role("data", (alice.identifier,))}),
            "data",
            TYPE,
            subject=SUBJECT,
            where="it",
        )


@pytest.mark.parametrize(
    ("signers", "threshold", "accepted"),
    [
        (["alice"], 1, True),
        (["alice"], 2, False),
        (["alice", "bob"], 2, True),
        (["alice", "mallory"], 2, False),
        (["alice", "mallory"], 1, True),
        (["mallory", "eve"], 1, False),
        (["mallory", "eve"], 2, False),
        (["alice", "bob", "carol"], 2, True),
        (["alice", "bob", "mallory"], 3, False),
        (["alice", "bob", "carol", "mallory"], 3, True),
    ],
)
def test_v4_as_many_different_keys_as_the_threshold(
    tmp_path: Path, signers: list[str], threshold: int, accepted: bool
) -> None:
    manifest = build_manifest(make_tree(tmp_path), "dataset")
    for name in signers:
        add_signature(tmp_path, manifest, LocalSigner(key(name)))
    trusted = [key("alice"), key("bob"), key("carol")]
    if accepted:
        names = {signer.name for signer in check(tmp_path, *trusted, threshold=threshold).signers}
        assert names == set(signers) - {"mallory"}
    else:
        with refused("ST-S02", "expected", "alice"):
            check(tmp_path, *trusted, threshold=threshold)


def test_v4_one_key_counts_once(tmp_path: Path) -> None:
    """Under as many file names as it likes, and listed in the role as often as it likes."""
    signed(tmp_path)
    for name in ("alice-2", "bob", "z"):
        bundle_path(tmp_path, name).write_bytes(bundle_path(tmp_path).read_bytes())
    with refused("ST-S02", "2 of alice", "found: alice"):
        check(tmp_path, key("alice"), key("bob"), threshold=2)


@pytest.mark.parametrize("threshold", [0, -1, 2, 3])
def test_v4_a_threshold_that_is_none_cannot_be_stated(threshold: int) -> None:
    with refused("ST-P03", str(threshold)):
        Role("data", ("a" * 64, "a" * 64), threshold)


# --- V5 -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("changes", "code"),
    [
        ({"_type": "https://in-toto.io/Statement/v0.1"}, "ST-S03"),
        ({"_type": None}, "ST-S03"),
        ({"predicateType": "urn:secure-train:test:v2"}, "ST-S04"),
        ({"predicateType": "https://model_signing/Digests/v0.1"}, "ST-S04"),
        ({"predicateType": None}, "ST-S04"),
        ({"predicateType": ["\x1b[2J"]}, "ST-S04"),
        ({"predicate": None}, "ST-S03"),
        ({"predicate": []}, "ST-S03"),
        ({"predicate": "text"}, "ST-S03"),
    ],
)
def test_v5_the_statement_is_of_the_expected_type(changes: Document, code: str) -> None:
    with refused(code, "it.json"):
        statement(statement_bundle(**changes))


@pytest.mark.parametrize(
    "data",
    [b"", b"[]", b"null", b"\xff", b'{"_type":1,"_type":1}', b"[" * 99_999, b'{"a":1.5}', b'{"\\ud800":1}'],
)
def test_v5_the_payload_is_strict_json(data: bytes) -> None:
    with refused("ST-S03", "it.json"):
        statement(sign_bytes(data))


def test_v5_an_artifact_is_not_vouched_for_by_another_kind_of_statement(tmp_path: Path) -> None:
    manifest = signed(tmp_path)
    bundle_path(tmp_path).write_bytes(
        statement_bundle(subject=[{"name": "it", "digest": {"sha256": manifest.digest}}])
    )
    with refused("ST-S04", "https://model_signing/signature/v1.0"):
        check(tmp_path)


# --- V6 -----------------------------------------------------------------------------------------------------


def test_v6_a_statement_about_something_else_is_refused() -> None:
    with refused("ST-S04", "about something else", "b" * 64, "a" * 64):
        statement(statement_bundle(), subject="b" * 64)


@pytest.mark.parametrize("position", [0, 1, 2])
def test_v6_with_several_subjects_each_one_verifies(position: int) -> None:
    digests = ["b" * 64, "c" * 64]
    digests.insert(position, SUBJECT)
    data = statement_bundle(subject=[{"name": "x", "digest": {"sha256": item}} for item in digests])
    for digest in digests:
        assert statement(data, subject=digest).statement["subject"]
    with refused("ST-S04"):
        statement(data, subject="d" * 64)


@pytest.mark.parametrize(
    "subject",
    [
        None,
        "text",
        {},
        {"digest": {"sha256": SUBJECT}},
        [SUBJECT],
        [{"name": "it"}],
        [{"digest": {"sha512": SUBJECT}}],
        [{"digest": SUBJECT}],
        [{"digest": {"sha256": SUBJECT}}, {"digest": {}}],
        [[]],
    ],
)
def test_v6_subjects_are_sha256_digests(subject: Any) -> None:
    with pytest.raises(SecureTrainError) as caught:
        statement(statement_bundle(subject=subject))
    check_error(caught.value, caught.value.code)
    assert caught.value.code in ("ST-S03", "ST-S04")


@pytest.mark.parametrize("subject", [[], [{"digest": {"sha256": None}}], [{"digest": {"sha256": [SUBJECT]}}]])
def test_v6_a_statement_about_nothing_satisfies_nobody(subject: Any) -> None:
    with refused("ST-S04"):
        statement(statement_bundle(subject=subject))


def test_v6_the_signature_of_another_artifact_is_refused(tmp_path: Path) -> None:
    signed(tmp_path / "one")
    signed(tmp_path / "two", files={"a": b"1"})
    bundle_path(tmp_path / "one").write_bytes(bundle_path(tmp_path / "two").read_bytes())
    with refused("ST-S04", "another manifest"):
        check(tmp_path / "one")


def test_v6_same_contents_under_other_names_are_another_artifact(tmp_path: Path) -> None:
    """The subject digest of OMS is equal; the identity is not."""
    signed(tmp_path / "one", files={"a.bin": b"1", "b.bin": b"2"})
    signed(tmp_path / "two", files={"run_me.py": b"1", "sandbox.so": b"2"})
    digests = [
        [item["digest"] for item in payload(bundle_path(tmp_path / name))["predicate"]["resources"]][:2]
        for name in ("one", "two")
    ]
    assert digests[0] == digests[1]
    bundle_path(tmp_path / "one").write_bytes(bundle_path(tmp_path / "two").read_bytes())
    with refused("ST-S04"):
        check(tmp_path / "one")


def _subject(statement: Document) -> None:
    """Make the subject right for the changed list."""
    statement["subject"][0]["digest"]["sha256"] = oms._subject_digest(
        item["digest"] for item in statement["predicate"]["resources"]
    )


def _drop(name: str) -> Callable[[Document], None]:
    def change(it: Document) -> None:
        it["predicate"]["resources"] = [item for item in it["predicate"]["resources"] if item["name"] != name]
        _subject(it)

    return change


def _add(name: str, digest: str = "0" * 64, algorithm: str = "sha256") -> Callable[[Document], None]:
    def change(it: Document) -> None:
        it["predicate"]["resources"].append({"name": name, "algorithm": algorithm, "digest": digest})
        _subject(it)

    return change


def _set(index: int, **values: Any) -> Callable[[Document], None]:
    def change(it: Document) -> None:
        it["predicate"]["resources"][index].update(values)
        if values.get("digest", "00") not in (None, "text"):
            _subject(it)

    return change


V6_LISTS: list[Callable[[Document], object]] = [
    _drop("config.json"),
    _drop("empty"),
    _drop(MANIFEST),
    _drop("secure-train/blocks/shards/shard-00000.bin"),
    _add("extra.py"),
    _add("../escape"),
    _add("empty"),
    _add("empty", hashlib.sha256(b"").hexdigest()),
    _add("secure-train/blocks/empty"),
    _set(0, digest="0" * 64),
    _set(0, name="renamed"),
    _set(0, algorithm="blake3"),
    _set(0, digest=None),
    _set(0, digest="text"),
    _set(0, name=None),
    _set(0, name=["a"]),
    _set(0, size=3),
    lambda it: it["predicate"].update(resources=[]),
    lambda it: it["predicate"].update(resources=None),
    lambda it: it["predicate"].update(resources={"a": 1}),
    lambda it: it["predicate"].update(resources=["config.json"]),
    lambda it: it["predicate"].pop("resources"),
    lambda it: it["predicate"].pop("serialization"),
    lambda it: it["predicate"]["serialization"].update(method="shards"),
    lambda it: it["predicate"]["serialization"].update(hash_type="blake2b"),
    lambda it: it["predicate"]["serialization"].update(allow_symlinks=True),
    lambda it: it["predicate"]["serialization"]["ignore_paths"].append("."),
    lambda it: it["predicate"]["serialization"].update(ignore_paths=[]),
    lambda it: it["predicate"].update(unknown="x"),
    lambda it: it.update(subject=[]),
    lambda it: it.update(subject=None),
    lambda it: it["subject"].append(it["subject"][0]),
    lambda it: it["subject"][0]["digest"].update(sha256="0" * 64),
    lambda it: it["subject"][0]["digest"].update(blake3="0" * 64),
]


@pytest.mark.parametrize("change", V6_LISTS)
def test_v6_the_list_of_files_is_exactly_the_manifests(
    tmp_path: Path, change: Callable[[Document], object]
) -> None:
    """Rightly signed by a trusted key, and still refused: both readers of a signature must see one thing."""
    signed(tmp_path)
    resign(bundle_path(tmp_path), lambda it: None)
    check(tmp_path)  # signing the same again is accepted, so it is the change that is refused
    resign(bundle_path(tmp_path), change)
    with refused("ST-S04", "alice.sigstore.json"):
        check(tmp_path)


def test_v6_each_signer_must_have_signed_this_artifact(tmp_path: Path) -> None:
    manifest = signed(tmp_path / "one")
    add_signature(tmp_path / "one", manifest, LocalSigner(key("bob")))
    signed(tmp_path / "two", key("bob"), files={"a": b"1"})
    bundle_path(tmp_path / "one", "bob").write_bytes(bundle_path(tmp_path / "two", "bob").read_bytes())
    with refused("ST-S04", "bob.sigstore.json"):
        check(tmp_path / "one", key("alice"), key("bob"))


# --- V7 -----------------------------------------------------------------------------------------------------


def test_v7_another_kind_is_refused(tmp_path: Path) -> None:
    signed(tmp_path)
    with refused("ST-P04", "checkpoint", "dataset"):
        check(tmp_path, kind="checkpoint")


def test_v7_an_edited_manifest_is_refused(tmp_path: Path) -> None:
    signed(tmp_path)
    path = tmp_path / MANIFEST
    path.write_bytes(path.read_bytes() + b"\n")
    with refused("ST-S04", "another manifest"):
        check(tmp_path)


def test_v7_a_signed_manifest_that_is_not_canonical_is_refused(tmp_path: Path) -> None:
    """A trusted key signed it, and two parsers could still read it differently."""
    signed(tmp_path)
    path = tmp_path / MANIFEST
    data = path.read_bytes() + b"\n"
    path.write_bytes(data)

    def follow(it: Document) -> None:
        for item in it["predicate"]["resources"]:
            if item["name"] == MANIFEST:
                item["digest"] = hashlib.sha256(data).hexdigest()
        _subject(it)

    resign(bundle_path(tmp_path), follow)
    with refused("ST-A02", "canonical", MANIFEST):
        check(tmp_path)


def test_v7_an_unsigned_manifest_is_not_even_parsed(tmp_path: Path) -> None:
    """A manifest that nobody trusted signed is answered by its signer, not by its contents."""
    signed(tmp_path, key("mallory"))
    (tmp_path / MANIFEST).write_bytes(b"[" * 1_000_000)
    with refused("ST-S02"):
        check(tmp_path)
    signed(tmp_path, key("alice"))
    (tmp_path / MANIFEST).write_bytes(b"[" * 1_000_000)
    with refused("ST-S04"):
        check(tmp_path)


# --- the types ----------------------------------------------------------------------------------------------


def test_verified_types_are_made_by_the_verifier_alone(tmp_path: Path) -> None:
    signed(tmp_path)
    artifact, verified = check(tmp_path), statement(statement_bundle())
    for proof in (None, object(), True):
        with pytest.raises(TypeError):
            SignedArtifact(tmp_path, artifact.manifest, artifact.signers, "data", artifact.bundles, proof)
        with pytest.raises(TypeError):
            VerifiedStatement(STATEMENT, verified.signer, verified.bundle, proof)
    with pytest.raises(TypeError):
        SignedArtifact(tmp_path, artifact.manifest, artifact.signers, "data", artifact.bundles)  # type: ignore[call-arg]  # what a careless caller writes
    for value, change in ((artifact, {"root": Path("/")}), (verified, {"statement": {}})):
        with pytest.raises((TypeError, ValueError)):
            dataclasses.replace(value, **change)
    with pytest.raises(dataclasses.FrozenInstanceError):
        artifact.root = Path("/")  # type: ignore[misc]


# --- fuzz ---------------------------------------------------------------------------------------------------

GOOD = statement_bundle()


@given(st.integers(0, len(GOOD) - 1), st.binary(min_size=1, max_size=3), st.integers(0, 3))
@settings(max_examples=300, deadline=None)
def test_an_edited_bundle_is_refused_or_says_the_same(offset: int, inserted: bytes, removed: int) -> None:
    data = GOOD[:offset] + inserted + GOOD[offset + removed :]
    try:
        verified = statement(data)
    except SecureTrainError as error:
        check_error(error, error.code)
        assert error.code in ("ST-S01", "ST-S02", "ST-S03")  # noqa: PT017
    else:
        assert verified.statement == STATEMENT


JSON: st.SearchStrategy[Any] = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**60), 2**60) | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=8,
)


def _places(value: Any, prefix: tuple[str | int, ...] = ()) -> list[tuple[str | int, ...]]:
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    return [place for name, item in items for place in ((*prefix, name), *_places(item, (*prefix, name)))]


def _put(document: Any, place: tuple[str | int, ...], value: Any) -> Any:
    result = copy.deepcopy(document)
    target = result
    for name in place[:-1]:
        target = target[name]
    target[place[-1]] = value
    return result


@given(st.sampled_from(_places(json.loads(GOOD))), JSON)
@settings(max_examples=200, deadline=None)
def test_a_bundle_with_one_hostile_field(place: tuple[str | int, ...], value: Any) -> None:
    data = json.dumps(_put(json.loads(GOOD), place, value)).encode()
    try:
        verified = statement(data)
    except SecureTrainError as error:
        check_error(error, error.code)
    else:
        assert verified.statement == STATEMENT


@pytest.fixture(scope="module")
def oms_artifact(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("artifact")
    signed(root, files={"a": b"1", "b/c": b"2"})
    return root


@given(st.data())
@settings(max_examples=200, deadline=None)
def test_a_signed_statement_with_one_hostile_field(oms_artifact: Path, data: st.DataObject) -> None:
    path = bundle_path(oms_artifact)
    good = path.read_bytes()
    original = payload(path)
    place = data.draw(st.sampled_from(_places(original)))
    value = data.draw(JSON)
    try:
        path.write_bytes(sign_bytes(json.dumps(_put(original, place, value)).encode()))
        try:
            check(oms_artifact)
        except SecureTrainError as error:
            check_error(error, error.code)
            assert error.code in ("ST-S03", "ST-S04")  # noqa: PT017
        else:
            assert (
                place in [("subject", 0, "name"), ("subject", 0)] or _put(original, place, value) == original
            )
    finally:
        path.write_bytes(good)


def test_the_manifest_type_is_what_was_signed(tmp_path: Path) -> None:
    manifest = sign_artifact(make_tree(tmp_path), "dataset", LocalSigner(key("alice")))
    assert isinstance(check(tmp_path).manifest, Manifest)
    assert check(tmp_path).manifest.digest == manifest.digest
    assert document(bundle_path(tmp_path))["verificationMaterial"]["publicKey"]["hint"] == (
        key("alice").public.identifier
    )
    assert sorted(os.listdir(tmp_path / SIGNATURES)) == ["alice.sigstore.json"]
