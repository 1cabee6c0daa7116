"""The simulated cluster of a dry run, on a virtual clock, behind the real launcher protocol.

The real flow runs on it and writes the real files. ``world`` has the cluster, its launcher and its jobs; ``draws`` has
the numbers of steps, the failures and the durations. ``evidence`` has what each failure leaves for the flow, and
``checkpoints`` the simulated checkpoints.
"""
