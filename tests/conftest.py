"""What every test may rely on: a home of its own, and no bytecode left in the tree."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest

# Child processes would otherwise write __pycache__ beside the sources and into the environments that tests build.
sys.dont_write_bytecode = True
os.environ["PYTHONDONTWRITEBYTECODE"] = "1"


@pytest.fixture(autouse=True)
def private_home(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Keys, caches and configuration of a test go to a folder of its own, never to the user's."""
    home = tmp_path_factory.mktemp("home")
    monkeypatch.setenv("HOME", str(home))
    for name in ("XDG_CONFIG_HOME", "XDG_CACHE_HOME", "XDG_DATA_HOME", "XDG_STATE_HOME"):
        monkeypatch.delenv(name, raising=False)
    for name in [key for key in os.environ if key.startswith("SECURE_TRAIN_")]:
        monkeypatch.delenv(name)
    return home
