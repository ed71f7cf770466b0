"""npm's sigstore, another implementation in another language, verifies the keyless bundles that we make.

SIGSTORE_NPM names a folder with `node_modules` that holds it (`npm install sigstore@5`).
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
from pathlib import Path

import pytest

from supplychain.trust import bundle
from supplychain.trust.keyless import KeylessSigner
from tests.sigstore.local import LocalSigstore
from tests.trust.support import STATEMENT

SCRIPT = Path(__file__).with_name("verify_bundle.cjs")
WHO = "https://github.com/acme/data/.github/workflows/publish.yml@refs/heads/main"


@pytest.fixture(scope="module")
def packages() -> str:
    place = os.environ.get("SIGSTORE_NPM")
    if not place or shutil.which("node") is None:
        pytest.skip("SIGSTORE_NPM names no folder with npm's sigstore, or there is no node")
    return place


def accepts(packages: str, running: LocalSigstore, path: Path, identity: str) -> bool:
    root = path.with_name("root.json")
    root.write_bytes(running.tuf_root)
    cache = path.with_name("cache")
    done = subprocess.run(
        ["node", SCRIPT, packages, path, running.url + "/tuf", root, running.issuer, identity, cache],
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.returncode in (0, 3), done.stderr
    return done.returncode == 0


@pytest.mark.parametrize("version", [1, 2])
def test_npm_sigstore_verifies_our_bundles(packages: str, tmp_path: Path, version: int) -> None:
    with LocalSigstore(rekor_version=version) as running:
        by = KeylessSigner(lambda: running.raw_token(WHO), json.dumps(running.trust_config_dict()).encode())
        made = by.sign_payload(json.dumps(STATEMENT).encode())
        path = tmp_path / "bundle.json"
        path.write_bytes(made.data)
        assert accepts(packages, running, path, WHO)
        assert not accepts(packages, running, path, WHO.replace("main", "evil"))
        document = json.loads(made.data)
        document["dsseEnvelope"]["payload"] = document["dsseEnvelope"]["payload"][:-4] + "AAAA"
        path.write_text(json.dumps(document))
        assert not accepts(packages, running, path, WHO)
        assert bundle.parse(made.data, where="it").method == "keyless"
