"""`hlatctl ui`: serves the live page of a runs folder, and the pages of Prefect and MLflow behind it."""

from __future__ import annotations

from typing import Annotated

import typer

from hlatctl.cli.common import RunsDir, runs_folder, say, write


def ui(
    port: Annotated[int, typer.Option(help="Port of the page.", min=0, max=65535)] = 8400,
    prefect_port: Annotated[int, typer.Option(help="Port of Prefect's web page.", min=1, max=65535)] = 4200,
    mlflow_port: Annotated[int, typer.Option(help="Port of MLflow's web page.", min=1, max=65535)] = 5000,
    page_only: Annotated[bool, typer.Option("--page-only", help="Don't start Prefect's and MLflow's servers.")] = False,
    allow_control: Annotated[bool, typer.Option("--allow-control", help="Let the page stop and resume runs.")] = False,
    runs_dir: RunsDir = None,
) -> None:
    """Serve a page that shows all runs live.

    Prints the page's link, and serves it until Ctrl-C. Prefect's and MLflow's own pages start behind it. Runs don't
    need these servers.
    """
    from flows.live.serve import Options, serve

    options = Options(
        port=port, prefect_port=prefect_port, mlflow_port=mlflow_port, page_only=page_only, allow_control=allow_control
    )
    serve(runs_folder(runs_dir), options, _ready, say)


def _ready(link: str, auth: str) -> None:
    write(f"page\t{link}")
    if auth:
        user, _, password = auth.partition(":")
        say(f"Prefect's and MLflow's pages are starting; their user is {user}, their password {password}")
        say(f"Prefect's page asks for both in one field: {auth}")
    say("press Ctrl-C to stop")
