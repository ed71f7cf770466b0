"""`keys`, `sign`, `verify` and `inspect` as a person runs them: real processes, codes asserted."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
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


def secure_train(*words: str | Path, code: int = 0, **variables: str | Path) -> dict[str, Any]:
    """One command in a process of its own; its JSON answer."""
    environment = os.environ | {name: str(value) for name, value in variables.items()}
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
        SECURE_TRAIN_IDENTITY_TOKEN=token,
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
    answer = secure_train("sign", folder, "--kind", "dataset", "--key", "sigstore", code=2, **token)
    assert codes(answer) == ["ST-S06"]
