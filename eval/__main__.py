"""``python -m eval``: evaluate one exported checkpoint. Only arguments and exit status are handled here."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from conf.load import load
from hlatctl.run.errors import RunNotFoundError, run_main
from hlatctl.run.paths import RunPaths


def main() -> int:
    """Parse the command line and evaluate; return 0 when results.json is complete."""
    options = _parser().parse_args()
    run = RunPaths(options.run_dir.absolute())
    if not run.config.is_file():
        raise RunNotFoundError(f"--run-dir={run.root}: is not a run directory: it has no config.yaml")
    from eval.milestone import evaluate
    from eval.tasks import Subject

    subject = Subject(
        run=run,
        milestone_tokens=options.milestone_tokens,
        step=options.step,
        model_folder=options.model.absolute(),
        weights=options.weights,
        from_elsewhere=options.from_elsewhere,
    )
    config = load(options.config) if options.config else None
    evaluate(subject, config=config, new_contract=options.new_contract, try_number=options.try_number)
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m eval", description="Evaluate one exported checkpoint of a run.")
    parser.add_argument("--run-dir", type=Path, required=True, help="the run directory")
    parser.add_argument("--milestone-tokens", type=int, required=True, help="tokens of the milestone")
    parser.add_argument("--step", type=int, required=True, help="optimizer step of the checkpoint")
    parser.add_argument("--model", type=Path, required=True, help="Hugging Face folder with weights and tokenizer")
    parser.add_argument("--weights", default="", help="identifies the weights, such as a manifest's checksum")
    parser.add_argument("--config", type=Path, help="configuration that replaces the run's own")
    parser.add_argument("--new-contract", action="store_true", help="allow a contract that differs from the run's")
    parser.add_argument("--from-elsewhere", action="store_true", help="the model is external: no held-out text")
    parser.add_argument("--try", dest="try_number", type=int, default=1, help="number of this try, from 1")
    return parser


if __name__ == "__main__":
    sys.exit(run_main(main))
