"""What every test may rely on: a private home, no bytecode in the tree, and the built environments."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
# Bytecode goes to one private folder: beside the sources it would be a file that nothing explains, and
# without it each of the many processes that tests start would compile torch's sources anew.
PYCACHE = os.environ.setdefault("PYTHONPYCACHEPREFIX", str(ROOT / ".secure-train" / "pycache"))
sys.pycache_prefix = PYCACHE
# Taken before the fixture below clears it: the state folder of the bootstrap.py that started the tests.
BUILT = os.environ.get("SECURE_TRAIN_TEST_HOME")


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


@pytest.fixture
def built() -> Path:
    """The state folder with the real environments: `gate/bin/secure-train` and `training/`. Never change
    them.
    """
    if BUILT is None:
        pytest.skip("needs the built environments: run it through bootstrap.py test")
    return Path(BUILT)
