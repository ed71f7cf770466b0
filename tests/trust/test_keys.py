"""Keys on disk: types, permissions, encryption, and what is said when one cannot be used."""

from __future__ import annotations

import hashlib
import os
import stat
import subprocess
import sys
from pathlib import Path

import pytest
from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric import dsa, ec, ed448, ed25519, rsa, x25519

from supplychain.trust.keys import ALGORITHMS, KeyStore, SigningKey, parse_public
from supplychain.trust.roots import Trust, config_folder, key_store, policy_keys
from tests.artifact.support import refused

PLAIN = serialization.NoEncryption()
PEM = serialization.Encoding.PEM
PKCS8 = serialization.PrivateFormat.PKCS8
SPKI = serialization.PublicFormat.SubjectPublicKeyInfo


def write(path: Path, data: bytes, mode: int = 0o600) -> Path:
    path.write_bytes(data)
    path.chmod(mode)
    return path


@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_a_key_signs_is_stored_and_found_again(tmp_path: Path, algorithm: str) -> None:
    store = KeyStore(tmp_path / "keys")
    made = store.new("release", algorithm)
    loaded, public = store.load("release"), store.public("release")
    signature = loaded.sign(b"message")
    assert public.accepts(b"message", signature)
    assert made.public.accepts(b"message", signature)
    assert not public.accepts(b"massage", signature)
    assert not public.accepts(b"message", signature[:-1])
    assert not public.accepts(b"message", b"")
    assert not store.new("other", algorithm).public.accepts(b"message", signature)
    assert public.algorithm == loaded.public.algorithm == algorithm
    assert public.name == "release"
    assert public.identifier == hashlib.sha256((tmp_path / "keys/release.pub").read_bytes()).hexdigest()
    assert [key.name for key in store.list()] == ["other", "release"]
    assert store.has_private("release")
    assert not store.has_private("nobody")


def test_a_private_key_is_for_its_owner_alone(tmp_path: Path) -> None:
    old = os.umask(0)  # the most careless one
    try:
        KeyStore(tmp_path / "keys").new("me")
    finally:
        os.umask(old)
    assert stat.S_IMODE((tmp_path / "keys").stat().st_mode) == 0o700
    assert stat.S_IMODE((tmp_path / "keys/me.key").stat().st_mode) == 0o600


@pytest.mark.parametrize("mode", [0o640, 0o604, 0o660, 0o601, 0o644])
def test_a_private_key_that_others_may_read_is_refused(tmp_path: Path, mode: int) -> None:
    store = KeyStore(tmp_path)
    store.new("me")
    (tmp_path / "me.key").chmod(mode)
    with refused("ST-S06", "other users", "chmod 600", "me.key"):
        store.load("me")


def test_a_key_has_no_repr_that_could_reach_a_log(tmp_path: Path) -> None:
    key = KeyStore(tmp_path).new("me")
    secret = (tmp_path / "me.key").read_text().splitlines()[1]
    for text in (repr(key), str(key), f"{key}", repr(vars(key)), repr([key])):
        assert secret not in text
        assert "PRIVATE" not in text


def test_an_encrypted_key_asks_for_its_passphrase(tmp_path: Path) -> None:
    private = ec.generate_private_key(ec.SECP256R1())
    best = serialization.BestAvailableEncryption(b"correct horse")
    path = write(tmp_path / "me.key", private.private_bytes(PEM, PKCS8, best))
    store = KeyStore(tmp_path)
    public = store.load("me", lambda: b"correct horse").public
    assert public.pem == private.public_key().public_bytes(PEM, SPKI)
    with refused("ST-S06", "passphrase", "me.key"):
        store.load("me", lambda: b"wrong")
    with refused("ST-S06", "passphrase", "me.key"):
        store.load(str(path))
    with refused("ST-S06", "passphrase"):
        store.load("me", lambda: b"")


def test_a_plain_key_asks_for_nothing(tmp_path: Path) -> None:
    def ask() -> bytes:
        raise AssertionError

    store = KeyStore(tmp_path)
    store.new("me")
    store.load("me", ask)


UNSUPPORTED = [
    rsa.generate_private_key(public_exponent=65537, key_size=2048),
    dsa.generate_private_key(key_size=1024),
    ed448.Ed448PrivateKey.generate(),
    x25519.X25519PrivateKey.generate(),
    ec.generate_private_key(ec.SECP256K1()),
    ec.generate_private_key(ec.SECP192R1()),
    ec.generate_private_key(ec.BrainpoolP256R1()),
]


@pytest.mark.parametrize("private", UNSUPPORTED, ids=lambda key: type(key).__name__)
def test_other_types_are_refused_on_both_sides(tmp_path: Path, private: rsa.RSAPrivateKey) -> None:
    write(tmp_path / "me.key", private.private_bytes(PEM, PKCS8, PLAIN))
    write(tmp_path / "me.pub", private.public_key().public_bytes(PEM, SPKI))
    store = KeyStore(tmp_path)
    with refused("ST-S06", "not supported", "me.key", "ecdsa-p256"):
        store.load("me")
    with refused("ST-S06", "not supported", "me.pub", "ecdsa-p256"):
        store.public("me")


