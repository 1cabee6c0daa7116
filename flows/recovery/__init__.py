"""What follows a failure: its cause, the policy that decides, and the ledger of the nodes. Starts nothing.

``failure_causes`` and ``policy`` are pure; ``node_ledger`` keeps what runs have shown of the hosts.
"""
