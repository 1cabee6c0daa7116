"""`hlatctl ui`: Prefect's and MLflow's web pages for a runs folder."""

from __future__ import annotations

from typing import Annotated

import typer

from hlatctl.cli.common import RunsDir, runs_folder, say


def ui(
    prefect_port: Annotated[int, typer.Option(help="Port of Prefect's page.", min=1, max=65535)] = 4200,
    mlflow_port: Annotated[int, typer.Option(help="Port of MLflow's page.", min=1, max=65535)] = 5000,
    runs_dir: RunsDir = None,
) -> None:
    """Serve Prefect's and MLflow's pages.

    Until Ctrl-C. A run needs neither.
    """
    from flows.servers import serve

    serve(runs_folder(runs_dir), prefect_port, mlflow_port, _ready)


def _ready(addresses: dict[str, str]) -> None:
    for name, address in addresses.items():
        typer.echo(f"{name}\t{address}")
    say("Ctrl-C ends both")
