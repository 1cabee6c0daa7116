"""``python -m eval.check --config FILE``: whether a suite can be run, before anything is: its names, data and packages.

A built-in suite is checked without the harness; any other asks it for its definitions, which takes some seconds. With
``--run-dir`` also whether the run's frozen contract allows it; prints the contract's hash and the folder of results
inside a milestone's as JSON.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path

from conf.load import load
from eval import contract, model, plan, runners
from eval.validation import held_out
from hlatctl.run import contract as contracts
from hlatctl.run.errors import run_main
from hlatctl.run.paths import RunPaths
from hlatctl.run.scratch import private_folder


def main(argv: list[str] | None = None) -> int:
    """Check the suite, its tasks and their files; 0 if all is there."""
    parser = argparse.ArgumentParser(prog="eval.check", description=__doc__)
    parser.add_argument("--config", type=Path, required=True)
    parser.add_argument("--run-dir", type=Path, help="whose contract would have to allow it")
    parser.add_argument("--new-contract", action="store_true", help="another one than the run has had would do")
    parser.add_argument("--from-elsewhere", action="store_true", help="the model is no run's: no held-out text")
    options = parser.parse_args(argv)
    config = load(options.config)
    runners.check(config.eval.runner)
    with private_folder("eval-check") as own:
        scratch = own.path
        if options.run_dir:
            model.settle_environment(scratch, offline=not plan.uses_network(config.eval))
        made = plan.make(config.eval, scratch)
        for note in made.notes:
            print(note, file=sys.stderr)
        if options.run_dir:
            run = RunPaths(options.run_dir.absolute())
            text = held_out(run, config, from_elsewhere=options.from_elsewhere) if made.validation else None
            present = contract.make(config, made, text, scratch)
            folder_name = contracts.results_folder(present, contracts.check(run, present, new=options.new_contract))
            print(json.dumps({"contract": contracts.of_tasks(present), "folder": folder_name}))
    return 0


if __name__ == "__main__":
    sys.exit(run_main(main))
