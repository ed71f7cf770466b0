"""The numbered obligations of `supplychain/trust/metadata.py` as tables: keys, thresholds, times."""

from __future__ import annotations

import datetime as dt
import json
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from supplychain import policy
from supplychain.errors import SecureTrainError
from supplychain.trust import metadata, revocations, roots
from supplychain.trust.keys import SigningKey
from supplychain.trust.metadata import Memory, Seen
from supplychain.trust.roots import Revocation
from tests.artifact.support import check_error, refused
from tests.gate.workshop import NOW, Workshop
from tests.trust.support import key

DAY = dt.timedelta(days=1)


def keys(names: str) -> list[SigningKey]:
    return [key(name) for name in names]


@dataclass
class Place:
    """A policy with trust metadata, and a host that has seen some of it."""

    policy: Path
    seen: Seen

    @staticmethod
    def create(folder: Path, signers: str = "a", members: str = "a", threshold: int = 1) -> Place:
        path = folder / "policy.toml"
        path.write_bytes(b"policy 1")
        first = metadata.create(
            path,
            path.read_bytes(),
            keys(signers),
            [item.public for item in keys(members)],
            threshold=threshold,
            root_expires=NOW + 365 * DAY,
            expires=NOW + 90 * DAY,
        )
        return Place(path, Seen(first))

    @property
    def folder(self) -> Path:
        return metadata.folder_of(self.policy)

    def check(self, *, now: dt.datetime = NOW) -> metadata.Vouched:
        """What a host does: verify, then remember."""
        found = metadata.verify(self.policy, self.policy.read_bytes(), self.seen, now=now)
        self.seen = found.seen
        return found

    def renew(self, signers: str = "a", *revoke: Revocation, days: int = 90) -> int:
        data = self.policy.read_bytes()
        return metadata.renew(self.policy, data, keys(signers), expires=NOW + days * DAY, revoke=revoke)

    def rotate(self, role: str, signers: str, days: int = 365, **changes: Any) -> bool:
        for name in ("add", "remove"):
            changes[name] = [item.public for item in keys(changes.get(name, ""))]
        return metadata.rotate(self.policy, role, keys(signers), expires=NOW + days * DAY, **changes)[1]

    def edit(self, name: str, change: Callable[[dict[str, Any]], object]) -> None:
        document = json.loads((self.folder / name).read_bytes())
        change(document)
        (self.folder / name).write_text(json.dumps(document))


def test_good_metadata_vouches_and_is_remembered(tmp_path: Path) -> None:
    place = Place.create(tmp_path)
    found = place.check()
    assert (found.seen.root, found.seen.targets, found.revocations) == (1, 1, ())
    assert place.renew("a") == 2
    assert place.check().seen.targets == 2


# --- M1, M2: the chain of roots -----------------------------------------------------------------------------


def test_m1_the_first_root_is_the_pinned_one(tmp_path: Path) -> None:
    place = Place.create(tmp_path)
    (tmp_path / "other").mkdir()
    other = Place.create(tmp_path / "other")  # by the same key, and yet another root
    place.seen = other.seen if other.seen != place.seen else Seen("0" * 64)
    with refused("ST-S09", "first root", place.seen.first):
        place.check()


@pytest.mark.parametrize(
    ("members", "threshold", "signers", "change", "valid"),
    [
        # signers of the next root; what it changes
        ("a", 1, "ab", {"add": "b"}, True),
        ("a", 1, "a", {"add": "b"}, True),  # one of the new two is enough
        ("a", 1, "b", {"add": "b"}, False),  # nobody of the old root
        ("a", 1, "ab", {"add": "b", "remove": "a"}, True),  # exchanged: both must sign
        ("a", 1, "a", {"add": "b", "remove": "a"}, False),
        ("a", 1, "b", {"add": "b", "remove": "a"}, False),
        ("abc", 2, "ab", {"add": "d"}, True),
        ("abc", 2, "ad", {"add": "d"}, False),  # d does not count for the old root
        ("abc", 2, "aa", {"add": "d"}, False),  # nor does a count twice
        ("abc", 2, "abd", {"add": "d", "threshold": 3}, True),
        ("abc", 2, "ab", {"add": "d", "threshold": 3}, False),
        ("abc", 2, "bc", {"remove": "a"}, True),
        ("abc", 2, "ab", {"remove": "a"}, False),  # a no longer counts for the new root
        ("abc", 2, "ab", {"threshold": 1}, True),
        ("abc", 2, "a", {"threshold": 1}, False),  # lowering the bar needs the old bar
    ],
)
def test_m2_a_rotation_needs_enough_of_the_old_and_of_the_new(
    tmp_path: Path, members: str, threshold: int, signers: str, change: dict[str, Any], valid: bool
) -> None:
    place = Place.create(tmp_path, members[:threshold], members, threshold)
    place.check()
    assert place.rotate("root", signers, **change) is valid
    if valid:
        assert place.check().seen.root == 2
        return
    draft = place.folder / metadata.DRAFT
    place.check()  # a draft changes nothing
    draft.rename(place.folder / "2.root.json")  # and put in place by hand it is refused
    with refused("ST-S09", "too few signatures", "root version"):
        place.check()


