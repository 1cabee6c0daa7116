"""``python -m eval``: evaluate one exported checkpoint. This module handles only arguments and the exit status.

With ``--then FOLDER`` the process stays for further milestones (``hlatctl.run.orders``). It imports the packages once,
which takes longer than evaluating a small model, and evaluates each milestone in a copy of itself (fork). So a
milestone's scores can't depend on an earlier one, and its memory is free when it is done.
"""

from __future__ import annotations

import argparse
import importlib
import os
import sys
import traceback
from contextlib import suppress
from pathlib import Path

from conf.load import load
from conf.of_run import of_run
from conf.schema import Config
from hlatctl.run import orders, startup
from hlatctl.run.errors import RunNotFoundError, run_main
from hlatctl.run.files import private_folder
from hlatctl.run.paths import RunPaths

#: The words of an order before the arguments; orders are written as for ``python``.
_MODULE = ("-m", "eval")
#: Packages that an evaluation imports late; transformers loads its parts when they are first used.
_PACKAGES = (
    "torch",
    "transformers.models.auto.modeling_auto",
    "transformers.models.llama.modeling_llama",
    "transformers.generation.utils",
    "transformers.distributed.configuration_utils",
    "lm_eval.evaluator",
    "lm_eval.tasks",
    "eval.serving.hugging_face",
    "eval.milestone",
)


def main() -> int:
    """Parse the command line and evaluate; return 0 when results.json is complete."""
    options = _parser().parse_args()
    return _stay(sys.argv[1:], options) if options.then else _evaluate(options)


def _stay(argv: list[str], options: argparse.Namespace) -> int:
    """Evaluate the milestone of the command line, then those of orders; return the exit code of the first that fails.

    A package that can't be imported here is reported by the evaluation that needs it.
    """
    config = _config(options, _run(options))
    with private_folder("eval") as own:
        _import_packages(config, own.path)
        if code := _in_copy(argv):
            return code
        orders.done(options.then, 0)
        for number, words in orders.coming(options.then):
            if code := _in_copy(words[len(_MODULE) :]):
                return code
            orders.done(options.then, number)
    return 0


def _import_packages(config: Config, scratch: Path) -> None:
    """Import what evaluations on a CPU need; nothing is computed, so no thread exists that a fork would lose."""
    from eval.serving import model
    from eval.tasks import plan

    model.settle_environment(scratch, offline=not plan.uses_network(config.eval))
    with suppress(ImportError):
        for name in _PACKAGES:
            importlib.import_module(name)
    startup.imported()


def _in_copy(argv: list[str]) -> int:
    """Evaluate a milestone in a copy of this process; return its exit code, 128 + n if signal n ended it."""
    pid = os.fork()
    if not pid:
        code = 1
        try:
            code = run_main(lambda: _evaluate(_parser().parse_args(argv)))
        except BaseException:
            traceback.print_exc()
        finally:
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(code)
    code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    return code if code >= 0 else 128 - code


def _run(options: argparse.Namespace) -> RunPaths:
    run = RunPaths(options.run_dir.absolute())
    if not run.config.is_file():
        raise RunNotFoundError(f"--run-dir={run.root}: is not a run directory: it has no config.yaml")
    return run


def _config(options: argparse.Namespace, run: RunPaths) -> Config:
    return load(options.config) if options.config else of_run(run)


def _evaluate(options: argparse.Namespace) -> int:
    run = _run(options)
    from eval.milestone import evaluate
    from eval.task_runner import Subject

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
    parser.add_argument("--then", type=Path, help="stay for the orders in this folder")
    parser.add_argument("--try", dest="try_number", type=int, default=1, help="number of this try, from 1")
    return parser


if __name__ == "__main__":
    sys.exit(run_main(main))
