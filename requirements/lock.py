"""Write the hash-pinned locks of this folder from pyproject.toml and `in/*.in`.

    python3 requirements/lock.py [--upgrade] [--check] [--torch-links PLACE]

Owns every `*.lock`. Promises that a lock holds `==` pins with sha256 hashes and environment markers and
nothing else (no host, no path), that the locks agree with each other on every package they share, and that no
pinned release was younger than seven days when it was chosen (most malicious releases are found sooner). uv
resolves, itself pinned by `generator.lock`; pip installs.

The CPU build of torch lies on no index that everybody uses. `--torch-links` names a folder or page that has
it; without the option, pip's own configuration is asked for one. Neither ends up in a lock. uv would fetch
the CUDA build where it finds no other, so the resolution of the CPU lock names the build exactly and fails
instead.
"""

from __future__ import annotations

import argparse
import datetime
import os
import re
import subprocess
import sys
import tempfile
import tomllib
import venv
from pathlib import Path

HERE = Path(__file__).resolve().parent
ROOT = HERE.parent
COOL_DOWN = datetime.timedelta(days=7)
PIN = re.compile(r"^(?P<name>[A-Za-z0-9._-]+)==(?P<version>[^\s;\\]+)\s*(?P<marker>;[^\\]*)?")


def project(*extras: str, base: bool = True) -> list[str]:
    """The requirements that pyproject.toml states: the gate's, and those of the extras named."""
    table = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    lines: list[str] = list(table["dependencies"]) if base else []
    for extra in extras:
        lines += table["optional-dependencies"][extra]
    return lines


def given(name: str) -> list[str]:
    """The requirements that `in/NAME.in` states."""
    lines = (HERE / "in" / f"{name}.in").read_text().splitlines()
    return [line for line in lines if line and not line.startswith("#")]


def inputs() -> dict[str, list[str]]:
    """Each lock and what it must satisfy. `everything` is no file: it is what makes the others agree."""
    trainer = project("trainer", base=False)
    return {
        "everything": project("trainer", "dev") + given("torch-default") + given("bootstrap"),
        "bootstrap": given("bootstrap"),
        "gate": project(),
        "training-default": trainer + given("torch-default"),
        "training-cpu": trainer + given("torch-cpu"),
        "dev": project("dev"),
        "peers": given("peers"),
        "generator": given("generator"),
    }


def generator() -> Path:
    """uv, from its own lock, in an environment of its own; a uv that is already there is used for the very
    first lock only.
    """
    lock = HERE / "generator.lock"
    home = ROOT / ".secure-train" / "generator"
    uv = home / "bin" / "uv"
    if not uv.exists():
        venv.EnvBuilder(with_pip=True, clear=True).create(home)
        pip = [
            str(home / "bin" / "python"),
            "-I",
            "-m",
            "pip",
            "install",
            "--quiet",
            "--no-deps",
            "--only-binary",
            ":all:",
        ]
        pinned = ["--require-hashes", "-r", str(lock)] if lock.exists() else given("generator")
        subprocess.run([*pip, *pinned], check=True)
    return uv


def torch_links(uv_python: Path) -> str | None:
    """The place for wheels that pip's own configuration names (find-links), if it names one."""
    if value := os.environ.get("PIP_FIND_LINKS"):
        return value.split()[0]
    pip = [str(uv_python), "-I", "-m", "pip", "config", "get", "global.find-links"]
    done = subprocess.run(pip, capture_output=True, text=True)
    return done.stdout.split()[0] if done.returncode == 0 and done.stdout.strip() else None


def resolve(uv: Path, wanted: list[str], constraints: list[str], known: str, options: list[str]) -> str:
    """One universal resolution (every platform, Python 3.11 and later) as hash-pinned lines."""
    with tempfile.TemporaryDirectory() as folder:
        source, limits, target = (Path(folder) / name for name in ("in.txt", "limits.txt", "out.txt"))
        source.write_text("\n".join(wanted) + "\n")
        limits.write_text("\n".join(constraints) + "\n")
        target.write_text(known)
        command = [
            str(uv),
            "pip",
            "compile",
            "--quiet",
            "--universal",
            "--python-version",
            "3.11",
            "--generate-hashes",
        ]
        command += [
            "--no-header",
            "--no-annotate",
            "--no-build",
            "--constraints",
            str(limits),
            "-o",
            str(target),
        ]
        subprocess.run([*command, *options, str(source)], check=True, stdout=subprocess.DEVNULL)
        return target.read_text()


