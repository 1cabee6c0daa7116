#!/bin/sh
# Job train, written by hlatctl. May be run by hand to repeat it.
export HLATCTL_ERROR_FILE=/runs/golden/launch/attempt-0002/train.error.json
export OMP_NUM_THREADS=1
export PYTHONSAFEPATH=1
export PYTHONUNBUFFERED=1
export TOKENIZERS_PARALLELISM=false
export TORCHINDUCTOR_CACHE_DIR=CACHE_DIR

# Writes train.pid first and train.exit_code last; SIGTERM asks the job to stop, SIGQUIT ends it at once.
exec PYTHON -m hlatctl.node /runs/golden/launch/attempt-0002/train --stay failed -- \
  PYTHON -m trainer.launch 2 --import=trainer.backends.torch_native --import=torch._dynamo -m trainer --run-dir /runs/golden --config /runs/golden/config.yaml --attempt 2
