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


@pytest.mark.parametrize("machine", ["x86_64", "aarch64"])
def test_what_is_denied_is_refused_and_the_rest_allowed(machine: str) -> None:
    column = list(seccomp._ARCHITECTURES).index(machine)
    denied = {numbers[column] for numbers in seccomp.DENIED.values()}
    special = {numbers[column] for numbers in (seccomp.CLONE, seccomp.CLONE3, seccomp.SOCKET, seccomp.SOCKETPAIR)}
    for number in range(500):
        if number not in special:
            assert _decide(machine, number) == (_refused(errno.EPERM) if number in denied else _ALLOW), number
    assert _decide(machine, seccomp.CLONE3[column]) == _refused(errno.ENOSYS)
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
    for command in (fcntl.F_SETLK, fcntl.F_SETLKW, 1031):  # F_SETPIPE_SZ
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
    named = seccomp.DENIED | {
        "clone": seccomp.CLONE,
        "clone3": seccomp.CLONE3,
        "socket": seccomp.SOCKET,
        "socketpair": seccomp.SOCKETPAIR,
        "mmap": seccomp.MMAP,
        "setsockopt": seccomp.SETSOCKOPT,
        "fcntl": seccomp.FCNTL,
    }
    ours = {name: numbers[column] for name, numbers in named.items()}
    # Old headers lack new calls.
    assert {name: theirs.get(name, number) for name, number in ours.items()} == ours
    assert len(set(ours) & set(theirs)) > 40
