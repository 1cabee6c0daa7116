"""The filter has the kernel's numbers, and refuses what it should."""

from __future__ import annotations

import errno
import fcntl
import mmap
import re
import socket
import struct
from pathlib import Path

import pytest

from eval.cell import seccomp

_HEADERS = {
    "x86_64": [Path("/usr/include/x86_64-linux-gnu/asm/unistd_64.h"), Path("/usr/include/asm/unistd_64.h")],
    "aarch64": [Path("/usr/include/asm-generic/unistd.h")],
}
_ALLOW, _KILL = 0x7FFF0000, 0x80000000


def _decide(machine: str, number: int, *arguments: int, architecture: int | None = None) -> int:
    """Return the action that the kernel would take, by running the classic BPF."""
    code: list[tuple[int, int, int, int]] = [struct.unpack("=HBBI", line) for line in _lines(seccomp.program(machine))]
    data = {0: number, 4: seccomp._ARCHITECTURES[machine] if architecture is None else architecture}
    data |= {16 + 8 * place: argument for place, argument in enumerate((*arguments, *[0] * 6)[:6])}
    at = loaded = 0
    while True:
        operation, yes, no, value = code[at]
        if operation == seccomp._RETURN:
            return value
        at += 1
        if operation == seccomp._LOAD:
            loaded = data[value]
            continue
        holds = {
            seccomp._IF_EQUAL: loaded == value,
            seccomp._IF_AT_LEAST: loaded >= value,
            seccomp._IF_ANY_BIT: loaded & value != 0,
        }[operation]
        at += yes if holds else no


def _lines(code: bytes) -> list[bytes]:
    return [code[at : at + 8] for at in range(0, len(code), 8)]


def _refused(error: int) -> int:
    return seccomp._REFUSE | error


#: What would disturb the machine or get around limits, on x86_64 and aarch64: each must stay off the list.
_HARMFUL = {
    "add_key": (248, 217),
    "bpf": (321, 280),
    "connect": (42, 203),
    "fadvise64": (221, 223),
    "fallocate": (285, 47),
    "fanotify_init": (300, 262),
    "fdatasync": (75, 83),
    "flock": (73, 32),
    "fsync": (74, 82),
    "inotify_init1": (294, 26),
    "io_setup": (206, 0),
    "io_uring_setup": (425, 425),
    "ioprio_set": (251, 30),
    "keyctl": (250, 219),
    "memfd_create": (319, 279),
    "mlock": (149, 228),
    "mount": (165, 40),
    "msync": (26, 227),
    "perf_event_open": (298, 241),
    "process_vm_writev": (311, 271),
    "ptrace": (101, 117),
    "readahead": (187, 213),
    "sched_setaffinity": (203, 122),
    "setns": (308, 268),
    "setpriority": (141, 140),
    "splice": (275, 76),
    "sync": (162, 81),
    "sync_file_range": (277, 84),
    "syncfs": (306, 267),
    "timer_create": (222, 107),
    "timerfd_create": (283, 85),
    "unshare": (272, 97),
    "userfaultfd": (323, 282),
}


@pytest.mark.parametrize("machine", ["x86_64", "aarch64"])
def test_what_is_not_on_the_list_is_refused(machine: str) -> None:
    column = list(seccomp._ARCHITECTURES).index(machine)
    allowed = {numbers[column] for numbers in seccomp.ALLOWED.values()}
    rules = {rule.call[column] for rule in seccomp._RULES}
    for number in range(500):
        unknown = number >= seccomp._NEWER or number == seccomp.CLONE3
        if number not in rules:
            refused = _refused(errno.ENOSYS if unknown else errno.EPERM)
            assert _decide(machine, number) == (_ALLOW if number in allowed else refused), number
    for name, numbers in _HARMFUL.items():
        assert _decide(machine, numbers[column]) == _refused(errno.EPERM), name
    assert _decide(machine, seccomp.CLONE[column], 17) == _ALLOW  # a fork: SIGCHLD alone
    for bit in (17, 25, 26, 27, 28, 29, 30):
        assert _decide(machine, seccomp.CLONE[column], 17 | 1 << bit) == _refused(errno.EPERM)
    for call in (seccomp.SOCKET, seccomp.SOCKETPAIR):
        assert _decide(machine, call[column], 1) == _ALLOW
        for family in (2, 10, 16, 17, 30, 40):
            assert _decide(machine, call[column], family) == _refused(errno.EAFNOSUPPORT)


