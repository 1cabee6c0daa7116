"""Starting processes: their priority beside training."""

from __future__ import annotations

import os
import subprocess

import pytest

from flows.launch.local import BESIDE_TRAINING_NICE
from flows.runtime import spawn


@pytest.mark.processes
def test_a_process_that_yields_has_a_low_priority_and_its_own_arguments() -> None:
    script = 'nice; echo "$1|$2"'
    words = spawn.yielding(["sh", "-c", script, "sh", "a b", "$HOME"])
    printed = subprocess.run(words, capture_output=True, text=True, check=True, start_new_session=True).stdout
    assert printed.splitlines() == [str(min(19, os.nice(0) + BESIDE_TRAINING_NICE)), "a b|$HOME"]
