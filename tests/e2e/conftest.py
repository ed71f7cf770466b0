"""The site that all end-to-end tests share. Tests that tamper with something take a copy of it."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.conftest import BUILT
from tests.e2e.site import Site, build_site


@pytest.fixture(scope="session")
def site(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Site]:
    """Built once for all tests: about twenty seconds, most of them copying and verifying the environment."""
    if BUILT is None:
        pytest.skip("needs the built environments: run it through bootstrap.py test")
    folder = tmp_path_factory.mktemp("e2e") / "site"
    yield build_site(folder, Path(BUILT))
    shutil.rmtree(folder, ignore_errors=True)  # the copied environment is large


@pytest.fixture(scope="session")
def finished(site: Site) -> Path:
    """A run of six steps on two processes, complete and verified. Never change it: copy it."""
    site.ok(*site.train(site.folder / "finished"))
    return site.folder / "finished"
