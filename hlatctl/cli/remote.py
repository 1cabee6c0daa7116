"""`hlatctl --host HOST COMMAND ...`: runs a command of hlatctl on another machine, over the user's own ssh.

ssh has the keys, the agent, the configuration and the multiplexing. With a terminal on both ends, the remote command
gets a terminal too. Otherwise its standard input is a line to this process: a byte 3 is Ctrl-C, and its end is
the end of this process or of the connection. Only data that are piped into this process take that place.

The page of `hlatctl ui` comes through a tunnel of the same connection. It is opened after the page listens on the
host, and ends with the page, so another user's server on that port never gets the page's token.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import shlex
import signal
import stat
import subprocess
import sys
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

from conf import folders
from hlatctl import __version__
from hlatctl.cli.common import place, say, write
from hlatctl.run import files
from hlatctl.run.errors import ConfigError, DependencyError, HlatctlError, LaunchError, PortInUseError, StorageError
from hlatctl.run.files import DAMAGED

OPTION = "--host"
#: Variable of the remote process: the version of the caller, and what its standard input is if it isn't the caller's: a
#: line to the caller, or a folder that it sends.
CALLER_ENV = "HLATCTL_CALLER"
_ATTACHED, _SENDS = "attached", "sends"
_INTERRUPT = b"\x03"
#: What ssh itself returns if it fails, and a shell if it finds no program or can't start it.
_SSH_FAILED, _NO_PROGRAM = 255, (126, 127)
_HOST = re.compile(
    r"(?P<ssh>(?:[A-Za-z0-9_][\w.+-]*@)?[A-Za-z0-9_][\w.-]*)(?::(?P<venv>(?:/|~/)[^\x00-\x1f]*))?", re.ASCII
)
_PAGE = re.compile(r"page\thttp://127\.0\.0\.1:(\d+)/")
_MAX_BYTES = 4 << 20


@dataclass(frozen=True, kw_only=True)
class Host:
    """A machine with hlatctl.

    Args:
        ssh: its name for ssh, with the user's name there if it differs.
        venv: folder of hlatctl's environment there; empty: `hlatctl` is on the PATH.
    """

    ssh: str
    venv: str = ""

    @classmethod
    def parse(cls, text: str) -> Host:
        """Return the host of ``[USER@]NAME[:VENV]``, or of a name in the ``hosts`` of a ``hlatctl.yaml``.

        Raises:
            ConfigError: the text is neither.
        """
        named = folders.project_hosts().get(text, text)
        match = _HOST.fullmatch(named)
        if match is None:
            raise ConfigError(
                f"{OPTION}={named}: must be [USER@]NAME or [USER@]NAME:VENV; VENV is the absolute path of hlatctl's "
                "environment on that machine",
                hint=f"{OPTION} me@login.example:/home/me/hlatctl/.venv; ~/.ssh/config is the place for ports and keys",
            )
        return cls(ssh=match["ssh"], venv=(match["venv"] or "").rstrip("/"))

    def command(self, words: Sequence[str], mode: str = "") -> str:
        """Return a line for the shell of the host, whichever shell that is."""
        caller = f"{CALLER_ENV}={__version__} {mode}".rstrip()
        return f"exec env {shlex.quote(caller)} {self._program()} {shlex.join(words)}"

    def _program(self) -> str:
        if not self.venv:
            return "hlatctl"
        home, path = ("~/", self.venv[2:]) if self.venv.startswith("~/") else ("", self.venv)
        return f"{home}{shlex.quote(f'{path}/bin/hlatctl')}"

    def failure(self, code: int) -> HlatctlError | None:
        """Return the error of a failed ssh or of a missing program; None if the exit code is hlatctl's own."""
        if code == _SSH_FAILED:
            return LaunchError(f"{OPTION}={self.ssh}: ssh failed", hint=f"`ssh {self.ssh} true` must work")
        if code in _NO_PROGRAM:
            where = f"{self.venv}/bin/hlatctl" if self.venv else "hlatctl on the PATH of a command of ssh"
            return DependencyError(
                f"{OPTION}={self.ssh}: that machine has no {where}",
                hint=f"install hlatctl {__version__} there, and name its folder: {OPTION} {self.ssh}:/path/to/.venv",
            )
        return None


