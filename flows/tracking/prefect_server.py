"""Prefect's server, for one flow or with its pages for `hlatctl ui`; it ends with the process that started it.

``python -m flows.tracking.prefect_server FD [--pages]`` serves on the listening socket that it inherits.
``flows.tracking.local_server`` decides who may use it. Prefect's own temporary server isn't used: it outlives a killed
flow, ends at Ctrl-C while the flow still reports to it, and answers anyone.
"""

from __future__ import annotations

import os
import sys

from flows.tracking.connections import inherited, run, take_auth
from flows.tracking.local_server import Gate, own_origins
from hlatctl.run.errors import run_main

#: Prefect's background services for schedules, pauses, workers and automations, which runs do not have.
_UNUSED_SERVICES = ("SCHEDULER", "LATE_RUNS", "PAUSE_EXPIRATIONS", "FOREMAN", "REPOSSESSOR", "TRIGGERS")


def settings(auth: str, port: int) -> dict[str, str]:
    """Return variables that make Prefect require a password and refuse requests from other pages."""
    return {
        "PREFECT_SERVER_API_AUTH_STRING": auth,
        "PREFECT_SERVER_API_CSRF_PROTECTION_ENABLED": "true",
        "PREFECT_SERVER_API_CORS_ALLOWED_ORIGINS": ",".join(own_origins(port)),
        # The default is port 4200, whatever port the pages are served on.
        "PREFECT_SERVER_UI_API_URL": f"{own_origins(port)[0]}/api",
        "PREFECT_SERVER_UI_SHOW_PROMOTIONAL_CONTENT": "false",
        **{f"PREFECT_SERVER_SERVICES_{name}_ENABLED": "false" for name in _UNUSED_SERVICES},
    }


def main(argv: list[str]) -> int:
    """Serve until standard input closes."""
    listener, port = inherited(int(argv[0]))
    auth = take_auth()
    os.environ.update(settings(auth, port))
    from prefect.server.api.server import create_app

    app = create_app(ephemeral="--pages" not in argv, final=True)
    return run(Gate(app, port, auth, app_checks=True), listener)


if __name__ == "__main__":
    sys.exit(run_main(lambda: main(sys.argv[1:])))
