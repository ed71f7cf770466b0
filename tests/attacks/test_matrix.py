"""The attack matrix: what can be done to a signed folder, our code for it, and what model-signing says.

`peer` is model-signing's outcome on the same folder and bundle, measured here, not quoted: True if it
notices, None if the attack does not apply to it. Rows that we do not catch either are kept, with the reason.
"""

from __future__ import annotations

import inspect
import json
import os
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from supplychain.artifact import (
    MANIFEST,
    SIGNATURES,
    SecureTrainError,
    VerifiedArtifact,
    build_manifest,
    check,
    differences,
)
from supplychain.trust import bundle, verify
from supplychain.trust.signers import LocalSigner, add_signature
from tests.artifact.support import check_error, flip, make_tree, refused
from tests.attacks import peer
from tests.trust import support
from tests.trust.support import bundle_path, edit, key, resign

FILES = {
    "a.bin": b"a" * 100_000,
    "b.bin": b"b" * 100_000,
    "config.json": b"{}",
    "code/__init__.py": b"",
    "code/model.py": b"pass\n",
}


def verdict(root: Path) -> list[str]:
    """The codes of everything that is wrong, as `secure-train verify` collects them; [] if it is accepted."""
    try:
        artifact = support.check(root)
        found = differences(root, artifact.manifest)
    except SecureTrainError as error:
        found = [error]
    for difference in found:
        check_error(difference, difference.code)
    return sorted({difference.code for difference in found})


@dataclass(frozen=True)
class Attack:
    name: str
    act: Callable[[Path], object]
    codes: list[str]
    peer: bool | None


def _append(path: Path, data: bytes) -> None:
    with open(path, "ab") as file:
        file.write(data)


def _swap(root: Path) -> None:
    (root / "a.bin").rename(root / "c")
    (root / "b.bin").rename(root / "a.bin")
    (root / "c").rename(root / "b.bin")


def _to_link(path: Path) -> None:
    """The same content, now from outside."""
    outside = path.parents[1] / f"outside-{path.name}"
    path.rename(outside)
    path.symlink_to(outside)


def _to_hard_link(root: Path) -> None:
    outside = root.parent / "outside"
    (root / "a.bin").rename(outside)
    os.link(outside, root / "a.bin")


def _other_bundle(root: Path) -> None:
    other = root.parent / "other"
    support.signed(other, files={"a": b"1"})
    shutil.copy(bundle_path(other), bundle_path(root))


def _other_key(root: Path) -> None:
    manifest = build_manifest(root, "dataset")
    add_signature(root, manifest, LocalSigner(key("mallory")))
    bundle_path(root, "mallory").rename(bundle_path(root))


def _other_signature(root: Path) -> None:
    other = root.parent / "other"
    support.signed(other, files={"a": b"1"})
    signatures = support.document(bundle_path(other))["dsseEnvelope"]["signatures"]
    edit(bundle_path(root), lambda it: it["dsseEnvelope"].update(signatures=signatures))


def _edit_payload(change: Callable[[dict[str, Any]], object]) -> Callable[[Path], None]:
    """Change the statement and keep the old signature."""

    def act(root: Path) -> None:
        old = support.document(bundle_path(root))["dsseEnvelope"]["signatures"]
        resign(bundle_path(root), change)
        edit(bundle_path(root), lambda it: it["dsseEnvelope"].update(signatures=old))

    return act


def _envelope(**changes: Any) -> Callable[[Path], None]:
    return lambda root: edit(bundle_path(root), lambda it: it["dsseEnvelope"].update(changes))


def _ignore_everything(statement: dict[str, Any]) -> None:
    """A signature over nothing: the signer ignored the whole folder."""
    statement["predicate"]["serialization"]["ignore_paths"] = ["."]
    statement["predicate"]["resources"] = []
    statement["subject"][0]["digest"]["sha256"] = (
        "e3b0c44298fc1c149afbf4c8996fb92427ae41e4649b934ca495991b7852b855"
    )


