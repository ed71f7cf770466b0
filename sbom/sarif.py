"""Findings as SARIF 2.1.0, which code hosting sites show beside the lines that they concern."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Result:
    """One finding about a file: the rule, in words, and whether it fails the check."""

    rule: str
    message: str
    file: str
    subject: str
    error: bool = True


def sarif(results: Sequence[Result], tool_version: str) -> bytes:
    """The report; a finding keeps its fingerprint while rule and subject are the same."""
    rules = sorted({result.rule for result in results})
    driver = {
        "name": "secure-train",
        "version": tool_version,
        "rules": [{"id": rule, "shortDescription": {"text": rule}} for rule in rules],
    }
    found = [
        {
            "ruleId": result.rule,
            "level": "error" if result.error else "warning",
            "message": {"text": f"{result.subject}: {result.message}"},
            "locations": [
                {"physicalLocation": {"artifactLocation": {"uri": result.file}, "region": {"startLine": 1}}}
            ],
            "partialFingerprints": {
                "subject/v1": hashlib.sha256(f"{result.rule}\0{result.subject}".encode()).hexdigest()
            },
        }
        for result in results
    ]
    document = {
        "$schema": "https://json.schemastore.org/sarif-2.1.0.json",
        "version": "2.1.0",
        "runs": [{"tool": {"driver": driver}, "results": found}],
    }
    return json.dumps(document, indent=1, sort_keys=True).encode() + b"\n"
