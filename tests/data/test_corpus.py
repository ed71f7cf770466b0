"""The embedded corpus: the released text or an error, cut into documents without loss."""

from __future__ import annotations

import hashlib
import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from supplychain.artifact import SecureTrainError
from trainer import corpus
from trainer.corpus import build

ROOT = Path(__file__).parents[2]
RELEASED = "c8d9c271cd36887b2d5c2beba505fdd7642df0c163c9afd4a371604fc79ee3c8"


def test_the_text_is_the_released_one() -> None:
    assert hashlib.sha256(corpus.text().encode()).hexdigest() == RELEASED


def test_documents_are_the_text() -> None:
    documents = corpus.documents()
    assert "".join(documents) == corpus.text()
    assert len(documents) == 959
    assert documents[1].startswith("ACT I.\n\nSCENE 1. Rousillon.")
    assert max(map(len, documents)) < 90_000


def test_origin_notes_agree_with_the_manifest() -> None:
    folder = Path(corpus.__file__).parent
    manifest = json.loads((folder / "manifest.json").read_bytes())
    notes = (folder / "ORIGIN.md").read_text()
    for part in ("origin", "text", "compressed"):
        assert manifest[part]["sha256"] in notes
    assert manifest["text"]["sha256"] == RELEASED
    assert manifest["origin"]["sha256"] == build.ORIGIN_SHA256


@pytest.mark.parametrize("place", [0, 700_000, -1])
def test_a_changed_package_file_is_an_error(tmp_path: Path, place: int) -> None:
    """A copy of the installed packages with one bit changed, run by a real interpreter."""
    for package in ("trainer/corpus", "supplychain"):
        shutil.copytree(ROOT / package, tmp_path / package)
    (tmp_path / "trainer" / "__init__.py").touch()
    file = tmp_path / "trainer" / "corpus" / "shakespeare.txt.xz"
    data = bytearray(file.read_bytes())
    data[place] ^= 1
    file.write_bytes(data)
    script = "from trainer import corpus\ntry:\n corpus.text()\nexcept Exception as e: print(e.code)"
    done = subprocess.run(
        [sys.executable, "-c", script], cwd=tmp_path, capture_output=True, text=True, timeout=60
    )
    assert done.stdout == "ST-D01\n", done.stderr


def test_another_archive_is_refused() -> None:
    with pytest.raises(SecureTrainError) as refused:
        build.build(b"another archive")
    assert refused.value.code == "ST-D01"
