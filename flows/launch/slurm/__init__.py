"""Jobs as Slurm batch jobs: a script per job, the scheduler's answers, and what each node wrote."""
