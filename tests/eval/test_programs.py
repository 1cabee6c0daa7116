"""Nothing gets out of a cell: each program here is hostile, really runs, and returns what it saw as its answer."""

from __future__ import annotations

import errno
import os
import platform
import shutil
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from conf.schema import CodeConfig
from eval import programs
from eval.cell import seccomp
from eval.cell.confine import Limits
from hlatctl.run.errors import EvaluationError
from tests.waiting import wait_for

pytestmark = pytest.mark.processes

needs_sandbox = pytest.mark.usefixtures("sandbox")
_LIMITS = Limits(cpu_s=0, memory_bytes=0)
_CLONE = seccomp.CLONE[platform.machine() == "aarch64"]
_SYNC = (162, 81)[platform.machine() == "aarch64"]
_PATIENT = CodeConfig(timeout_s=30.0, memory_bytes=512 << 20)


@pytest.fixture(scope="module")
def worker() -> Iterator[programs.Worker]:
    """One worker for all of these tests, so that a program that damages it fails the next ones."""
    with programs.start_worker(_PATIENT) as started:
        yield started


@pytest.fixture(scope="module")
def hasty() -> Iterator[programs.Worker]:
    """A worker for the programs that never end."""
    with programs.start_worker(CodeConfig(timeout_s=0.5)) as started:
        yield started


def _result(worker: programs.Worker, body: str, test: str = "f() == 1") -> str:
    """Return the result of a function with this body; its test asserts this, and its message is the answer."""
    lines = "".join(f"    {line}\n" for line in body.splitlines())
    problem = {
        "task_id": "t/0",
        "prompt": "def f():\n",
        "canonical_solution": "    return 1\n",
        "entry_point": "f",
        "test": f"def check(candidate):\n    answer = candidate()\n    f = lambda: answer\n    assert {test}, answer\n",
    }
    verdict = worker.run(problem, f"def f():\n{lines}")
    assert verdict["passed"] == (verdict["result"] == "passed")
    return str(verdict["result"])


def _answer(worker: programs.Worker, body: str) -> str:
    """Return the answer of a function with this body."""
    return _result(worker, body, "False").removeprefix("failed: ")


def _command_lines() -> list[str]:
    lines = []
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            lines.append(path.read_bytes().replace(b"\0", b" ").decode(errors="replace"))
        except OSError:
            continue  # it has ended since
    return lines


def _is_gone(marker: str) -> bool:
    """Return whether no process has this word in its command line; the kernel needs a moment to reap them."""
    return not any(marker in line for line in _command_lines())


@needs_sandbox
def test_an_endless_loop_is_over_in_time(hasty: programs.Worker) -> None:
    assert _result(hasty, "while True: pass") == "timed out"


@needs_sandbox
def test_a_sleep_that_blocks_all_signals_is_over_in_time(hasty: programs.Worker) -> None:
    body = "import signal, time\nsignal.pthread_sigmask(signal.SIG_BLOCK, range(1, 65))\ntime.sleep(600)"
    assert _result(hasty, body) == "timed out"


@needs_sandbox
def test_a_fork_bomb_is_held_to_the_limit_on_processes(worker: programs.Worker, hasty: programs.Worker) -> None:
    bomb = "import posix\nwhile True:\n    try: posix.fork()\n    except OSError: pass"
    assert _result(hasty, bomb) == "timed out"
    count = (
        "import posix, time\nn = 0\nwhile True:\n    try:\n        if posix.fork() == 0: time.sleep(600)\n"
        "    except OSError: return n\n    n += 1"
    )
    assert 1 < int(_answer(worker, count)) <= _LIMITS.processes


@needs_sandbox
def test_100_gigabytes_can_not_be_allocated(worker: programs.Worker) -> None:
    assert _result(worker, "x = bytearray(100 << 30); return 1") == "failed: "
    body = "try: bytearray(100 << 30)\nexcept MemoryError: return 1"
    assert _result(worker, body) == "passed"


@needs_sandbox
def test_memory_is_limited_over_all_processes(worker: programs.Worker) -> None:
    body = (
        "import posix, time\nfor i in range(8):\n"
        "    if posix.fork() == 0: x = bytearray(b'x') * (150 << 20); time.sleep(600)\ntime.sleep(600)"
    )
    assert _result(worker, body) == f"failed: the program used more than {512 << 20} bytes of memory before its tests"


