"""Optimizers over this process's shard of the parameters."""
