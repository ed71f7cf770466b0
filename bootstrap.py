"""Builds everything from the locks, then runs the main job or the tests. Standard library only.

    python3 bootstrap.py quickstart [--wheelhouse DIR] [--profile auto|cpu|default] [--editable] [--home DIR]
    python3 bootstrap.py test       [the same options] [pytest's arguments]
    python3 bootstrap.py bench TOPIC [the same options] [--json FILE]
    python3 bootstrap.py build      [the same options]

Owns the state folder (`.secure-train/` in the checkout, or --home): the gate's environment, the training
environments, the development environment and our own wheel. Promises that only hash-pinned wheels are
installed, that nothing is built from source or byte-compiled, that a second call reuses what is there, and
that each thing that can be wrong with the machine is said in one sentence (exit 2: something to mend here; 3:
a file differs from its lock; 5: a package cannot be obtained).

The syntax stays old enough for an old Python to reach the sentence that refuses it.
"""

from __future__ import annotations

import argparse
import contextlib
import errno
import hashlib
import importlib.util
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any, Iterator, NoReturn, Sequence  # noqa: UP035 - old Pythons have them only here

ROOT = Path(__file__).resolve().parent
LOCKS = ROOT / "requirements"
FORMAT = "1"  # of the state folder: raise it when what is built changes
MINIMUM = (3, 11)
# The time written into our wheel. Constant, so that the same sources give the same bytes.
SOURCE_DATE_EPOCH = "1767225600"
PACKAGES = ("trainer", "supplychain", "sbom", "policies")
PROJECT_FILES = ("pyproject.toml", "README.md", "LICENSE")
# What an installation needs on disk, in bytes, with room to unpack.
NEEDED = {"gate": 400 << 20, "cpu": 2 << 30, "default": 12 << 30}
# The only flags under which pip installs here: nothing but the locked wheels, nothing built, no bytecode left
# behind.
PINNED = ["--require-hashes", "--no-deps", "--only-binary", ":all:"]

BUILD_HOOK = """
import os, sys
source, target, hook = sys.argv[1:]
os.chdir(source)
import pdm.backend
print(getattr(pdm.backend, hook)(target))
"""


class Failure(Exception):
    """One sentence for the user, with what to do next and the exit code."""

    def __init__(self, what: str, step: str, code: int = 2) -> None:
        super().__init__(what)
        self.what = what
        self.step = step
        self.code = code


def say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def digest(*parts: bytes) -> str:
    """One digest of several byte strings; each is hashed first, so that no two lists run together."""
    outer = hashlib.sha256()
    for part in parts:
        outer.update(hashlib.sha256(part).digest())
    return outer.hexdigest()


# --- what the machine is ------------------------------------------------------------------------------------


def check_python() -> None:
    if sys.version_info < MINIMUM:
        newer = [
            name for name in ("python3.14", "python3.13", "python3.12", "python3.11") if shutil.which(name)
        ]
        raise Failure(
            "secure-train needs Python 3.11 or newer, and this is Python {}.{}".format(*sys.version_info[:2]),
            f"run `{newer[-1]} bootstrap.py ...`" if newer else "install Python 3.11 or newer",
        )


def check_modules() -> None:
    for name in ("venv", "ensurepip"):
        if importlib.util.find_spec(name) is None:
            package = "python{}.{}-venv".format(*sys.version_info[:2])
            raise Failure(
                f"this Python ({sys.executable}) has no {name} module, so no environment can be made",
                f"install it (on Debian and Ubuntu: apt install {package}), or use another Python",
            )


def check_space(folder: Path, profile: str) -> None:
    free = shutil.disk_usage(folder).free
    needed = NEEDED[profile]
    if free < needed:
        raise Failure(
            f"{folder} has {free / 1e9:.1f} GB free, and {needed / 1e9:.1f} GB are needed",
            "free some space, or name a folder on another disk with --home",
        )


def nvidia_driver() -> str | None:
    """How we know that there is an NVIDIA driver, or None."""
    if Path("/proc/driver/nvidia/version").exists():
        return "an NVIDIA driver is loaded"
    if Path("/dev/nvidiactl").exists():
        return "there is an NVIDIA device"
    if (
        shutil.which("nvidia-smi")
        and subprocess.run(["nvidia-smi", "-L"], capture_output=True).returncode == 0
    ):
        return "nvidia-smi lists a GPU"
    return None


