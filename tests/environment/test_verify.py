"""Attacks on a real environment, each caught from outside, by its code, with nothing executed.

Two kinds of attacker: one who can change files after the manifest was signed (the digest stays the old one),
and one who can also have a new manifest signed, so that only the chain lock -> wheel -> RECORD -> disk is
left to catch it.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pytest

from supplychain.artifact import MANIFEST, build_manifest, canonical_json
from supplychain.environment.build import build_environment
from supplychain.environment.verify import EnvironmentFacts, verify_environment
from supplychain.errors import SecureTrainError
from tests.environment.wheelhouse import make_lock, make_wheel, record_hash

ROOT = Path(__file__).resolve().parents[2]
PYTHON = f"python{sys.version_info[0]}.{sys.version_info[1]}"
SITE = f"lib/{PYTHON}/site-packages"


@dataclass(frozen=True)
class Built:
    root: Path
    digest: str
    lock: bytes

    def verify(self) -> EnvironmentFacts:
        return verify_environment(self.root, self.digest, self.lock)

    def resigned(self) -> EnvironmentFacts:
        """As if whoever signs environments had signed what lies there now."""
        return verify_environment(
            self.root, build_manifest(self.root, "environment", blocks=False).digest, self.lock
        )


@pytest.fixture(scope="module")
def pristine(tmp_path_factory: pytest.TempPathFactory) -> Built:
    folder = tmp_path_factory.mktemp("environment")
    house = folder / "house"
    big = bytes(range(256)) * 8192  # 2 MiB: hashed in pieces
    wheels = [
        make_wheel(
            house,
            "alpha",
            files={"alpha/__init__.py": b"def main(): print('hi')\n"},
            scripts={"alpha": "alpha:main"},
        ),
        make_wheel(house, "beta", files={"beta.py": b"X = 1\n", "beta/native.so": b"\x7fELF" + big}),
    ]
    lock = make_lock(folder / "lock", wheels)
    own = make_wheel(folder / "own", "secure_train", "0.1.0", files={"trainer/__init__.py": b""})
    root = build_environment(lock, folder / "store", wheelhouse=house, project_wheel=own)
    return Built(root, hashlib.sha256((root / MANIFEST).read_bytes()).hexdigest(), lock.read_bytes())


@pytest.fixture
def env(pristine: Built, tmp_path: Path) -> Built:
    """A copy to attack."""
    root = tmp_path / "env"
    shutil.copytree(pristine.root, root, symlinks=True)
    return Built(root, pristine.digest, pristine.lock)


PAYLOAD = "open({marker!r}, 'w').close()\n"


def payload() -> str:
    """Code that leaves a trace where it runs; the trace is looked for after every attack."""
    return PAYLOAD.format(marker=os.environ["ATTACK_MARKER"])


@pytest.fixture(autouse=True)
def nothing_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):  # type: ignore[no-untyped-def]  # a generator fixture
    marker = tmp_path / "executed"
    monkeypatch.setenv("ATTACK_MARKER", str(marker))
    yield
    assert not marker.exists()


def write(root: Path, path: str, text: str | bytes) -> None:
    target = root / path
    target.parent.mkdir(parents=True, exist_ok=True)
    target.write_bytes(text if isinstance(text, bytes) else text.encode())


def edit_record(root: Path, name: str, path: str, data: bytes | None) -> None:
    """Rewrite, add or (None) remove a row of a package's RECORD."""
    record = root / SITE / f"{name}-1.0.dist-info" / "RECORD"
    rows = [row for row in record.read_text().splitlines() if not row.startswith(f"{path},")]
    if data is not None:
        rows.append(f"{path},{record_hash(data)},{len(data)}")
    record.write_text("\n".join(rows) + "\n")


def source_edited(root: Path) -> None:
    write(root, f"{SITE}/alpha/__init__.py", payload())


def source_and_record(root: Path) -> None:
    source_edited(root)
    edit_record(root, "alpha", "alpha/__init__.py", payload().encode())


def unowned_module(root: Path) -> None:
    write(root, f"{SITE}/torch.py", payload())


