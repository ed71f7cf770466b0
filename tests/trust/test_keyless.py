"""Signatures by Sigstore identities, against a local instance with real certificates, logs and timestamps."""

from __future__ import annotations

import base64
import dataclasses
import datetime as dt
import json
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from supplychain.artifact import build_manifest
from supplychain.errors import SecureTrainError
from supplychain.trust import bundle, keyless
from supplychain.trust.bundle import Bundle
from supplychain.trust.keyless import KeylessSigner
from supplychain.trust.roots import Identity, Instance, Revocation, Role, Trust, Window
from supplychain.trust.signers import LocalSigner, add_signature
from supplychain.trust.verify import verify_artifact, verify_statement
from tests.artifact.support import check_error, flip, make_tree, refused
from tests.sigstore.local import LocalSigstore
from tests.trust.support import STATEMENT, TYPE, edit, key

ROBOT = "https://github.com/acme/data/.github/workflows/publish.yml@refs/heads/main"
PAYLOAD = json.dumps(STATEMENT).encode()


@pytest.fixture(scope="module")
def sigstore() -> Iterator[LocalSigstore]:
    with LocalSigstore() as running:
        yield running


def root_of(instance: LocalSigstore, name: str = "acme") -> Instance:
    return Instance(name, json.dumps(instance.trusted_root_dict()).encode())


def signer(instance: LocalSigstore, who: str = ROBOT, **claims: Any) -> KeylessSigner:
    config = json.dumps(instance.trust_config_dict()).encode()
    return KeylessSigner(lambda: instance.raw_token(who, **claims), config)


def identity(running: LocalSigstore, who: str = ROBOT, **changes: Any) -> Identity:
    made = Identity("publisher", running.issuer, who, root_of(running))
    return dataclasses.replace(made, **changes)


def check(data: bytes, *members: Identity, **changes: Any) -> str:
    trust = dataclasses.replace(Trust.of("data", *members), **changes)
    return verify_statement(data, trust, "data", TYPE, subject="a" * 64, where="it.json").signer.name


def made_with_fault(instance: LocalSigstore, *faults: str) -> bytes | None:
    """A bundle that the misbehaving instance gave, or None if our own side refused to take it."""
    with instance.fault(*faults):
        try:
            return signer(instance).sign_payload(PAYLOAD).data
        except SecureTrainError as error:
            check_error(error, "ST-S11")
            return None


@pytest.mark.parametrize("version", [1, 2])
def test_an_identity_signs_and_is_verified_when_the_instance_is_gone(version: int) -> None:
    with LocalSigstore(rekor_version=version) as running:
        by = signer(running)
        made = [by.sign_payload(PAYLOAD) for _ in range(3)]
        assert by.public.subject == ROBOT
    for item in made:
        assert item.method == "keyless"
        assert item.payload == PAYLOAD  # signed bytes are stored bytes
        assert check(item.data, identity(running)) == "publisher"


def test_verification_opens_no_connection(sigstore: LocalSigstore, monkeypatch: pytest.MonkeyPatch) -> None:
    data = signer(sigstore).sign_payload(PAYLOAD).data

    def refuse(*_: Any) -> None:
        raise AssertionError("verification must be offline")

    monkeypatch.setattr(socket.socket, "connect", refuse)
    monkeypatch.setattr(socket, "getaddrinfo", refuse)
    keyless._verifier.cache_clear()
    check(data, identity(sigstore))


