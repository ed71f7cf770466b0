"""Small environments as installers leave them, made file by file."""

from __future__ import annotations

import datetime as dt
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from sbom.environment import Setting, environment_bom
from sbom.inventory import Installed, read_inventory
from sbom.tree import DiskTree

TIME = dt.datetime(2026, 11, 30, 12, 0, tzinfo=dt.UTC)
SITE = "lib/python3.11/site-packages"


def install(
    root: Path,
    name: str,
    version: str = "1.0",
    *,
    headers: Sequence[str] = (),
    metadata: bytes | None = None,
    files: dict[str, bytes] | None = None,
    info: str | None = None,
) -> Path:
    """One distribution below `root`; `files` are relative to site-packages and stand in its RECORD."""
    site = root / SITE
    folder = site / (info or f"{name}-{version}.dist-info")
    folder.mkdir(parents=True)
    lines = [f"Metadata-Version: 2.4\nName: {name}\nVersion: {version}", *headers]
    (folder / "METADATA").write_bytes(
        metadata if metadata is not None else "\n".join(lines).encode() + b"\n\nText\n"
    )
    for path, data in (files or {}).items():
        target = site / path
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_bytes(data)
    (folder / "RECORD").write_text("".join(f"{path},,\n" for path in files or {}))
    (root / "pyvenv.cfg").write_text("version = 3.11.7\ninclude-system-site-packages = false\n")
    return folder


def inventory(root: Path) -> list[Installed]:
    return read_inventory(DiskTree(root), SITE)


def bom(root: Path, setting: Setting | None = None, spec: str = "1.6") -> dict[str, Any]:
    return environment_bom(
        inventory(root), setting or Setting(python="3.11.7"), time=TIME, tool_version="1", spec=spec
    )


def component(document: dict[str, Any], name: str) -> dict[str, Any]:
    (found,) = [item for item in document["components"] if item["name"] == name]
    return dict(found)
