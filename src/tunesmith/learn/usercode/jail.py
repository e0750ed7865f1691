"""Confines a forked process with what Linux has for everybody: namespaces, Landlock, seccomp and
resource limits.

``enter`` is called in a fork, whose processes then see no others and end with it. They can read
the given paths, change only a small file system of their own, open no sockets, and be only so
many. A part that the machine refuses raises: nothing runs half confined.

Imports only the standard library: the fork server of ``killable_child.py`` loads it by its path.
"""

from __future__ import annotations

import ctypes
import fcntl
import os
import platform
import resource
import shutil
import signal
import socket
import struct
from collections.abc import Sequence
from typing import NoReturn, TypedDict


class Jail(TypedDict):
    """How a process is confined."""

    read: list[str]
    """Paths that can be read and executed."""
    names: list[str]
    """Directories whose names can be read."""
    hidden: list[str]
    """Directories in which only Python files on import paths can be read."""
    folder: str
    """Where its own file system is mounted, the working directory."""
    files: int
    """Bytes of that."""
    processes: int
    """How many, threads counted."""
    network: bool
    """Whether internet sockets can be opened."""
    listens: bool
    """Whether it listens on a loopback interface, its own one without ``network``."""


_NEW_NAMESPACES = 0x20000000 | 0x08000000 | 0x00020000
"""CLONE_NEWPID, CLONE_NEWIPC and CLONE_NEWNS."""
_NEW_USER = 0x10000000
_NEW_NETWORK = 0x40000000
_SET_FLAGS = 0x8914
"""SIOCSIFFLAGS."""
_UP = 0x1
_FIRST_USER = 0x70000000
"""The first user id of jails that a root process starts: each jail has its own user, so that its
processes are counted apart."""
_MOST_FILES = 4096
_MOST_OPEN = 512
_PRIVATE = 0x44000
"""MS_REC | MS_PRIVATE."""
_TMPFS = 0x6
"""MS_NOSUID | MS_NODEV."""
_MOUNT_SETATTR = 442
_HERE = -100
"""AT_FDCWD."""
_RECURSIVE = 0x8000
_READ_ONLY = struct.pack("=4Q", 1, 0, 0, 0)
"""A ``mount_attr`` that sets MOUNT_ATTR_RDONLY."""
_READ_SEARCH = 1 << 2
"""CAP_DAC_READ_SEARCH: a jail of root can read what root can, as far as Landlock lets it."""
_PDEATHSIG = 1
_KEEPCAPS = 8
_AMBIENT = 47
_NO_NEW_PRIVS = 38
_SECCOMP = 22

# Landlock's rights, from <linux/landlock.h>.
_READ = 0b1101
"""Execute, read files and directories."""
_LIST = 0b1000
_OF_FILES = 0b1100_0000_0000_0111
"""The rights that a rule on a file may name."""
_WRITE_DEVICE = 0b110
_RIGHTS = {1: 13, 2: 14, 3: 15, 4: 15, 5: 16, 6: 16}
"""Number of rights on files that each version knows."""
_DEVICES = ("/dev/null", "/dev/zero", "/dev/random", "/dev/urandom")
SYSTEM = (
    "/usr", "/bin", "/sbin", "/lib", "/lib64", "/etc/ld.so.cache", "/etc/localtime", "/etc/passwd",
    "/etc/group", "/etc/nsswitch.conf", "/etc/alternatives", "/sys/devices/system/cpu",
)  # fmt: skip
"""What programs need of the system."""
NETWORK = ("/etc/hosts", "/etc/resolv.conf", "/etc/ssl", "/etc/ca-certificates")
_CALLS = {
    "x86_64": {
        "arch": 0xC000003E, "socket": 41, "by_handle": 304, "unshare": 272, "clone": 56,
        "mmap": 9, "shmget": 29, "memfd": 319, "socketpair": 53,
    },
    "aarch64": {
        "arch": 0xC00000B7, "socket": 198, "by_handle": 265, "unshare": 97, "clone": 220,
        "mmap": 222, "shmget": 194, "memfd": 279, "socketpair": 199,
    },
}  # fmt: skip
_IO_URING_SETUP = 425
_CLONE3 = 435
"""Its flags are in memory, which a filter cannot read; the C library then uses ``clone``."""
_ANY_NAMESPACE = 0x7E020000
_SHARED_MEMORY = 0x21
"""MAP_SHARED | MAP_ANONYMOUS: no limit of a process counts it."""
_UNIX = 1
_STREAM = 1
"""SOCK_STREAM: from other pairs of sockets, messages can be sent to any socket of this machine."""
# Of the language of filters, from <linux/bpf_common.h> and <linux/seccomp.h>.
_LOAD = 0x20
_EQUAL = 0x15
_AT_LEAST = 0x35
_ANY_BIT = 0x45
_AND = 0x54
_ALLOWED = 0x7FFF0000

_libc = ctypes.CDLL(None, use_errno=True)


class JailError(OSError):
    """A part of the confinement that this machine refuses."""