# --- the state folder ---------------------------------------------------------------------------------------


class Home:
    """The state folder. `stamps` say from what each thing was built; a stamp is written when the thing is
    complete.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        try:
            path.mkdir(parents=True, exist_ok=True)
            with tempfile.TemporaryFile(dir=str(path)):
                pass
        except OSError as error:
            raise Failure(
                f"the folder {path} cannot be written: {error.strerror}",
                "name another one with --home DIR",
            ) from None

    @property
    def tools(self) -> Path:
        return self.path / "tools"

    @property
    def gate(self) -> Path:
        return self.path / "gate"

    @property
    def development(self) -> Path:
        return self.path / "development"

    @property
    def peers(self) -> Path:
        return self.path / "peers"

    @property
    def wheels(self) -> Path:
        return self.path / "cache" / "wheels"

    @property
    def training(self) -> Path:
        """A link to the current training environment; the gate's command looks beside its own."""
        return self.path / "training"

    def stamp(self, name: str) -> dict[str, Any]:
        try:
            found = json.loads((self.path / "stamps" / (name + ".json")).read_text())
        except (OSError, ValueError):
            return {}
        return found if isinstance(found, dict) else {}

    def set_stamp(self, name: str, value: dict[str, Any]) -> None:
        folder = self.path / "stamps"
        folder.mkdir(exist_ok=True)
        temporary = folder / (name + ".partial")
        temporary.write_text(json.dumps(value, indent=1, sort_keys=True) + "\n")
        os.replace(str(temporary), str(folder / (name + ".json")))

    def forget(self, name: str) -> None:
        with contextlib.suppress(FileNotFoundError):
            (self.path / "stamps" / (name + ".json")).unlink()

    @contextlib.contextmanager
    def alone(self) -> Iterator[None]:
        """One bootstrap at a time works on a state folder."""
        import fcntl

        with open(str(self.path / "lock"), "w") as file:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except OSError:
                say(f"another bootstrap.py works on {self.path}; waiting for it")
                fcntl.flock(file, fcntl.LOCK_EX)
            yield


def python_identity() -> bytes:
    """What an environment is tied to: this very interpreter."""
    real = Path(sys.executable).resolve()
    return "\0".join([FORMAT, sys.version, str(real), str(real.stat().st_size)]).encode()


# --- running pip --------------------------------------------------------------------------------------------


def pip_environment() -> dict[str, str]:
    """The user's own pip configuration decides where packages come from; never where they go."""
    environment = {
        key: value for key, value in os.environ.items() if key not in ("PIP_TARGET", "PIP_PREFIX", "PIP_ROOT")
    }
    environment.update(
        PIP_USER="0",
        PIP_NO_INPUT="1",
        PIP_DISABLE_PIP_VERSION_CHECK="1",
        PYTHONDONTWRITEBYTECODE="1",
    )
    return environment


def run_pip(command: Sequence[str], what: str, total: int = 0, quiet: bool = False) -> None:
    """Run pip; show how far it is, and turn its failure into one sentence."""
    process = subprocess.Popen(
        [*command, "--progress-bar", "off"],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        env=pip_environment(),
        universal_newlines=True,
        errors="replace",
    )
    try:
        tail = watch_pip(process, what, total, quiet)
    except BaseException:  # Ctrl-C: pip is stopped with us
        process.kill()
        raise
    finally:
        process.wait()
    if process.returncode != 0:
        explain_pip("\n".join(tail), what)


def watch_pip(process: subprocess.Popen[str], what: str, total: int, quiet: bool) -> list[str]:
    """A line every few seconds, and for every large file; returns the end of what pip said."""
    tail: list[str] = []
    count = 0
    last = time.monotonic()
    for line in process.stdout or ():
        tail.append(line.rstrip())
        del tail[:-200]
        if line.startswith("Collecting "):
            count += 1
        size = re.search(r"\((\d+(?:\.\d+)? [MG]B)\)", line)
        large = size and (size[1].endswith("GB") or float(size[1].split()[0]) >= 20)
        if not quiet and large and line.lstrip().startswith(("Downloading", "Processing")):
            say(f"  {what}: {line.strip()}")
            last = time.monotonic()
        elif not quiet and time.monotonic() - last > 3:
            say(f"  {what}: {count} of {total} packages" if total else f"  {what}: {count} packages")
            last = time.monotonic()
    return tail