def _bundle_to_folder(root: Path) -> None:
    path = bundle_path(root)
    path.unlink()
    make_tree(path, {"run.py": b"evil"})


def _duplicate_key(root: Path) -> None:
    text = bundle_path(root).read_text()
    bundle_path(root).write_text(text.replace('"dsseEnvelope":', '"dsseEnvelope":{},"dsseEnvelope":', 1))


def _old_pae(root: Path) -> None:
    data = bundle.parse(bundle_path(root).read_bytes(), where="it").payload
    kind = bundle.PAYLOAD_TYPE.encode()
    text = f"DSSEV1 {len(kind)} {bundle.PAYLOAD_TYPE} {len(data)} {data!r}"  # what model-signing 0.2 signed
    message = text.encode()
    forged = bundle.emit(data, key("alice").sign(message), key("alice").public.identifier)
    bundle_path(root).write_bytes(forged.data)


def _old_predicate(statement: dict[str, Any]) -> None:
    statement["predicateType"] = "https://model_signing/Digests/v0.1"


def _certificate(document: dict[str, Any]) -> None:
    document["verificationMaterial"] = {
        "x509CertificateChain": {"certificates": [{"rawBytes": "AAAA"}]},
        "tlogEntries": [],
    }


def _signed_escape(statement: dict[str, Any]) -> None:
    statement["predicate"]["resources"].insert(
        0, {"name": "../secret.txt", "algorithm": "sha256", "digest": "0" * 64}
    )