def asked(words: Sequence[str]) -> tuple[str, list[str]] | None:
    """Return the host and the other words of a command line that begins with ``--host``; None if it has no such word.

    Raises:
        ConfigError: the option is not the first word.
    """
    if words and words[0] == OPTION and len(words) > 1:
        return words[1], list(words[2:])
    if words and words[0].startswith(f"{OPTION}="):
        return words[0].partition("=")[2], list(words[1:])
    options = words[1 : words.index("--") if "--" in words else None]
    if any(word.partition("=")[0] == OPTION for word in options):
        raise ConfigError(f"{OPTION}: must be the first word", hint=f"hlatctl {OPTION} HOST COMMAND")
    return None


def run(name: str, words: list[str]) -> int:
    """Run a command on a host and return its exit code.

    Raises:
        ConfigError: the host or a folder of configuration can't be used.
        DependencyError: no ssh here, or no hlatctl there.
        LaunchError: ssh failed.
    """
    host = Host.parse(name)
    words = _with_sent_folders(host, words)
    if words[:1] == ["ui"]:
        return _page(host, words)
    on_terminal = sys.stdin.isatty() and sys.stdout.isatty()
    attached = not on_terminal and stat.S_ISCHR(os.fstat(0).st_mode)
    line = ["-t" if on_terminal else "-T", "--", host.ssh, host.command(words, _ATTACHED if attached else "")]
    with _ssh(line, stdin=subprocess.PIPE if attached else None) as process:
        return _finished(host, process)


@contextmanager
def _ssh(words: Sequence[str], **options: Any) -> Iterator[subprocess.Popen[bytes]]:
    """Start ssh, which ignores Ctrl-C: this process passes it on, or ends ssh."""
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        process = subprocess.Popen(("ssh", "-o", "LogLevel=ERROR", *words), **options)
    except FileNotFoundError:
        raise DependencyError("ssh: no such command on this machine", hint="install OpenSSH's client") from None
    finally:
        signal.signal(signal.SIGINT, before)
    try:
        yield process
    finally:
        if process.stdin:
            with suppress(OSError):
                process.stdin.close()  # a command that is attached ends
        if process.stdin is None:
            process.terminate()
        process.wait()


def _finished(host: Host, process: subprocess.Popen[bytes]) -> int:
    """Wait for ssh's end and return the command's exit code. Ctrl-C is passed on to a command that is attached."""
    while True:
        try:
            code = process.wait()
            break
        except KeyboardInterrupt:
            if process.stdin is None:
                raise
            with suppress(OSError):
                process.stdin.write(_INTERRUPT)
                process.stdin.flush()
    if error := host.failure(code):
        raise error
    return code