@needs_sandbox
def test_memory_that_processes_share_and_let_go_of_is_limited_too(worker: programs.Worker) -> None:
    # The pages of a shared mapping stay when a process drops them; each process alone is below the limit.
    hold = (
        "import mmap, posix, time\nfor i in range(8):\n    if posix.fork() == 0:\n"
        "        kept = mmap.mmap({}192 << 20)\n"
        "        for at in range(0, 192 << 20, 1 << 20):\n            kept[at:at + (1 << 20)] = b'x' * (1 << 20)\n"
        "            kept.madvise(mmap.MADV_DONTNEED)\n        time.sleep(600)\nreturn 1"
    )
    assert "Operation not permitted" in _result(worker, "import mmap\nmmap.mmap(-1, 1 << 20)\nreturn 1")
    assert "Operation not permitted" in _result(worker, hold.format("-1, "))
    assert "No such file" in _result(worker, hold.format("posix.open('/dev/zero', posix.O_RDWR), "))
    private = "import mmap\nmmap.mmap(-1, 1 << 20, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)\n"
    from_a_file = "with open('x', 'w+b') as file:\n    file.truncate(4096)\n    mmap.mmap(file.fileno(), 4096)\n"
    assert _result(worker, f"{private}{from_a_file}return 1") == "passed"


@needs_sandbox
def test_what_lies_in_sockets_counts_as_memory(worker: programs.Worker) -> None:
    body = (
        "import posix, socket, time\nfor i in range(24):\n    if posix.fork() == 0:\n        kept = []\n        try:\n"
        "            while True:\n                kept += socket.socketpair()\n"
        "                kept[-1].setblocking(False)\n                try:\n"
        "                    while True: kept[-1].send(bytes(1 << 16))\n                except BlockingIOError: pass\n"
        "        except OSError: pass\n        time.sleep(600)\ntime.sleep(600)"
    )
    assert _result(worker, body) == f"failed: the program used more than {512 << 20} bytes of memory before its tests"
    larger = "import socket\nsocket.socketpair()[0].setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 1 << 22)\nreturn 1"
    assert "Operation not permitted" in _result(worker, larger)


@needs_sandbox
def test_event_loops_threads_and_copied_files_work(worker: programs.Worker) -> None:
    body = (
        "import asyncio, concurrent.futures, shutil\nasync def g(): return open('b').read()\n"
        "with concurrent.futures.ThreadPoolExecutor(4) as pool: assert list(pool.map(abs, [-1, 2])) == [1, 2]\n"
        "with open('a', 'w') as file: file.write('1')\n"
        "shutil.copyfile('a', 'b')\nreturn int(asyncio.run(g()))"
    )
    assert _result(worker, body) == "passed"


@needs_sandbox
@pytest.mark.parametrize(
    "call",
    [
        "__import__('os').memfd_create('x')",
        "libc(shmget=(0, 1 << 30, 0o1666))",
        "libc(unshare=(0x10000000,))",
        "libc(mount=(b'tmpfs', b'/cell', b'tmpfs', 0, None))",
        "libc(ptrace=(16, 1, 0, 0))",
        f"libc(syscall=({_CLONE}, 0x10000000 | 17, 0, 0, 0, 0))",
    ],
)
def test_ways_around_the_limits_are_refused(worker: programs.Worker, call: str) -> None:
    body = (
        "import ctypes, os\ndef libc(**wanted):\n    ((name, arguments),) = wanted.items()\n"
        "    own = ctypes.CDLL(None, use_errno=True)\n    done = getattr(own, name)(*arguments)\n"
        "    if done == -1: raise OSError(ctypes.get_errno(), name)\n    return done\n"
        f"try: {call}\nexcept OSError as error: return error.errno"
    )
    assert _answer(worker, body) == str(errno.EPERM)


@needs_sandbox
def test_a_filled_disk_is_its_own_and_small(worker: programs.Worker) -> None:
    body = (
        "n = 0\nwhile True:\n    try:\n        with open(f'{n}', 'wb') as file: file.write(bytes(1 << 20))\n"
        "    except OSError as error: return [n, error.strerror]\n    n += 1"
    )
    written, reason = _answer(worker, body).strip("[]").split(", ")
    assert 1 <= int(written) <= _LIMITS.tmp_bytes >> 20
    assert reason == "'No space left on device'"
    assert _answer(worker, "import posix; return posix.listdir('.')") == "[]"


