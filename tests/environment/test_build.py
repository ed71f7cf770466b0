"""Building environments from small real wheels: what comes out, what is refused, and that nothing half-built
stays.
"""

from __future__ import annotations

import hashlib
import json
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

from supplychain.artifact import MANIFEST
from supplychain.environment.build import build_environment
from supplychain.environment.verify import EnvironmentFacts, find_environment, verify_environment
from supplychain.errors import SecureTrainError
from tests.environment.wheelhouse import make_lock, make_wheel, record_hash, sha256


def verify(root: Path, lock: Path | None = None) -> EnvironmentFacts:
    digest = hashlib.sha256((root / MANIFEST).read_bytes()).hexdigest()
    return verify_environment(root, digest, lock.read_bytes() if lock else None)


def refused(house: Path, lock: Path, store: Path) -> SecureTrainError:
    with pytest.raises(SecureTrainError) as caught:
        build_environment(lock, store, wheelhouse=house)
    assert not [path for path in store.glob("*env-*") if path.is_dir()]  # nothing half-built, under any name
    return caught.value


def test_builds_verifies_and_runs(tmp_path: Path) -> None:
    house = tmp_path / "house"
    wheels = [
        make_wheel(
            house,
            "alpha",
            scripts={"alpha-hello": "alpha:main"},
            files={"alpha/__init__.py": b"def main(): print('hi')\n"},
        ),
        make_wheel(
            house, "beta", files={"beta.py": b"X = 1\n", "beta-1.0.data/data/share/beta.txt": b"text\n"}
        ),
        make_wheel(house, "shared_a", files={"ns/common.py": b"", "ns/a.py": b""}),
        make_wheel(house, "shared_b", files={"ns/common.py": b"", "ns/b.py": b""}),
    ]
    skipped = f"never==1.0 ; sys_platform == 'win32' --hash=sha256:{'0' * 64}\n"
    lock = make_lock(tmp_path / "lock", wheels, extra=skipped)
    own = make_wheel(tmp_path / "own", "secure_train", "0.1.0", files={"trainer/__init__.py": b""})
    lines: list[str] = []
    root = build_environment(
        lock, tmp_path / "store", wheelhouse=house, project_wheel=own, profile="cpu", progress=lines.append
    )

    facts = verify(root, lock)
    assert facts.findings == ()
    assert (facts.sealed, facts.profile, facts.code["sha256"]) == (True, "cpu", sha256(own))
    assert facts.lock == sha256(lock)
    assert [item.name for item in facts.packages] == ["alpha", "beta", "secure-train", "shared-a", "shared-b"]
    document = json.loads((root / "environment.json").read_bytes())
    assert document["skipped"] == [{"name": "never", "version": "1.0"}]
    assert lines
    # No links, no bytecode, no pip, no activation script.
    assert not [path for path in root.rglob("*") if path.is_symlink() or path.suffix == ".pyc"]
    assert sorted(path.name for path in (root / "bin").iterdir()) == ["alpha-hello", "python", "python3"]
    # It runs: isolated, with its own prefix, and by its script under the final name.
    code = "import alpha, beta, ns.a, ns.b, sys; print(sys.prefix)"
    said = subprocess.run(
        [root / "bin/python", "-I", "-B", "-c", code], capture_output=True, text=True, check=True
    )
    assert Path(said.stdout.strip()) == root
    hello = subprocess.run(
        [root / "bin/alpha-hello"], capture_output=True, text=True, env={"PYTHONDONTWRITEBYTECODE": "1"}
    )
    assert hello.stdout == "hi\n"
    assert verify(root, lock).findings == ()


def test_the_same_inputs_give_the_same_environment(tmp_path: Path) -> None:
    house = tmp_path / "house"
    lock = make_lock(tmp_path / "lock", [make_wheel(house, "alpha", scripts={"run-alpha": "alpha:NAME"})])
    first = build_environment(lock, tmp_path / "store", wheelhouse=house)
    manifest = (first / MANIFEST).read_bytes()
    assert build_environment(lock, tmp_path / "store", wheelhouse=house) == first  # at once: it is there
    for path in sorted(first.rglob("*"), reverse=True):
        path.rmdir() if path.is_dir() else path.unlink()
    assert build_environment(lock, tmp_path / "store", wheelhouse=house) == first
    assert (first / MANIFEST).read_bytes() == manifest
    other = build_environment(lock, tmp_path / "store", wheelhouse=house, profile="other")
    assert other != first


