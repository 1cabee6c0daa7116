#!/bin/bash
#SBATCH --job-name=hlatctl:/runs/a%20%24%28touch%20x%29%27%25j/launch/attempt-0000/eval-833333
#SBATCH --nodes=1
#SBATCH --ntasks-per-node=1
#SBATCH --no-requeue
#SBATCH --open-mode=append
#SBATCH '--output=/runs/a $(touch x)'"'"'%%j/logs/attempt-0000/eval-833333.log'
# Job eval-833333, written by hlatctl. Submit this file with sbatch to repeat it.
# A job that its driver has given up does nothing.
[ -z "$HLATCTL_TOKEN" ] || [ "$HLATCTL_TOKEN" = "$(cat '/runs/a $(touch x)'"'"'%j/launch/attempt-0000/eval-833333.token')" ] || exit 0
# What srun itself says belongs into the job's log too.
exec >>'/runs/a $(touch x)'"'"'%j/logs/attempt-0000/eval-833333.log' 2>&1
trap : TERM
export EVIL=''"'"'; touch x; $(touch x) `touch x` " \ %j
next line'
export HLATCTL_ERROR_FILE='/runs/a $(touch x)'"'"'%j/launch/attempt-0000/eval-833333.error.json'
export OMP_NUM_THREADS=1
nodes=${HLATCTL_NODE_LIST:-$SLURM_JOB_NODELIST}
export HLATCTL_NODES=$(scontrol show hostnames "$nodes" | wc -l)
export HLATCTL_MASTER_ADDR=$(scontrol show hostnames "$nodes" | head -n 1)
# A free port that nobody can foresee, below those that Linux gives to connections (net.ipv4.ip_local_port_range).
for try in 1 2 3 4 5 6 7 8; do
  export HLATCTL_MASTER_PORT=$((20000 + $(od -An -N2 -tu2 /dev/urandom) % 12768))
  cat /proc/net/tcp* | grep -q "^ *[0-9]*: [0-9A-F]*:$(printf %04X $HLATCTL_MASTER_PORT) " || break
done
# A task has the whole node, but a site may bind it to a core. Where Slurm can't bind, srun complains about the option.
scontrol show config | grep -q '^TaskPlugin .*affinity' && export SLURM_CPU_BIND=none
srun --overlap --kill-on-bad-exit=1 '--output=/runs/a $(touch x)'"'"'%%j/logs/attempt-0000/eval-833333.log' --open-mode=append \
  --nodes=$HLATCTL_NODES --ntasks=$HLATCTL_NODES --nodelist="$nodes" \
  sh -c 'NODE_RANK=$SLURM_NODEID HLATCTL_NODE_NAME=$SLURMD_NODENAME exec PYTHON -m hlatctl.node '"'"'/runs/a $(touch x)'"'"'"'"'"'"'"'"'%j/launch/attempt-0000/eval-833333'"'"' -- PYTHON -m eval --note '"'"''"'"'"'"'"'"'"'"'; touch x; $(touch x) `touch x` " \ %j
next line'"'"''
code=$?
echo "{\"v\": 1, \"code\": $code}" >'/runs/a $(touch x)'"'"'%j/launch/attempt-0000/eval-833333.ended'.tmp && mv '/runs/a $(touch x)'"'"'%j/launch/attempt-0000/eval-833333.ended'.tmp '/runs/a $(touch x)'"'"'%j/launch/attempt-0000/eval-833333.ended'
exit $code
