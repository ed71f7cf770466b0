"""Before an environment is signed, its wheels say what it should hold: a consistent forgery of everything
else is noticed.
"""

from __future__ import annotations

import base64
import hashlib
import json
import sys
from pathlib import Path

import pytest

from supplychain.artifact import MANIFEST, build_manifest, canonical_json
from supplychain.environment.build import build_environment
from supplychain.environment.origin import differences_from_wheels
from supplychain.environment.verify import ENVIRONMENT, verify_environment, wheel_digest
from tests.environment.wheelhouse import make_lock, make_wheel, record_hash

SITE = f"lib/python{sys.version_info[0]}.{sys.version_info[1]}/site-packages"


@pytest.fixture
def place(tmp_path: Path) -> Path:
    """A folder with a wheelhouse, our wheel, a lock, and the environment built from them."""
    wheels = [
        make_wheel(tmp_path / "house", name, files={f"{name}.py": b"X = 1\n"}) for name in ("alpha", "beta")
    ]
    own = make_wheel(tmp_path / "own", "secure_train", "0.1.0", files={"trainer/__init__.py": b""})
    lock = make_lock(tmp_path / "lock", wheels)
    build_environment(lock, tmp_path / "store", wheelhouse=tmp_path / "house", project_wheel=own)
    return tmp_path


def listed(record: Path) -> list[tuple[str, str]]:
    """What a RECORD says of the files that came from the wheel: (path from the root, sha256 in hex)."""
    rows = (row.split(",") for row in record.read_text().splitlines())
    return [
        (f"{SITE}/{path}", base64.urlsafe_b64decode(stated.removeprefix("sha256=") + "=").hex())
        for path, stated, _ in rows
        if stated and not path.endswith("/INSTALLER")
    ]


def environment(place: Path) -> Path:
    return next((place / "store").glob("env-*"))


def codes(place: Path, *folders: str) -> list[str]:
    root = environment(place)
    manifest = hashlib.sha256((root / MANIFEST).read_bytes()).hexdigest()
    return [
        error.code
        for error in differences_from_wheels(root, manifest, [place / folder for folder in folders])
    ]


def test_an_honest_environment_is_that_of_its_wheels(place: Path) -> None:
    assert codes(place, "house", "own") == []


def test_a_forgery_that_is_consistent_in_itself_is_noticed(place: Path) -> None:
    """Source, RECORD, environment.json and manifest are changed together; only the wheels disagree."""
    root = environment(place)
    data = b"X = 2  # not what was locked\n"
    (root / SITE / "alpha.py").write_bytes(data)
    record = root / SITE / "alpha-1.0.dist-info" / "RECORD"
    rows = [row for row in record.read_text().splitlines() if not row.startswith("alpha.py,")]
    record.write_text("\n".join([*rows, f"alpha.py,{record_hash(data)},{len(data)}"]) + "\n")
    document = json.loads((root / ENVIRONMENT).read_bytes())
    for item in document["distributions"]:
        if item["name"] == "alpha":
            item["files"] = wheel_digest(listed(record))
    (root / ENVIRONMENT).write_bytes(canonical_json(document))
    manifest = build_manifest(root, "environment", blocks=False)
    assert verify_environment(root, manifest.digest, (place / "lock").read_bytes()).findings == ()
    assert codes(place, "house", "own") == ["ST-E03"]


def test_without_the_wheels_nothing_can_be_said(place: Path) -> None:
    assert codes(place, "own") == ["ST-E11", "ST-E11"]
    make_wheel(place / "house", "beta", files={"beta.py": b"X = 3\n"})  # the right name, another content
    assert codes(place, "house", "own") == ["ST-E11"]
