"""Lists of what is no longer believed: their file format, and the list of this host.

One canonical JSON document, `{"schema", "revoked": [{"kind", "what", "reason", "since"}]}`. The host's own
list lies in its configuration folder, like its keys, and is asked in every verification; lists for everybody
stand in a policy or in signed trust metadata.
"""

from __future__ import annotations

import datetime as dt
from collections.abc import Sequence

from supplychain.artifact import canonical_json, parse_json, write_durably
from supplychain.errors import SecureTrainError
from supplychain.trust import roots
from supplychain.trust.roots import Revocation

SCHEMA = "urn:secure-train:revocations:v1"
KINDS = ("digest", "key", "identity")
MAX_LIST = 16 << 20  # bytes
_FILE = "revoked.json"


def emit(entries: Sequence[Revocation]) -> bytes:
    listed = [
        {
            "kind": entry.kind,
            "what": entry.what,
            "reason": entry.reason,
            "since": entry.since and entry.since.astimezone(dt.UTC).strftime("%Y-%m-%dT%H:%M:%SZ"),
        }
        for entry in entries
    ]
    return canonical_json({"schema": SCHEMA, "revoked": listed})


def parse(data: bytes, *, where: str) -> tuple[Revocation, ...]:
    """ST-S09 for a list that is not understood whole: what it hides may be the one thing that matters."""
    document = parse_json(data, what="the list of revocations", where=where, code="ST-S09", limit=MAX_LIST)
    try:
        if set(document) != {"schema", "revoked"} or document["schema"] != SCHEMA:
            raise ValueError("another schema")
        entries = tuple(_entry(item) for item in document["revoked"])
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise SecureTrainError(
            "ST-S09", f"the list of revocations is malformed: {error}", where=where, expected=SCHEMA
        ) from None
    return entries


def _entry(item: dict[str, str | None]) -> Revocation:
    if set(item) != {"kind", "what", "reason", "since"} or item["kind"] not in KINDS:
        raise ValueError("an entry is not understood")
    what, reason, since = item["what"], item["reason"], item["since"]
    if not isinstance(what, str) or not isinstance(reason, str) or not what:
        raise ValueError("an entry is not understood")
    return Revocation(item["kind"], what, reason, None if since is None else moment(since))  # type: ignore[arg-type]  # it is one of KINDS


def moment(text: str) -> dt.datetime:
    """A date with a time zone; ValueError for everything else."""
    value = dt.datetime.fromisoformat(text)
    if value.tzinfo is None:
        raise ValueError(f"{text!r} has no time zone")
    return value


def of_this_host() -> tuple[Revocation, ...]:
    """What this host no longer believes, whoever says otherwise."""
    path = roots.config_folder() / _FILE
    try:
        data = path.read_bytes()
    except FileNotFoundError:
        return ()
    except OSError as error:
        raise SecureTrainError(
            "ST-S09", f"this host's revocations cannot be read: {error.strerror}", where=str(path)
        ) from None
    return parse(data, where=str(path))


def add_to_this_host(entry: Revocation) -> None:
    entries = of_this_host()
    if entry in entries:
        return
    path = roots.config_folder() / _FILE
    try:
        path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        write_durably(path, emit((*entries, entry)))
    except OSError as error:
        raise SecureTrainError(
            "ST-U04", f"the revocation cannot be written: {error.strerror}", where=str(path)
        ) from None