@pytest.mark.parametrize(
    "data",
    [b"", b"text", b"-----BEGIN PRIVATE KEY-----\n!!!\n-----END PRIVATE KEY-----\n", b"\xff" * 100_000],
)
def test_damaged_keys_are_refused(tmp_path: Path, data: bytes) -> None:
    write(tmp_path / "me.key", data)
    write(tmp_path / "me.pub", data)
    store = KeyStore(tmp_path)
    with refused("ST-S06", "me.key"):
        store.load("me")
    with refused("ST-S06", "PEM", "me.pub"):
        store.public("me")


def test_a_private_key_is_no_public_key(tmp_path: Path) -> None:
    store = KeyStore(tmp_path)
    store.new("me")
    with refused("ST-S06", "not a public key"):
        parse_public("me", (tmp_path / "me.key").read_bytes(), where="here")
    with refused("ST-S06"):
        store.load(str(write(tmp_path / "pub.key", (tmp_path / "me.pub").read_bytes())))


def test_missing_keys_name_the_next_step(tmp_path: Path) -> None:
    store = KeyStore(tmp_path / "none")
    with refused("ST-S06", "'me'", "No such file", "keys new me"):
        store.load("me")
    with refused("ST-S06", "'me'", "keys list"):
        store.public("me")
    with refused("ST-S06", "directory"):
        store.load(f"{tmp_path}/")
    with refused("ST-S06", "directory"):
        store.public(f"{tmp_path}/")
    assert store.list() == []


def test_a_key_may_be_named_by_its_path(tmp_path: Path) -> None:
    KeyStore(tmp_path / "elsewhere").new("team")
    store = KeyStore(tmp_path / "keys")
    assert store.load(f"{tmp_path}/elsewhere/team.key").name == "team"
    assert store.public(f"{tmp_path}/elsewhere/team.pub").name == "team"


@pytest.mark.parametrize("name", ["", ".", "..", "../x", "a/b", "-x", "a b", "a\n", "é", "x" * 65, "\x1b[2J"])
def test_bad_names_are_refused(tmp_path: Path, name: str) -> None:
    with refused("ST-U03"):
        KeyStore(tmp_path / "keys").new(name)
    assert not (tmp_path / "keys").exists()


def test_unknown_algorithms_are_refused(tmp_path: Path) -> None:
    with refused("ST-U03", "'rsa'", "ecdsa-p256", "ed25519"):
        KeyStore(tmp_path).new("me", "rsa")


def test_a_key_is_never_overwritten(tmp_path: Path) -> None:
    store = KeyStore(tmp_path)
    before = store.new("me").public.identifier
    with refused("ST-U05", "'me'", "me.key"):
        store.new("me")
    assert store.load("me").public.identifier == before


def test_a_folder_that_cannot_hold_keys(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"")
    with refused("ST-U04", "file"):
        KeyStore(tmp_path / "file/keys").new("me")
    (tmp_path / "keys").mkdir()
    (tmp_path / "keys/me.key").symlink_to("/dev/null")
    with refused("ST-U05"):
        KeyStore(tmp_path / "keys").new("me")


def test_the_identifier_does_not_depend_on_how_the_key_is_written() -> None:
    """Line breaks, headers and point compression are not the key."""
    private = ec.generate_private_key(ec.SECP256R1())
    pem = private.public_key().public_bytes(PEM, SPKI)
    one_line = (
        b"-----BEGIN PUBLIC KEY-----\n" + b"".join(pem.splitlines()[1:-1]) + b"\n-----END PUBLIC KEY-----\n"
    )
    identifiers = {
        parse_public("me", text, where="here").identifier
        for text in (pem, pem.replace(b"\n", b"\r\n"), one_line, b"a comment\n" + pem)
    }
    assert identifiers == {SigningKey("me", private).public.identifier}


def test_the_users_own_folders(tmp_path: Path, private_home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert config_folder().is_relative_to(private_home)
    monkeypatch.setenv("SECURE_TRAIN_CONFIG", str(tmp_path))
    assert key_store().folder == tmp_path / "keys"
    assert policy_keys().folder == tmp_path / "trusted"


def test_trust_is_described_by_name() -> None:
    alice = SigningKey("alice", ed25519.Ed25519PrivateKey.generate()).public
    bob = SigningKey("bob", ed25519.Ed25519PrivateKey.generate()).public
    assert Trust.of("data", alice).describe("data") == f"alice ({alice.identifier[:12]})"
    both = Trust.of("data", alice, bob).describe("data")
    assert both == f"alice ({alice.identifier[:12]}), bob ({bob.identifier[:12]})"
    assert Trust.of("data").describe("data") == "nobody"


def test_a_full_disk_leaves_no_half_key(tmp_path: Path) -> None:
    """The name stays free: a second try makes the key."""
    store = KeyStore(tmp_path / "keys")
    code = (
        "import resource, signal, sys\n"
        "from pathlib import Path\n"
        "from supplychain.trust.keys import KeyStore\n"
        "signal.signal(signal.SIGXFSZ, signal.SIG_IGN)\n"
        "resource.setrlimit(resource.RLIMIT_FSIZE, (100, 100))\n"
        f"KeyStore(Path({str(store.folder)!r})).new('me')\n"
    )
    environment = os.environ | {"PYTHONPATH": str(Path(__file__).resolve().parents[2])}
    done = subprocess.run(
        [sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=False
    )
    assert "ST-U04" in done.stderr
    assert list(store.folder.iterdir()) == []
    store.new("me")
