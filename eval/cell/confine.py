"""Isolation of a cell: its own process and mount namespaces, limits, no capabilities, a filter of system calls.

Called after the fork and before the program. bubblewrap's isolation of the worker (read-only system, no network, no
environment) holds for every cell in it.
"""

from __future__ import annotations

import ctypes
import os
import resource
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from eval.cell import FOLDER, seccomp

#: Uid and gid of a program if root started the worker: the kernel does not apply RLIMIT_NPROC to root.
NOBODY = 65534
_CLONE_NEWNS, _CLONE_NEWUSER, _CLONE_NEWPID = 0x00020000, 0x10000000, 0x20000000
_MS_RDONLY, _MS_NOSUID, _MS_NODEV, _MS_BIND, _MS_REC, _MS_PRIVATE = 1, 2, 4, 4096, 16384, 1 << 18
_PR_CAPBSET_DROP, _PR_SET_NO_NEW_PRIVS, _PR_SET_SECCOMP, _SECCOMP_MODE_FILTER = 24, 38, 22, 2
_CAPABILITY_VERSION_3 = 0x20080522
_libc = ctypes.CDLL(None, use_errno=True)


@dataclass(frozen=True, kw_only=True)
class Limits:
    """Limits of one program.

    Args:
        cpu_s: processor time of each process.
        memory_bytes: address space of each process; also the memory of all processes and sockets together, polled.
        tmp_bytes: files in the cell's folder, which is in memory and counted separately.
        file_bytes: size of one file.
        open_files: open files of each process.
        processes: maximum number of simultaneous processes and threads.
        signals: maximum number of pending signals and timers.
        hidden: files of the system that it must not see.
    """

    cpu_s: int
    memory_bytes: int
    tmp_bytes: int = 64 << 20
    file_bytes: int = 32 << 20
    open_files: int = 128
    processes: int = 32
    signals: int = 128
    hidden: tuple[str, ...] = ()


class _Filter(ctypes.Structure):
    _fields_ = (("length", ctypes.c_ushort), ("instructions", ctypes.c_char_p))


def begin_own_processes() -> bool:
    """Continue in a process that may create process namespaces without a sandbox; false if the kernel forbids it.

    The calling process ends. The one that returns is the first process of a new namespace.
    """
    # Tried in another process first, because a process that fails half-way has lost its user id.
    trial = os.fork()
    if not trial:
        with suppress(OSError):
            _unshare_processes()
            os._exit(0)
        os._exit(1)
    if os.waitpid(trial, 0)[1] != 0:
        return False
    _unshare_processes()
    if os.fork():
        os._exit(0)
    return True


def _unshare_processes() -> None:
    user, group = os.geteuid(), os.getegid()
    _call("unshare", _CLONE_NEWUSER | _CLONE_NEWPID)
    for name, content in (("setgroups", "deny"), ("uid_map", f"{user} {user} 1"), ("gid_map", f"{group} {group} 1")):
        Path("/proc/self", name).write_text(content, encoding="ascii")


def fork_with_own_processes(own: int) -> int:
    """Fork a child that is the first process of a new namespace: when it dies, its descendants die too.

    ``own`` is an open ``/proc/self/ns/pid`` of this process.
    """
    _call("unshare", _CLONE_NEWPID)
    child = os.fork()
    if child:
        _call("setns", own, _CLONE_NEWPID)  # otherwise this process could not fork into another namespace
    return child


def enter(limits: Limits, *, namespaces: bool) -> None:
    """Isolate this process; ``namespaces`` creates the mounts of a cell. OSError: the kernel refused a step."""
    # A signal to its process group (`kill(0, n)`) must not reach the examiner: namespaces don't separate process groups
    # and sessions.
    os.setsid()
    Path("/proc/self/oom_score_adj").write_text("1000", encoding="ascii")
    if namespaces:
        user = NOBODY if _has_user(NOBODY) else None
        _mount(limits)
        os.chdir(FOLDER)
        _set_limits(limits)
        drop_rights(user)
    else:
        _set_limits(limits)
        drop_rights()
    _call("prctl", _PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0)
    code = seccomp.program()
    _call("prctl", _PR_SET_SECCOMP, _SECCOMP_MODE_FILTER, ctypes.byref(_Filter(len(code) // 8, code)), 0, 0)


def drop_rights(user: int | None = None) -> None:
    """Drop every capability irreversibly, and become another user if one is given."""
    capability = 0
    while _libc.prctl(_PR_CAPBSET_DROP, capability, 0, 0, 0) == 0:
        capability += 1  # until the last one of this kernel
    if user is not None:
        os.setgroups([])
        os.setresgid(user, user, user)
        os.setresuid(user, user, user)
    header = (ctypes.c_uint32 * 2)(_CAPABILITY_VERSION_3, 0)
    _call("capset", header, (ctypes.c_uint32 * 6)())


def _mount(limits: Limits) -> None:
    _call("unshare", _CLONE_NEWNS)
    _mount_one("none", "/", "", _MS_REC | _MS_PRIVATE, "")
    for path in limits.hidden:
        _mount_one("/dev/null", path, "", _MS_BIND, "")
    size = f"size={limits.tmp_bytes},nr_inodes=16384,mode=1777"
    _mount_one("tmpfs", FOLDER, "tmpfs", _MS_NOSUID | _MS_NODEV, size)
    # A program needs nothing from /proc, and must not see the worker's.
    _mount_one("tmpfs", "/proc", "tmpfs", _MS_NOSUID | _MS_NODEV | _MS_RDONLY, "size=4k")


def _mount_one(source: str, target: str, kind: str, flags: int, options: str) -> None:
    texts = [os.fsencode(text) for text in (source, target, kind)]
    _call("mount", *texts, ctypes.c_ulong(flags), os.fsencode(options))


def _set_limits(limits: Limits) -> None:
    values = {
        resource.RLIMIT_CPU: limits.cpu_s,
        resource.RLIMIT_AS: limits.memory_bytes,
        resource.RLIMIT_FSIZE: limits.file_bytes,
        resource.RLIMIT_NOFILE: limits.open_files,
        resource.RLIMIT_NPROC: limits.processes,
        resource.RLIMIT_SIGPENDING: limits.signals,
        resource.RLIMIT_CORE: 0,
        resource.RLIMIT_MEMLOCK: 0,
    }
    for name, value in values.items():
        hard = resource.getrlimit(name)[1]
        limit = value if hard == resource.RLIM_INFINITY else min(value, hard)
        resource.setrlimit(name, (limit, limit))


def _has_user(uid: int) -> bool:
    ranges = [map(int, line.split()) for line in Path("/proc/self/uid_map").read_text(encoding="ascii").splitlines()]
    return any(first <= uid < first + count for first, _, count in ranges)


def _call(name: str, *arguments: object) -> None:
    if getattr(_libc, name)(*arguments) != 0:
        number = ctypes.get_errno()
        raise OSError(number, f"{name}: {os.strerror(number)}")
