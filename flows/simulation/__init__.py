"""The simulated cluster of a dry run, on a virtual clock, behind the real launcher protocol.

The real flow runs on it and writes the real files. ``mock`` is the launcher, ``world`` the cluster with its failures.
``scripts`` has the simulated jobs, ``training`` that of training, and ``process`` runs them. ``failures`` draws
failures, ``evidence`` has what each leaves for the flow, ``timing`` computes durations and ``curves`` the numbers of
steps.
"""
