"""One signature, two readers: model-signing verifies what we sign; why what it signs is not enough for us."""

from __future__ import annotations

import dataclasses
import datetime as dt
import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from cryptography.hazmat.primitives import serialization

from supplychain import lineage
from supplychain.artifact import SIGNATURES, build_manifest
from supplychain.lineage import Checker
from supplychain.trust import bundle
from supplychain.trust.keyless import KeylessSigner
from supplychain.trust.keys import ALGORITHMS, SigningKey
from supplychain.trust.roots import Authority, Holder, Identity, Instance, Signatory, Trust
from supplychain.trust.signers import CertificateSigner, LocalSigner, add_signature, sign_artifact
from supplychain.trust.verify import verify_artifact
from tests.artifact.support import flip, make_tree, refused
from tests.attacks import peer
from tests.sigstore.local import LocalSigstore
from tests.trust import authority
from tests.trust.support import bundle_path, check, key, payload, sign_bytes, signed

SHARD = "shards/shard-00000.bin"


@pytest.mark.parametrize("algorithm", ["ecdsa-p256", "ecdsa-p384", "ecdsa-p521"])
def test_model_signing_verifies_what_we_sign(tmp_path: Path, algorithm: str) -> None:
    signer = SigningKey("me", ALGORITHMS[algorithm]())
    root = tmp_path / "artifact"
    signed(root, signer)
    assert peer.accepts(root, bundle_path(root, "me"), signer.public)
    flip(root / SHARD, 5)
    assert not peer.accepts(root, bundle_path(root, "me"), signer.public)
    flip(root / SHARD, 5)
    (root / "extra").write_bytes(b"")
    assert not peer.accepts(root, bundle_path(root, "me"), signer.public)
    (root / "extra").unlink()
    assert not peer.accepts(root, bundle_path(root, "me"), key("mallory").public)
    assert peer.accepts(root, bundle_path(root, "me"), signer.public)


def test_model_signing_verifies_each_of_several_signatures(tmp_path: Path) -> None:
    root = tmp_path / "artifact"
    add_signature(root, signed(root), LocalSigner(key("bob")))
    assert sorted(os.listdir(root / SIGNATURES)) == ["alice.sigstore.json", "bob.sigstore.json"]
    for name in ("alice", "bob"):
        assert peer.accepts(root, bundle_path(root, name), key(name).public)


def test_model_signing_verifies_a_certificates_signature(tmp_path: Path) -> None:
    """In its time: the same chain, expired, is refused by us and accepted by it."""
    root = authority.issue("root", ca=True, days=(-4000, 4000))
    leaf = authority.issue("leaf", root, san="release@acme.test", eku=authority.CODE)
    by = CertificateSigner(leaf.signing_key("me"), leaf.pem, where="it.crt")
    folder = make_tree(tmp_path / "artifact")
    sign_artifact(folder, "dataset", by)
    assert peer.accepts_certificate(folder, bundle_path(folder, "me"), root.pem)
    holder = Holder("me", "release@acme.test", Authority("acme", root.pem))
    believed = dataclasses.replace(Trust.of("data", holder), now=authority.NOW)
    verify_artifact(folder, believed, "data")
    with refused("ST-S07"):
        verify_artifact(folder, dataclasses.replace(believed, now=authority.NOW + 99 * authority.DAY), "data")
    flip(folder / SHARD, 5)
    assert not peer.accepts_certificate(folder, bundle_path(folder, "me"), root.pem)


@pytest.mark.parametrize("version", [1, 2])
def test_model_signing_verifies_an_identitys_signature(tmp_path: Path, version: int) -> None:
    who = "trainer@example.com"
    with LocalSigstore(rekor_version=version) as running:
        config = running.write_trust_config(tmp_path / "trust.json")
        by = KeylessSigner(lambda: running.raw_token(who), config.read_bytes())
        folder = make_tree(tmp_path / "artifact")
        sign_artifact(folder, "dataset", by)
    path = bundle_path(folder, who)
    assert peer.accepts_identity(folder, path, who, running.issuer, config)
    assert not peer.accepts_identity(folder, path, "eve@example.com", running.issuer, config)
    flip(folder / SHARD, 5)
    assert not peer.accepts_identity(folder, path, who, running.issuer, config)


