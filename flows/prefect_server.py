"""Prefect's API for one flow: a server process that ends with the process that started it.

``python -m flows.prefect_server FD`` serves on the listening socket that it inherits, without pages, until its standard
input closes. Prefect's own temporary server outlives a killed flow, dies with the terminal's Ctrl-C while the flow
still reports to it, and is waited for 20 s when it can't start. The pages are ``flows.servers``'s.
"""

from __future__ import annotations

import os
import signal
import socket
import sys
import threading


def main(fd: int) -> int:
    """Serve until standard input closes."""
    import uvicorn
    from prefect.server.api.server import create_app

    app = create_app(ephemeral=True, final=True)
    # Connections are not waited for: whoever held them is gone, or has already been told that its events are stored.
    server = uvicorn.Server(uvicorn.Config(app, log_level="error", lifespan="on", timeout_graceful_shutdown=0))

    def end_with_parent() -> None:
        sys.stdin.buffer.read()
        # Prefect's background services stop at once for a signal, and take seconds for `should_exit`.
        os.kill(os.getpid(), signal.SIGTERM)

    threading.Thread(target=end_with_parent, daemon=True).start()
    server.run(sockets=[socket.socket(fileno=fd)])
    return 0 if server.started else 1


if __name__ == "__main__":
    sys.exit(main(int(sys.argv[1])))