def explain_pip(output: str, what: str) -> NoReturn:
    if "No space left on device" in output or "Errno 28" in output:
        raise Failure(
            f"the disk is full; {what} could not be installed",
            "free some space, then run the same command again",
        )
    if "DO NOT MATCH THE HASHES" in output:
        found = re.search(r"^\s*(\S+==\S+) from", output, re.MULTILINE)
        raise Failure(
            "a downloaded package{} is not the one that the lock pins".format(
                " (" + found[1] + ")" if found else ""
            ),
            "do not install it; compare the package index with another one",
            3,
        )
    missing = re.search(r"(?:No matching distribution found for|Cannot install) (\S+)", output)
    unreachable = re.search(
        r"NewConnectionError|ConnectionError|Temporary failure in name resolution|Name or service not known"
        r"|Max retries|ConnectTimeout|Connection broken|timed out|Network is unreachable",
        output,
    )
    if unreachable:
        raise Failure(
            f"no package index could be reached; {what} could not be installed",
            "check the network and `pip config list`, or give a folder of wheels with --wheelhouse DIR",
            5,
        )
    if missing:
        raise Failure(
            f"{missing[1]} cannot be had from the configured package index for this Python and platform",
            "see pip config list, or give a folder that has it with --wheelhouse DIR",
            5,
        )
    lines = [line for line in output.splitlines() if line.startswith("ERROR")] or output.splitlines()[-3:]
    raise Failure(
        "pip could not install {}: {}".format(what, " ".join(" ".join(lines).split())[:600]),
        "mend that, then run the same command again",
        5,
    )


def sources(wheelhouse: Path | None) -> list[str]:
    return ["--no-index", "--find-links", str(wheelhouse)] if wheelhouse else []


def count_pins(*locks: Path) -> int:
    return sum(len(re.findall(r"^[A-Za-z0-9]", lock.read_text(), re.MULTILINE)) for lock in locks)


def make_environment(
    home: Home, name: str, locks: Sequence[Path], options: argparse.Namespace, label: str
) -> Path:
    """A virtual environment at its final place from hash-pinned locks; reused while its stamp fits."""
    import venv

    target = home.path / name
    wanted = digest(python_identity(), str(target).encode(), *[lock.read_bytes() for lock in locks])
    if home.stamp(name).get("built_from") == wanted and (target / "bin" / "python").exists():
        return target
    started = time.monotonic()
    say(f"building {label} in {target}")
    home.forget(name)
    tools(home, options)
    shutil.rmtree(str(target), ignore_errors=True)
    venv.EnvBuilder(with_pip=False, symlinks=True).create(str(target))
    pip = [
        str(home.tools / "bin" / "python"),
        "-I",
        "-m",
        "pip",
        "--python",
        str(target / "bin" / "python"),
        "install",
    ]
    with merged(locks) as requirements:
        command = [*pip, "--no-compile", *PINNED, *sources(options.wheelhouse), "-r", str(requirements)]
        if home.wheels.is_dir() and not options.wheelhouse:
            command += ["--find-links", str(home.wheels)]
        run_pip(command, label, count_pins(requirements))
    home.set_stamp(name, {"built_from": wanted})
    say(f"  {label} is ready ({time.monotonic() - started:.0f} s)")
    return target


@contextlib.contextmanager
def merged(locks: Sequence[Path]) -> Iterator[Path]:
    """Several locks as one file. They agree on what they share (requirements/lock.py sees to it), so each pin
    is kept once.
    """
    entries: dict[str, str] = {}
    for lock in locks:
        for entry in re.split(r"\n(?=[A-Za-z0-9])", lock.read_text()):
            entries.setdefault(entry.split("\\")[0].split(";")[0].strip(), entry)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "merged.lock"
        path.write_text("\n".join(entry.rstrip() for entry in entries.values()) + "\n")
        yield path


