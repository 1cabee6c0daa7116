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
#SBATCH --reservation=course
#SBATCH '--constraint=$(touch x)|'"'"'a b'"'"'\\'
#SBATCH --exclusive
#SBATCH --gpus-per-node=8
#SBATCH --mem=0
#SBATCH --time=25:01:01
#SBATCH --signal=TERM@600
#SBATCH --exclude=n3,n7
# Written by hlatctl: keeps nodes for a run, and runs there what its driver orders in this folder.
# An allocation that its driver has given up does nothing.
[ -z "$HLATCTL_TOKEN" ] || [ "$HLATCTL_TOKEN" = "$(cat /runs/golden/launch/allocation-0001/nodes.token)" ] || exit 0
# A shell that isn't a login shell may not have Environment Modules or Lmod yet.
type module >/dev/null 2>&1 || . /etc/profile
module load CUDA/12.9 '$(touch x)' && . '/project/a b/$(touch x).sh'
prepared=$?
[ $prepared = 0 ] || exit 1
export PYTHONSAFEPATH=1 PYTHONUNBUFFERED=1
exec PYTHON -m hlatctl.allocation /runs/golden/launch/allocation-0001 600
