"""Did every packaged file of an environment come out of its wheels? Asked before it is signed, with the
wheels at hand.

Until an environment is signed, its own description vouches for nothing: whoever could write to the store
could have changed a file, its RECORD and `environment.json` together. The wheels, whose sha256 the lock
states, tell. Imports nothing of the environment.
"""

from __future__ import annotations

import zipfile
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from supplychain.artifact import VerifiedArtifact, parse_json
from supplychain.environment.interpreter import file_sha256
from supplychain.environment.verify import ENVIRONMENT
from supplychain.environment.wheels import check_archive, describe
from supplychain.errors import SecureTrainError


def default_folders(prefix: Path) -> list[Path]:
    """Where `env build` and bootstrap.py keep wheels, seen from an environment in its store."""
    store = prefix.parent
    return [store / ".wheels", store.parent / "cache" / "wheels", store.parent / "wheel"]


def differences_from_wheels(prefix: Path, manifest: str, folders: Iterable[Path]) -> list[SecureTrainError]:
    """A ST-E03 for each package whose description is not that of its wheel, a ST-E11 for each wheel that is
    not here.

    Together with `verify_environment` against the lock this binds the files on disk to hash-checked wheels.
    """
    document = parse_json(VerifiedArtifact.open(prefix, manifest).read_bytes(ENVIRONMENT), what=ENVIRONMENT)
    wheels = {path.name: path for folder in folders if folder.is_dir() for path in folder.rglob("*.whl")}
    own = document["code"].get("sha256") if "editable" in document["code"] else None
    found = [
        _compare(prefix, item, wheels, document["site"])
        for item in document["distributions"]
        if item["sha256"] != own
    ]
    return [error for error in found if error]


def _compare(
    prefix: Path, item: dict[str, Any], wheels: dict[str, Path], site: str
) -> SecureTrainError | None:
    path = wheels.get(item["wheel"])
    if path is None or file_sha256(path) != item["sha256"]:
        return SecureTrainError(
            "ST-E11",
            f"the wheel of {item['name']} is not at hand, so its files cannot be compared",
            where=str(prefix),
            expected=f"{item['wheel']} with sha256:{item['sha256']}",
            found="no such file" if path is None else "another file of that name",
            next_step="name the folder that has it with --wheels, or build the environment again",
        )
    with zipfile.ZipFile(path) as archive:
        check_archive(archive)
        name = next(
            name for name in archive.namelist() if name.count("/") == 1 and name.endswith(".dist-info/RECORD")
        )
        record = archive.read(name).decode("utf-8")
    digests = describe(record, name.partition(".dist-info/")[0] + ".data", site, item["name"])
    if digests != (item["record"], item["files"]):
        return SecureTrainError(
            "ST-E03",
            f"the files of {item['name']} are not those of its wheel",
            where=str(prefix / ENVIRONMENT),
            expected=f"files {digests[1]}",
            found=f"files {item['files']}",
            next_step=f"rm -r {prefix}, and build it again; find out first who changed it",
        )
    return None
