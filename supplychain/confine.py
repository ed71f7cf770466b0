"""The last step before a launched program: tie its life to the launcher's, fence it in, then become it.

Started by path as `python -I -S confine.py --read P... --write P... --level L -- COMMAND`. With Landlock
(unprivileged, Linux 5.13 or newer) the program and all that it starts can read only the given paths and write
only the given ones: not the key on disk, not the statements of its own run. It is told to end (SIGTERM) when
the launcher dies, however that happens. Standard library only.

Landlock does not cover network, chmod and times of files; `level` says what is wanted: `auto` takes what the
kernel has, `required` refuses to start without it, `off` leaves it out.
"""

from __future__ import annotations

import ctypes
import os
import signal
import struct
import sys
from collections.abc import Sequence
from pathlib import Path

_PR_SET_PDEATHSIG, _PR_SET_DUMPABLE, _PR_SET_CHILD_SUBREAPER, _PR_SET_NO_NEW_PRIVS = 1, 4, 36, 38
# System calls: the same numbers on every architecture of Linux.
_CREATE_RULESET, _ADD_RULE, _RESTRICT_SELF = 444, 445, 446
_VERSION_FLAG, _PATH_BENEATH = 1, 1

_EXECUTE, _WRITE_FILE, _READ_FILE, _READ_DIR = 1 << 0, 1 << 1, 1 << 2, 1 << 3
_ALL_ABI_1 = (1 << 13) - 1  # every access to files that the first version knows
_REFER, _TRUNCATE = 1 << 13, 1 << 14  # since ABI 2 and 3
_SCOPE_SIGNAL = 1 << 1  # since ABI 6: no signals to processes outside the fence
_READ = _EXECUTE | _READ_FILE | _READ_DIR
_ON_FILES = (
    _EXECUTE | _WRITE_FILE | _READ_FILE | _TRUNCATE
)  # accesses that make sense for something that is no folder


def landlock_abi() -> int:
    """The kernel's Landlock version; 0 where there is none."""
    if sys.platform != "linux":
        return 0
    return max(0, int(_libc().syscall(_CREATE_RULESET, None, 0, _VERSION_FLAG)))


def adopt_orphans() -> None:
    """From now on, descendants that lose their parent become children of this process, so that none escapes
    it.
    """
    if sys.platform == "linux":
        _libc().prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)


def hide_memory() -> None:
    """Other processes of this user can no longer read this one's memory, open files and variables: it holds a
    key.
    """
    if sys.platform == "linux":
        _libc().prctl(_PR_SET_DUMPABLE, 0, 0, 0, 0)


def fence(read: Sequence[Path], write: Sequence[Path]) -> None:
    """From now on this process and its children reach only these paths, and all below them. Paths that do not
    exist are left out. OSError.
    """
    abi = landlock_abi()
    handled = _ALL_ABI_1 | (_REFER if abi >= 2 else 0) | (_TRUNCATE if abi >= 3 else 0)
    attributes = struct.pack("=QQQ", handled, 0, _SCOPE_SIGNAL) if abi >= 6 else struct.pack("=Q", handled)
    ruleset = _call(
        _CREATE_RULESET, ctypes.create_string_buffer(attributes, len(attributes)), len(attributes), 0
    )
    for paths, access in ((read, _READ), (write, handled)):
        for path in paths:
            _allow(ruleset, path, access & handled)
    if _libc().prctl(_PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0):
        raise OSError(ctypes.get_errno(), "no_new_privs cannot be set")
    _call(_RESTRICT_SELF, ruleset, 0)
    os.close(ruleset)


def _allow(ruleset: int, path: Path, access: int) -> None:
    try:
        descriptor = os.open(path, os.O_PATH | os.O_CLOEXEC)
    except (FileNotFoundError, NotADirectoryError):
        return
    if not path.is_dir():
        access &= _ON_FILES
    rule = struct.pack("=Qi", access, descriptor)
    _call(_ADD_RULE, ruleset, _PATH_BENEATH, ctypes.create_string_buffer(rule, len(rule)), 0)
    os.close(descriptor)


def _call(*arguments: object) -> int:
    result = int(_libc().syscall(*arguments))
    if result < 0:
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number))
    return result


def _libc() -> ctypes.CDLL:
    return ctypes.CDLL(None, use_errno=True)


def _die_with_launcher(launcher: int) -> None:
    """SIGTERM when the parent ends. If it has ended already, end now: the signal would never come."""
    if sys.platform == "linux":
        _libc().prctl(_PR_SET_PDEATHSIG, int(signal.SIGTERM), 0, 0, 0)
        if os.getppid() != launcher:
            sys.exit(128 + signal.SIGTERM)


def main(arguments: Sequence[str]) -> None:
    split = arguments.index("--")
    options, command = arguments[:split], arguments[split + 1 :]
    values: dict[str, list[str]] = {"--read": [], "--write": [], "--level": [], "--launcher": []}
    for name, value in zip(options[::2], options[1::2], strict=True):
        values[name].append(value)
    _die_with_launcher(int(values["--launcher"][0]))
    level = values["--level"][0]
    if level == "required" or (level == "auto" and landlock_abi()):
        fence([Path(item) for item in values["--read"]], [Path(item) for item in values["--write"]])
    os.execv(command[0], list(command))


if __name__ == "__main__":
    main(sys.argv[1:])