def missing() -> str:
    """Why this machine cannot confine a process; empty if it can. Forks to find out."""
    if platform.system() != "Linux" or platform.machine() not in _CALLS:
        return f"{platform.system()} on {platform.machine()} is not Linux on x86-64 or ARM64"
    if _landlock() < 1:
        return "its kernel has no Landlock (Linux 5.13, and lsm=landlock)"
    child = os.fork()
    if child == 0:
        root = os.geteuid() == 0
        done = _libc.unshare(_NEW_NAMESPACES | (0 if root else _NEW_USER))
        os._exit(0 if done == 0 else 1)
    if os.waitpid(child, 0)[1]:
        return "it allows no new namespaces (a container needs --security-opt seccomp=unconfined)"
    return ""


def enter(jail: Jail) -> int | None:
    """Go on in a confined process; the calling one waits for it and ends as it does.

    Returns:
        The socket that it listens on, if it does.
    """
    user = os.geteuid()
    group = os.getegid()
    root = user == 0
    apart = jail["listens"] and not jail["network"]
    spaces = _NEW_NAMESPACES | (0 if root else _NEW_USER) | (_NEW_NETWORK if apart else 0)
    _try("namespaces", _libc.unshare(spaces))
    if not root:
        for name, text in (
            ("setgroups", "deny"),
            ("uid_map", f"{user} {user} 1"),
            ("gid_map", f"{group} {group} 1"),
        ):
            with open(f"/proc/self/{name}", "w", encoding="ascii") as file:
                file.write(text)
    listener = _listener(apart) if jail["listens"] else None
    own = _FIRST_USER + os.getpid() if root else user
    inner = os.fork()
    if inner:
        _end_as(inner)
    os.setsid()  # signals to its process group reach nobody outside
    _libc.prctl(_PDEATHSIG, signal.SIGKILL)
    _try("mounts", _libc.mount(b"none", b"/", None, _PRIVATE, None))
    # Landlock lets the owner of a file change its mode, owner, times and attributes.
    size = ctypes.c_size_t(len(_READ_ONLY))
    _try("mounts", _libc.syscall(_MOUNT_SETATTR, _HERE, b"/", _RECURSIVE, _READ_ONLY, size))
    options = f"size={jail['files']},nr_inodes={_MOST_FILES},mode=0700"
    options += f",uid={own},gid={own if root else group}"
    folder = os.fsencode(jail["folder"])
    _try("a file system", _libc.mount(b"tmpfs", folder, b"tmpfs", _TMPFS, options.encode()))
    for limit, most in (
        (resource.RLIMIT_NPROC, jail["processes"]),
        (resource.RLIMIT_FSIZE, jail["files"]),
        (resource.RLIMIT_NOFILE, min(_MOST_OPEN, resource.getrlimit(resource.RLIMIT_NOFILE)[1])),
        (resource.RLIMIT_CORE, 0),
    ):
        resource.setrlimit(limit, (most, most))
    kept = _READ_SEARCH if root else 0
    if root:
        _try("capabilities", _libc.prctl(_KEEPCAPS, 1, 0, 0, 0))
        os.setgroups([])
        os.setresgid(own, own, own)
        os.setresuid(own, own, own)
    _keep_capabilities(kept)
    _libc.prctl(_PDEATHSIG, signal.SIGKILL)  # changing the user cleared it
    _try("no_new_privs", _libc.prctl(_NO_NEW_PRIVS, 1, 0, 0, 0))
    os.chdir(folder)
    _restrict_files(jail)
    _restrict_calls(network=jail["network"] or apart)
    return listener


