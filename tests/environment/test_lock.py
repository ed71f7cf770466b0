"""The lock's strict parser: pins with hashes, and nothing else that pip would obey."""

from __future__ import annotations

import hashlib
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from supplychain.environment.lock import Lock, normalize, parse_lock
from supplychain.errors import SecureTrainError

ROOT = Path(__file__).resolve().parents[2]
LOCKS = sorted((ROOT / "requirements").glob("*.lock"))
H = "--hash=sha256:" + "a" * 64
OTHER = "--hash=sha256:" + "b" * 64
LINUX = {
    "implementation_name": "cpython",
    "implementation_version": "3.11.7",
    "os_name": "posix",
    "platform_machine": "x86_64",
    "platform_python_implementation": "CPython",
    "platform_release": "6.1",
    "platform_system": "Linux",
    "platform_version": "1",
    "python_full_version": "3.11.7",
    "python_version": "3.11",
    "sys_platform": "linux",
}


def test_reads_pins_with_markers_and_comments() -> None:
    text = (
        "# a comment\n\n"
        f"Foo_Bar==1.2.3 \\\n    {H} \\\n    {OTHER}\n"
        f"numpy==2.4.6 ; python_full_version < '3.12' {H}\r\n"
        f"numpy==2.5.5 ; python_full_version >= '3.12' {OTHER}\n"
        f"torch==2.13.0+cpu {H}\n"
    )
    lock = parse_lock(text.encode())
    assert [(pin.name, pin.version, len(pin.hashes), pin.line) for pin in lock.pins] == [
        ("foo-bar", "1.2.3", 2, 3),
        ("numpy", "2.4.6", 1, 6),
        ("numpy", "2.5.5", 1, 7),
        ("torch", "2.13.0+cpu", 1, 8),
    ]
    assert lock.digest == hashlib.sha256(text.encode()).hexdigest()
    assert [pin.version for pin in lock.applicable(LINUX)] == ["1.2.3", "2.4.6", "2.13.0+cpu"]
    newer = {**LINUX, "python_full_version": "3.13.0", "python_version": "3.13"}
    assert [pin.version for pin in lock.applicable(newer)] == ["1.2.3", "2.5.5", "2.13.0+cpu"]


@pytest.mark.parametrize(
    ("text", "line"),
    [
        (f"foo>=1.0 {H}", 1),
        (f"foo==1.* {H}", 1),
        (f"foo===1.0 {H}", 1),
        (f"foo {H}", 1),
        ("foo==1.0", 1),
        (f"ok==1 {H}\nfoo==1.0", 2),
        (f"foo==1.0,<2 {H}", 1),
        (f"foo[extra]==1.0 {H}", 1),
        (f"foo @ https://example.org/foo.whl {H}", 1),
        ("-r other.txt", 1),
        ("-e .", 1),
        ("--index-url https://example.org/simple", 1),
        ("--extra-index-url=https://example.org/simple", 1),
        ("--find-links /tmp", 1),
        ("--no-binary :all:", 1),
        ("./foo-1.0-py3-none-any.whl", 1),
        ("https://example.org/foo-1.0-py3-none-any.whl", 1),
        (f"foo==1.0 --hash=md5:{'a' * 32}", 1),
        (f"foo==1.0 --hash=sha256:{'A' * 64}", 1),
        (f"foo==1.0 --hash=sha256:{'a' * 63}", 1),
        (f"foo==1.0 {H} --config-settings=x=y", 1),
        (f"foo==1.0 {H} --global-option=x", 1),
        (f"foo==1.0 ; __import__('os') {H}", 1),
        (f"foo==1.0 ; python_version {H}", 1),
        (f"foo==1.0 ; {H}", 1),
        (f"foo==1.0 {H}\nfoo==1.0 {OTHER}", 2),
        (f"foo==1.0 {H}\nFoo==2.0 {H}", 2),
        (f"foo==1.0 \\\n  {H} \\", 1),
        (f"foo==1.0 {H}\n\x1b[31mbar==1 {H}", 2),
        (f"foo==1.0 {H}\x0cbar==1.0", 1),
        (f"fоo==1.0 {H}", 1),  # a Cyrillic letter
        (f"foo==1.0 {H} # comment", 1),
        ("x" * 5000, 1),
    ],
)
def test_refuses_everything_else_with_its_line(text: str, line: int) -> None:
    with pytest.raises(SecureTrainError) as caught:
        parse_lock(text.encode(), where="my.lock")
    assert caught.value.code == "ST-E01"
    assert caught.value.where == f"my.lock:{line}"


@pytest.mark.parametrize("data", [b"", b"# nothing\n", b"\xff\xfe", b"foo==1\x00", b"a" * (9 << 20)])
def test_refuses_what_is_no_lock(data: bytes) -> None:
    with pytest.raises(SecureTrainError) as caught:
        parse_lock(data)
    assert caught.value.code == "ST-E01"


def test_two_pins_that_both_apply_are_refused() -> None:
    text = f"foo==1.0 ; sys_platform == 'linux' {H}\nfoo==2.0 ; python_version >= '3.11' {H}\n"
    with pytest.raises(SecureTrainError) as caught:
        parse_lock(text.encode()).applicable(LINUX)
    assert caught.value.code == "ST-E01"


def _only_ours(data: bytes) -> Lock | None:
    try:
        return parse_lock(data)
    except SecureTrainError as error:
        if error.code != "ST-E01":
            raise
        return None


@given(st.binary(max_size=400))
def test_any_bytes_end_in_a_lock_or_one_error(data: bytes) -> None:
    _only_ours(data)


@given(
    st.lists(
        st.sampled_from(
            [
                "foo==1",
                "bar==2.0+cpu",
                " ",
                "\\\n",
                "\n",
                H,
                OTHER,
                ";",
                "python_version",
                "<",
                "'3'",
                "(",
                "and ",
                "-r x",
            ]
        ),
        max_size=25,
    )
)
def test_any_arrangement_of_its_parts_ends_in_a_lock_or_one_error(parts: list[str]) -> None:
    lock = _only_ours("".join(parts).encode())
    for pin in lock.pins if lock else ():
        assert pin.hashes
        assert pin.name == normalize(pin.name)


@pytest.mark.parametrize("path", LOCKS, ids=lambda path: path.name)
def test_our_own_locks_are_strict_and_name_no_place(path: Path) -> None:
    data = path.read_bytes()
    lock = parse_lock(data)
    assert lock.applicable(LINUX)
    for word in (b"://", b"file:", b"/", b"@"):
        assert word not in data.replace(b"requirements/lock.py", b"")


def test_our_locks_agree_on_what_they_share() -> None:
    agreed: dict[tuple[str, str | None], str] = {}
    for path in LOCKS:
        if path.stem in ("peers", "generator"):
            continue
        for pin in parse_lock(path.read_bytes()).applicable(LINUX):
            version = agreed.setdefault((pin.name, None), pin.version)
            assert version.split("+")[0] == pin.version.split("+")[0], (path.name, pin.name)


def test_the_two_torch_profiles_differ_in_torch_and_cuda_only() -> None:
    cpu, default = (
        {
            pin.name: pin.version
            for pin in parse_lock((ROOT / f"requirements/training-{name}.lock").read_bytes()).pins
        }
        for name in ("cpu", "default")
    )
    assert cpu.pop("torch") == "2.13.0+cpu"
    assert default.pop("torch") == "2.13.0"
    extra = {name for name in default if name not in cpu}
    assert all(name.startswith(("nvidia-", "cuda-")) or name == "triton" for name in extra)
    assert {name: default[name] for name in cpu} == cpu
