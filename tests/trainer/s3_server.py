"""moto's S3 server on loopback, for tests of checkpoints and corpora in object storage."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys

from hlatctl.cache.store import connect
from tests.ports import free_port
from tests.waiting import wait_for

BUCKET = "s3://bucket"


class Server:
    """moto's S3 server. It keeps objects in memory, so a server that dies loses them."""

    def __init__(self) -> None:
        self.port = free_port()
        self.start()

    def start(self) -> None:
        argv = [sys.executable, "-m", "moto.server", "-H", "127.0.0.1", "-p", str(self.port)]
        self._process = subprocess.Popen(argv, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        wait_for(self._answers)

    def kill(self) -> None:
        self._process.send_signal(signal.SIGKILL)
        self._process.wait()

    def _answers(self) -> bool:
        assert self._process.poll() is None
        with socket.socket() as client:
            return client.connect_ex(("127.0.0.1", self.port)) == 0

    def environment(self) -> dict[str, str]:
        """Variables that make it the S3 server of a process."""
        return {
            "AWS_ENDPOINT_URL": f"http://127.0.0.1:{self.port}",
            "AWS_ACCESS_KEY_ID": "somebody",
            "AWS_SECRET_ACCESS_KEY": "anything",
            "AWS_DEFAULT_REGION": "us-east-1",
            "AWS_MAX_ATTEMPTS": "1",
            "AWS_CONFIG_FILE": os.devnull,
            "AWS_SHARED_CREDENTIALS_FILE": os.devnull,
        }


def make_bucket() -> None:
    system, _ = connect(BUCKET)
    if system.exists("bucket"):
        system.rm("bucket", recursive=True)
    system.mkdir("bucket")
