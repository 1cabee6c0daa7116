"""The simulated cluster of a dry run, on a virtual clock, behind the real launcher protocol.

The real flow runs on it and writes the real files. ``cluster`` has the clock, the hosts, the failures and the launcher;
``jobs`` has what each job does and leaves.
"""
