"""`data prepare`, `data adopt` and `data inspect` as commands: what comes out is signed, and shown."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from tests.e2e.site import Site

pytestmark = pytest.mark.e2e


def test_a_dataset_is_prepared_packed_and_inspected(site: Site, tmp_path: Path) -> None:
    out = tmp_path / "packed"
    options = ["--pack", "64", "--rows", "--shuffle", "--drop-duplicates", "--document", "paragraph"]
    code, document = site.json(
        "data", "prepare", site.folder / "corpus.txt", "--tokenizer", site.tokenizer / "tokenizer.json",
        "--out", out, "--key", "owner", *options,
    )  # fmt: skip
    assert code == 0, document
    code, found = site.json("data", "inspect", out)
    assert code == 0
    dataset = found["dataset"]
    assert dataset["packings"] == [64]
    assert dataset["parameters"]["shuffle"] is True
    assert dataset["splits"]["train"]["samples"][0]["text"]
    assert [signature["name"] for signature in found["signatures"]] == ["owner"]
    text = site.ok("data", "inspect", out)
    assert "packed into rows of 64 tokens" in text
    assert "claims to be signed by owner" in text


def test_a_dataset_of_another_trainer_is_adopted(site: Site, tmp_path: Path) -> None:
    (np.arange(3000) % 250).astype("<u2").tofile(tmp_path / "train.bin")
    before = (tmp_path / "train.bin").read_bytes()
    tokenizer = site.tokenizer / "tokenizer.json"
    code, document = site.json(
        "data", "adopt", tmp_path, "--tokenizer", tokenizer, "--dtype", "uint16", "--key", "owner"
    )
    assert code == 0, document
    assert (tmp_path / "train.bin").read_bytes() == before
    site.ok("verify", tmp_path)
    assert site.json("data", "inspect", tmp_path)[1]["dataset"]["tokens"] == 3000


def test_refusals_are_passed_on_whole(site: Site, tmp_path: Path) -> None:
    code, document = site.json("data", "adopt", tmp_path, "--vocab-size", "100", "--key", "owner")
    assert code == 2
    assert document["error"]["code"] == "ST-D16"
    code, document = site.json("data", "inspect", tmp_path)
    assert document["error"]["code"] == "ST-A09"