def test_files_of_git_are_covered_by_us_and_ignored_by_model_signing(tmp_path: Path) -> None:
    """Its default leaves `.gitattributes` out, whatever the signature lists: such a folder it can only verify
    when told not to. We never leave anything out.
    """
    root = tmp_path / "artifact"
    signed(root, files={".gitattributes": b"*.bin filter=lfs\n", "a.bin": b"1"})
    check(root)
    assert ".gitattributes" in [item["name"] for item in payload(bundle_path(root))["predicate"]["resources"]]
    assert not peer.accepts(root, bundle_path(root), key("alice").public)
    assert peer.accepts(root, bundle_path(root), key("alice").public, git_paths=True)


@pytest.fixture
def foreign(tmp_path: Path) -> tuple[Path, Path, SigningKey]:
    """A folder that model-signing signed, its signature file, and the key."""
    signer = key("peer")
    root = make_tree(tmp_path / "model")
    path = tmp_path / "peer.key"
    path.write_bytes(pem_of(signer))
    peer.sign(root, root / "model.sig", path)
    return root, root / "model.sig", signer


def test_what_model_signing_signs_is_parsed(foreign: tuple[Path, Path, SigningKey]) -> None:
    """The envelope is the same: key, signature and statement are read and right."""
    _, path, signer = foreign
    parsed = bundle.parse(path.read_bytes(), where=str(path))
    assert parsed.key_hint == signer.public.identifier
    assert signer.public.accepts(bundle.pae(parsed.payload), parsed.signature)


def test_a_folder_that_only_model_signing_signed_has_no_manifest(
    foreign: tuple[Path, Path, SigningKey],
) -> None:
    """No sizes, modes, block digests and identity: a named refusal, with the way to mend it."""
    root, path, signer = foreign
    with refused("ST-A09", "no manifest", f"secure-train sign {root}"):
        check(root, signer)
    # Its bundle among our signatures is another statement than ours: it leaves files out.
    build_manifest(root, "dataset")
    bundle_path(root, "peer").parent.mkdir()
    bundle_path(root, "peer").write_bytes(path.read_bytes())
    with refused("ST-S04", "lists its files in a way that is not accepted"):
        check(root, signer)


def test_both_signatures_live_side_by_side(foreign: tuple[Path, Path, SigningKey]) -> None:
    """Adopting a folder that carries a `model.sig`: it becomes a file like any other."""
    root, _, _ = foreign
    manifest = signed(root, files={})
    assert manifest.has("model.sig")
    check(root)
    assert peer.accepts(root, bundle_path(root), key("alice").public)


def verdict(root: Path, path: Path, *members: Signatory) -> list[str]:
    """What `verify --signature` says about a folder that another tool signed."""
    node = lineage.verify_foreign(root, path, Checker.by_signatories(members))
    assert (node.state == "verified") is (not node.errors)
    return sorted({error.code for error in node.errors})


def test_we_verify_what_model_signing_signs_with_a_key(foreign: tuple[Path, Path, SigningKey]) -> None:
    root, path, signer = foreign
    assert verdict(root, path, signer.public) == []
    assert verdict(root, path, key("mallory").public) == ["ST-S02"]
    flip(root / SHARD, 5)
    assert verdict(root, path, signer.public) == ["ST-A03"]
    flip(root / SHARD, 5)
    make_tree(root, {".git/hooks/x": b"evil"})  # the signature ignores it; it is not covered
    assert verdict(root, path, signer.public) == ["ST-A05"]
    shutil.rmtree(root / ".git")
    (root / "empty").unlink()
    assert verdict(root, path, signer.public) == ["ST-A04"]
    assert verdict(root, root / "none.sig", signer.public) == ["ST-U01"]


