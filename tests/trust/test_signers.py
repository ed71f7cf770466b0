"""Signing artifacts: what is written, several signers, and what may not be overwritten."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from supplychain.artifact import SIGNATURES, SecureTrainError, build_manifest, differences
from supplychain.trust import bundle
from supplychain.trust.keys import ALGORITHMS, KeyStore, SigningKey
from supplychain.trust.signers import LocalSigner, add_signature, sign_artifact
from tests.artifact.support import codes, make_tree, refused
from tests.trust.support import bundle_path, check, document, key, payload, signed


@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_a_signed_artifact_verifies(tmp_path: Path, algorithm: str) -> None:
    signer = SigningKey("me", ALGORITHMS[algorithm]())
    manifest = signed(tmp_path, signer)
    assert check(tmp_path, signer).manifest == manifest
    assert differences(tmp_path, manifest) == []
    # What stands there is read back to the same parts, and is one canonical document.
    data = bundle_path(tmp_path, "me").read_bytes()
    parsed = bundle.parse(data, where="it")
    assert bundle.emit(parsed.payload, parsed.signature, parsed.key_hint) == parsed
    assert parsed.data == data


def test_the_statement_lists_every_file_but_the_signatures(tmp_path: Path) -> None:
    signed(tmp_path)
    resources = [item["name"] for item in payload(bundle_path(tmp_path))["predicate"]["resources"]]
    present = [
        str((Path(folder) / name).relative_to(tmp_path))
        for folder, _, names in os.walk(tmp_path)
        for name in names
    ]
    assert resources == sorted(resources)
    assert set(present) - set(resources) == {f"{SIGNATURES}/alice.sigstore.json"}
    assert set(resources) <= set(present)


def test_signing_again_replaces_all_signatures(tmp_path: Path) -> None:
    manifest = signed(tmp_path)
    add_signature(tmp_path, manifest, LocalSigner(key("bob")))
    (tmp_path / "new").write_bytes(b"1")
    again = signed(tmp_path, key("carol"))
    assert again != manifest
    assert os.listdir(tmp_path / SIGNATURES) == ["carol.sigstore.json"]
    with refused("ST-S02"):
        check(tmp_path, key("alice"), key("bob"))


def test_the_same_signer_may_sign_again(tmp_path: Path) -> None:
    manifest = signed(tmp_path)
    add_signature(tmp_path, manifest, LocalSigner(key("alice")))
    assert os.listdir(tmp_path / SIGNATURES) == ["alice.sigstore.json"]
    check(tmp_path)


def test_a_namesake_signs_beside_the_other(tmp_path: Path) -> None:
    manifest = signed(tmp_path)
    namesake = SigningKey("alice", ALGORITHMS["ed25519"]())
    for _ in range(2):
        add_signature(tmp_path, manifest, LocalSigner(namesake))
    second = f"alice-{namesake.public.identifier[:12]}.sigstore.json"
    assert sorted(os.listdir(tmp_path / SIGNATURES)) == sorted(["alice.sigstore.json", second])
    check(tmp_path)


def test_a_folder_with_an_undecodable_name_can_be_signed(tmp_path: Path) -> None:
    root = Path(os.fsdecode(os.fsencode(tmp_path) + b"/d\xff"))
    root.mkdir()
    signed(root)
    check(root)
    assert payload(bundle_path(root))["subject"][0]["name"] == "d\ufffd"


def test_the_name_of_the_folder_is_not_part_of_the_identity(tmp_path: Path) -> None:
    signed(tmp_path / "before")
    (tmp_path / "before").rename(tmp_path / "after")
    check(tmp_path / "after")


def test_a_signature_that_cannot_be_written_is_told(tmp_path: Path) -> None:
    manifest = build_manifest(make_tree(tmp_path), "dataset")
    (tmp_path / SIGNATURES).write_bytes(b"")
    with refused("ST-U04", "signature cannot be written"):
        add_signature(tmp_path, manifest, LocalSigner(key("alice")))


def test_block_digests_that_vanished_are_told(tmp_path: Path) -> None:
    manifest = build_manifest(make_tree(tmp_path), "dataset")
    (tmp_path / "secure-train/blocks/shards/shard-00000.bin").unlink()
    with refused("ST-A04", "block digests", "secure-train sign"):
        add_signature(tmp_path, manifest, LocalSigner(key("alice")))


def test_what_a_killed_signer_leaves_is_named_and_cured_by_signing_again(tmp_path: Path) -> None:
    manifest = signed(tmp_path)
    leftover = tmp_path / SIGNATURES / ".bob.sigstore.json.partial"
    leftover.write_bytes(b'{"half')
    assert codes(differences(tmp_path, manifest), tmp_path) == [("ST-A05", f"{SIGNATURES}/{leftover.name}")]
    add_signature(tmp_path, manifest, LocalSigner(key("bob")))
    assert differences(tmp_path, manifest) == []
    check(tmp_path, key("alice"), key("bob"), threshold=2)


def test_a_kind_that_is_none_is_refused(tmp_path: Path) -> None:
    with refused("ST-U03"):
        sign_artifact(make_tree(tmp_path), "no kind", LocalSigner(key("alice")))


def test_private_keys_do_not_reach_what_is_written(tmp_path: Path) -> None:
    store = KeyStore(tmp_path / "keys")
    signer = store.new("me")
    secret = "".join((tmp_path / "keys/me.key").read_text().splitlines()[1:-1])
    signed(tmp_path / "artifact", signer)
    for folder, _, names in os.walk(tmp_path / "artifact"):
        for name in names:
            assert secret[:40].encode() not in (Path(folder) / name).read_bytes()
    assert secret[:40] not in json.dumps(document(bundle_path(tmp_path / "artifact", "me")))
    with pytest.raises(SecureTrainError) as caught:
        store.new("me")
    assert secret[:40] not in str(caught.value)
