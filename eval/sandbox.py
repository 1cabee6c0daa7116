"""A child process that sees and changes nothing: bubblewrap's command line, limits, and what came out.

Standard library only; knows nothing of models or problems. Inside there are a read-only system and Python, the files
given, an empty /tmp in memory and the program's output. There is no network, no other process, no environment, no
home. The sandbox protects the machine; it can't make a hostile program's output true.
"""

from __future__ import annotations

import json
import shutil
import site
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path

from hlatctl.run.errors import EvaluationError

_PROBE_TIMEOUT_S = 20.0
_TMP_BYTES = 256 << 20
_SYSTEM = ("/usr", "/bin", "/sbin", "/lib", "/lib32", "/lib64", "/etc/ld.so.cache", "/etc/alternatives")
# Runs inside the sandbox before anything else: limits of a process are inherited and can't be raised again.
_SET_LIMITS = (
    "import json,os,resource,sys\n"
    "for name,value in json.loads(sys.argv[1]).items():\n"
    "    resource.setrlimit(getattr(resource,'RLIMIT_'+name),(value,value))\n"
    "os.execv(sys.argv[2],sys.argv[2:])\n"
)
# A private user with no rights; one math thread, so that a library's thread pools don't eat the process limit.
_ENVIRONMENT = {"PATH": "/usr/bin:/bin", "HOME": "/tmp", "LANG": "C.UTF-8", "OMP_NUM_THREADS": "1",
                "OPENBLAS_NUM_THREADS": "1", "PYTHONDONTWRITEBYTECODE": "1"}  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class Limits:
    """Resource limits of every process in the sandbox, and of the whole.

    Args:
        wall_s: after this the whole sandbox is killed.
        cpu_s: processor time of one process.
        memory_bytes: address space of one process.
        file_bytes: size of one file, the output included.
        processes: processes and threads at once. The kernel does not hold root to it; the wall clock does.
    """

    wall_s: float = 120.0
    cpu_s: int = 60
    memory_bytes: int = 2 << 30
    file_bytes: int = 32 << 20
    processes: int = 128


@dataclass(frozen=True)
class Outcome:
    """What a sandboxed command left: exit status (None: killed at ``wall_s``) and its output."""

    exit_code: int | None
    stdout: str
    stderr: str


def why_unavailable() -> str | None:
    """The reason why nothing can be sandboxed here, with what helps; None if all is well."""
    if shutil.which("bwrap") is None:
        return "bubblewrap is not installed, and generated code never runs without it (apt-get install bubblewrap)"
    try:
        outcome = run(["/bin/true"], Limits(wall_s=_PROBE_TIMEOUT_S))
    except EvaluationError as error:
        return error.message
    if outcome.exit_code != 0:
        reason = outcome.stderr.strip() or f"exit status {outcome.exit_code}"
        return f"bubblewrap does not work here ({reason}); it needs user namespaces (sysctl user.max_user_namespaces)"
    return None


def run(argv: list[str], limits: Limits, *, readable: dict[Path, str] | None = None) -> Outcome:
    """Run a command inside the sandbox.

    Args:
        argv: the command; its first word is an absolute path inside.
        limits: what it may use.
        readable: files or folders of this machine by the absolute path at which they appear, read-only.

    Raises:
        EvaluationError: bubblewrap can't be started.
    """
    command = [*_bubblewrap(readable or {}), *_limited(argv, limits)]
    # Files, not pipes: the limit on file size then also bounds what a program can make this process read.
    with tempfile.TemporaryFile() as stdout, tempfile.TemporaryFile() as stderr:
        try:
            done = subprocess.run(
                command, stdin=subprocess.DEVNULL, stdout=stdout, stderr=stderr, timeout=limits.wall_s,
                env=_ENVIRONMENT, check=False,
            )  # fmt: skip
            exit_code: int | None = done.returncode
        except subprocess.TimeoutExpired:
            exit_code = None
        except OSError as error:
            raise EvaluationError(
                f"bwrap: can't be started ({error.strerror})", hint="apt-get install bubblewrap"
            ) from None
        texts = []
        for file in (stdout, stderr):
            file.seek(0)
            texts.append(file.read(limits.file_bytes).decode("utf-8", errors="replace"))
    return Outcome(exit_code=exit_code, stdout=texts[0], stderr=texts[1])


def _bubblewrap(readable: dict[Path, str]) -> list[str]:
    command = [
        shutil.which("bwrap") or "bwrap", "--unshare-all", "--unshare-user", "--uid", "65534", "--gid", "65534",
        "--cap-drop", "ALL", "--die-with-parent", "--new-session", "--clearenv", "--hostname", "sandbox",
    ]  # fmt: skip
    for name, value in _ENVIRONMENT.items():
        command += ["--setenv", name, value]
    command += ["--proc", "/proc", "--dev", "/dev", "--size", str(_TMP_BYTES), "--tmpfs", "/tmp"]
    for path in _system_paths():
        # The system's own links (/bin -> usr/bin) stay links.
        if Path(path).is_symlink():
            command += ["--symlink", str(Path(path).readlink()), path]
        else:
            command += ["--ro-bind-try", path, path]
    for source, target in readable.items():
        command += ["--ro-bind", str(source), target]
    return [*command, "--remount-ro", "/", "--chdir", "/tmp", "--"]


def _limited(argv: list[str], limits: Limits) -> list[str]:
    values = {"CPU": limits.cpu_s, "AS": limits.memory_bytes, "FSIZE": limits.file_bytes, "NPROC": limits.processes,
              "CORE": 0}  # fmt: skip
    return [sys.executable, "-I", "-S", "-c", _SET_LIMITS, json.dumps(values), *argv]


def _system_paths() -> list[str]:
    """The system's programs and libraries, and the running Python with its packages, wherever it is installed."""
    python = [sys.prefix, sys.base_prefix, str(Path(sys.executable).resolve().parent.parent), *site.getsitepackages()]
    paths = list(_SYSTEM)
    for path in python:
        covered = any(Path(path).is_relative_to(known) for known in paths)
        if not covered and Path(path) != Path("/"):
            paths.append(path)
    return [path for path in paths if Path(path).exists()]
