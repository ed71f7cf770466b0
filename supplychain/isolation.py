"""How anything is started in the training environment: isolated interpreter, allow-listed variables, private
caches.

`-I` keeps the current directory, PYTHON* variables and the user's site out of the interpreter that we start;
processes that it starts itself (the compiler's workers) inherit no flags, so the same is said again in
variables for them. No bytecode is read from a folder that somebody else could have filled, no cache is
shared, and the home folder, where keys lie, is a private empty one.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from supplychain import confine

# Variables that a job may need and that cannot make Python or the loader run other code.
_ALLOWED = (
    "LANG",
    "LC_ALL",
    "LC_CTYPE",
    "TZ",
    "TERM",
    "CUDA_VISIBLE_DEVICES",
    "NVIDIA_VISIBLE_DEVICES",
    "CUDA_DEVICE_ORDER",
    "OPENBLAS_CORETYPE",
    "OPENBLAS_L2_SIZE",
    "GLOO_SOCKET_IFNAME",
    "NCCL_SOCKET_IFNAME",
    "NCCL_IB_HCA",
    "NCCL_DEBUG",
    "NO_COLOR",
)
# What a program needs of the system: libraries, compilers, name lookups; /proc and /sys tell cores and GPUs.
# Not all of /etc, not /run: other programs keep secrets there.
_SYSTEM = ("/usr", "/lib", "/lib32", "/lib64", "/bin", "/sbin", "/opt", "/proc", "/sys")
_ETC = (
    "alternatives",
    "group",
    "host.conf",
    "hosts",
    "ld.so.cache",
    "ld.so.conf",
    "ld.so.conf.d",
    "libibverbs.d",
    "localtime",
    "nccl.conf",
    "nsswitch.conf",
    "os-release",
    "passwd",
    "resolv.conf",
    "services",
    "timezone",
)
_DEVICES = (
    "null",
    "zero",
    "full",
    "random",
    "urandom",
    "shm",
    "infiniband",
    "nvidia*",
    "nvidia-caps",
    "dri",
    "kfd",
)
_PATH = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"  # where the system's C++ compiler is


@dataclass(frozen=True)
class Scratch:
    """A private folder (0700) for the caches of one launch. Made anew each time: a bytecode or kernel cache
    is code.
    """

    folder: Path

    @staticmethod
    def create(folder: Path) -> Scratch:
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir(parents=True, mode=0o700)
        for name in ("bytecode", "inductor", "triton", "tmp", "home"):
            (folder / name).mkdir(mode=0o700)
        return Scratch(folder)

    def remove(self) -> None:
        """Delete it, and the folder that held it if that is empty now."""
        shutil.rmtree(self.folder, ignore_errors=True)
        with contextlib.suppress(OSError):
            self.folder.parent.rmdir()


def interpreter(prefix: Path) -> Path:
    return prefix / "bin" / "python"


def base_prefix(prefix: Path) -> Path:
    """Where the interpreter lies that the environment was built on, with its standard library, as pyvenv.cfg
    says.
    """
    for line in (prefix / "pyvenv.cfg").read_text("utf-8").splitlines():
        name, _, value = line.partition("=")
        if name.strip() == "home":
            return Path(value.strip()).parent
    return prefix


def command(prefix: Path, scratch: Scratch, module: str, arguments: Sequence[str]) -> list[str]:
    """argv that runs `module` in the environment, isolated. `-I` ignores PYTHONPYCACHEPREFIX, hence the -X
    option.
    """
    return [
        str(interpreter(prefix)),
        "-I",
        "-X",
        f"pycache_prefix={scratch.folder / 'bytecode'}",
        "-m",
        module,
        *arguments,
    ]


def environment(scratch: Scratch, outer: Mapping[str, str] = os.environ) -> dict[str, str]:
    """The child's whole environment: nothing is inherited but what `_ALLOWED` names."""
    folder = scratch.folder
    return {name: outer[name] for name in _ALLOWED if name in outer} | {
        "PATH": _PATH,
        "HOME": str(folder / "home"),
        "TMPDIR": str(folder / "tmp"),
        "PYTHONSAFEPATH": "1",
        "PYTHONNOUSERSITE": "1",
        "PYTHONPYCACHEPREFIX": str(folder / "bytecode"),
        "PYTHONHASHSEED": "0",
        "PYTHONUNBUFFERED": "1",
        "TORCHINDUCTOR_CACHE_DIR": str(folder / "inductor"),
        "TRITON_CACHE_DIR": str(folder / "triton"),
        # An installed package may otherwise register itself to be imported by `import torch`.
        "TORCH_DEVICE_BACKEND_AUTOLOAD": "0",
        "HF_HUB_OFFLINE": "1",
        "TOKENIZERS_PARALLELISM": "true",
    }


def fence(
    prefix: Path,
    scratch: Scratch,
    *,
    level: str,
    editable: str | None = None,
    read: Sequence[Path] = (),
    write: Sequence[Path] = (),
) -> list[str]:
    """argv to put before a command of the environment: it will reach only the environment, the system, `read`
    and `write`.

    `level` is the policy's: auto, required or off. Whatever it is, the command ends when this process does.
    """
    devices = [path for name in _DEVICES for path in Path("/dev").glob(name)]
    system = [*map(Path, _SYSTEM), *(Path("/etc") / name for name in _ETC)]
    readable = [*system, prefix, base_prefix(prefix), *([Path(editable)] if editable else []), *read]
    options = [item for path in readable for item in ("--read", str(path))]
    options += [item for path in [*devices, scratch.folder, *write] for item in ("--write", str(path))]
    program = [sys.executable, "-I", "-S", "-B", confine.__file__]
    return [*program, *options, "--level", level, "--launcher", str(os.getpid()), "--"]
