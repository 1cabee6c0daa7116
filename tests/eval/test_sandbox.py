"""The sandbox contains what runs in it; every escape that is tried here prints what it saw."""

from __future__ import annotations

import os
import shutil
import socket
import sys
import time
from pathlib import Path

import pytest

from eval import sandbox

pytestmark = pytest.mark.skipif(
    sandbox.why_unavailable() is not None, reason=f"no sandbox here: {sandbox.why_unavailable()}"
)
_SHORT = sandbox.Limits(wall_s=30.0, cpu_s=20)


def _python(program: str, limits: sandbox.Limits = _SHORT, readable: dict[Path, str] | None = None) -> sandbox.Outcome:
    return sandbox.run([sys.executable, "-I", "-c", program], limits, readable=readable)


def _command_lines() -> list[str]:
    found = []
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            found.append(path.read_bytes().replace(b"\0", b" ").decode(errors="replace"))
        except OSError:
            continue  # it has ended since
    return found


def _is_gone(marker: str) -> bool:
    """Whether no process with this word in its command line is left, giving the kernel time to reap them."""
    for _ in range(200):
        if not any(marker in line for line in _command_lines()):
            return True
        time.sleep(0.05)
    return False


def test_a_program_runs_and_its_output_comes_back() -> None:
    outcome = _python("import sys; print('out'); print('err', file=sys.stderr); sys.exit(3)")
    assert outcome == sandbox.Outcome(exit_code=3, stdout="out\n", stderr="err\n")


def test_files_of_the_machine_are_not_visible(tmp_path: Path) -> None:
    secret = tmp_path / "run" / "config.yaml"
    secret.parent.mkdir()
    secret.write_text("secret", encoding="utf-8")
    outcome = _python(f"print(open({str(secret)!r}).read())")
    assert outcome.exit_code == 1
    assert "FileNotFoundError" in outcome.stderr


def test_the_checkout_is_not_visible() -> None:
    repository = Path(sandbox.__file__).resolve().parents[1]
    outcome = _python(f"import os; print(os.path.exists({str(repository / 'pyproject.toml')!r}))")
    assert outcome.stdout == "False\n"


def test_a_file_that_is_given_can_be_read_but_not_changed(tmp_path: Path) -> None:
    given = tmp_path / "given.txt"
    given.write_text("text", encoding="utf-8")
    readable = {given: "/inputs/given.txt"}
    assert _python("print(open('/inputs/given.txt').read())", readable=readable).stdout == "text\n"
    assert "Read-only file system" in _python("open('/inputs/given.txt', 'w')", readable=readable).stderr
    assert given.read_text(encoding="utf-8") == "text"


def test_the_environment_is_empty(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "do-not-tell")
    outcome = _python("import os; print(dict(os.environ), open('/proc/1/environ').read())")
    assert outcome.exit_code == 0
    assert "do-not-tell" not in outcome.stdout
    assert "HOME" in outcome.stdout


def test_there_is_no_network() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        program = (
            "import socket\n"
            "print(socket.if_nameindex())\n"
            "for host in ('127.0.0.1', '10.0.0.1', '169.254.169.254'):\n"
            "    try:\n"
            f"        socket.create_connection((host, {server.getsockname()[1]}), timeout=5)\n"
            "        print('connected')\n"
            "    except OSError as error:\n"
            "        print(error.strerror)\n"
        )
        outcome = _python(program)
    assert outcome.stdout.splitlines() == ["[(1, 'lo')]", "Connection refused", *["Network is unreachable"] * 2]


def test_other_processes_are_not_visible() -> None:
    outcome = _python(
        f"import os\nprint(len([p for p in os.listdir('/proc') if p.isdigit()]), os.path.exists('/proc/{os.getpid()}'))"
    )
    count, _, own = outcome.stdout.strip().partition(" ")
    assert int(count) <= 3
    assert own == "False" or os.getpid() <= 3


def test_the_system_can_not_be_written() -> None:
    for path in ("/usr/x", "/etc/x", "/x", os.path.join(sys.prefix, "x")):
        outcome = _python(f"open({path!r}, 'w')")
        assert outcome.exit_code == 1, path
        assert not os.path.exists(path)


def test_the_program_has_no_rights() -> None:
    outcome = _python("import os; print(os.getuid(), [l for l in open('/proc/self/status') if l.startswith('CapEff')])")
    assert outcome.stdout.split(maxsplit=1) == ["65534", "['CapEff:\\t0000000000000000\\n']\n"]


def test_memory_is_limited() -> None:
    outcome = _python("x = bytearray(1 << 30)", sandbox.Limits(wall_s=30, memory_bytes=512 << 20))
    assert "MemoryError" in outcome.stderr


def test_the_size_of_a_file_is_limited() -> None:
    outcome = _python("open('/tmp/big', 'wb').write(bytes(2 << 20))", sandbox.Limits(wall_s=30, file_bytes=1 << 20))
    assert "File too large" in outcome.stderr


def test_output_is_limited() -> None:
    limits = sandbox.Limits(wall_s=30, file_bytes=1 << 20)
    outcome = _python("import os\nfor _ in range(99): os.write(1, bytes(1 << 16))", limits)
    assert outcome.exit_code != 0
    assert len(outcome.stdout) == 1 << 20


def test_processor_time_is_limited() -> None:
    outcome = _python("while True: pass", sandbox.Limits(wall_s=60, cpu_s=1))
    assert outcome.exit_code not in (0, None)


def test_an_endless_program_is_killed_with_all_that_it_started() -> None:
    marker = "31415.92653"
    program = (
        f"import os\nos.posix_spawn('/bin/sleep', ['sleep', '{marker}'], {{}})\n"
        "import signal\nsignal.signal(signal.SIGTERM, signal.SIG_IGN)\nwhile True: pass"
    )
    outcome = _python(program, sandbox.Limits(wall_s=1.5))
    assert outcome.exit_code is None
    assert _is_gone(marker)


def test_what_a_program_leaves_running_ends_with_it() -> None:
    marker = "27182.81828"
    outcome = _python(f"import os\nos.posix_spawn('/bin/sleep', ['sleep', '{marker}'], {{}})\nprint('left')")
    assert outcome.stdout == "left\n"
    assert _is_gone(marker)


def test_without_bubblewrap_the_reason_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shutil, "which", lambda name: None)
    reason = sandbox.why_unavailable()
    assert reason == (
        "bubblewrap is not installed, and generated code never runs without it (apt-get install bubblewrap)"
    )


def test_a_bubblewrap_that_does_not_work_is_told_by_its_own_message(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    broken = tmp_path / "bwrap"
    broken.write_text("#!/bin/sh\necho 'No permissions to create new namespace' >&2\nexit 1\n", encoding="utf-8")
    broken.chmod(0o755)
    monkeypatch.setattr(shutil, "which", lambda name: str(broken))
    assert "No permissions to create new namespace" in str(sandbox.why_unavailable())