def sourceless_bytecode(root: Path) -> None:
    write(root, f"{SITE}/gamma.pyc", b"\0" * 64)


def poisoned_cache(root: Path) -> None:
    write(root, f"{SITE}/alpha/__pycache__/__init__.{sys.implementation.cache_tag}.pyc", b"\0" * 64)


def pth(root: Path) -> None:
    write(root, f"{SITE}/helper.pth", "import os; " + payload())


def owned_pth(root: Path) -> None:
    text = "import os; " + payload()
    write(root, f"{SITE}/helper.pth", text)
    edit_record(root, "alpha", "helper.pth", text.encode())


def sitecustomize(root: Path) -> None:
    write(root, f"{SITE}/sitecustomize.py", payload())


def usercustomize(root: Path) -> None:
    write(root, f"{SITE}/usercustomize.py", payload())


def one_byte_in_a_library(root: Path) -> None:
    target = root / SITE / "beta/native.so"
    data = bytearray(target.read_bytes())
    data[1_500_000] ^= 1
    target.write_bytes(bytes(data))


def truncated(root: Path) -> None:
    os.truncate(root / SITE / "beta/native.so", 1000)


def file_deleted(root: Path) -> None:
    (root / SITE / "beta.py").unlink()


def record_deleted(root: Path) -> None:
    (root / SITE / "beta-1.0.dist-info/RECORD").unlink()


def link_out(root: Path) -> None:
    (root / SITE / "outside").symlink_to("/tmp")


def file_becomes_link(root: Path) -> None:
    target = root / SITE / "beta.py"
    moved = root.parent / "beta.py"
    target.rename(moved)
    target.symlink_to(moved)


def folder_becomes_link(root: Path) -> None:
    target = root / SITE / "alpha"
    moved = root.parent / "alpha"
    target.rename(moved)
    target.symlink_to(moved)


def lib64(root: Path) -> None:
    (root / "lib64").symlink_to("lib")


def extra_distribution(root: Path) -> None:
    info = f"{SITE}/gamma-1.0.dist-info"
    entry = "[torch.backends]\ngamma = gamma:autoload\n"
    write(root, f"{SITE}/gamma.py", payload())
    write(root, f"{info}/METADATA", "Metadata-Version: 2.1\nName: gamma\nVersion: 1.0\n")
    write(root, f"{info}/entry_points.txt", entry)
    rows = [
        f"gamma.py,{record_hash(payload().encode())},1",
        f"gamma-1.0.dist-info/entry_points.txt,{record_hash(entry.encode())},1",
        "gamma-1.0.dist-info/METADATA,,",
        "gamma-1.0.dist-info/RECORD,,",
    ]
    write(root, f"{info}/RECORD", "\n".join(rows) + "\n")


def overwritten_by_another(root: Path) -> None:
    """Two packages claim one file, and both RECORDs agree with the disk."""
    source_and_record(root)
    edit_record(root, "beta", "alpha/__init__.py", payload().encode())


def console_script(root: Path) -> None:
    write(root, "bin/alpha", f"#!{root}/bin/python\n{payload()}")


def python_replaced(root: Path) -> None:
    write(root, "bin/python", "#!/bin/sh\ntouch $ATTACK_MARKER\n")


def version_forged(root: Path) -> None:
    metadata = root / SITE / "beta-1.0.dist-info/METADATA"
    data = metadata.read_bytes().replace(b"Version: 1.0", b"Version: 9.9")
    metadata.write_bytes(data)
    edit_record(root, "beta", "beta-1.0.dist-info/METADATA", data)


def system_site(root: Path) -> None:
    target = root / "pyvenv.cfg"
    target.write_text(target.read_text().replace("packages = false", "packages = true"))


def home_moved(root: Path) -> None:
    target = root / "pyvenv.cfg"
    target.write_text(target.read_text().replace("home = ", "home = /tmp/"))


