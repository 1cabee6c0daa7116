"""`hlatctl ui`: serves the web pages of Prefect and MLflow for a runs folder."""

from __future__ import annotations

from typing import Annotated

import typer

from hlatctl.cli.common import RunsDir, runs_folder, say


def ui(
    prefect_port: Annotated[int, typer.Option(help="Port of Prefect's web page.", min=1, max=65535)] = 4200,
    mlflow_port: Annotated[int, typer.Option(help="Port of MLflow's web page.", min=1, max=65535)] = 5000,
    runs_dir: RunsDir = None,
) -> None:
    """Serve the web pages of Prefect and MLflow.

    Serves them until Ctrl-C. Runs don't need these pages.
    """
    from flows.tracking.ui import serve

    serve(runs_folder(runs_dir), prefect_port, mlflow_port, _ready, say)


def _ready(addresses: dict[str, str], auth: str) -> None:
    for name, address in addresses.items():
        typer.echo(f"{name}\t{address}")
    user, _, password = auth.partition(":")
    say(f"password for Prefect's page: {auth}")
    say(f"for MLflow's page: user {user}, password {password}")
    say("press Ctrl-C to stop both")