@needs_sandbox
def test_one_file_is_limited_and_nothing_else_can_be_written(worker: programs.Worker) -> None:
    too_large = "try: open('big', 'wb').write(bytes(33 << 20))\nexcept OSError as error: return error.strerror"
    assert _answer(worker, too_large) == "File too large"
    # What is mounted lies no deeper than this, but for Python and its packages.
    body = (
        "import os, sys\nfound = []\nfor root in ('/', sys.prefix, sys.base_prefix, os.__file__.rsplit('/', 1)[0]):\n"
        "    for folder, inner, _ in os.walk(root):\n"
        "        try:\n            with open(folder + '/x', 'w'): found.append(folder)\n"
        "        except OSError: pass\n"
        "        if folder.count('/') > 2: inner.clear()\nreturn found"
    )
    assert _answer(worker, body) == "['/cell']"


@needs_sandbox
def test_home_the_run_and_the_environment_are_out_of_reach(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    kept = tmp_path / "run" / "config.yaml"
    kept.parent.mkdir()
    kept.write_text("secret", encoding="utf-8")
    monkeypatch.setenv("HOME", str(kept.parent))
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "do-not-tell")
    repository = Path(programs.__file__).resolve().parents[1]
    with programs.start_worker(_PATIENT) as worker:
        for way in ("open({!r}).read()", "posix.unlink({!r})", "posix.listdir({!r})"):
            body = f"import posix\ntry: {way.format(str(kept))}\nexcept OSError as error: return error.errno"
            assert _answer(worker, body) == "2"
        for own in (repository / "pyproject.toml", repository / "conf"):
            assert _answer(worker, f"import os; return os.path.exists({str(own)!r})") == "False"
        environment = _answer(worker, "import os; return [sorted(os.environ), os.environ['HOME'], os.listdir('/proc')]")
    names = "HOME LANG OMP_NUM_THREADS OPENBLAS_NUM_THREADS PATH PWD PYTHONDONTWRITEBYTECODE PYTHONHASHSEED TMPDIR"
    assert environment == str([names.split(), "/cell", []])
    assert kept.read_text(encoding="utf-8") == "secret"


@needs_sandbox
def test_there_is_no_network(worker: programs.Worker) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        body = f"import socket\nsocket.create_connection(('127.0.0.1', {port}), 1)"
        assert "Address family not supported" in _result(worker, body)
    assert "Address family not supported" in _result(worker, "import socket\nsocket.socket(socket.AF_VSOCK)")
    assert _result(worker, "import socket\nsocket.socketpair()\nreturn 1") == "passed"
    assert _answer(worker, "import socket; return socket.if_nameindex()").startswith("[Errno 97]")


@needs_sandbox
def test_it_cannot_write_the_disks_or_hold_files_of_the_machine(worker: programs.Worker) -> None:
    body = (
        "import ctypes, posix\nown = ctypes.CDLL(None, use_errno=True)\nfile = posix.open('/usr/bin/env', 0)\n"
        "def refused(name, *arguments):\n"
        "    ctypes.set_errno(0)\n"
        "    return getattr(own, name)(*arguments) == -1 and ctypes.get_errno() == 1\n"
        "calls = [('syncfs', file), ('fsync', file), ('fdatasync', file), ('flock', file, 2), ('inotify_init',)]\n"
        f"return [name for name, *arguments in [*calls, ('syscall', {_SYNC})] if not refused(name, *arguments)]"
    )
    assert _answer(worker, body) == "[]"


@needs_sandbox
def test_it_is_alone_and_has_no_rights(worker: programs.Worker) -> None:
    body = (
        "import ctypes, posix\nown = ctypes.CDLL(None)\n"
        "rights = [n for n in range(64) if own.prctl(23, n, 0, 0, 0) == 1]\n"
        "return [posix.getpid(), posix.getppid(), rights, own.prctl(39, 0, 0, 0, 0)]"
    )
    assert _answer(worker, body) == "[1, 0, [], 1]"
    assert "Operation not permitted" in _result(worker, "import posix\nposix.setuid(0) or posix.chroot('/')")
    if os.geteuid() == 0:
        assert _answer(worker, "import posix; return [posix.getuid(), posix.getgroups()]") == "[65534, []]"


