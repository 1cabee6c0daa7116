"""Prefect's and MLflow's servers for a drill: start them with `hlatctl ui`, kill them, and query them."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

from flows.runtime import programs
from flows.tracking import local_server, mlflow_client, ui, ui_record
from flows.tracking.mirrors.mlflow_run import LAST_STEP_TAG
from hlatctl.run import processes
from hlatctl.run.errors import LaunchError
from hlatctl.run.paths import RunPaths

_POLL_S = 0.1


class Servers:
    """The servers of a runs folder, on free ports of this machine.

    Args:
        say: called while waiting for the servers.
    """

    def __init__(self, runs_dir: Path, say: Callable[[str], None]) -> None:
        self._runs_dir, self._say = runs_dir, say
        self._prefect_port, self._mlflow_port = _free_ports()
        self._ui: subprocess.Popen[bytes] | None = None
        self._auth = ""

    @property
    def mlflow_uri(self) -> str:
        """MLflow's address."""
        return f"http://127.0.0.1:{self._mlflow_port}"

    def start(self) -> None:
        """Start both servers, and return when they answer.

        Raises:
            LaunchError: they don't start.
        """
        self._runs_dir.mkdir(parents=True, exist_ok=True)
        log = self._runs_dir / "ui.log"
        ports = ("--port=0", f"--prefect-port={self._prefect_port}", f"--mlflow-port={self._mlflow_port}")
        with log.open("ab") as output:
            serve = programs.python_command("hlatctl", "ui", *ports, "--runs-dir", os.fspath(self._runs_dir))
            self._ui = programs.start_alongside(serve, output)
        wait = local_server.Wait(self._say)
        while not (record := ui_record.read(self._runs_dir)) or not (record.mlflow and record.prefect):
            waited_s = wait.so_far_s("MLflow's and Prefect's servers")
            if self._ui.poll() is not None or waited_s > ui.START_TIMEOUT_S:
                raise LaunchError("MLflow's and Prefect's servers do not start", hint=f"see {log}")
            time.sleep(_POLL_S)
        self._auth = record.auth

    def kill(self) -> None:
        """Kill both servers, and stop `hlatctl ui`."""
        if self._ui is None:
            return
        for process in map(processes.identify, processes.descendants(self._ui.pid)):
            if process:
                processes.send(process, signal.SIGKILL)
        self.stop()

    def stop(self) -> None:
        """Stop both servers."""
        if self._ui is not None:
            self._ui.terminate()
            self._ui.wait()
            self._ui = None

    def last_step(self, run: RunPaths) -> int:
        """Return the newest step of a run in MLflow; 0 if MLflow doesn't answer."""
        with suppress(OSError, ValueError, KeyError):
            url = f"{self.mlflow_uri}/api/2.0/mlflow/runs/get?run_id={mlflow_client.copied_to(run)['run_id']}"
            tags = json.loads(local_server.get(url, self._auth, timeout_s=5))["run"]["data"]["tags"]
            return int(next(tag["value"] for tag in tags if tag["key"] == LAST_STEP_TAG))
        return 0


def _free_ports() -> tuple[int, int]:
    with socket.socket() as first, socket.socket() as second:
        for probe in (first, second):
            probe.bind(("127.0.0.1", 0))
        return first.getsockname()[1], second.getsockname()[1]
