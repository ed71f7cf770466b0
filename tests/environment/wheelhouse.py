"""Makes small real wheels and locks for them, good ones and bad ones."""

from __future__ import annotations

import base64
import hashlib
import zipfile
from collections.abc import Iterable, Mapping
from pathlib import Path


def record_hash(data: bytes) -> str:
    return "sha256=" + base64.urlsafe_b64encode(hashlib.sha256(data).digest()).decode().rstrip("=")


def make_wheel(
    folder: Path,
    name: str,
    version: str = "1.0",
    files: Mapping[str, bytes] | None = None,
    *,
    scripts: Mapping[str, str] | None = None,
    record: Mapping[str, str] | None = None,
    unlisted: Iterable[tuple[str, bytes]] = (),
    tag: str = "py3-none-any",
    metadata_name: str | None = None,
) -> Path:
    """A wheel of `files` (default: one module). `record` overrides RECORD's hashes, `unlisted` go in without
    a row.
    """
    info = f"{name}-{version}.dist-info"
    content = dict(files if files is not None else {f"{name}/__init__.py": f"NAME = '{name}'\n".encode()})
    content[f"{info}/METADATA"] = (
        f"Metadata-Version: 2.1\nName: {metadata_name or name}\nVersion: {version}\n".encode()
    )
    content[f"{info}/WHEEL"] = (
        f"Wheel-Version: 1.0\nGenerator: test\nRoot-Is-Purelib: true\nTag: {tag}\n".encode()
    )
    if scripts:
        lines = "".join(f"{script} = {target}\n" for script, target in scripts.items())
        content[f"{info}/entry_points.txt"] = f"[console_scripts]\n{lines}".encode()
    rows = [f"{path},{record_hash(data)},{len(data)}" for path, data in content.items()]
    for path, stated in (record or {}).items():
        rows = [f"{path},{stated},{len(content[path])}" if row.split(",")[0] == path else row for row in rows]
    rows.append(f"{info}/RECORD,,")
    content[f"{info}/RECORD"] = ("\n".join(rows) + "\n").encode()
    folder.mkdir(parents=True, exist_ok=True)
    target = folder / f"{name}-{version}-{tag}.whl"
    with zipfile.ZipFile(target, "w") as archive:
        for path, data in [*content.items(), *unlisted]:
            archive.writestr(zipfile.ZipInfo(path, (2020, 1, 1, 0, 0, 0)), data)
    return target


def sha256(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()


def make_lock(path: Path, wheels: Iterable[Path], *, extra: str = "") -> Path:
    """A hash-pinned lock of `wheels`."""
    lines = []
    for wheel in wheels:
        name, version = wheel.name.split("-")[:2]
        lines.append(f"{name}=={version} \\\n    --hash=sha256:{sha256(wheel)}\n")
    path.write_text("".join(lines) + extra)
    return path
