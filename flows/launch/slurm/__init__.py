"""Jobs on a Slurm cluster: a batch script per job, the scheduler's answers, and each node's records."""