def test_an_editable_environment_says_so(tmp_path: Path) -> None:
    checkout = tmp_path / "checkout"
    (checkout / "trainer").mkdir(parents=True)
    (checkout / "trainer/__init__.py").write_text("WHERE = __file__\n")
    house = tmp_path / "house"
    lock = make_lock(tmp_path / "lock", [make_wheel(house, "alpha")])
    own = make_wheel(
        tmp_path / "own",
        "secure_train",
        "0.1.0",
        files={"_editable_impl_secure_train.pth": f"{checkout}\n".encode()},
    )
    root = build_environment(lock, tmp_path / "store", wheelhouse=house, project_wheel=own, editable=checkout)
    facts = verify(root, lock)
    assert facts.findings == ()
    assert (facts.sealed, facts.code["editable"]) == (False, str(checkout))
    # The same wheel without --editable is what it looks like: a start-up file.
    assert (
        _code(lambda: build_environment(lock, tmp_path / "s", wheelhouse=house, project_wheel=own))
        == "ST-E04"
    )


def test_a_wheel_with_other_bytes_is_refused(tmp_path: Path) -> None:
    house = tmp_path / "house"
    wheel = make_wheel(house, "alpha")
    lock = make_lock(tmp_path / "lock", [wheel])
    wheel.write_bytes(wheel.read_bytes() + b"\0")
    assert refused(house, lock, tmp_path / "store").code == "ST-E07"


def test_a_package_that_the_wheelhouse_lacks_is_named(tmp_path: Path) -> None:
    house = tmp_path / "house"
    lock = make_lock(tmp_path / "lock", [make_wheel(house, "alpha"), make_wheel(house, "beta")])
    (house / "beta-1.0-py3-none-any.whl").unlink()
    make_wheel(house, "beta", tag="cp27-cp27m-win32")  # of no use here
    error = refused(house, lock, tmp_path / "store")
    assert error.code == "ST-E08"
    assert "beta==1.0" in str(error)


@pytest.mark.parametrize(
    ("files", "options", "code"),
    [
        (
            {"alpha.py": b"x"},
            {"record": {"alpha.py": record_hash(b"y")}},
            "ST-E07",
        ),  # content and RECORD differ
        ({"alpha.py": b"x"}, {"record": {"alpha.py": ""}}, "ST-E07"),
        ({"alpha.py": b"x"}, {"unlisted": [("evil.py", b"x")]}, "ST-E07"),
        ({"alpha.py": b"x"}, {"unlisted": [("../evil.py", b"x")]}, "ST-E07"),
        ({"../evil.py": b"x"}, {}, "ST-E07"),
        ({"/evil.py": b"x"}, {}, "ST-E07"),
        ({"a/../../evil.py": b"x"}, {}, "ST-E07"),
        ({"alpha-1.0.data/data/../../evil.py": b"x"}, {}, "ST-E07"),
        ({"alpha-1.0.data/nonsense/evil.py": b"x"}, {}, "ST-E07"),
        ({"a\\b.py": b"x"}, {}, "ST-E07"),
        ({"a\nb.py": b"x"}, {}, "ST-E07"),
        ({"alpha.pyc": b"x"}, {}, "ST-E07"),
        ({"__pycache__/alpha.cpython-311.pyc": b"x"}, {}, "ST-E07"),
        ({"alpha.pth": b"import os"}, {}, "ST-E04"),
        ({"sitecustomize.py": b"import os"}, {}, "ST-E04"),
        ({"alpha-1.0.data/purelib/usercustomize.py": b"import os"}, {}, "ST-E04"),
    ],
)
def test_a_malicious_wheel_is_refused_although_its_hash_is_locked(
    tmp_path: Path, files: dict[str, bytes], options: dict[str, object], code: str
) -> None:
    house = tmp_path / "house"
    lock = make_lock(tmp_path / "lock", [make_wheel(house, "alpha", files=files, **options)])  # type: ignore[arg-type]  # a table
    assert refused(house, lock, tmp_path / "store").code == code
    assert not list(tmp_path.rglob("evil.py"))


def test_a_wheel_with_a_link_or_a_name_twice_is_refused(tmp_path: Path) -> None:
    for number in range(2):
        house = tmp_path / f"house{number}"
        wheel = make_wheel(house, "alpha")
        with zipfile.ZipFile(wheel, "a") as archive:
            info = zipfile.ZipInfo("alpha/link")
            info.external_attr = 0o120777 << 16
            entry = info if number == 0 else zipfile.ZipInfo("alpha/__init__.py")
            with pytest.warns(UserWarning, match="Duplicate name") if number else _nothing():
                archive.writestr(entry, "/etc/passwd")
        lock = make_lock(tmp_path / f"lock{number}", [wheel])
        assert refused(house, lock, tmp_path / f"store{number}").code == "ST-E07"