def environment_json(root: Path) -> None:
    document = json.loads((root / "environment.json").read_bytes())
    document["code"] = {"wheel": "secure-train-0.1.0", "sha256": "0" * 64}
    (root / "environment.json").write_bytes(canonical_json(document))


def made_executable(root: Path) -> None:
    (root / SITE / "beta.py").chmod(0o755)


def set_uid(root: Path) -> None:
    (root / "bin/alpha").chmod(0o4755)


def pipe(root: Path) -> None:
    os.mkfifo(root / SITE / "pipe")


def empty_folder(root: Path) -> None:
    (root / SITE / "namespace").mkdir()


def beside_the_signatures(root: Path) -> None:
    write(root, "secure-train/signatures/evil.py", payload())


@pytest.mark.parametrize(
    ("attack", "code", "names"),
    [
        (source_edited, "ST-E03", "alpha/__init__.py"),
        (source_and_record, "ST-E03", "alpha/__init__.py"),
        (unowned_module, "ST-E04", "torch.py"),
        (sourceless_bytecode, "ST-E04", "gamma.pyc"),
        (poisoned_cache, "ST-E04", ".pyc"),
        (pth, "ST-E04", "helper.pth"),
        (owned_pth, "ST-E04", "helper.pth"),
        (sitecustomize, "ST-E04", "sitecustomize.py"),
        (usercustomize, "ST-E04", "usercustomize.py"),
        (one_byte_in_a_library, "ST-E03", "native.so"),
        (truncated, "ST-E03", "native.so"),
        (file_deleted, "ST-E03", "beta.py"),
        (record_deleted, "ST-E03", "RECORD"),
        (link_out, "ST-E04", "outside"),
        (file_becomes_link, "ST-E04", "beta.py"),
        (folder_becomes_link, "ST-E04", "alpha"),
        (lib64, "ST-E04", "lib64"),
        (extra_distribution, "ST-E04", "gamma"),
        (overwritten_by_another, "ST-E03", "alpha/__init__.py"),
        (console_script, "ST-E03", "bin/alpha"),
        (python_replaced, "ST-E03", "bin/python"),
        (version_forged, "ST-E03", "METADATA"),
        (system_site, "ST-E03", "pyvenv.cfg"),
        (home_moved, "ST-E03", "pyvenv.cfg"),
        (environment_json, "ST-E03", "environment.json"),
        (made_executable, "ST-E03", "beta.py"),
        (set_uid, "ST-E03", "bin/alpha"),
        (pipe, "ST-E04", "pipe"),
        (empty_folder, "ST-E04", "namespace"),
        (beside_the_signatures, "ST-E04", "evil.py"),
    ],
    ids=lambda value: value.__name__ if callable(value) else None,
)
def test_after_signing(env: Built, attack: Callable[[Path], None], code: str, names: str) -> None:
    attack(env.root)
    findings = env.verify().findings
    assert (code, True) in [(finding.code, names in (finding.where or "")) for finding in findings], findings
    assert all(finding.exit_code in (3, 5) for finding in findings)


@pytest.mark.parametrize(
    ("attack", "code", "names"),
    [
        (source_edited, "ST-E03", "alpha/__init__.py"),
        (source_and_record, "ST-E03", "alpha-1.0.dist-info/RECORD"),
        (unowned_module, "ST-E04", "torch.py"),
        (sourceless_bytecode, "ST-E04", "gamma.pyc"),
        (poisoned_cache, "ST-E04", ".pyc"),
        (pth, "ST-E04", "helper.pth"),
        (owned_pth, "ST-E04", "helper.pth"),
        (sitecustomize, "ST-E04", "sitecustomize.py"),
        (file_deleted, "ST-E03", "beta.py"),
        (record_deleted, "ST-E03", "beta-1.0.dist-info"),
        (extra_distribution, "ST-E02", "gamma"),
        (overwritten_by_another, "ST-E03", "beta-1.0.dist-info/RECORD"),
        (version_forged, "ST-E03", "beta-1.0.dist-info/RECORD"),
        (console_script, "ST-E03", "bin/alpha"),
        (system_site, "ST-E10", "pyvenv.cfg"),
        (environment_json, "ST-E02", "environment.json"),
    ],
    ids=lambda value: value.__name__ if callable(value) else None,
)
def test_even_if_it_is_signed_again(
    env: Built, attack: Callable[[Path], None], code: str, names: str
) -> None:
    attack(env.root)
    findings = env.resigned().findings
    assert (code, True) in [(finding.code, names in (finding.where or "")) for finding in findings], findings