def test_no_cache_is_read(
    sigstore: LocalSigstore, private_home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A rogue root where sigstore keeps its cache changes nothing: only the pinned bytes count."""
    with LocalSigstore() as rogue:
        data = signer(rogue).sign_payload(PAYLOAD).data
    for place in (".cache", ".local/share"):
        for name in ("https%3A%2F%2Ftuf-repo-cdn.sigstore.dev",):
            folder = private_home / place / "sigstore-python" / "tuf" / name / "targets"
            folder.mkdir(parents=True)
            (folder / "trusted_root.json").write_text(json.dumps(rogue.trusted_root_dict()))
    with refused("ST-S01", "another instance"):
        check(data, identity(sigstore, issuer=rogue.issuer))


def test_the_library_is_loaded_for_keyless_bundles_only(tmp_path: Path) -> None:
    code = (
        "import sys\nimport supplychain.cli, supplychain.cli.verify, supplychain.cli.sign, supplychain.gate\n"
        "late = ('sigstore', 'tuf', 'requests', 'rfc3161_client')\n"
        "print([name for name in sys.modules if name.split('.')[0] in late])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


# --- V3: the identity and its instance ----------------------------------------------------------------------


def test_v3_another_identity_or_issuer_is_refused_and_named(sigstore: LocalSigstore) -> None:
    data = signer(sigstore).sign_payload(PAYLOAD).data
    with refused("ST-S02", ROBOT, "mallory@example.com"):
        check(data, identity(sigstore, "mallory@example.com"))
    with refused("ST-S02", "https://other.test", sigstore.issuer):
        check(data, identity(sigstore, issuer="https://other.test"))
    for near in (ROBOT.upper(), ROBOT + "/", ROBOT[:-1], ROBOT.replace("main", "*")):
        with refused("ST-S02"):
            check(data, identity(sigstore, near))


def test_v3_the_claims_of_a_workflow_are_compared_exactly(sigstore: LocalSigstore) -> None:
    """A valid signature of the right workflow on another runner, branch or trigger is refused."""
    claims = {"repository": "acme/data", "ref": "refs/heads/main", "runner_environment": "github-hosted"}
    data = signer(sigstore, **claims).sign_payload(PAYLOAD).data
    good = (
        ("runner_environment", "github-hosted"),
        ("source_repository_ref", "refs/heads/main"),
        ("source_repository_uri", "https://github.com/acme/data"),
    )
    assert check(data, identity(sigstore, claims=good))
    for name, value in good:
        wrong = tuple((key, value + "x" if key == name else other) for key, other in good)
        with refused("ST-S02", name, value):
            check(data, identity(sigstore, claims=wrong))
    with refused("ST-S02", "build_trigger"):
        check(data, identity(sigstore, claims=(("build_trigger", "push"),)))


def test_v3_an_identity_that_is_not_ascii(sigstore: LocalSigstore) -> None:
    who = "https://ids.example.com/jürgen"
    try:
        data = signer(sigstore, who).sign_payload(PAYLOAD).data
    except SecureTrainError as error:  # certificates hold ASCII only; then nothing was signed
        check_error(error, "ST-S11")
        return
    assert check(data, identity(sigstore, who))


def test_v3_another_instance_is_refused_and_named(sigstore: LocalSigstore) -> None:
    with LocalSigstore() as other:
        data = signer(other).sign_payload(PAYLOAD).data
        with refused("ST-S01", sigstore.url, "another instance's log"):
            check(data, identity(sigstore))
        check(data, identity(other))


@pytest.mark.parametrize(
    "fault",
    [
        *("no-sct", "bad-sct", "expired-cert", "bad-checkpoint", "wrong-root", "tsa-late"),
        *("tsa-wrong-message", "no-timestamp", "rekor-500", "fulcio-500"),
    ],
)
def test_v3_each_fault_of_an_instance_is_noticed(sigstore: LocalSigstore, fault: str) -> None:
    data = made_with_fault(sigstore, fault)
    if data is not None:
        with refused("ST-S01", "not valid", "it.json"):
            check(data, identity(sigstore))


def test_v3_a_bad_promise_of_the_older_log() -> None:
    with LocalSigstore(rekor_version=1) as instance:
        data = made_with_fault(instance, "bad-set")
        assert data is not None
        with refused("ST-S01", "SET"):
            check(data, identity(instance))


def _payload(document: dict[str, Any]) -> None:
    other = json.dumps(STATEMENT | {"predicate": {"answer": "43"}}).encode()
    document["dsseEnvelope"]["payload"] = base64.b64encode(other).decode()


CHANGES: list[tuple[str, Callable[[dict[str, Any]], object]]] = [
    ("ST-S01", _payload),
    ("ST-S01", lambda it: it["dsseEnvelope"]["signatures"][0].update(sig="AAAA")),
    ("ST-S03", lambda it: it["verificationMaterial"].update(timestampVerificationData={})),
    (
        "ST-S01",
        lambda it: it["verificationMaterial"]["tlogEntries"][0]["inclusionProof"].update(logIndex="0"),
    ),
    ("ST-S03", lambda it: it["verificationMaterial"]["tlogEntries"][0].pop("inclusionProof")),
    ("ST-S01", lambda it: it["verificationMaterial"]["tlogEntries"][0].update(canonicalizedBody="e30=")),
    ("ST-S03", lambda it: it["verificationMaterial"]["tlogEntries"].__setitem__(0, 1)),
    ("ST-S03", lambda it: it["verificationMaterial"].update(tlogEntries=[])),
    ("ST-S03", lambda it: it["verificationMaterial"].update(publicKey={"hint": "a" * 64})),
    ("ST-S03", lambda it: it["verificationMaterial"]["certificate"].update(rawBytes="AAAA")),
    ("ST-S03", lambda it: it["verificationMaterial"]["certificate"].update(rawBytes="")),
]


@pytest.mark.parametrize(("code", "change"), CHANGES)
def test_v3_each_part_of_a_bundle_counts(
    sigstore: LocalSigstore, code: str, change: Callable[[dict[str, Any]], object]
) -> None:
    document = json.loads(signer(sigstore).sign_payload(PAYLOAD).data)
    change(document)
    with refused(code, "it.json"):
        check(json.dumps(document).encode(), identity(sigstore))


def test_v3_a_trusted_root_that_is_none(sigstore: LocalSigstore) -> None:
    data = signer(sigstore).sign_payload(PAYLOAD).data
    root = sigstore.trusted_root_dict()
    for bad in (b"{}", b"[]", b"", json.dumps(root | {"tlogs": []}).encode(), b'{"mediaType":"x"}'):
        with pytest.raises(SecureTrainError) as caught:
            check(data, identity(sigstore, instance=Instance("bad", bad)))
        check_error(caught.value, caught.value.code)
        assert caught.value.code in ("ST-S09", "ST-U02")


# --- V4: thresholds over keys and identities ----------------------------------------------------------------


def test_v4_keys_and_identities_make_a_threshold_together(sigstore: LocalSigstore, tmp_path: Path) -> None:
    manifest = build_manifest(make_tree(tmp_path), "dataset")
    add_signature(tmp_path, manifest, signer(sigstore))
    robot, alice = identity(sigstore), key("alice").public
    members = (robot.identifier, alice.identifier)
    trust = Trust({alice.identifier: alice}, {"data": Role("data", members, 2)}, (robot,))
    with refused("ST-S02", "2 of", "publisher"):
        verify_artifact(tmp_path, trust, "data")
    add_signature(tmp_path, manifest, LocalSigner(key("alice")))
    found = verify_artifact(tmp_path, trust, "data")
    assert {item.name for item in found.signers} == {"publisher", "alice"}
    flip(tmp_path / "config.json", 0)
    for path in (tmp_path / "secure-train/signatures").iterdir():
        if "alice" not in path.name:
            edit(path, _payload)
            with refused("ST-S01"):  # never passed over, though alice's is right
                verify_artifact(
                    tmp_path, dataclasses.replace(trust, roles={"data": Role("data", members)}), "data"
                )


def test_v4_one_identity_counts_once(sigstore: LocalSigstore, tmp_path: Path) -> None:
    """With as many certificates as it likes, and with claims or without."""
    manifest = build_manifest(make_tree(tmp_path), "dataset")
    path = add_signature(tmp_path, manifest, signer(sigstore))
    path.rename(path.with_name("other.sigstore.json"))
    add_signature(tmp_path, manifest, signer(sigstore))
    robot, again = identity(sigstore), identity(sigstore, claims=(("runner_environment", "x"),))
    assert robot.identifier == again.identifier
    mallory = identity(sigstore, "mallory@example.com")
    role = Role("data", (robot.identifier, mallory.identifier), 2)
    with refused("ST-S02", "found: publisher"):
        verify_artifact(tmp_path, Trust({}, {"data": role}, (robot, again, mallory)), "data")


# --- V8, V9: time and revocation ----------------------------------------------------------------------------


def test_v8_an_identity_has_its_time(sigstore: LocalSigstore) -> None:
    data, who = signer(sigstore).sign_payload(PAYLOAD).data, identity(sigstore)
    now = dt.datetime.now(dt.UTC)
    hour = dt.timedelta(hours=1)
    assert check(data, who, windows={who.identifier: Window(now - hour, now + hour)})
    # The log proves when it was signed: years later it is as good as today.
    assert check(data, who, windows={who.identifier: Window(now - hour, now + hour)}, now=now + 9999 * hour)
    for window in (Window(end=now), Window(start=now + hour), Window(now - hour, now - hour)):
        with refused("ST-S07", "publisher"):
            check(data, who, windows={who.identifier: window})


@pytest.mark.parametrize(("since", "valid"), [(None, False), (-1, False), (0, False), (1, True)])
def test_v9_an_identity_is_revoked_from_a_time_on(
    sigstore: LocalSigstore, since: int | None, valid: bool
) -> None:
    data, who = signer(sigstore).sign_payload(PAYLOAD).data, identity(sigstore)
    start = None if since is None else dt.datetime.now(dt.UTC) + dt.timedelta(hours=since)
    for what in (who.identifier, ROBOT):
        entry = Revocation("identity", what, "the workflow was taken over", start)
        if valid:
            assert check(data, who, revocations=(entry,))
        else:
            with refused("ST-S08", "taken over", ROBOT):
                check(data, who, revocations=(entry,))


# --- signing ------------------------------------------------------------------------------------------------


def test_a_token_that_cannot_be_used(sigstore: LocalSigstore) -> None:
    for token in ("", "x", "a.b.c", sigstore.raw_token(ROBOT, lifetime=-100)):
        with refused("ST-S06", "identity token"):
            KeylessSigner(lambda token=token: token, None)  # type: ignore[misc]  # a default binds the value


def test_the_token_of_another_instance_gets_no_signature(sigstore: LocalSigstore) -> None:
    with LocalSigstore() as other:
        token = other.raw_token(ROBOT)
        by = KeylessSigner(lambda: token, json.dumps(sigstore.trust_config_dict()).encode())
        with pytest.raises(SecureTrainError) as caught:
            by.sign_payload(PAYLOAD)
        check_error(caught.value, "ST-S11", "private")
        assert token not in str(caught.value)


def test_signing_with_the_instance_gone(tmp_path: Path) -> None:
    with LocalSigstore() as instance:
        by = signer(instance)
    manifest = build_manifest(make_tree(tmp_path), "dataset")
    with refused("ST-S11", "did not sign"):
        add_signature(tmp_path, manifest, by)
    assert not (tmp_path / "secure-train/signatures").exists()


def test_the_bundle_is_read_by_the_reference_client(sigstore: LocalSigstore) -> None:
    from sigstore.models import Bundle as Reference
    from sigstore.verify import Verifier, policy

    made: Bundle = signer(sigstore).sign_payload(PAYLOAD)
    verifier = Verifier(trusted_root=sigstore.trust_config().trusted_root)
    expected = policy.Identity(identity=ROBOT, issuer=sigstore.issuer)
    kind, payload = verifier.verify_dsse(Reference.from_json(made.data), expected)
    assert (kind, payload) == (bundle.PAYLOAD_TYPE, PAYLOAD)


def test_verifying_an_artifact_by_a_named_key_loads_no_gate() -> None:
    """It is asked for often and answers at once: no policy, no run, no BOM."""
    code = (
        "import sys\nimport supplychain.cli.verify\n"
        "late = {'pydantic', 'supplychain.gate', 'supplychain.policy', 'supplychain.runbom', 'sbom', 'tuf'}\n"
        "print(sorted(late & set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
