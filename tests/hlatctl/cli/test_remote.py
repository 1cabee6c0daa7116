"""`hlatctl --host`: commands over this machine's own sshd, which each connection starts for itself, without a port."""

from __future__ import annotations

import getpass
import os
import pty
import shlex
import shutil
import signal
import subprocess
import sys
import urllib.request
from contextlib import suppress
from pathlib import Path

import pytest

from hlatctl.cli import remote
from hlatctl.cli.main import main
from tests.hlatctl.conftest import MakeRun

pytestmark = pytest.mark.processes

SSHD = "/usr/sbin/sshd"
VENV = Path(sys.executable).parent.parent
#: Each connection of root has a network of its own, as another machine has, and a folder for sshd that /run may lack.
_AS_ROOT = "mount -t tmpfs tmpfs /run && mkdir -m 755 /run/sshd && ip link set lo up && exec "


@pytest.fixture(scope="module")
def host(tmp_path_factory: pytest.TempPathFactory) -> str:
    """The name of a host for ssh; other names fail."""
    if not (os.access(SSHD, os.X_OK) and shutil.which("ssh")):
        pytest.skip("sshd or ssh not installed (apt-get install openssh-server openssh-client)")
    if not (VENV / "bin" / "hlatctl").exists():
        pytest.skip(f"no hlatctl in {VENV}/bin")
    folder = tmp_path_factory.mktemp("ssh")
    (folder / "home").mkdir()
    for key in ("own", "server"):
        subprocess.run(("ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", folder / key), check=True)
    home = f"SetEnv HOME={folder}/home PATH={os.environ['PATH']}"
    server = [f"HostKey {folder}/server", f"AuthorizedKeysFile {folder}/own.pub", "StrictModes no", "UsePAM no", home]
    (folder / "sshd_config").write_text("\n".join(server) + "\n")
    start = f"{SSHD} -i -f {folder}/sshd_config"
    if os.geteuid() == 0:
        start = f"unshare --net --mount sh -c {shlex.quote(_AS_ROOT + start)}"
    known = f"UserKnownHostsFile {folder}/known"
    client = [f"User {getpass.getuser()}", f"IdentityFile {folder}/own", known, "StrictHostKeyChecking accept-new"]
    lines = ["Host lab", *client, f"ProxyCommand {start} 2>/dev/null", "Host *", "ProxyCommand false"]
    (folder / "ssh_config").write_text("\n".join(lines) + "\n")
    (folder / "bin").mkdir()
    (folder / "bin" / "ssh").write_text(f'#!/bin/sh\nexec {shutil.which("ssh")} -F {folder}/ssh_config "$@"\n')
    (folder / "bin" / "ssh").chmod(0o755)
    return os.fspath(folder / "bin")


@pytest.fixture(autouse=True)
def _own_ssh(host: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", host + os.pathsep + os.environ["PATH"])


def test_words_and_the_exit_code_pass_unchanged(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    hostile = 'it\'s $HOME; `id` "*" \\ & ü !x'
    assert main(["--host", f"lab:{VENV}", "status", hostile, f"--runs-dir={tmp_path}"]) == 13
    assert hostile in capfd.readouterr().err


@pytest.mark.parametrize(
    ("name", "code", "message"),
    [
        ("lab:/nowhere", 17, "--host=lab: that machine has no /nowhere/bin/hlatctl\nhint: install hlatctl "),
        ("away", 19, "--host=away: ssh failed\nhint: `ssh away true` must work"),
        ("-oProxyCommand=x", 10, "--host=-oProxyCommand=x: must be [USER@]NAME"),
        ("me@-oProxyCommand=x", 10, "--host=me@-oProxyCommand=x: must be [USER@]NAME"),
        ("a b", 10, "--host=a b: must be [USER@]NAME"),
        ("lab:venv", 10, "--host=lab:venv: must be [USER@]NAME"),
    ],
)
def test_a_host_without_hlatctl_or_with_a_strange_name_is_an_error(
    name: str, code: int, message: str, capfd: pytest.CaptureFixture[str]
) -> None:
    assert main(["--host", name, "runs"]) == code
    assert message in capfd.readouterr().err


def test_another_version_refuses_the_command(
    capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(remote, "__version__", "9.9.9")
    assert main([f"--host=lab:{VENV}", "runs"]) == 17
    assert "and 9.9.9 called it\nhint: install 9.9.9 on this machine" in capfd.readouterr().err


def test_only_a_folder_that_the_command_names_is_copied(
    tmp_path: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "conf").mkdir()
    (tmp_path / "conf" / "hlatctl.yaml").write_text(f"hosts: {{there: 'lab:{tmp_path}'}}\n")
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin" / "hlatctl").write_text(f'#!/bin/sh\necho Welcome\nexec {VENV}/bin/hlatctl "$@"\n')
    (tmp_path / "bin" / "hlatctl").chmod(0o755)
    own = tmp_path / "my own"
    (own / "experiment").mkdir(parents=True)
    (own / "experiment" / "mine.yaml").write_text("# @package _global_\n# My experiment.\nseed: 7\n")
    assert main(["--host", "there", "config", "list", "experiment", "--config-dir", os.fspath(own)]) == 0
    shown = capfd.readouterr()
    assert "copied 1 files of " in shown.err
    assert "  mine" in shown.out


def test_a_terminal_and_its_ctrl_c_reach_the_command(host: str, make_run: MakeRun) -> None:
    run = make_run("one")
    pid, terminal = pty.fork()
    if pid == 0:
        words = ("-m", "hlatctl", "--host", f"lab:{VENV}", "watch", "--runs-dir", os.fspath(run.root.parent))
        os.execvpe(sys.executable, (sys.executable, *words), {**os.environ, "TERM": "xterm"})
    shown = b""
    while b"q ends" not in shown:
        shown += os.read(terminal, 4096)
    os.write(terminal, b"\x03")
    with suppress(OSError):  # a terminal without a program
        while os.read(terminal, 4096):
            pass
    os.close(terminal)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0


@pytest.mark.skipif(os.geteuid() != 0, reason="needs root: the host must have a network of its own")
def test_the_page_comes_through_a_tunnel_and_ends_with_ctrl_c(make_run: MakeRun) -> None:
    run = make_run("one")
    words = (sys.executable, "-m", "hlatctl", "--host", f"lab:{VENV}", "ui", "--runs-dir", os.fspath(run.root.parent))
    process = subprocess.Popen(
        words, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    assert process.stdout
    name, link = process.stdout.readline().rstrip("\n").split("\t")
    opener = urllib.request.build_opener(urllib.request.HTTPCookieProcessor())
    with opener.open(link, timeout=60) as answer:
        page = answer.read().decode()
    assert (name, "<title>" in page) == ("page", True)
    process.send_signal(signal.SIGINT)
    _, said = process.communicate(timeout=60)
    assert process.returncode in (0, 130), said
    with pytest.raises(OSError, match="refused"):
        urllib.request.urlopen(link, timeout=5)
