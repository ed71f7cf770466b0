"""What a run leaves must never cost the run: failures are told, not raised."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from supplychain import runbom
from supplychain.chain import Link
from supplychain.plan import Plan
from supplychain.trust.signers import LocalSigner
from tests.trust.support import key


def plan(prefix: object) -> Plan:
    document: dict[str, Any] = {
        "run": {"id": "run", "segment": "1"},
        "environment": {"prefix": prefix, "manifest": "0" * 64},
    }
    return Plan(document)


@pytest.mark.parametrize("prefix", ["/nonexistent", "", 7, None])
def test_a_failure_is_a_problem_and_leaves_nothing_half_written(tmp_path: Path, prefix: object) -> None:
    signer = LocalSigner(key("alice"))
    last = Link(0, 2, "0" * 64, "0" * 64, "0" * 64, "0" * 64, signer.public)
    written = runbom.leave(tmp_path, plan(prefix), last, signer, started="", finished="", status="completed")
    assert written.files == ()
    assert written.problem
    assert "\n" not in written.problem
    assert [path for path in tmp_path.rglob("*") if path.is_file()] == []


def test_a_run_folder_that_cannot_be_written_is_a_problem_too(tmp_path: Path) -> None:
    (tmp_path / "bom").write_text("in the way")
    signer = LocalSigner(key("alice"))
    last = Link(0, 2, "0" * 64, "0" * 64, "0" * 64, "0" * 64, signer.public)
    written = runbom.leave(tmp_path, plan("/x"), last, signer, started="", finished="", status="")
    assert (written.files, bool(written.problem)) == ((), True)