def _page(host: Host, words: list[str]) -> int:
    """Serve the page on the host, and forward its port from here until it ends."""
    given = any(word.partition("=")[0] == "--port" for word in words)
    words = [*words, "--page-only", *(() if given else ("--port", "0"))]  # 8400 may be another user's there
    with files.private_folder("s") as folder:
        control = ("-S", os.fspath(folder.path / "c"))
        line = ("-T", "-M", *control, "-o", "ControlPersist=no", "--", host.ssh, host.command(words, _ATTACHED))
        with _ssh(line, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
            assert process.stdout
            reader = threading.Thread(target=_forward, args=(host, process, process.stdout, control), daemon=True)
            reader.start()
            code = _finished(host, process)
            reader.join()
            return code


def _forward(host: Host, process: subprocess.Popen[bytes], lines: IO[bytes], control: Sequence[str]) -> None:
    """Print what the remote command prints; open the tunnel before its link is printed."""
    for line in lines:
        text = line.decode(errors="replace").rstrip("\r\n")
        if page := _PAGE.match(text):
            ends = f"127.0.0.1:{page[1]}:127.0.0.1:{page[1]}"
            words = ("ssh", *control, "-O", "forward", "-L", ends, "--", host.ssh)
            done = subprocess.run(words, capture_output=True, text=True, check=False, stdin=subprocess.DEVNULL)
            if done.returncode:
                why = " ".join(done.stderr.split()) or f"ssh returned {done.returncode}"
                error = PortInUseError(
                    f"port {page[1]}: ssh can't forward it from this machine ({why})", hint="choose another with --port"
                )
                print(f"{error.word}: {error}", file=sys.stderr)
                with suppress(OSError):
                    process.stdin and process.stdin.close()
                return
        write(text)
        sys.stdout.flush()


def _with_sent_folders(host: Host, words: list[str]) -> list[str]:
    """Copy the folders of ``--config-dir`` to the host, and return the words with their paths there."""
    sent, rest = [], iter(words)
    for word in rest:
        name, equals, value = word.partition("=")
        if name != "--config-dir":
            sent.append(word)
            continue
        folder = value if equals else next(rest, "")
        sent += [name, _send(host, place(folder))]
    return sent


def _send(host: Host, folder: Path) -> str:
    with folders.using([folder], others=False):
        folders.checked_folders()
    names = [f"{group}/{option}.yaml" for group, options in folders.options(folder).items() for option in options]
    names += [folders.PROJECT_FILE] if (folder / folders.PROJECT_FILE).exists() else []
    texts = json.dumps({name: files.read_text(folder / name) for name in names}).encode()
    words = ("-T", "--", host.ssh, host.command([], _SENDS))
    with _ssh(words, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        output = process.communicate(texts)[0]
    if error := host.failure(process.returncode):
        raise error
    if process.returncode:
        raise LaunchError(f"{folder}: {host.ssh} did not take it (exit code {process.returncode})")
    say(f"copied {len(names)} files of {folder} to {host.ssh}")
    return output.decode(errors="replace").strip().rpartition("\n")[2]  # a shell's start may print something before


def _receive() -> None:
    """Keep the folder of configuration that the caller sends, and print its path."""
    content = sys.stdin.buffer.read(_MAX_BYTES + 1)
    try:
        texts = {str(name): str(text) for name, text in files.parse_json(content).items()}
    except (*DAMAGED, AttributeError):
        texts = {}
    allowed = re.compile(r"(?:[a-z_]+/)?[A-Za-z0-9_][A-Za-z0-9_.-]*\.yaml")
    if not texts or len(content) > _MAX_BYTES or not all(map(allowed.fullmatch, texts)):
        raise ConfigError("standard input: is not a folder of configuration", hint="`hlatctl --host HOST` sends one")
    folder = Path.home() / ".cache" / "hlatctl" / f"config-{hashlib.sha256(content).hexdigest()[:16]}"
    try:
        if not folder.exists():
            with files.created_with(files.PRIVATE), files.new_folder(folder) as new:
                for name, text in texts.items():
                    (new / name).parent.mkdir(exist_ok=True)
                    (new / name).write_text(text, encoding="utf-8")
    except StorageError:
        if not folder.exists():  # otherwise another process has taken the same folder meanwhile
            raise
    write(os.fspath(folder))


def begin() -> bool:
    """Do the remote part: compare the versions, and follow the line to the caller or take what it sends.

    Returns:
        Whether nothing else is to be done.

    Raises:
        DependencyError: the caller has another version.
    """
    version, _, mode = os.environ.pop(CALLER_ENV, __version__).partition(" ")
    if version != __version__:
        raise DependencyError(
            f"{OPTION}: hlatctl {__version__} is on this machine, and {version} called it",
            hint=f"install {version} on this machine, or {__version__} where you typed the command",
        )
    if mode == _SENDS:
        _receive()
    if mode == _ATTACHED:
        line = os.dup(0)
        with open(os.devnull, "rb") as nothing:
            os.dup2(nothing.fileno(), 0)
        threading.Thread(target=_follow, args=(line,), name="caller", daemon=True).start()
    return mode == _SENDS


def _follow(line: int) -> None:
    """Interrupt this process for each Ctrl-C, and end it when the caller is gone; training then continues."""
    while data := os.read(line, 64):
        for _ in range(data.count(_INTERRUPT)):
            os.kill(os.getpid(), signal.SIGINT)
    os.kill(os.getpid(), signal.SIGTERM)