def tools(home: Home, options: argparse.Namespace) -> Path:
    """The pinned pip and the build backend, in an environment of their own. The pip that Python ships
    installs them.
    """
    import venv

    lock = LOCKS / "bootstrap.lock"
    wanted = digest(python_identity(), str(home.tools).encode(), lock.read_bytes())
    if home.stamp("tools").get("built_from") == wanted:
        return home.tools
    say("preparing pip and the build backend")
    home.forget("tools")
    try:
        venv.EnvBuilder(with_pip=True, symlinks=True, clear=True).create(str(home.tools))
    except subprocess.CalledProcessError as error:
        raise Failure(
            f"Python could not make an environment with pip ({error})",
            f"try `{sys.executable} -m venv /tmp/try`; on Debian and Ubuntu install python3-venv",
        ) from None
    pip = [str(home.tools / "bin" / "python"), "-I", "-m", "pip", "install", "--no-compile"]
    run_pip(
        [*pip, *PINNED, *sources(options.wheelhouse), "-r", str(lock)],
        "pip and the build backend",
        quiet=True,
    )
    home.set_stamp("tools", {"built_from": wanted})
    return home.tools


# --- our own wheel ------------------------------------------------------------------------------------------


def project_files() -> list[Path]:
    """What our wheel is made of, in a fixed order."""
    for name in PROJECT_FILES:
        if not (ROOT / name).is_file():
            raise Failure(f"the checkout has no {name}", "clone the repository again, whole")
    files = [ROOT / name for name in PROJECT_FILES]
    for package in PACKAGES:
        for folder, names, leaves in os.walk(str(ROOT / package)):
            names[:] = sorted(name for name in names if name != "__pycache__" and not name.startswith("."))
            files += [
                Path(folder) / leaf
                for leaf in sorted(leaves)
                if not leaf.startswith(".") and not leaf.endswith(".pyc")
            ]
    return files


def source_digest(files: Sequence[Path]) -> str:
    parts: list[bytes] = []
    for file in files:
        parts += [str(file.relative_to(ROOT)).encode(), file.read_bytes()]
    return digest(*parts)


def project_wheel(home: Home, options: argparse.Namespace) -> dict[str, str]:
    """Our wheel, built once by the pinned backend from a clean copy. Returns its path and sha256: the code
    identity.
    """
    kind = "editable" if options.editable else "wheel"
    files = project_files()
    place = str(ROOT) if options.editable else ""
    code = (ROOT / "pyproject.toml").read_bytes().hex() if options.editable else source_digest(files)
    wanted = digest(python_identity(), code.encode(), place.encode(), (LOCKS / "bootstrap.lock").read_bytes())
    stamp = home.stamp(kind)
    if stamp.get("built_from") == wanted and Path(stamp["path"]).is_file():
        return stamp
    tools(home, options)
    target = home.path / kind
    shutil.rmtree(str(target), ignore_errors=True)
    target.mkdir()
    with tempfile.TemporaryDirectory(dir=str(home.path)) as folder:
        source = ROOT
        if not options.editable:
            source = Path(folder) / "source"
            for file in files:
                copy = source / file.relative_to(ROOT)
                copy.parent.mkdir(parents=True, exist_ok=True)
                shutil.copyfile(str(file), str(copy))
                copy.chmod(0o644)
        hook = "build_editable" if options.editable else "build_wheel"
        command = [
            str(home.tools / "bin" / "python"),
            "-I",
            "-B",
            "-c",
            BUILD_HOOK,
            str(source),
            str(target),
            hook,
        ]
        environment = dict(os.environ, SOURCE_DATE_EPOCH=SOURCE_DATE_EPOCH)
        done = subprocess.run(command, capture_output=True, text=True, env=environment)
    if options.editable:
        shutil.rmtree(str(ROOT / ".pdm-build"), ignore_errors=True)
    built = sorted(target.glob("*.whl"))
    if done.returncode != 0 or len(built) != 1:
        raise Failure(
            "the project could not be built into a wheel: {}".format(" ".join(done.stderr.split())[-600:]),
            "look at pyproject.toml; the packages must be importable",
        )
    sha256 = hashlib.sha256(built[0].read_bytes()).hexdigest()
    stamp = {"built_from": wanted, "path": str(built[0]), "sha256": sha256}
    home.set_stamp(kind, stamp)
    say(
        "{} {} sha256:{}".format(
            "editable install of" if options.editable else "built", built[0].name, sha256
        )
    )
    return stamp