@needs_sandbox
def test_its_parent_can_not_be_killed(worker: programs.Worker) -> None:
    body = (
        f"import posix\nfor pid in (posix.getppid(), -1, 1, 2, 3, {os.getpid()}):\n"
        f"    try: posix.kill(pid, {signal.SIGKILL:d})\n    except OSError: pass\nreturn 1"
    )
    assert _result(worker, body) == "passed"
    assert _result(worker, "return 1") == "passed"


#: Signals the whole process group, ends all else that it may signal, and goes on.
_SIGNALS = (
    "import posix, signal\nfor number in (signal.SIGALRM, signal.SIGTERM, signal.SIGUSR1):\n"
    "    signal.signal(number, lambda *_: 0)\n    posix.kill(0, number)\n"
    "for pid in {others}:\n    try: posix.kill(pid, signal.SIGKILL)\n    except OSError: pass\nreturn 1"
)


def _signals_reach_no_examiner(sandboxed: bool) -> None:
    with programs.start_worker(_PATIENT, sandboxed=sandboxed) as worker:
        others = sorted({worker.process.pid, *_below(worker.process.pid)})
        assert _result(worker, _SIGNALS.format(others=f"(posix.getppid(), *{others})")) == "passed"
        # The first process of a namespace can't stop itself.
        assert _result(worker, "import posix\nposix.kill(0, 19)\nreturn 1") == "passed"
        assert _result(worker, "return 1") == "passed"


def _below(pid: int) -> set[int]:
    children = Path(f"/proc/{pid}/task/{pid}/children").read_text(encoding="ascii").split()
    return {int(child) for child in children}.union(*(_below(int(child)) for child in children))


@needs_sandbox
def test_a_signal_to_its_process_group_reaches_no_examiner() -> None:
    _signals_reach_no_examiner(sandboxed=True)


def test_without_a_sandbox_a_program_can_signal_no_examiner_where_users_may_have_namespaces() -> None:
    if subprocess.run(["unshare", "--user", "--pid", "--fork", "true"], capture_output=True, check=False).returncode:
        pytest.skip("no user namespace can be created here")
    _signals_reach_no_examiner(sandboxed=False)


@needs_sandbox
@pytest.mark.parametrize(
    ("answer", "test"),
    [
        ("__import__('decimal').Decimal('1e99999999')", "int(f()) == 1"),
        ("range(10 ** 15)", "sum(f()) == 1"),
        (None, "f() == 1"),
    ],
)
def test_comparing_an_answer_takes_no_longer_than_the_program_may(
    hasty: programs.Worker, answer: str | None, test: str
) -> None:
    """Each comparison is one operation of the interpreter, which no Python signal handler can interrupt."""
    # A fraction of two random numbers of 26 Mbit, sent past what would take this program itself as long.
    send = (
        "import gc, json, random, socket, struct\n"
        "own = next(x for x in gc.get_objects() if isinstance(x, socket.socket))\n"
        "top, bottom = (hex(random.getrandbits(26_000_000)) for _ in range(2))\n"
        "text = json.dumps(['return', ['fraction', top, bottom]]).encode()\n"
        "own.sendall(struct.pack('!I', len(text)) + text)\nwhile True: pass"
    )
    assert _result(hasty, f"return {answer}" if answer else send, test) == "timed out"
    wait_for(lambda: _result(hasty, "return 1") == "passed")  # by the same worker; the machine may be busy at first


@needs_sandbox
def test_a_gigabyte_of_output_goes_nowhere(worker: programs.Worker) -> None:
    body = "import os\nfor fd in (1, 2):\n    for _ in range(1 << 9): os.write(fd, bytes(1 << 20))\nreturn 1"
    assert _result(worker, body) == "passed"
    assert _result(worker, "print('passed', flush=True); return 2") == "failed: 2"


@needs_sandbox
@pytest.mark.parametrize(
    ("kind", "then", "result"), [("worker", "return 1", "passed"), ("hasty", "while True: pass", "timed out")]
)
def test_a_daemon_ends_with_its_program(request: pytest.FixtureRequest, kind: str, then: str, result: str) -> None:
    marker = f"2718.2818{len(then)}"
    body = (
        "import posix\nif posix.fork() == 0:\n    posix.setsid()\n    if posix.fork() == 0:\n"
        f"        posix.execv('/bin/sleep', ['sleep', '{marker}'])\n    posix._exit(0)\n{then}"
    )
    assert _result(request.getfixturevalue(kind), body) == result
    assert _is_gone(marker)


