"""The cell's filter of system calls: no new namespaces, no memory outside of processes, only local sockets.

The filter closes the ways around limits and namespaces. A new namespace would give rights, and file systems in memory
without a limit. Memory behind a file descriptor or a System V key counts for no process. Neither do pages of shared
memory without a file after ``madvise``, or pages in a pipe after ``splice``. Some address families (vsock) ignore
network namespaces. The numbers of system calls are Linux's (arch/x86/entry/syscalls/syscall_64.tbl;
include/uapi/asm-generic/unistd.h for aarch64). docs/decisions/0025-the-filter-of-system-calls.md says why libseccomp
is not used.
"""

from __future__ import annotations

import errno
import functools
import platform
import socket
import struct
from dataclasses import dataclass

#: The kernel's AUDIT_ARCH of each processor, in the order of the columns below.
_ARCHITECTURES = {"x86_64": 0xC000003E, "aarch64": 0xC00000B7}
#: Refused with any arguments, by number on x86_64 and aarch64.
DENIED = {
    "acct": (163, 89),
    "add_key": (248, 217),
    "bpf": (321, 280),
    "chroot": (161, 51),
    "delete_module": (176, 106),
    "finit_module": (313, 273),
    "fsconfig": (431, 431),
    "fsmount": (432, 432),
    "fsopen": (430, 430),
    "fspick": (433, 433),
    "init_module": (175, 105),
    "io_uring_setup": (425, 425),
    "kcmp": (312, 272),
    "kexec_file_load": (320, 294),
    "kexec_load": (246, 104),
    "keyctl": (250, 219),
    "memfd_create": (319, 279),
    "memfd_secret": (447, 447),
    "mount": (165, 40),
    "mount_setattr": (442, 442),
    "move_mount": (429, 429),
    "mq_open": (240, 180),
    "msgget": (68, 186),
    "name_to_handle_at": (303, 264),
    "open_by_handle_at": (304, 265),
    "open_tree": (428, 428),
    "perf_event_open": (298, 241),
    "personality": (135, 92),
    "pidfd_getfd": (438, 438),
    "pivot_root": (155, 41),
    "process_vm_readv": (310, 270),
    "process_vm_writev": (311, 271),
    "ptrace": (101, 117),
    "quotactl": (179, 60),
    "reboot": (169, 142),
    "request_key": (249, 218),
    "semget": (64, 190),
    "sendfile": (40, 71),
    "setns": (308, 268),
    "shmat": (30, 196),
    "shmget": (29, 194),
    "splice": (275, 76),
    "swapoff": (168, 225),
    "swapon": (167, 224),
    "syslog": (103, 116),
    "tee": (276, 77),
    "umount2": (166, 39),
    "unshare": (272, 97),
    "userfaultfd": (323, 282),
    "vmsplice": (278, 75),
}
#: Refused depending on their arguments.
CLONE, CLONE3, SOCKET, SOCKETPAIR = (56, 220), (435, 435), (41, 198), (53, 199)
MMAP, SETSOCKOPT, FCNTL = (9, 222), (54, 208), (72, 25)
#: CLONE_NEWNS, NEWCGROUP, NEWUTS, NEWIPC, NEWUSER, NEWPID, NEWNET.
_NEW_NAMESPACE = 0x00020000 | 0x02000000 | 0x04000000 | 0x08000000 | 0x10000000 | 0x20000000 | 0x40000000
_MAP_SHARED, _MAP_ANONYMOUS, _MAP_HUGETLB = 0x01, 0x20, 0x40000
#: F_SETLK, F_SETLKW, F_OFD_SETLK, F_OFD_SETLKW: a lock on a range of a file uses kernel memory, without a limit.
_LOCKING = (6, 7, 37, 38)
_F_SETPIPE_SZ = 1031
#: System calls of the x32 interface have this bit, and other numbers.
_X32 = 0x40000000
_LOAD, _IF_EQUAL, _IF_AT_LEAST, _IF_ANY_BIT, _RETURN = 0x20, 0x15, 0x35, 0x45, 0x06
_ALLOW, _REFUSE, _KILL_PROCESS = 0x7FFF0000, 0x00050000, 0x80000000
# Offsets in the kernel's seccomp_data. An argument has 8 bytes; the lower half is first, and only it is compared.
_NUMBER_AT, _ARCHITECTURE_AT, _ARGUMENTS_AT = 0, 4, 16