def install_project(home: Home, name: str, wheel: dict[str, str], options: argparse.Namespace) -> None:
    """Put our wheel into an environment of ours, by its hash."""
    target = home.path / name
    if home.stamp(name + "-project").get("sha256") == wheel["sha256"] + str(options.editable):
        return
    home.forget(name + "-project")
    pip = [
        str(home.tools / "bin" / "python"),
        "-I",
        "-m",
        "pip",
        "--python",
        str(target / "bin" / "python"),
        "install",
    ]
    with tempfile.TemporaryDirectory() as folder:
        requirement = Path(folder) / "project.txt"
        version = Path(wheel["path"]).name.split("-")[1]
        requirement.write_text("secure-train=={} --hash=sha256:{}\n".format(version, wheel["sha256"]))
        command = [
            *pip,
            "--no-compile",
            *PINNED,
            "--no-index",
            "--find-links",
            str(Path(wheel["path"]).parent),
        ]
        run_pip([*command, "--force-reinstall", "-r", str(requirement)], "secure-train itself", quiet=True)
    isolate_program(target / "bin" / "secure-train")
    home.set_stamp(name + "-project", {"sha256": wheel["sha256"] + str(options.editable)})


def isolate_program(program: Path) -> None:
    """Let our program start Python with -I: PYTHONPATH must not bring code to where a key is used."""
    first, _, rest = program.read_text().partition("\n")
    # A longer path, or one with a space, is started by a shell; that is left alone.
    if first.startswith("#!/") and " " not in first and len(first) < 120:
        program.write_text(first + " -I\n" + rest)


# --- the environments ---------------------------------------------------------------------------------------


def build_gate(home: Home, options: argparse.Namespace) -> dict[str, str]:
    check_space(home.path, "gate") if not home.stamp("gate") else None
    make_environment(home, "gate", [LOCKS / "gate.lock"], options, "the gate's environment")
    wheel = project_wheel(home, options)
    tools(home, options)
    install_project(home, "gate", wheel, options)
    return wheel


def choose_profile(home: Home, options: argparse.Namespace) -> tuple[str, str]:
    """The torch build to install, and why."""
    if options.profile != "auto":
        return options.profile, "as asked for"
    known = home.stamp("profile")
    key = digest(
        (LOCKS / "training-cpu.lock").read_bytes(), str(options.wheelhouse).encode(), python_identity()
    )
    driver = nvidia_driver()
    if known.get("key") == key and known.get("driver") == str(driver):
        return known["profile"], known["why"]
    if driver:
        profile, why = "default", driver
    elif sys.platform != "linux":
        profile, why = "default", "on this platform it is the only build"
    elif obtain_cpu_torch(home, options):
        profile, why = "cpu", "no GPU here, and the locked CPU build of torch can be had"
    else:
        profile, why = "default", "no GPU here, but the locked CPU build of torch is on no configured index"
    home.set_stamp("profile", {"key": key, "driver": str(driver), "profile": profile, "why": why})
    return profile, why


def obtain_cpu_torch(home: Home, options: argparse.Namespace) -> bool:
    """Try to fetch the CPU build into the cache of wheels, from where it will be installed: the question is
    the answer.
    """
    text = (LOCKS / "training-cpu.lock").read_text()
    entry = re.search(r"^torch==(?:.*\\\n)*.*$", text, re.MULTILINE)
    if entry is None:
        raise Failure(
            "requirements/training-cpu.lock pins no torch",
            "make the locks again: python3 requirements/lock.py",
        )
    say("looking for the CPU build of torch")
    home.wheels.mkdir(parents=True, exist_ok=True)
    tools(home, options)
    with tempfile.TemporaryDirectory(dir=str(home.path)) as folder:
        requirement = Path(folder) / "torch.txt"
        requirement.write_text(entry[0] + "\n")
        pip = [
            str(home.tools / "bin" / "python"),
            "-I",
            "-m",
            "pip",
            "download",
            *PINNED,
            *sources(options.wheelhouse),
        ]
        try:
            run_pip([*pip, "-d", folder, "-r", str(requirement)], "torch", quiet=True)
        except Failure as failure:
            if failure.code != 5:
                raise
            return False
        for wheel in Path(folder).glob("*.whl"):
            os.replace(str(wheel), str(home.wheels / wheel.name))
    return True


