"""Keys in a hardware module: SoftHSM, where it is installed (Debian: softhsm2), with the extra `hsm`."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from supplychain.trust import hsm
from tests.artifact.support import make_tree, refused
from tests.trust.test_commands import codes, secure_train

PLACES = ("/usr/lib/softhsm/libsofthsm2.so", "/usr/lib64/pkcs11/libsofthsm2.so")
MODULE = next((place for place in PLACES if os.path.exists(place)), None)
PIN = "1234"


@pytest.fixture(scope="module")
def token(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """A token with a P-256, a P-384 and a P-521 key; the variables that a process needs to use it."""
    pytest.importorskip("pkcs11", reason="the extra `hsm` is not installed")
    if MODULE is None or shutil.which("softhsm2-util") is None:
        pytest.skip("SoftHSM is not installed (Debian: softhsm2)")
    folder = tmp_path_factory.mktemp("hsm")
    (folder / "tokens").mkdir()
    settings, pin = folder / "softhsm2.conf", folder / "pin"
    settings.write_text(f"directories.tokendir = {folder / 'tokens'}\nobjectstore.backend = file\n")
    pin.write_text(PIN + "\n")
    variables = {
        "SOFTHSM2_CONF": settings,
        "SECURE_TRAIN_PASSPHRASE_FILE": pin,
        "SECURE_TRAIN_CONFIG": folder / "config",
    }
    environment = os.environ | {name: str(value) for name, value in variables.items()}
    begin = ["softhsm2-util", "--init-token", "--free", "--label", "st", "--so-pin", "0000", "--pin", PIN]
    subprocess.run(begin, check=True, env=environment, capture_output=True)
    code = (
        "import sys, pkcs11\nfrom pkcs11.util.ec import encode_named_curve_parameters as curve\n"
        "token = pkcs11.lib(sys.argv[1]).get_token(token_label='st')\n"
        "with token.open(rw=True, user_pin=sys.argv[2]) as session:\n"
        "    for name in ('secp256r1', 'secp384r1', 'secp521r1'):\n"
        "        domain = session.create_domain_parameters(pkcs11.KeyType.EC,\n"
        "            {pkcs11.Attribute.EC_PARAMS: curve(name)}, local=True)\n"
        "        domain.generate_keypair(store=True, label=name)\n"
    )
    subprocess.run([sys.executable, "-c", code, MODULE, PIN], check=True, env=environment, timeout=60)
    return variables


def uri(name: str) -> str:
    return f"pkcs11:token=st;object={name}?module-path={MODULE}"


@pytest.mark.parametrize("curve", ["secp256r1", "secp384r1", "secp521r1"])
def test_a_module_signs_and_the_public_key_verifies(
    token: dict[str, Path], tmp_path: Path, curve: str
) -> None:
    folder = make_tree(tmp_path / "data")
    answer = secure_train("sign", folder, "--kind", "dataset", "--key", uri(curve), env=token)
    public = tmp_path / f"{curve}.pub"
    public.write_text(secure_train("keys", "export", uri(curve), env=token)["pem"])
    assert secure_train("verify", folder, "--key", public)["results"][0]["state"] == "verified"
    assert answer["signer"] == secure_train("keys", "export", uri(curve), env=token)["identifier"]


def test_errors_of_a_module_are_clear_and_show_no_pin(token: dict[str, Path], tmp_path: Path) -> None:
    folder = make_tree(tmp_path / "data")
    sign = ("sign", folder, "--kind", "dataset", "--key")
    wrong = tmp_path / "pin"
    wrong.write_text("99999")
    for name, env in (
        (uri("nokey"), token),
        (uri("secp256r1").replace("token=st", "token=other"), token),
        (uri("secp256r1").replace(str(MODULE), "/no/such.so"), token),
        (uri("secp256r1"), token | {"SECURE_TRAIN_PASSPHRASE_FILE": wrong}),
    ):
        answer = secure_train(*sign, name, code=5, env=env)
        assert codes(answer) == ["ST-S11"]
        assert PIN not in str(answer)
        assert "99999" not in str(answer)
    assert not (folder / "secure-train").exists()


@pytest.mark.parametrize(
    "text", ["pkcs11:", "pkcs11:token=t", "pkcs11:token=t;object=k", "pkcs11:object=k?module-path=/m"]
)
def test_an_address_names_module_token_and_key(text: str) -> None:
    with refused("ST-U03", "pkcs11:token="):
        hsm.parse(text)


def test_a_pin_in_the_address_is_refused_and_not_repeated() -> None:
    with refused("ST-U03", "command line") as _:
        hsm.parse("pkcs11:token=t;object=k?module-path=/m&pin-value=secret")
    found = hsm.parse("pkcs11:token=my%20token;id=%01%02?module-path=/m.so")
    assert (found.token, found.identifier, found.name) == ("my token", b"\x01\x02", "0102")


def test_without_the_extra_it_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pkcs11", None)
    with refused("ST-S06", "secure-train[hsm]"):
        hsm.HardwareKey(uri("k"), lambda: b"")