def test_m2_a_draft_is_countersigned_until_it_is_complete(tmp_path: Path) -> None:
    place = Place.create(tmp_path, "ab", "abc", 2)
    assert not place.rotate("root", "a", add="d", threshold=3)
    assert not metadata.countersign(place.policy, keys("d"))[1]
    assert metadata.countersign(place.policy, keys("b"))[1]
    assert place.check().seen.root == 2
    with refused("ST-U01"):
        metadata.countersign(place.policy, keys("c"))


def test_m2_roots_follow_each_other(tmp_path: Path) -> None:
    place = Place.create(tmp_path)
    for _ in range(3):
        assert place.rotate("root", "a")
    assert place.check().seen.root == 4
    (place.folder / "3.root.json").write_bytes((place.folder / "4.root.json").read_bytes())
    with refused("ST-S09", "another version", "3.root.json"):
        place.check()


def test_m2_one_key_under_two_names_counts_once(tmp_path: Path) -> None:
    place = Place.create(tmp_path)

    def double(document: dict[str, Any]) -> None:
        signed = document["signed"]
        (keyid,) = signed["roles"]["root"]["keyids"]
        signed["keys"]["f" * 64] = signed["keys"][keyid]
        signed["roles"]["root"]["keyids"].append("f" * 64)

    place.edit("1.root.json", double)
    place.seen = Seen(metadata._hash((place.folder / "1.root.json").read_bytes()))
    with refused("ST-S09", "twice"):
        place.check()


# --- M3, M6: expiry -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("root", "targets", "day", "code"),
    [
        (365, 90, 0, None),
        (365, 90, 89, None),
        (365, 90, 90, "ST-S10"),  # not after its last moment, but from it on
        (365, 90, 400, "ST-S10"),
        (10, 90, 9, None),
        (10, 90, 10, "ST-S10"),
    ],
)
def test_m3_m6_expired_metadata_decides_nothing(
    tmp_path: Path, root: int, targets: int, day: int, code: str | None
) -> None:
    place = Place.create(tmp_path)
    place.rotate("root", "a", days=root)
    place.renew("a", days=targets)
    if code is None:
        place.check(now=NOW + day * DAY)
    else:
        with refused(code, "expired"):
            place.check(now=NOW + day * DAY)


def test_m3_an_expired_root_may_have_a_current_follower(tmp_path: Path) -> None:
    place = Place.create(tmp_path)
    place.rotate("root", "a", days=1)
    place.rotate("root", "a", days=365)
    place.check(now=NOW + 2 * DAY)


# --- M4: the policy role ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("change", "signers", "valid"),
    [
        ({}, "a", True),
        ({}, "b", False),
        ({"add": "b"}, "b", True),
        ({"add": "b", "remove": "a"}, "a", False),  # taken from a
        ({"add": "b", "remove": "a"}, "b", True),
        ({"add": "bc", "threshold": 2}, "bc", True),
        ({"add": "bc", "threshold": 2}, "bb", False),
        ({"add": "bc", "threshold": 2}, "bd", False),
    ],
)
def test_m4_only_the_policy_role_vouches(
    tmp_path: Path, change: dict[str, Any], signers: str, valid: bool
) -> None:
    place = Place.create(tmp_path)
    place.check()
    if change:
        assert place.rotate("policy", "a", **change)
    if valid:
        place.renew(signers)
        assert place.check().seen.targets == 2
        return
    with refused("ST-S09", "too few signatures"):
        place.renew(signers)
    if change:
        with refused("ST-S09", "'targets'"):
            place.check()  # what a signed before he lost the role no longer counts


# --- M5: rollback -------------------------------------------------------------------------------------------


def test_m5_what_was_seen_is_never_undone(tmp_path: Path) -> None:
    place = Place.create(tmp_path)
    old = tmp_path / "old"
    shutil.copytree(place.folder, old)
    place.renew("a", Revocation("digest", "a" * 64, "bad"))
    place.rotate("root", "a")
    assert place.check().revocations
    for names in (["targets.json", "revoked.json"], ["2.root.json"]):
        shutil.copytree(place.folder, tmp_path / "new", dirs_exist_ok=True)
        for name in names:
            if (old / name).exists():
                shutil.copy(old / name, place.folder / name)
            else:
                (place.folder / name).unlink()
        with refused("ST-S09", "older than what this host has seen"):
            place.check()
        shutil.copytree(tmp_path / "new", place.folder, dirs_exist_ok=True)
    place.check()


def test_m5_one_version_has_one_content(tmp_path: Path) -> None:
    place = Place.create(tmp_path)
    place.check()
    old = (place.folder / "targets.json").read_bytes()
    place.renew("a")
    twin = json.loads((place.folder / "targets.json").read_bytes())
    assert twin["signed"]["version"] == 2
    (place.folder / "targets.json").write_bytes(old)
    place.renew("a", days=91)  # another version 2
    place.check()
    (place.folder / "targets.json").write_text(json.dumps(twin))
    with refused("ST-S09", "without a new version"):
        place.check()