def build_training(home: Home, options: argparse.Namespace, wheel: dict[str, str]) -> str:
    """The training environment, by the gate's own verb. Returns the profile."""
    profile, why = choose_profile(home, options)
    lock = LOCKS / f"training-{profile}.lock"
    wanted = digest(
        python_identity(),
        str(home.path).encode(),
        lock.read_bytes(),
        wheel["sha256"].encode(),
        str(options.editable).encode(),
    )
    stamp = home.stamp("training")
    if (
        stamp.get("built_from") == wanted
        and (Path(stamp["environment"]) / "secure-train" / "manifest.json").is_file()
    ):
        point(home.training, Path(stamp["environment"]))
        return profile
    say(f"torch profile {profile}: {why}")
    check_space(home.path, profile)
    command = [str(home.gate / "bin" / "secure-train"), "env", "build", "--json", "--profile", profile]
    command += ["--lock", str(lock), "--store", str(home.path / "environments"), "--cache", str(home.wheels)]
    command += ["--project-wheel", wheel["path"]]
    command += ["--editable", str(ROOT)] if options.editable else []
    command += ["--wheelhouse", str(options.wheelhouse)] if options.wheelhouse else []
    answer, code = ask(command, pip_environment())
    if code != 0:
        raise Failure(
            "the training environment could not be built (see above)",
            "mend that, then run the same command again",
            code if code > 0 else 128 - code,
        )
    environment = json.loads(answer)["environment"]
    point(home.training, Path(environment))
    home.set_stamp("training", {"built_from": wanted, "environment": environment})
    others = [path for path in Path(environment).parent.glob("env-*") if path != Path(environment)]
    if len(others) > 2:
        # Kept, because runs that were made with them can only be resumed and reproduced there.
        say(f"{len(others)} older environments lie in {others[0].parent}; remove what no run needs")
    return profile


def ask(
    command: Sequence[str], environment: dict[str, str], capture: bool = True, folder: Path | None = None
) -> tuple[str, int]:
    """Run a command; its answer (with `capture`) and exit code. When we are stopped, so is it."""
    process = subprocess.Popen(
        command,
        stdin=subprocess.DEVNULL if capture else None,
        stdout=subprocess.PIPE if capture else None,
        universal_newlines=True,
        env=environment,
        cwd=str(folder) if folder else None,
    )
    try:
        answer, _ = process.communicate()
    except KeyboardInterrupt:
        try:
            process.wait(timeout=5)  # a terminal told it as well; twice would cut its own ending short
        except subprocess.TimeoutExpired:
            process.send_signal(signal.SIGINT)
            process.wait()
        raise
    return answer or "", process.returncode


def stop(*_: object) -> NoReturn:
    """SIGTERM ends us the way Ctrl-C does: what we started ends first."""
    raise KeyboardInterrupt


def point(link: Path, target: Path) -> None:
    """Make `link` lead to `target`, in one step."""
    relative = os.path.relpath(str(target), str(link.parent))
    if link.is_symlink() and os.readlink(str(link)) == relative:
        return
    temporary = link.with_name(".training.partial")
    with contextlib.suppress(FileNotFoundError):
        temporary.unlink()
    temporary.symlink_to(relative)
    os.replace(str(temporary), str(link))


def build_development(home: Home, options: argparse.Namespace, profile: str) -> Path:
    """The interpreter of the tests: the gate's packages, the trainer's and the tools in one, with our sources
    in place.
    """
    locks = [LOCKS / "dev.lock", LOCKS / f"training-{profile}.lock"]
    make_environment(home, "development", locks, options, "the development environment")
    editable = argparse.Namespace(**dict(vars(options), editable=True))
    install_project(home, "development", project_wheel(home, editable), editable)
    return home.development


# --- the commands -------------------------------------------------------------------------------------------


def build(home: Home, options: argparse.Namespace) -> str:
    with home.alone():
        wheel = build_gate(home, options)
        return build_training(home, options, wheel)


def quickstart(home: Home, options: argparse.Namespace, rest: list[str]) -> int:
    lock = LOCKS / f"training-{build(home, options)}.lock"
    command = str(home.gate / "bin" / "secure-train")
    sys.stdout.flush()
    sys.stderr.flush()
    # In our place, so that signals and the exit code are its own: it saves a checkpoint when it is stopped.
    os.execv(command, [command, "quickstart", "--lock", os.path.relpath(str(lock)), *rest])


def test(home: Home, options: argparse.Namespace, rest: list[str]) -> int:
    """ruff, mypy and pytest; all three run, and the first failure decides. With arguments: pytest alone, with
    them.
    """
    profile = build(home, options)
    with home.alone():
        bin_ = build_development(home, options, profile) / "bin"
    commands = [] if rest else [[str(bin_ / "ruff"), "check", "."], [str(bin_ / "python"), "-m", "mypy"]]
    commands.append([str(bin_ / "python"), "-m", "pytest", *rest])
    environment = dict(
        os.environ, SECURE_TRAIN_TEST_HOME=str(home.path), PYTHONPYCACHEPREFIX=str(home.path / "pycache")
    )
    code = 0
    for command in commands:
        say("$ " + " ".join([Path(command[0]).name, *command[1:]]))
        code = ask(command, environment, capture=False, folder=ROOT)[1] or code
    return code