def pins(text: str, *, without: tuple[str, ...] = ()) -> list[str]:
    """The pins of a lock as constraints, with their markers and without their hashes."""
    found = [match for match in map(PIN.match, text.splitlines()) if match]
    return [
        f"{m['name']}=={m['version']} {m['marker'] or ''}".strip() for m in found if m["name"] not in without
    ]


def add_hashes(text: str, name: str) -> str:
    """Allow, for one package, the files that `in/NAME.hashes` lists beside those that the resolver saw."""
    listed = HERE / "in" / f"{name}.hashes"
    if not listed.exists():
        return text
    digests = [
        line.split()[0] for line in listed.read_text().splitlines() if line and not line.startswith("#")
    ]
    out: list[str] = []
    inside = False
    for line in text.splitlines():
        if not line.startswith(" "):
            inside = line.startswith(f"{name.split('-')[0]}==")
            out.append(line)
            if inside:
                out += [f"    --hash=sha256:{digest} \\" for digest in sorted(digests) if digest not in text]
            continue
        out.append(line)
    return "\n".join(out) + "\n"


def lint(name: str, text: str) -> None:
    """Refuse to write a lock that our own strict parser would refuse to read."""
    sys.path.insert(0, str(ROOT))
    from supplychain.environment.lock import parse_lock

    parse_lock(text.encode(), where=f"{name}.lock")


def main() -> int:
    parser = argparse.ArgumentParser(description="Write requirements/*.lock.")
    parser.add_argument(
        "--upgrade", action="store_true", help="take the newest releases allowed, not those pinned now"
    )
    parser.add_argument(
        "--check", action="store_true", help="write nothing; exit 4 where a lock does not fit its inputs"
    )
    parser.add_argument("--torch-links", metavar="PLACE", help="a folder or page with the CPU build of torch")
    options = parser.parse_args()

    uv = generator()
    newest = (datetime.datetime.now(datetime.UTC) - COOL_DOWN).replace(microsecond=0)
    common = ["--exclude-newer", newest.isoformat().replace("+00:00", "Z")]
    common += ["--upgrade"] if options.upgrade else []
    links = options.torch_links or torch_links(uv.parent / "python")

    wanted = inputs()
    current = {
        name: (HERE / f"{name}.lock").read_text() for name in wanted if (HERE / f"{name}.lock").exists()
    }
    known = "".join(current.get(name, "") for name in ("dev", "training-default", "bootstrap"))
    everything = resolve(uv, wanted.pop("everything"), [], known, common)
    stale: list[str] = []
    for name, requirements in wanted.items():
        extra = [*common]
        limits = pins(everything)
        if name == "training-cpu":
            limits = pins(everything, without=("torch",))
            extra += ["--find-links", links] if links else []
        if name in ("peers", "generator"):
            limits = []  # environments of their own: nothing has to agree
        text = resolve(uv, requirements, limits, current.get(name, ""), extra)
        if name == "training-cpu":
            text = add_hashes(text, "torch-cpu")
        text = (
            f"# Written by requirements/lock.py; do not edit. Pins, with the hashes of their files.\n{text}"
        )
        lint(name, text)
        if text == current.get(name):
            continue
        stale.append(name)
        if not options.check:
            temporary = HERE / f".{name}.lock.partial"
            temporary.write_text(text)
            temporary.rename(HERE / f"{name}.lock")
    for name in wanted:
        state = "differs" if options.check else "written"
        print(f"{name}.lock: {state if name in stale else 'as it was'}")
    return 4 if options.check and stale else 0


if __name__ == "__main__":
    sys.exit(main())
