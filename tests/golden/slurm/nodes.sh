#!/bin/bash
#SBATCH --job-name=hlatctl:/runs/golden/launch/allocation-0001/nodes
#SBATCH --nodes=2-3
#SBATCH --no-kill
#SBATCH --no-requeue
#SBATCH --open-mode=append
#SBATCH --output=/runs/golden/launch/allocation-0001/nodes.log
#SBATCH --partition=gpu
#SBATCH --account=physics
#SBATCH --qos=long
#SBATCH --exclusive
#SBATCH --gpus-per-node=8
#SBATCH '--constraint=$(touch x)|'"'"'a b'"'"'\\'
#SBATCH --time=25:01:01
#SBATCH --signal=TERM@600
#SBATCH --exclude=n3,n7
# Written by hlatctl: keeps nodes for a run, and runs there what its driver orders in this folder.
# An allocation that its driver has given up does nothing.
[ -z "$HLATCTL_TOKEN" ] || [ "$HLATCTL_TOKEN" = "$(cat /runs/golden/launch/allocation-0001/nodes.token)" ] || exit 0
export PYTHONSAFEPATH=1 PYTHONUNBUFFERED=1
exec PYTHON -m hlatctl.allocation /runs/golden/launch/allocation-0001 600