def bench(home: Home, options: argparse.Namespace, rest: list[str]) -> int:
    """One benchmark, with the peers that it compares against in an environment of their own."""
    topics = sorted(path.stem for path in (ROOT / "tests" / "benchmarks").glob("[a-z]*.py"))
    if options.topic not in topics:
        raise Failure(
            f"there is no benchmark {options.topic}",
            "choose one of: {}".format(", ".join(topics) or "none yet"),
        )
    profile = build(home, options)
    with home.alone():
        development = build_development(home, options, profile)
        peers = make_environment(home, "peers", [LOCKS / "peers.lock"], options, "the peers' environment")
    command = [str(development / "bin" / "python"), "-m", "tests.benchmarks." + options.topic, *rest]
    environment = dict(os.environ, SECURE_TRAIN_PEERS=str(peers), SECURE_TRAIN_TEST_HOME=str(home.path))
    return ask(command, environment, capture=False, folder=ROOT)[1]


def arguments() -> argparse.ArgumentParser:
    common = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    common.add_argument(
        "--wheelhouse", metavar="DIR", help="install from the wheels in this folder, and from nowhere else"
    )
    common.add_argument(
        "--profile",
        choices=("auto", "cpu", "default"),
        default="auto",
        help="the torch build (default: auto)",
    )
    common.add_argument(
        "--editable", action="store_true", help="run our sources from this checkout (for development)"
    )
    common.add_argument("--home", metavar="DIR", default=str(ROOT / ".secure-train"), help="the state folder")
    parser = argparse.ArgumentParser(
        prog="bootstrap.py", description="Build secure-train from its locks, and run it.", allow_abbrev=False
    )
    verbs = parser.add_subparsers(dest="verb", required=True, metavar="VERB")
    for name, text in (
        ("quickstart", "build both environments, then train a tiny signed Llama end to end"),
        ("test", "build, then run ruff, mypy and pytest (with arguments: pytest with them)"),
        ("bench", "build, then run one benchmark beside its peers"),
        ("build", "only build both environments"),
    ):
        verb = verbs.add_parser(name, parents=[common], help=text, description=text, allow_abbrev=False)
        if name == "bench":
            verb.add_argument("topic", metavar="TOPIC")
    return parser


def run(argv: Sequence[str]) -> int:
    check_python()
    signal.signal(signal.SIGTERM, stop)
    options, rest = arguments().parse_known_args(list(argv))
    rest = [part for part in rest if part != "--"] if options.verb == "quickstart" else rest
    if options.verb == "build" and rest:
        raise Failure(
            "bootstrap.py build does not know {}".format(" ".join(rest)),
            "see python3 bootstrap.py build --help",
        )
    check_modules()
    if options.wheelhouse:
        options.wheelhouse = Path(options.wheelhouse).resolve()
        if not options.wheelhouse.is_dir() or not any(options.wheelhouse.glob("*.whl")):
            raise Failure(f"the wheelhouse {options.wheelhouse} is no folder with wheels", "check the path")
    home = Home(Path(options.home).resolve())
    if options.verb == "quickstart":
        return quickstart(home, options, rest)
    if options.verb == "test":
        return test(home, options, rest)
    if options.verb == "bench":
        return bench(home, options, rest)
    profile = build(home, options)
    say(f"ready: {home.gate} and {home.training} (torch profile {profile})")
    return 0


def main(argv: Sequence[str] | None = None) -> int:
    try:
        return run(sys.argv[1:] if argv is None else argv)
    except Failure as failure:
        say(f"error: {failure.what}\n  next: {failure.step}")
        return failure.code
    except KeyboardInterrupt:
        say("stopped; what was built stays, and the same command goes on from there")
        return 130
    except OSError as error:
        if error.errno not in (errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EACCES, errno.EPERM):
            raise
        say(
            "error: {}: {}\n  next: free some space or mend the permissions, then try again".format(
                error.filename or "the state folder", error.strerror
            )
        )
        return 2


if __name__ == "__main__":
    sys.exit(main())