def test_a_file_is_no_zip(tmp_path: Path) -> None:
    house = tmp_path / "house"
    house.mkdir()
    wheel = house / "alpha-1.0-py3-none-any.whl"
    wheel.write_bytes(b"PK\x03\x04 not really")
    assert refused(house, make_lock(tmp_path / "lock", [wheel]), tmp_path / "store").code == "ST-E07"


def test_two_wheels_may_not_bring_different_files_of_one_name(tmp_path: Path) -> None:
    house = tmp_path / "house"
    wheels = [make_wheel(house, name, files={"common.py": name.encode()}) for name in ("alpha", "beta")]
    assert refused(house, make_lock(tmp_path / "lock", wheels), tmp_path / "store").code == "ST-E07"


def test_usage_errors(tmp_path: Path) -> None:
    house = tmp_path / "house"
    lock = make_lock(tmp_path / "lock", [make_wheel(house, "alpha")])
    store = tmp_path / "store"
    assert _code(lambda: build_environment(tmp_path / "none", store)) == "ST-U01"
    assert _code(lambda: build_environment(lock, lock / "below-a-file", wheelhouse=house)) == "ST-U04"
    assert _code(lambda: build_environment(lock, store, python=tmp_path / "nopython")) == "ST-E06"
    assert _code(lambda: build_environment(lock, store, project_wheel=tmp_path / "x.whl")) == "ST-U01"
    (tmp_path / "bad").write_text("alpha>=1\n")
    assert _code(lambda: build_environment(tmp_path / "bad", store)) == "ST-E01"


def test_without_an_index_a_package_cannot_be_had(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    lock = make_lock(tmp_path / "lock", [make_wheel(tmp_path / "elsewhere", "secure_train_alpha")])
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_CONFIG_FILE", "/dev/null")
    with pytest.raises(SecureTrainError) as caught:
        build_environment(lock, tmp_path / "store")
    assert caught.value.code == "ST-E08"
    assert "secure-train-alpha==1.0" in str(caught.value)


def test_downloads_with_pip_and_keeps_what_it_got(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    elsewhere = tmp_path / "elsewhere"
    wheels = [make_wheel(elsewhere, "secure_train_alpha"), make_wheel(elsewhere, "secure_train_beta")]
    lock = make_lock(tmp_path / "lock", wheels)
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_CONFIG_FILE", "/dev/null")
    monkeypatch.setenv("PIP_FIND_LINKS", str(elsewhere))
    cache = tmp_path / "cache"
    hidden = wheels[1].rename(tmp_path / "hidden.whl")
    assert _code(lambda: build_environment(lock, tmp_path / "store", cache=cache)) == "ST-E08"
    assert [path.name for path in cache.iterdir()] == [wheels[0].name]  # the next build goes on from here
    hidden.rename(wheels[1])
    wheels[0].unlink()
    root = build_environment(lock, tmp_path / "store", cache=cache)
    assert verify(root, lock).findings == ()
    # A torn file in the cache is fetched again, not believed.
    (cache / wheels[1].name).write_bytes(b"torn")
    again = build_environment(make_lock(tmp_path / "lock2", [wheels[1]]), tmp_path / "store", cache=cache)
    assert verify(again).findings == ()


def test_finds_the_environment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    house = tmp_path / "house"
    root = build_environment(
        make_lock(tmp_path / "lock", [make_wheel(house, "alpha")]), tmp_path / "store", wheelhouse=house
    )
    assert find_environment(root) == root
    monkeypatch.setenv("SECURE_TRAIN_ENV", str(root))
    assert find_environment(None) == root
    monkeypatch.delenv("SECURE_TRAIN_ENV")
    monkeypatch.setattr(sys, "prefix", str(tmp_path / "gate"))
    assert _code(lambda: find_environment(None)) == "ST-E05"
    (tmp_path / "training").symlink_to(root)
    assert find_environment(None) == root
    assert _code(lambda: find_environment(tmp_path)) == "ST-E05"


class _nothing:
    def __enter__(self) -> None: ...

    def __exit__(self, *_: object) -> None: ...


def _code(call: object) -> str:
    assert callable(call)
    with pytest.raises(SecureTrainError) as caught:
        call()
    return caught.value.code
