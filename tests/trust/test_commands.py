"""`keys`, `sign`, `verify` and `inspect` as a person runs them: real processes, codes asserted."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest

from tests.artifact.support import flip, make_tree
from tests.sigstore.local import LocalSigstore

WHO = "trainer@example.com"


@pytest.fixture(scope="module")
def sigstore() -> Iterator[LocalSigstore]:
    with LocalSigstore() as running:
        yield running


def secure_train(*words: str | Path, code: int = 0, env: Mapping[str, Path] | None = None) -> dict[str, Any]:
    """One command in a process of its own; its JSON answer."""
    environment = os.environ | {name: str(value) for name, value in (env or {}).items()}
    done = subprocess.run(
        [sys.executable, "-c", "from supplychain.cli import main; main()", *map(str, words), "--json"],
        capture_output=True,
        text=True,
        env=environment,
        timeout=120,
    )
    assert done.returncode == code, done.stdout + done.stderr
    assert "Traceback" not in done.stderr, done.stderr
    answer: dict[str, Any] = json.loads(done.stdout)
    return answer


def codes(answer: dict[str, Any]) -> list[str]:
    """Every code in an answer, of the command or of the trees that it verified."""
    nodes, found = list(answer.get("results", [])), []
    if answer.get("error"):
        found.append(answer["error"]["code"])
    while nodes:
        node = nodes.pop()
        found += [error["code"] for error in node["errors"]]
        nodes += node["children"]
    return sorted(found)


def test_sign_and_verify_as_an_identity(sigstore: LocalSigstore, tmp_path: Path) -> None:
    config = sigstore.write_trust_config(tmp_path / "trust.json")
    root = tmp_path / "trusted_root.json"
    root.write_text(json.dumps(sigstore.trusted_root_dict()))
    token = tmp_path / "token"
    token.write_text(sigstore.raw_token(WHO))
    folder = make_tree(tmp_path / "data")
    secure_train(
        *("sign", folder, "--kind", "dataset", "--key", f"sigstore:{config}"),
        env={"SECURE_TRAIN_IDENTITY_TOKEN": token},
    )
    shown = secure_train("inspect", folder)["signatures"]
    assert [(item["method"], item["name"]) for item in shown] == [("keyless", f"{WHO} of {sigstore.issuer}")]
    trust = ("--issuer", sigstore.issuer, "--trusted-root", root)
    answer = secure_train("verify", folder, "--identity", WHO, *trust)
    assert WHO in answer["results"][0]["note"]
    assert codes(secure_train("verify", folder, "--identity", "eve@x.test", *trust, code=4)) == ["ST-S02"]
    flip(folder / "config.json", 0)
    assert codes(secure_train("verify", folder, "--identity", WHO, *trust, code=3)) == ["ST-A03"]
    with LocalSigstore() as other:
        root.write_text(json.dumps(other.trusted_root_dict()))
    assert codes(secure_train("verify", folder, "--identity", WHO, *trust, code=3)) == ["ST-S01"]
    secure_train("verify", folder, "--identity", WHO, code=2)


def test_no_token_is_a_clear_error(tmp_path: Path) -> None:
    folder = make_tree(tmp_path / "data")
    answer = secure_train("sign", folder, "--kind", "dataset", "--key", "sigstore:/no/such", code=2)
    assert codes(answer) == ["ST-S06"]
    token = {"SECURE_TRAIN_IDENTITY_TOKEN": tmp_path / "none"}
    answer = secure_train("sign", folder, "--kind", "dataset", "--key", "sigstore", code=2, env=token)
    assert codes(answer) == ["ST-S06"]


def test_trust_metadata_from_the_first_root_to_a_revocation(tmp_path: Path) -> None:
    """Two people keep a policy; a host trusts their root, follows their rotation, and meets a revocation."""
    makers, host = {"SECURE_TRAIN_CONFIG": tmp_path / "makers"}, {"SECURE_TRAIN_CONFIG": tmp_path / "host"}
    for name in ("ann", "bob", "eve"):
        secure_train("keys", "new", name, env=makers)
    file = tmp_path / "policy.toml"
    secure_train("policy", "new", file, "--key", "ann", env=makers)
    folder = make_tree(tmp_path / "data")
    manifest = secure_train("sign", folder, "--kind", "dataset", "--key", "ann", env=makers)["manifest"]
    two = ("--key", "ann", "--key", "bob")
    begun = secure_train("keys", "root", file, *two, "--threshold", "2", env=makers)["root"]

    verify = ("verify", folder, "--policy", file)
    assert codes(secure_train(*verify, code=5, env=host)) == ["ST-P02"]  # this host trusts nothing yet
    assert codes(secure_train("keys", "trust", file, "--root", "0" * 64, code=3, env=host)) == ["ST-S09"]
    secure_train("keys", "trust", file, "--root", begun, env=host)
    secure_train(*verify, env=host)

    one = ("--role", "policy", "--add", "eve", "--remove", "ann")
    assert not secure_train("keys", "rotate", file, *one, "--key", "ann", env=makers)["complete"]
    assert secure_train("keys", "countersign", file, "--key", "bob", env=makers)["complete"]
    assert codes(secure_train(*verify, code=3, env=host)) == ["ST-S09"]  # ann's signature counts no more
    assert codes(secure_train("keys", "renew", file, *two, code=3, env=makers)) == ["ST-S09"]
    new = ("--key", "eve", "--key", "bob")
    secure_train("keys", "renew", file, *new, env=makers)
    secure_train(*verify, env=host)

    revoked = ("keys", "revoke", f"sha256:{manifest}", "--reason", "poisoned documents")
    secure_train(*revoked, "--in", file, *new, env=makers)
    answer = secure_train(*verify, code=3, env=host)
    assert codes(answer) == ["ST-S08"]
    assert "poisoned documents" in json.dumps(answer)


def test_what_a_host_revokes_for_itself(tmp_path: Path) -> None:
    home = {"SECURE_TRAIN_CONFIG": tmp_path / "config"}
    secure_train("keys", "new", "ann", "--trust", env=home)
    folder = make_tree(tmp_path / "data")
    secure_train("sign", folder, "--kind", "dataset", env=home)
    verify = ("verify", folder, "--key", "ann")
    secure_train(*verify, env=home)
    for bad in (("nobody",), ("ann", "--since", "yesterday"), ("xyz", "--kind", "digest")):
        secure_train("keys", "revoke", *bad, "--reason", "x", code=2, env=home)
    secure_train("keys", "revoke", "ann", "--reason", "lost laptop", env=home)
    assert codes(secure_train(*verify, code=3, env=home)) == ["ST-S08"]


def test_what_changed_since_it_was_signed(tmp_path: Path) -> None:
    home = {"SECURE_TRAIN_CONFIG": tmp_path / "config"}
    secure_train("keys", "new", "ann", env=home)
    folder = make_tree(tmp_path / "data")
    secure_train("sign", folder, "--kind", "dataset", env=home)
    assert secure_train("inspect", folder, "--diff", env=home)["changes"] == []
    flip(folder / "shards/shard-00000.bin", 70_000)
    (folder / "empty").unlink()
    (folder / "config.json").write_bytes(b"{} \n")
    make_tree(folder, {"new.bin": b"1"})
    changes = secure_train("inspect", folder, "--diff", env=home)["changes"]
    assert [(row["change"], row["path"]) for row in changes] == [
        ("resized", "config.json"),
        ("missing", "empty"),
        ("added", "new.bin"),
        ("changed", "shards/shard-00000.bin"),
    ]