def test_a_clean_copy_has_no_findings(env: Built) -> None:
    facts = env.verify()
    assert facts.findings == ()
    assert facts.require() is facts
    assert env.resigned().findings == ()


def test_all_findings_are_reported(env: Built) -> None:
    for attack in (source_edited, pth, file_deleted, link_out):
        attack(env.root)
    facts = env.verify()
    places = " ".join(finding.where or "" for finding in facts.findings)
    assert all(name in places for name in ("alpha/__init__.py", "helper.pth", "beta.py", "outside"))
    with pytest.raises(SecureTrainError, match="more findings"):
        facts.require()


def test_another_manifest_is_refused_first(env: Built) -> None:
    facts = verify_environment(env.root, "0" * 64)
    assert [finding.code for finding in facts.findings] == ["ST-A01"]
    (env.root / MANIFEST).unlink()
    assert [finding.code for finding in env.verify().findings] == ["ST-A09"]


def test_another_kind_of_artifact_is_refused(tmp_path: Path) -> None:
    (tmp_path / "a").mkdir()
    (tmp_path / "a/file").write_text("x")
    digest = build_manifest(tmp_path / "a", "dataset").digest
    assert [finding.code for finding in verify_environment(tmp_path / "a", digest).findings] == ["ST-P04"]


@pytest.mark.parametrize(
    "edit",
    [
        lambda text: text.replace("alpha==1.0", "alpha==2.0"),
        lambda text: text.replace("alpha==1.0", "gamma==1.0"),
        lambda text: text + f"gamma==1.0 --hash=sha256:{'0' * 64}\n",
        lambda text: "\n".join(text.splitlines()[2:]) + "\n",
        lambda text: text.replace("sha256:", "sha256:0000")[:0] + _other_hash(text),
    ],
)
def test_another_lock_is_named(env: Built, edit: Callable[[str], str]) -> None:
    lock = edit(env.lock.decode()).encode()
    codes = {finding.code for finding in verify_environment(env.root, env.digest, lock).findings}
    assert codes == {"ST-E02"}


def _other_hash(text: str) -> str:
    first = text.index("sha256:") + 7
    return text[:first] + "0" * 64 + text[first + 64 :]


def test_a_lock_that_cannot_be_read_is_a_finding(env: Built) -> None:
    assert [f.code for f in verify_environment(env.root, env.digest, b"alpha>=1\n").findings] == ["ST-E01"]


def test_the_interpreter_underneath_is_checked(env: Built, tmp_path: Path) -> None:
    """A standard library of our own stands in for the real one, which a test must not touch."""
    stdlib = tmp_path / PYTHON
    write(stdlib, "os.py", "x")
    write(stdlib, "json/__init__.py", "x")
    said = json.loads((env.root / "interpreter.json").read_bytes())
    said["stdlib"] = str(stdlib)
    said["shared"] = None
    executable = Path(said["executable"])
    paths = [executable, stdlib / "os.py", stdlib / "json/__init__.py"]
    said["files"] = {str(path): hashlib.sha256(path.read_bytes()).hexdigest() for path in paths}
    (env.root / "interpreter.json").write_bytes(canonical_json(said))
    assert env.resigned().findings == ()
    for path, text in (
        (stdlib / "os.py", payload()),  # changed
        (stdlib / "sitecustomize.py", payload()),  # new: Python imports it at every start
        (tmp_path / f"{PYTHON.replace('.', '')}.zip", "zip"),  # stands before the library on sys.path
    ):
        before = path.read_bytes() if path.exists() else None
        path.write_text(text)
        findings = env.resigned().findings
        assert [(finding.code, finding.where) for finding in findings] == [("ST-E09", str(path))]
        path.unlink() if before is None else path.write_bytes(before)
    (stdlib / "json/__init__.py").unlink()
    assert [finding.code for finding in env.resigned().findings] == ["ST-E09"]