@needs_sandbox
def test_programs_find_nothing_of_those_before_them(worker: programs.Worker) -> None:
    leave = "import sys, random\nopen('left', 'w').write('x')\nrandom.seed(9)\nsys.modules['left'] = sys\nreturn 1"
    assert _result(worker, leave) == "passed"
    look = "import sys, posix, random; return [posix.listdir('.'), 'left' in sys.modules, random.random()]"
    assert _answer(worker, look) == "[[], False, 0.8444218515250481]"  # the first number after seed 0


@needs_sandbox
def test_a_worker_that_is_closed_leaves_nothing_running() -> None:
    marker = "31415.92653"
    body = f"import posix\nif posix.fork() == 0: posix.execv('/bin/sleep', ['sleep', '{marker}'])\nwhile True: pass"
    with programs.start_worker(CodeConfig(timeout_s=0.2)) as worker:
        # Closed in the middle of a program: as when the evaluation is stopped.
        problem = {
            "task_id": "t",
            "prompt": "def f():\n",
            "canonical_solution": "    return 1\n",
            "entry_point": "f",
            "test": "def check(candidate): candidate()\n",
        }
        with pytest.raises(programs.WorkerGoneError, match="it does not answer"):
            _impatient(worker).run(problem, "def f():\n" + "".join(f"    {x}\n" for x in body.splitlines()))
    wait_for(lambda: _is_gone(marker))


@needs_sandbox
def test_an_evaluator_that_is_killed_takes_its_programs_along() -> None:
    marker = "1618.03398"
    body = f"def f():\n    import posix\n    posix.execv('/bin/sleep', ['sleep', '{marker}'])\n"
    evaluator = (
        "from conf.schema import CodeConfig\nfrom eval import programs\n"
        "problem = {'task_id': 't', 'prompt': 'def f():\\n', 'canonical_solution': '    return 1\\n',"
        " 'entry_point': 'f', 'test': 'def check(candidate): candidate()'}\n"
        f"with programs.start_worker(CodeConfig(timeout_s=600.0)) as worker: worker.run(problem, {body!r})\n"
    )
    process = subprocess.Popen([sys.executable, "-c", evaluator], cwd=Path(programs.__file__).resolve().parents[1])

    def sleeps() -> bool:
        assert process.poll() is None
        return any(line.startswith(f"sleep {marker}") for line in _command_lines())

    wait_for(sleeps)
    process.kill()
    process.wait()
    wait_for(lambda: _is_gone(marker))


def _impatient(worker: programs.Worker) -> programs.Worker:
    return programs.Worker(worker.process, worker.log, timeout_s=0.1 - programs._GRACE_S)


def test_without_bubblewrap_the_reason_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shutil, "which", lambda name: None)
    assert programs.why_unavailable() == (
        "bubblewrap is not installed, and generated code does not run without it (apt-get install bubblewrap; or "
        "eval.code.allow_unsandboxed=true, which lets it read and change everything that this user can)"
    )


def test_a_bubblewrap_that_does_not_work_is_reported_with_its_message(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    broken = tmp_path / "bwrap"
    broken.write_text("#!/bin/sh\necho 'No permissions to create new namespace' >&2\nexit 1\n", encoding="utf-8")
    broken.chmod(0o755)
    monkeypatch.setattr(shutil, "which", lambda name: str(broken))
    assert programs.why_unavailable() == (
        "generated code can't run here (No permissions to create new namespace); it needs user namespaces "
        "(sysctl user.max_user_namespaces)"
    )


@needs_sandbox
@pytest.mark.parametrize("way", ["folder/../python", "link"])
def test_python_may_be_named_by_a_path_through_folders_that_the_sandbox_lacks(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, way: str
) -> None:
    (tmp_path / "folder").mkdir()
    (tmp_path / "python").symlink_to(Path(sys.executable).parent.parent)
    (tmp_path / "link").symlink_to(tmp_path / "python")
    monkeypatch.setattr(sys, "executable", os.fspath(tmp_path / way / "bin" / Path(sys.executable).name))
    assert programs.why_unavailable() is None


@needs_sandbox
def test_a_cell_that_can_not_be_built_is_an_error_and_no_verdict(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(programs, "_answers", lambda: ["/usr/no-such-file"])
    with pytest.raises(EvaluationError) as raised, programs.start_worker(_PATIENT):
        pytest.fail("a worker has passed its first program")
    assert raised.value.message == (
        "generated code can't run here: no cell could be built: [Errno 2] mount: No such file or directory"
    )