# --- M7: the files ------------------------------------------------------------------------------------------


def test_m7_the_policy_and_the_revocations_are_the_vouched_ones(tmp_path: Path) -> None:
    place = Place.create(tmp_path)
    good = place.policy.read_bytes()
    place.policy.write_bytes(b"policy 2")
    with refused("ST-S09", "policy.toml", "vouches for"):
        place.check()
    place.policy.write_bytes(good)
    (place.folder / "revoked.json").write_bytes(
        revocations.emit([Revocation("digest", "a" * 64, "a rumour")])
    )
    with refused("ST-S09", "revoked.json"):
        place.check()
    (place.folder / "revoked.json").unlink()
    with refused("ST-S09", "revoked.json"):
        place.check()


# --- hostile bytes ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["1.root.json", "2.root.json", "targets.json", "revoked.json"])
@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"{}",
        b"[]",
        b"null",
        b"\xff",
        b"[" * 99_999,
        b'{"signed":{"_type":"root"},"signatures":[]}',
        b"1" * 5000,
    ],
)
def test_malformed_metadata_is_refused(tmp_path: Path, name: str, data: bytes) -> None:
    place = Place.create(tmp_path)
    (place.folder / name).write_bytes(data)
    if name == "1.root.json":
        place.seen = Seen(metadata._hash(data))
    with refused("ST-S09"):
        place.check()


@given(
    st.sampled_from(["1.root.json", "targets.json"]), st.integers(0, 3000), st.binary(min_size=1, max_size=3)
)
@example(name="1.root.json", offset=339, inserted=b" ")  # a role that names a key which is not there
@settings(max_examples=60, deadline=None)
def test_edited_metadata_is_refused_or_says_the_same(
    tmp_path_factory: pytest.TempPathFactory, name: str, offset: int, inserted: bytes
) -> None:
    place = Place.create(tmp_path_factory.mktemp("place"))
    path = place.folder / name
    data = path.read_bytes()
    offset %= len(data)
    path.write_bytes(data[:offset] + inserted + data[offset + len(inserted) :])
    if name == "1.root.json":
        place.seen = Seen(metadata._hash(path.read_bytes()))
    try:
        place.check()
    except SecureTrainError as error:
        check_error(error, error.code)
        assert error.code in ("ST-S09", "ST-S10")  # noqa: PT017


# --- M8: a host, through the policy -------------------------------------------------------------------------


@pytest.fixture
def shop(tmp_path: Path) -> Workshop:
    """A workshop whose policy has trust metadata that this host trusts."""
    made = Workshop.create(tmp_path)
    first = metadata.create(
        made.policy,
        made.policy.read_bytes(),
        [made.keys.load("owner")],
        [made.keys.public("owner")],
        threshold=1,
        root_expires=NOW + 365 * DAY,
        expires=NOW + 60 * DAY,
    )
    policy.trust_metadata(made.policy, first, now=NOW)
    return made


def test_m8_a_policy_is_believed_by_its_metadata(shop: Workshop) -> None:
    found = policy.load(shop.policy, trusted=[], now=NOW)  # no key is trusted on this host
    assert "trust metadata" in found.vouched_by
    entry = Revocation("digest", "c" * 64, "poisoned")
    data, owner = shop.policy.read_bytes(), [shop.keys.load("owner")]
    metadata.renew(shop.policy, data, owner, expires=NOW + 60 * DAY, revoke=[entry])
    assert policy.load(shop.policy, trusted=[], now=NOW).trust.revocations == (entry,)


def test_m8_taking_the_metadata_away_does_not_help(shop: Workshop) -> None:
    """The policy still has a good signature of a key that this host trusts: an old one, perhaps."""
    shutil.rmtree(metadata.folder_of(shop.policy))
    with refused("ST-S09"):
        shop.load()


def test_m8_a_wrong_root_is_not_remembered(shop: Workshop) -> None:
    before = Memory(roots.memory_folder()).recall("development")
    with refused("ST-S09", "first root"):
        policy.trust_metadata(shop.policy, "0" * 64, now=NOW)
    assert Memory(roots.memory_folder()).recall("development") == before


def test_m8_a_damaged_memory_is_no_fresh_start(shop: Workshop) -> None:
    (path,) = roots.memory_folder().iterdir()
    path.write_bytes(b"{}")
    with refused("ST-P02", "damaged"):
        shop.load()


def test_the_list_of_this_host(shop: Workshop) -> None:
    entry = Revocation("key", shop.keys.public("owner").identifier, "lost", NOW)
    revocations.add_to_this_host(entry)
    revocations.add_to_this_host(entry)
    assert revocations.of_this_host() == (entry,)
    assert entry in shop.load().trust.revocations
    (roots.config_folder() / "revoked.json").write_bytes(b'{"schema":"urn:secure-train:revocations:v9"}')
    with refused("ST-S09", "revocations"):
        shop.load()
