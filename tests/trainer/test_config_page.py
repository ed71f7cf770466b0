"""docs/config.md names every key with its default and meaning, as the program itself says it."""

from __future__ import annotations

from pathlib import Path

from trainer import fields
from trainer.config import PRESETS, Config
from trainer.flavors import FLAVORS

PAGE = Path(__file__).resolve().parents[2] / "docs" / "config.md"


def test_the_page_is_what_the_program_says() -> None:
    rows = [line for line in PAGE.read_text().splitlines() if line.startswith("| `")]
    expected = [(name, str(default), doc) for name, default, doc in fields.describe(Config)]
    assert [row.split("`")[1] for row in rows] == [name for name, _, _ in expected]
    for (_, default, doc), row in zip(expected, rows, strict=True):
        assert f"`{default}`" in row or not default
        assert doc.replace("|", "\\|") in row


def test_every_flavor_and_preset_is_named() -> None:
    text = PAGE.read_text()
    assert all(name in text for name in [*FLAVORS, *PRESETS])