ATTACKS = [
    # --- contents and names ---------------------------------------------------------------------------------
    Attack("byte changed", lambda root: flip(root / "a.bin", 70_000), ["ST-A03"], True),
    Attack("appended", lambda root: _append(root / "a.bin", b"x"), ["ST-A06"], True),
    Attack("truncated", lambda root: os.truncate(root / "a.bin", 99_999), ["ST-A06"], True),
    Attack("extra file", lambda root: make_tree(root, {"x.py": b"evil"}), ["ST-A05"], True),
    Attack("extra empty file", lambda root: make_tree(root, {"conftest.py": b""}), ["ST-A05"], True),
    Attack("extra hidden file", lambda root: make_tree(root, {"code/.x": b""}), ["ST-A05"], True),
    Attack("missing", lambda root: (root / "b.bin").unlink(), ["ST-A04"], True),
    Attack("missing empty file", lambda root: (root / "code/__init__.py").unlink(), ["ST-A04"], True),
    Attack("renamed", lambda root: (root / "a.bin").rename(root / "c.bin"), ["ST-A04", "ST-A05"], True),
    Attack("names swapped", _swap, ["ST-A03"], True),
    Attack(
        "renamed by case", lambda root: (root / "a.bin").rename(root / "A.bin"), ["ST-A04", "ST-A05"], True
    ),
    Attack("look-alike name", lambda root: make_tree(root, {"\u0430.bin": b""}), ["ST-A05"], True),
    Attack("name with a newline", lambda root: make_tree(root, {"a\nb": b""}), ["ST-A05"], True),
    Attack("name that is no UTF-8", lambda root: make_tree(root, {"\udcff": b""}), ["ST-A05"], True),
    # --- what is not a plain file ---------------------------------------------------------------------------
    Attack("FIFO", lambda root: os.mkfifo(root / "fifo"), ["ST-A05"], True),
    Attack("file to link", lambda root: _to_link(root / "a.bin"), ["ST-A04", "ST-A05"], True),
    Attack("folder to link", lambda root: _to_link(root / "code"), ["ST-A04", "ST-A05"], True),
    Attack("extra empty folder", lambda root: (root / "void").mkdir(), ["ST-A05"], False),
    Attack("made executable", lambda root: (root / "code/model.py").chmod(0o755), ["ST-A07"], False),
    Attack("mode 0777", lambda root: (root / "a.bin").chmod(0o777), ["ST-A07"], False),
    Attack("set-uid", lambda root: (root / "a.bin").chmod(0o4644), ["ST-A05"], False),
    # The content is the signed one; verified reads notice when it stops being so.
    Attack("hard link to outside", _to_hard_link, [], False),
    Attack("extended attribute", lambda root: os.setxattr(root / "a.bin", "user.x", b"1"), [], False),
    Attack("time changed", lambda root: os.utime(root / "a.bin", (0, 0)), [], False),
    # --- places that tools ignore ---------------------------------------------------------------------------
    Attack("code in .git", lambda root: make_tree(root, {".git/hooks/x": b""}), ["ST-A05"], False),
    Attack("code in .github", lambda root: make_tree(root, {".github/x": b""}), ["ST-A05"], False),
    Attack(
        "folder .gitattributes", lambda root: make_tree(root, {".gitattributes/x.py": b""}), ["ST-A05"], False
    ),
    Attack(
        "code among the signatures",
        lambda root: make_tree(root, {f"{SIGNATURES}/x.py": b""}),
        ["ST-A05"],
        False,
    ),
    Attack("folder model.sig", lambda root: make_tree(root, {"model.sig/x.py": b""}), ["ST-A05"], True),
    Attack("bundle to folder of code", _bundle_to_folder, ["ST-S03"], True),
    Attack(
        "code beside the manifest", lambda root: make_tree(root, {"secure-train/x": b""}), ["ST-A05"], True
    ),
    Attack(
        "block digests changed", lambda root: flip(root / "secure-train/blocks/a.bin", 0), ["ST-A08"], True
    ),
    Attack(
        "block digests longer",
        lambda root: _append(root / "secure-train/blocks/a.bin", b"x"),
        ["ST-A08"],
        True,
    ),
    Attack("manifest changed", lambda root: flip(root / MANIFEST, 50), ["ST-S04"], True),
    Attack("manifest removed", lambda root: (root / MANIFEST).unlink(), ["ST-A09"], True),
    Attack("signatures removed", lambda root: shutil.rmtree(root / SIGNATURES), ["ST-A09"], None),
    # --- the signature --------------------------------------------------------------------------------------
    Attack("bundle of another folder", _other_bundle, ["ST-S04"], True),
    Attack("another key", _other_key, ["ST-S02"], True),
    Attack("signature of another bundle", _other_signature, ["ST-S01"], True),
    Attack("payload edited", _edit_payload(lambda it: it["predicate"]["resources"].pop()), ["ST-S01"], True),
    Attack("ignored paths edited", _edit_payload(_ignore_everything), ["ST-S01"], True),
    Attack("payload type", _envelope(payloadType="application/json"), ["ST-S03"], True),
    Attack(
        "media type",
        lambda root: edit(bundle_path(root), lambda it: it.update(mediaType="x")),
        ["ST-S03"],
        True,
    ),
    Attack("empty signature", _envelope(signatures=[{"sig": "", "keyid": ""}]), ["ST-S01"], True),
    Attack("no signature", _envelope(signatures=[]), ["ST-S03"], True),
    Attack(
        "second, bogus signature",
        lambda root: edit(
            bundle_path(root),
            lambda it: it["dsseEnvelope"]["signatures"].append({"sig": "AAAA", "keyid": ""}),
        ),
        ["ST-S03"],
        False,
    ),
    Attack("duplicate key in the bundle", _duplicate_key, ["ST-S03"], False),
    Attack(
        "hint removed",
        lambda root: edit(bundle_path(root), lambda it: it["verificationMaterial"].update(publicKey={})),
        ["ST-S03"],
        False,
    ),
    Attack(
        "certificate in place of the key",
        lambda root: edit(bundle_path(root), _certificate),
        ["ST-S03"],
        True,
    ),
    # --- a trusted signer's own mistake or malice -----------------------------------------------------------
    Attack(
        "signer ignored everything",
        lambda root: resign(bundle_path(root), _ignore_everything),
        ["ST-S04"],
        False,
    ),
    Attack(
        "signed name that leaves the folder",
        lambda root: resign(bundle_path(root), _signed_escape),
        ["ST-S04"],
        True,
    ),
    Attack("mis-encoded envelope", _old_pae, ["ST-S01"], False),
    Attack("deprecated statement", lambda root: resign(bundle_path(root), _old_predicate), ["ST-S04"], None),
    Attack(
        "shards",
        lambda root: resign(
            bundle_path(root), lambda it: it["predicate"]["serialization"].update(method="shards")
        ),
        ["ST-S04"],
        None,
    ),
    Attack(
        "links allowed",
        lambda root: resign(
            bundle_path(root), lambda it: it["predicate"]["serialization"].update(allow_symlinks=True)
        ),
        ["ST-S04"],
        None,
    ),
]


