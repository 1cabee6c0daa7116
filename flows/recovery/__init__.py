"""Causes of failures, the restart policy and the node ledger. Starts no process.

``failure_causes`` and ``policy`` are pure; ``node_ledger`` reads and writes the file with the hosts' failures and
checks.
"""