@dataclass(frozen=True)
class _Rule:
    """A system call that is refused if all conditions on its arguments hold.

    Args:
        call: its number on each processor.
        conditions: index of an argument, comparison, value, and whether the comparison must be true or false.
    """

    call: tuple[int, int]
    conditions: tuple[tuple[int, int, int, bool], ...]
    error: int = errno.EPERM

    def lines(self, column: int) -> list[tuple[int, int, int, int]]:
        """Return the rule's instructions; the call's number is loaded before and after them."""
        lines = [_refuse(self.error)]
        for argument, test, value, wanted in reversed(self.conditions):
            past = len(lines)
            jumps = (0, past) if wanted else (past, 0)
            lines = [(_LOAD, 0, 0, _ARGUMENTS_AT + 8 * argument), (test, *jumps, value), *lines]
        reload = (_LOAD, 0, 0, _NUMBER_AT)
        return [(_IF_EQUAL, 0, len(lines) + 1, self.call[column]), *lines, reload]


_RULES = (
    _Rule(CLONE, ((0, _IF_ANY_BIT, _NEW_NAMESPACE, True),)),
    _Rule(SOCKET, ((0, _IF_EQUAL, int(socket.AF_UNIX), False),), errno.EAFNOSUPPORT),
    _Rule(SOCKETPAIR, ((0, _IF_EQUAL, int(socket.AF_UNIX), False),), errno.EAFNOSUPPORT),
    _Rule(MMAP, ((3, _IF_ANY_BIT, _MAP_SHARED, True), (3, _IF_ANY_BIT, _MAP_ANONYMOUS, True))),
    _Rule(MMAP, ((3, _IF_ANY_BIT, _MAP_HUGETLB, True),)),
    # `eval.cell.memory` counts the default size of the buffer for each socket.
    _Rule(SETSOCKOPT, ((1, _IF_EQUAL, int(socket.SOL_SOCKET), True), (2, _IF_EQUAL, int(socket.SO_SNDBUF), True))),
    *(_Rule(FCNTL, ((1, _IF_EQUAL, command, True),)) for command in (_F_SETPIPE_SZ, *_LOCKING)),
)


@functools.cache
def program(machine: str = "") -> bytes:
    """Return the filter for a processor, by default this one, as classic BPF: 8 bytes per instruction.

    Raises:
        OSError: the processor is neither x86_64 nor aarch64.
    """
    machine = machine or platform.machine()
    if machine not in _ARCHITECTURES:
        raise OSError(errno.ENOSYS, f"there is no filter of system calls for {machine}")
    column = list(_ARCHITECTURES).index(machine)
    lines = [(_LOAD, 0, 0, _ARCHITECTURE_AT), (_IF_EQUAL, 1, 0, _ARCHITECTURES[machine]), _return(_KILL_PROCESS)]
    lines += [(_LOAD, 0, 0, _NUMBER_AT), (_IF_AT_LEAST, 0, 1, _X32), _refuse(errno.EPERM)]
    for numbers in DENIED.values():
        lines += [(_IF_EQUAL, 0, 1, numbers[column]), _refuse(errno.EPERM)]
    # The C library then falls back to clone, whose flags a filter can read.
    lines += [(_IF_EQUAL, 0, 1, CLONE3[column]), _refuse(errno.ENOSYS)]
    for rule in _RULES:
        lines += rule.lines(column)
    return b"".join(struct.pack("=HBBI", *line) for line in [*lines, _return(_ALLOW)])


def _return(action: int) -> tuple[int, int, int, int]:
    return (_RETURN, 0, 0, action)


def _refuse(error: int) -> tuple[int, int, int, int]:
    return _return(_REFUSE | error)
