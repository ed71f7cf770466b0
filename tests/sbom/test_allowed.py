"""Licence lists: expressions, wide lists, exceptions and their end."""

from __future__ import annotations

import datetime as dt
import json
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sbom.allowed import Exemption, Lists, judge, judge_expression
from supplychain.cli import invoke
from tests.sbom.support import bom, install

LISTS = Lists(
    allow=["MIT", "Apache-2.0", "BSD-*", "GPL-2.0-only WITH Classpath-exception-2.0"],
    deny=["GPL-*", "BSD-4-Clause"],
    review=["MPL-2.0"],
)
TODAY = dt.date(2026, 11, 30)


@pytest.mark.parametrize(
    ("expression", "verdict"),
    [
        ("MIT", "allowed"),
        ("mit", "allowed"),
        ("BSD-3-Clause", "allowed"),
        ("BSD-4-Clause", "denied"),
        ("GPL-3.0-or-later", "denied"),
        ("MPL-2.0", "review"),
        ("Zlib", "review"),
        ("MIT OR GPL-3.0-only", "allowed"),
        ("MIT AND GPL-3.0-only", "denied"),
        ("MIT AND (GPL-3.0-only OR Apache-2.0)", "allowed"),
        ("MIT OR GPL-3.0-only AND MPL-2.0", "allowed"),
        ("GPL-2.0-only WITH Classpath-exception-2.0", "allowed"),
        ("Apache-2.0 WITH LLVM-exception", "allowed"),
        ("GPL-3.0-only WITH GCC-exception-3.1", "denied"),
        ("", "review"),
        ("MIT MIT", "review"),
        ("(MIT", "review"),
        ("MIT OR", "review"),
        ("MIT; DROP", "review"),
        ("(" * 5000, "review"),
    ],
)
def test_expressions_are_judged_as_a_whole(expression: str, verdict: str) -> None:
    assert judge_expression(expression, LISTS) == verdict


@given(st.text(alphabet="()MITANDORGPL-3.0 ", max_size=80))
def test_any_text_has_a_verdict(text: str) -> None:
    assert judge_expression(text, LISTS) in ("allowed", "review", "denied")


def test_exceptions_hold_until_their_day(tmp_path: Path) -> None:
    install(tmp_path, "bad", headers=["License-Expression: GPL-3.0-only"])
    install(tmp_path, "silent")
    lists = Lists(
        LISTS.allow, LISTS.deny, LISTS.review, [Exemption("pkg:pypi/*", "reviewed", TODAY + dt.timedelta(1))]
    )
    document = bom(tmp_path)
    before = {item.component: item for item in judge(document, lists, TODAY)}
    assert before["pkg:pypi/bad"].verdict == before["pkg:pypi/silent"].verdict == "allowed"
    after = {item.component: item for item in judge(document, lists, TODAY + dt.timedelta(1))}
    assert (after["pkg:pypi/bad"].verdict, after["pkg:pypi/silent"].verdict) == ("denied", "review")
    assert "ended" in after["pkg:pypi/bad"].note


def test_the_policy_decides_with_exit_code_4(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("SECURE_TRAIN_CONFIG", str(tmp_path / "config"))
    install(tmp_path / "env", "bad", headers=["License-Expression: GPL-3.0-only"])
    file, policy, report = tmp_path / "bom.json", tmp_path / "policy.toml", tmp_path / "out.sarif"
    assert (
        invoke(["sbom", "environment", "--env", str(tmp_path / "env"), "--unverified", "-o", str(file)]) == 0
    )
    assert invoke(["keys", "new", "owner", "--trust"]) == 0
    assert invoke(["policy", "new", str(policy)]) == 0
    arguments = ["sbom", "licenses", str(file), "--policy", str(policy), "--sarif", str(report)]
    assert invoke(arguments) == 5
    assert "ST-M08" in capsys.readouterr().err
    text = policy.read_text()
    policy.write_text(text + '\n[licenses]\nallow = ["MIT"]\ndeny = ["GPL-*"]\nunknown = "allowed"\n')
    assert invoke(["policy", "sign", str(policy)]) == 0
    capsys.readouterr()
    assert invoke(arguments) == 4
    assert "ST-M06" in capsys.readouterr().err
    (result,) = json.loads(report.read_bytes())["runs"][0]["results"]
    assert result["ruleId"] == "ST-M06"
    exception = (
        '[[licenses.exceptions]]\ncomponent = "pkg:pypi/bad"\nreason = "used alone"\nuntil = "2999-01-01"\n'
    )
    policy.write_text(policy.read_text() + exception)
    assert invoke(["policy", "sign", str(policy)]) == 0
    assert invoke(arguments) == 0