@pytest.fixture
def root(tmp_path: Path) -> Path:
    folder = tmp_path / "artifact"
    support.signed(folder, files=FILES)
    return folder


def test_the_honest_folder_is_accepted_by_both(root: Path) -> None:
    assert verdict(root) == []
    assert peer.accepts(root, bundle_path(root), key("alice").public)


@pytest.mark.parametrize("attack", ATTACKS, ids=lambda attack: attack.name)
def test_attack(root: Path, attack: Attack) -> None:
    attack.act(root)
    assert verdict(root) == attack.codes
    if attack.peer is not None:
        noticed = not peer.accepts(root, bundle_path(root), key("alice").public)
        assert noticed is attack.peer, "model-signing behaves otherwise than the table says"


def test_the_table_is_whole() -> None:
    names = [attack.name for attack in ATTACKS]
    assert len(set(names)) == len(names) >= 50
    assert [attack.name for attack in ATTACKS if not attack.codes] == [
        "hard link to outside",
        "extended attribute",
        "time changed",
    ]


def test_an_empty_folder_cannot_be_signed(tmp_path: Path) -> None:
    with refused("ST-U06", "nothing to sign"):
        build_manifest(tmp_path, "dataset")


def test_verification_has_no_option_to_ignore() -> None:
    for function in (verify.verify_artifact, verify.verify_statement, check.differences):
        names = set(inspect.signature(function).parameters)
        assert names <= {
            *("root", "trust", "role", "kinds", "data", "predicate_type", "subject", "where"),
            *("manifest", "hash_files", "paranoid", "progress"),
        }


def test_a_file_replaced_after_verification_is_noticed_when_it_is_used(root: Path) -> None:
    """The time between check and use: model-signing's verdict is over by then."""
    artifact = support.check(root)
    assert differences(root, artifact.manifest) == []
    (root / "new").write_bytes(b"x" * 100_000)
    os.replace(root / "new", root / "a.bin")
    opened = VerifiedArtifact.open(root, artifact.manifest.digest)
    with opened.open_file("a.bin") as file, refused("ST-A03"):
        file.read(0, 10)
    with refused("ST-A03"):
        opened.read_bytes("a.bin")


def test_two_folders_exchanged_as_a_whole_are_told_apart_by_identity(root: Path) -> None:
    """Both rightly signed: a signature says who, the identity says which."""
    other = root.parent / "other"
    support.signed(other, files={"a": b"1"})
    expected = support.check(root).manifest.digest
    root.rename(root.parent / "aside")
    other.rename(root)
    assert verdict(root) == []
    with refused("ST-A01", expected):
        VerifiedArtifact.open(root, expected)


def test_the_bundle_is_json_that_other_tools_read(root: Path) -> None:
    document = json.loads(bundle_path(root).read_bytes())
    assert document["mediaType"] == "application/vnd.dev.sigstore.bundle.v0.3+json"
    assert list(document["verificationMaterial"]) == ["publicKey", "tlogEntries"]