def _listener(apart: bool) -> int:
    """A socket that listens on the loopback interface; ``apart``: that of a new namespace."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        if apart:
            fcntl.ioctl(listener, _SET_FLAGS, struct.pack("16sh22x", b"lo", _UP))
        return listener.detach()


def _end_as(inner: int) -> NoReturn:
    status = os.waitpid(inner, 0)[1]
    if os.WIFSIGNALED(status):
        signal.signal(signal.SIGINT, signal.SIG_DFL)
        os.kill(os.getpid(), os.WTERMSIG(status))
    os._exit(os.waitstatus_to_exitcode(status) & 0xFF)


def _keep_capabilities(kept: int) -> None:
    header = struct.pack("=Ii", 0x20080522, 0)
    _try("capabilities", _libc.capset(header, struct.pack("=6I", kept, kept, kept, 0, 0, 0)))
    if kept:  # also in the programs that it executes
        _try("capabilities", _libc.prctl(_AMBIENT, 2, 2, 0, 0))


def _landlock() -> int:
    """The version of Landlock; 0 or less: there is none."""
    return _libc.syscall(444, None, ctypes.c_size_t(0), 1)


def _restrict_files(jail: Jail) -> None:
    version = _landlock()
    if version < 1:
        raise JailError("Landlock: this kernel has none")
    rights = (1 << _RIGHTS.get(version, max(_RIGHTS.values()))) - 1
    scoped = 0b11 if version >= 6 else 0
    attributes = struct.pack("=QQQ", rights, 0, scoped)[: 24 if scoped else 8]
    size = ctypes.c_size_t(len(attributes))
    rules = _try("Landlock", _libc.syscall(444, attributes, size, 0))
    network = NETWORK if jail["network"] or jail["listens"] else ()
    granted = [
        *((path, _READ) for path in (*SYSTEM, *network, *jail["read"])),
        *((path, _LIST) for path in jail["names"]),
        *((path, _WRITE_DEVICE) for path in _DEVICES),
        (jail["folder"], rights),
    ]
    for path, allowed in granted:
        _grant(rules, path, allowed & rights)
    _try("Landlock", _libc.syscall(446, rules, 0))
    os.close(rules)


def _grant(rules: int, path: str, allowed: int) -> None:
    try:
        place = os.open(path, os.O_PATH | os.O_CLOEXEC)
    except OSError:  # not on this machine
        return
    if not os.path.isdir(path):
        allowed &= _OF_FILES
    if allowed:
        _try("Landlock", _libc.syscall(445, rules, 1, struct.pack("=Qi", allowed, place), 0))
    os.close(place)


def _restrict_calls(*, network: bool) -> None:
    """Refuse sockets (with ``network``: those of this machine only), memory that no limit counts,
    and what goes around Landlock or this filter."""
    calls = _CALLS[platform.machine()]
    end = 0x06
    killed = 0x80000000
    refused = 0x00050001
    unknown = 0x00050026
    no_memory = 0x0005000C
    program: list[tuple[int, int, int, int]] = [
        (_LOAD, 0, 0, 4),
        (_EQUAL, 1, 0, calls["arch"]),
        (end, 0, 0, killed),
        (_LOAD, 0, 0, 0),
        (_AT_LEAST, 0, 1, 0x40000000),  # x32
        (end, 0, 0, killed),
        (_EQUAL, 0, 1, _CLONE3),
        (end, 0, 0, unknown),
        (_EQUAL, 4, 0, _IO_URING_SETUP),
        (_EQUAL, 3, 0, calls["by_handle"]),
        (_EQUAL, 2, 0, calls["shmget"]),
        (_EQUAL, 1, 0, calls["memfd"]),
        (_EQUAL, 0, 1, calls["unshare"]),
        (end, 0, 0, refused),
        (_EQUAL, 0, 5, calls["mmap"]),
        (_LOAD, 0, 0, 40),
        (_AND, 0, 0, _SHARED_MEMORY),
        (_EQUAL, 0, 1, _SHARED_MEMORY),
        (end, 0, 0, no_memory),
        (end, 0, 0, _ALLOWED),
        (_EQUAL, 0, 4, calls["clone"]),
        (_LOAD, 0, 0, 16),
        (_ANY_BIT, 0, 1, _ANY_NAMESPACE),
        (end, 0, 0, refused),
        (end, 0, 0, _ALLOWED),
        (_EQUAL, 0, 5, calls["socketpair"]),
        (_LOAD, 0, 0, 24),
        (_AND, 0, 0, 0xF),
        (_EQUAL, 1, 0, _STREAM),
        (end, 0, 0, refused),
        (end, 0, 0, _ALLOWED),
        (_EQUAL, 1, 0, calls["socket"]),
        (end, 0, 0, _ALLOWED),
    ]
    if network:
        program += [(_LOAD, 0, 0, 16), (_EQUAL, 1, 0, _UNIX), (end, 0, 0, _ALLOWED)]
    program.append((end, 0, 0, refused))
    held = ctypes.create_string_buffer(b"".join(struct.pack("=HBBI", *line) for line in program))
    filters = struct.pack("@HP", len(program), ctypes.addressof(held))
    _try("seccomp", _libc.prctl(_SECCOMP, 2, filters, 0, 0))


def _try(what: str, result: int) -> int:
    if result < 0:
        number = ctypes.get_errno()
        raise JailError(number, f"{what}: {os.strerror(number)}")
    return result


def interpreter_paths() -> list[str]:
    """Directories of the ``python3`` that programs find, where that is a virtual environment's."""
    found = shutil.which("python3") or ""
    own = os.path.dirname(os.path.dirname(found))
    if not os.path.isfile(os.path.join(own, "pyvenv.cfg")):
        return []
    return [own, os.path.dirname(os.path.dirname(os.path.realpath(found)))]


def paths_for(search: Sequence[str], hidden: Sequence[str]) -> tuple[list[str], list[str]]:
    """``read`` and ``names`` of a jail for Python with this import path.

    A directory that holds a ``hidden`` one is opened only for its Python files and packages.
    """
    read: list[str] = []
    listed: list[str] = []
    around = [os.path.realpath(path) for path in hidden]
    for entry in dict.fromkeys(os.path.realpath(path or ".") for path in search):
        holds = any(f"{path}/".startswith(f"{entry}/") for path in around)
        if not holds or not os.path.isdir(entry):
            read.append(entry)
            continue
        listed.append(entry)
        for name in os.listdir(entry):
            path = os.path.join(entry, name)
            package = os.path.isfile(os.path.join(path, "__init__.py"))
            if name.endswith(".py") or package:
                read.append(path)
    return read, listed
