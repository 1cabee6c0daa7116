"""The cell's filter of system calls: those that programs in Python need, and no others.

Other calls would bypass limits and namespaces, or disturb the machine. A new namespace would give rights, and
file systems in memory without a limit. Memory behind a file descriptor or a System V key counts for no process. Neither
do pages of shared memory without a file after ``madvise``, or pages in a pipe after ``splice``. Some address families
(vsock) ignore network namespaces. ``sync`` writes all disks of the machine, ``fsync`` works on files that a program can
only read, and locks on such files stop the processes outside that use them. The numbers of system calls are Linux's
(arch/x86/entry/syscalls/syscall_64.tbl; include/uapi/asm-generic/unistd.h for aarch64). See
docs/decisions/0025-the-filter-of-system-calls.md for why libseccomp is not used, and 0076 for why this is a list of
what is allowed.
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
#: What programs may use, by number on x86_64 and aarch64; None: the processor has no such call.
ALLOWED: dict[str, tuple[int, int | None]] = {
    # Memory of the process itself.
    "brk": (12, 214),
    "madvise": (28, 233),
    "mmap": (9, 222),
    "mprotect": (10, 226),
    "mremap": (25, 216),
    "munmap": (11, 215),
    # Files and pipes. Not: locks, writes to the disk (sync), its cache (fadvise, readahead), watches.
    "access": (21, None),
    "chdir": (80, 49),
    "chmod": (90, None),
    "close": (3, 57),
    "close_range": (436, 436),
    "creat": (85, None),
    "dup": (32, 23),
    "dup2": (33, None),
    "dup3": (292, 24),
    "faccessat": (269, 48),
    "faccessat2": (439, 439),
    "fchdir": (81, 50),
    "fchmod": (91, 52),
    "fchmodat": (268, 53),
    "fcntl": (72, 25),
    "fstat": (5, 80),
    "fstatfs": (138, 44),
    "ftruncate": (77, 46),
    "getcwd": (79, 17),
    "getdents": (78, None),
    "getdents64": (217, 61),
    "ioctl": (16, 29),
    "link": (86, None),
    "linkat": (265, 37),
    "lseek": (8, 62),
    "lstat": (6, None),
    "mkdir": (83, None),
    "mkdirat": (258, 34),
    "newfstatat": (262, 79),
    "open": (2, None),
    "openat": (257, 56),
    "pipe": (22, None),
    "pipe2": (293, 59),
    "pread64": (17, 67),
    "pwrite64": (18, 68),
    "read": (0, 63),
    "readlink": (89, None),
    "readlinkat": (267, 78),
    "readv": (19, 65),
    "rename": (82, None),
    "renameat": (264, 38),
    "renameat2": (316, 276),
    "rmdir": (84, None),
    "stat": (4, None),
    "statfs": (137, 43),
    "statx": (332, 291),
    "symlink": (88, None),
    "symlinkat": (266, 36),
    "truncate": (76, 45),
    "umask": (95, 166),
    "unlink": (87, None),
    "unlinkat": (263, 35),
    "utime": (132, None),
    "utimensat": (280, 88),
    "utimes": (235, None),
    "write": (1, 64),
    "writev": (20, 66),
    # Time and waiting. Not: timers, which are kernel memory.
    "alarm": (37, None),
    "clock_nanosleep": (230, 115),
    "epoll_create1": (291, 20),
    "epoll_ctl": (233, 21),
    "epoll_pwait": (281, 22),
    "epoll_wait": (232, None),
    "futex": (202, 98),
    "getitimer": (36, 102),
    "nanosleep": (35, 101),
    "pause": (34, None),
    "poll": (7, None),
    "ppoll": (271, 73),
    "pselect6": (270, 72),
    "restart_syscall": (219, 128),
    "select": (23, None),
    "setitimer": (38, 103),
    # Threads, processes and signals. Not: priorities, processors, other users, namespaces.
    "arch_prctl": (158, None),
    "clone": (56, 220),
    "execve": (59, 221),
    "exit": (60, 93),
    "exit_group": (231, 94),
    "fork": (57, None),
    "getegid": (108, 177),
    "geteuid": (107, 175),
    "getgid": (104, 176),
    "getgroups": (115, 158),
    "getpgid": (121, 155),
    "getpgrp": (111, None),
    "getpid": (39, 172),
    "getppid": (110, 173),
    "getresgid": (120, 150),
    "getresuid": (118, 148),
    "getsid": (124, 156),
    "gettid": (186, 178),
    "getuid": (102, 174),
    "kill": (62, 129),
    "rseq": (334, 293),
    "rt_sigaction": (13, 134),
    "rt_sigpending": (127, 136),
    "rt_sigprocmask": (14, 135),
    "rt_sigreturn": (15, 139),
    "rt_sigsuspend": (130, 133),
    "rt_sigtimedwait": (128, 137),
    "set_robust_list": (273, 99),
    "set_tid_address": (218, 96),
    "setpgid": (109, 154),
    "setsid": (112, 157),
    "sigaltstack": (131, 132),
    "tgkill": (234, 131),
    "tkill": (200, 130),
    "vfork": (58, None),
    "wait4": (61, 260),
    "waitid": (247, 95),
    # Facts about the machine and the process.
    "clock_getres": (229, 114),
    "clock_gettime": (228, 113),
    "getcpu": (309, 168),
    "getrandom": (318, 278),
    "getrlimit": (97, 163),
    "getrusage": (98, 165),
    "gettimeofday": (96, 169),
    "prctl": (157, 167),
    "prlimit64": (302, 261),
    "sched_getaffinity": (204, 123),
    "sched_yield": (24, 124),
    "setrlimit": (160, 164),
    "sysinfo": (99, 179),
    "time": (201, None),
    "times": (100, 153),
    "uname": (63, 160),
    # Local sockets between its own threads and processes. Not: connections to others.
    "getpeername": (52, 205),
    "getsockname": (51, 204),
    "getsockopt": (55, 209),
    "recvfrom": (45, 207),
    "recvmsg": (47, 212),
    "sendmsg": (46, 211),
    "sendto": (44, 206),
    "setsockopt": (54, 208),
    "shutdown": (48, 210),
    "socket": (41, 198),
    "socketpair": (53, 199),
}
#: Allowed depending on their arguments.
CLONE, SOCKET, SOCKETPAIR = (56, 220), (41, 198), (53, 199)
MMAP, SETSOCKOPT, FCNTL, IOCTL, PRCTL = (9, 222), (54, 208), (72, 25), (16, 29), (157, 167)
#: Newer system calls than these (Linux 5.9), and clone3, are unknown to some kernels, and C libraries do without them.
CLONE3, _NEWER = 435, 440
#: CLONE_NEWNS, NEWCGROUP, NEWUTS, NEWIPC, NEWUSER, NEWPID, NEWNET.
_NEW_NAMESPACE = 0x00020000 | 0x02000000 | 0x04000000 | 0x08000000 | 0x10000000 | 0x20000000 | 0x40000000
_MAP_SHARED, _MAP_ANONYMOUS, _MAP_HUGETLB = 0x01, 0x20, 0x40000
#: F_DUPFD, F_GETFD, F_SETFD, F_GETFL, F_SETFL, F_DUPFD_CLOEXEC. Locks and leases would stop processes outside that use
#: the same file, locks on ranges use kernel memory without a limit, and larger pipes too.
_FILE_COMMANDS = (0, 1, 2, 3, 4, 1030)
#: TCGETS (isatty), TIOCGWINSZ, FIONREAD, FIONBIO, FIONCLEX, FIOCLEX.
_DEVICE_COMMANDS = (0x5401, 0x5413, 0x541B, 0x5421, 0x5450, 0x5451)
#: PR_SET_NAME, PR_CAPBSET_READ, PR_GET_NO_NEW_PRIVS.
_PROCESS_COMMANDS = (15, 23, 39)
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
    # `eval.cell.zygote` counts the default size of the buffer for each socket.
    _Rule(SETSOCKOPT, ((1, _IF_EQUAL, int(socket.SOL_SOCKET), True), (2, _IF_EQUAL, int(socket.SO_SNDBUF), True))),
    _Rule(FCNTL, tuple((1, _IF_EQUAL, command, False) for command in _FILE_COMMANDS)),
    _Rule(PRCTL, tuple((0, _IF_EQUAL, command, False) for command in _PROCESS_COMMANDS)),
    _Rule(IOCTL, tuple((1, _IF_EQUAL, command, False) for command in _DEVICE_COMMANDS), errno.ENOTTY),
)


@functools.cache
def program(machine: str = "") -> bytes:
    """Return the filter as classic BPF, 8 bytes per instruction; OSError unless for x86_64 or aarch64."""
    machine = machine or platform.machine()
    if machine not in _ARCHITECTURES:
        raise OSError(errno.ENOSYS, f"there is no filter of system calls for {machine}")
    column = list(_ARCHITECTURES).index(machine)
    lines = [(_LOAD, 0, 0, _ARCHITECTURE_AT), (_IF_EQUAL, 1, 0, _ARCHITECTURES[machine]), _return(_KILL_PROCESS)]
    lines += [(_LOAD, 0, 0, _NUMBER_AT), (_IF_AT_LEAST, 0, 1, _X32), _refuse(errno.EPERM)]
    for rule in _RULES:
        lines += rule.lines(column)
    for numbers in ALLOWED.values():
        if (number := numbers[column]) is not None:
            lines += [(_IF_EQUAL, 0, 1, number), _return(_ALLOW)]
    # The C library then falls back to clone, whose flags a filter can read.
    lines += [(_IF_EQUAL, 1, 0, CLONE3), (_IF_AT_LEAST, 0, 1, _NEWER), _refuse(errno.ENOSYS)]
    return b"".join(struct.pack("=HBBI", *line) for line in [*lines, _refuse(errno.EPERM)])


def _return(action: int) -> tuple[int, int, int, int]:
    return (_RETURN, 0, 0, action)


def _refuse(error: int) -> tuple[int, int, int, int]:
    return _return(_REFUSE | error)