@pytest.mark.parametrize("machine", ["x86_64", "aarch64"])
def test_memory_that_no_process_would_be_charged_for_is_refused(machine: str) -> None:
    column = list(seccomp._ARCHITECTURES).index(machine)
    shared, private, anonymous, huge = mmap.MAP_SHARED, mmap.MAP_PRIVATE, mmap.MAP_ANONYMOUS, 0x40000
    for flags in (private, private | anonymous, shared):
        assert _decide(machine, seccomp.MMAP[column], 0, 4096, 3, flags) == _ALLOW, flags
    for flags in (shared | anonymous, 3 | anonymous, private | anonymous | huge):  # 3: MAP_SHARED_VALIDATE
        assert _decide(machine, seccomp.MMAP[column], 0, 4096, 3, flags) == _refused(errno.EPERM), flags
    assert _decide(machine, seccomp.SETSOCKOPT[column], 3, 1, socket.SO_RCVBUF) == _ALLOW
    assert _decide(machine, seccomp.SETSOCKOPT[column], 3, 6, socket.SO_SNDBUF) == _ALLOW
    assert _decide(machine, seccomp.SETSOCKOPT[column], 3, 1, socket.SO_SNDBUF) == _refused(errno.EPERM)
    assert _decide(machine, seccomp.FCNTL[column], 3, fcntl.F_GETFL) == _ALLOW
    for command in (fcntl.F_SETLK, fcntl.F_SETLKW, fcntl.F_SETLEASE, fcntl.F_NOTIFY, 1031):  # F_SETPIPE_SZ
        assert _decide(machine, seccomp.FCNTL[column], 3, command) == _refused(errno.EPERM)


def test_calls_of_other_interfaces_have_other_numbers_and_are_refused() -> None:
    assert _decide("x86_64", 0x40000000 | 1) == _refused(errno.EPERM)
    assert _decide("x86_64", 1, architecture=0x40000003) == _KILL  # 32 bits, as in int 0x80


def test_a_processor_without_numbers_is_an_error() -> None:
    with pytest.raises(OSError, match="there is no filter of system calls for riscv64"):
        seccomp.program("riscv64")


@pytest.mark.parametrize("machine", ["x86_64", "aarch64"])
def test_the_numbers_are_those_of_the_kernels_headers(machine: str) -> None:
    header = next((path for path in _HEADERS[machine] if path.is_file()), None)
    if header is None:
        pytest.skip("the kernel's headers are not installed (linux-libc-dev)")
    text = header.read_text(encoding="utf-8")
    theirs = {name: int(number) for name, number in re.findall(r"#define __NR(?:3264)?_(\w+)\s+(\d+)\b", text)}
    column = list(seccomp._ARCHITECTURES).index(machine)
    named = {**seccomp.ALLOWED, **_HARMFUL}
    assert {rule.call for rule in seccomp._RULES} <= set(seccomp.ALLOWED.values())
    ours = {name: number for name, numbers in named.items() if (number := numbers[column]) is not None}
    theirs.setdefault("newfstatat", theirs.get("fstatat", ours["newfstatat"]))
    assert theirs["clone3"] == seccomp.CLONE3
    # Old headers lack new calls.
    assert {name: theirs.get(name, number) for name, number in ours.items()} == ours
    assert len(set(ours) & set(theirs)) > 40
