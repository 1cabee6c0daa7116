"""How an evaluated model answers requests: loading, runners, log-likelihoods, memory, stored answers."""