def test_we_verify_what_model_signing_signs_with_a_certificate(tmp_path: Path) -> None:
    now = (dt.datetime.now(dt.UTC) - authority.NOW).days
    root = authority.issue("root", ca=True, days=(now - 9, now + 9))
    leaf = authority.issue("leaf", root, san="a@acme.test", eku=authority.CODE, days=(now - 9, now + 9))
    folder = make_tree(tmp_path / "model")
    files = {"key": pem_of(leaf.signing_key()), "leaf": leaf.pem, "root": root.pem}
    for name, data in files.items():
        (tmp_path / name).write_bytes(data)
    path = folder / "model.sig"
    peer.sign_certificate(folder, path, tmp_path / "key", tmp_path / "leaf", [tmp_path / "root"])
    assert verdict(folder, path, Holder("a", "a@acme.test", Authority("acme", root.pem))) == []
    assert verdict(folder, path, Holder("b", "b@acme.test", Authority("acme", root.pem))) == ["ST-S02"]
    other = authority.issue("root", ca=True)
    assert verdict(folder, path, Holder("a", "a@acme.test", Authority("acme", other.pem))) == ["ST-S01"]


@pytest.mark.parametrize("version", [1, 2])
def test_we_verify_what_model_signing_signs_as_an_identity(tmp_path: Path, version: int) -> None:
    who, folder = "trainer@example.com", make_tree(tmp_path / "model")
    path = folder / "model.sig"
    with LocalSigstore(rekor_version=version) as running:
        config = running.write_trust_config(tmp_path / "trust.json")
        peer.sign_identity(folder, path, running.raw_token(who), config)
    instance = Instance("acme", json.dumps(running.trusted_root_dict()).encode())
    assert verdict(folder, path, Identity("it", running.issuer, who, instance)) == []
    assert verdict(folder, path, Identity("it", running.issuer, "eve@example.com", instance)) == ["ST-S02"]
    flip(folder / SHARD, 5)
    assert verdict(folder, path, Identity("it", running.issuer, who, instance)) == ["ST-A03"]


def test_hostile_lists_of_other_tools(tmp_path: Path) -> None:
    """Rightly signed by a trusted key, and still refused, before anything they name is opened."""
    folder = make_tree(tmp_path / "model")
    (tmp_path / "secret").write_bytes(b"")
    good = payload_of(folder)
    changes: list[Callable[[dict[str, Any]], object]] = [
        lambda it: it["predicate"]["resources"][0].update(name="../secret"),
        lambda it: it["predicate"]["resources"][0].update(name="/etc/passwd"),
        lambda it: it["predicate"]["resources"][0].update(digest="00"),
        lambda it: it["predicate"]["resources"][0].update(algorithm="blake3"),
        lambda it: it["predicate"]["resources"].append(it["predicate"]["resources"][0]),
        lambda it: it["predicate"].update(resources=[]),
        lambda it: it["predicate"].update(resources=[1]),
        lambda it: it["predicate"].pop("serialization"),
        lambda it: it["predicate"]["serialization"].update(method="shards"),
        lambda it: it["predicate"]["serialization"].update(allow_symlinks=True),
        lambda it: it["subject"].append(it["subject"][0]),
        lambda it: it["subject"][0]["digest"].update(sha256="0" * 64),
    ]
    path = folder / "model.sig"
    for change in changes:
        statement = json.loads(good)
        change(statement)
        path.write_bytes(sign_bytes(json.dumps(statement).encode(), key("peer")))
        assert verdict(folder, path, key("peer").public) == ["ST-S04"]
    path.write_bytes(sign_bytes(good, key("peer")))
    assert verdict(folder, path, key("peer").public) == []


def payload_of(folder: Path) -> bytes:
    """A statement as model-signing makes it: every file, and the paths that it ignores by default."""
    path, pem = folder / "model.sig", folder.parent / "peer.key"
    pem.write_bytes(pem_of(key("peer")))
    peer.sign(folder, path, pem)
    return bundle.parse(path.read_bytes(), where="it").payload


def pem_of(signer: SigningKey) -> bytes:
    return signer._key.private_bytes(
        serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
    )