@pytest.mark.parametrize(
    "row",
    [
        "../../../../../../etc/passwd,sha256=AAAA,1",
        "/etc/passwd,sha256=AAAA,1",
        "one-field-only",
        "alpha/__init__.py,md5=AAAA,1",
        "alpha/__init__.py,sha256=!!!!,1",
        "\x1b[31mred,sha256=AAAA,1",
        '"unterminated',
        "a,b,c,d,e",
        "x" * 200_000 + ",,",
    ],
)
def test_a_hostile_record_ends_in_findings(env: Built, row: str) -> None:
    record = env.root / SITE / "alpha-1.0.dist-info/RECORD"
    record.write_text(record.read_text() + row + "\n")
    findings = env.resigned().findings
    assert findings
    assert {finding.code for finding in findings} <= {"ST-E03", "ST-E04"}
    assert all(finding.where is None or "\x1b" not in finding.where for finding in findings)


@pytest.mark.parametrize("data", [b"\xff\xfe", b"", b"\0\0"])
def test_a_record_that_is_no_text_ends_in_findings(env: Built, data: bytes) -> None:
    (env.root / SITE / "alpha-1.0.dist-info/RECORD").write_bytes(data)
    assert env.resigned().findings


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"[]",
        b"{}",
        b'{"schema":"urn:secure-train:environment:v2"}',
        b'{"schema":"urn:secure-train:environment:v1","lock":1}',
        b"not json",
        b"{" * 500,
    ],
)
def test_a_hostile_environment_json_ends_in_findings(env: Built, data: bytes) -> None:
    (env.root / "environment.json").write_bytes(data)
    codes = {finding.code for finding in env.resigned().findings}
    assert codes
    assert codes <= {"ST-E05", "ST-U02"}


def test_runs_alone_with_any_python(env: Built, pristine: Built) -> None:
    """By path, isolated, without site: nothing that is installed anywhere can change its answer."""
    lock = env.root.parent / "lock"
    lock.write_bytes(env.lock)
    script = ROOT / "supplychain" / "environment"
    command = [
        sys.executable,
        "-I",
        "-S",
        "-B",
        str(script),
        "--prefix",
        str(env.root),
        "--manifest",
        env.digest,
    ]
    done = subprocess.run([*command, "--lock", str(lock)], capture_output=True, text=True)
    assert (done.returncode, json.loads(done.stdout)["findings"]) == (0, []), done.stderr
    pth(env.root)
    done = subprocess.run([*command, "--lock", str(lock)], capture_output=True, text=True)
    assert done.returncode == 3
    assert [finding["code"] for finding in json.loads(done.stdout)["findings"]] == ["ST-E04"]


@pytest.mark.slow
def test_the_real_training_environment_is_clean_and_fast(built: Path) -> None:
    root = (built / "training").resolve()
    digest = hashlib.sha256((root / MANIFEST).read_bytes()).hexdigest()
    profile = json.loads((root / "environment.json").read_bytes())["profile"]
    lock = (ROOT / "requirements" / f"training-{profile}.lock").read_bytes()
    command = [sys.executable, "-I", "-S", "-B", str(ROOT / "supplychain/environment"), "--prefix", str(root)]
    done = subprocess.run([*command, "--manifest", digest], capture_output=True, text=True)
    assert json.loads(done.stdout)["findings"] == [], done.stderr
    facts = verify_environment(root, digest, lock)
    assert facts.findings == ()
    assert facts.bytes > 400 << 20
    code = "import torch, safetensors, tokenizers, numpy; import torch.distributed.run"
    cache = built / "pycache"
    subprocess.run([facts.interpreter, "-I", "-X", f"pycache_prefix={cache}", "-c", code], check=True)
    assert verify_environment(root, digest, lock).findings == ()
