"""Benchmarks: each prints a ratio measured in one run against a named peer. Only their arithmetic has tests."""

import os
from pathlib import Path

#: Real data, for the benchmarks that need them: `corpora`, `tokenizers`, `weights`, and `eval` in the layout of
#: ``eval.data_dir``.
DATA_FOLDER = Path(os.environ.get("HLATCTL_BENCH_DATA", "data")).absolute()
