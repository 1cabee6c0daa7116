from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

_CREATE = (
    "import sys; from pathlib import Path; from flows.tracking import prefect_api as p; p.configure(Path(sys.argv[1]))"
)


@pytest.fixture(scope="session")
def prefect_home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with Prefect's empty database, to copy: creating it takes longer than most tests."""
    folder = tmp_path_factory.mktemp("prefect")
    environment = {name: value for name, value in os.environ.items() if not name.startswith("PREFECT_")}
    subprocess.run([sys.executable, "-c", _CREATE, os.fspath(folder)], env=environment, check=True, timeout=600)
    return folder / ".prefect"
