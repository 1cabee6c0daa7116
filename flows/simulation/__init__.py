"""The simulated cluster on a virtual clock, behind the real launcher protocol; `--dry-run` selects it.

The flow that runs on it is the real one, and so is everything that it writes. ``mock`` is the launcher. ``world`` is
the cluster and what breaks in it; ``scripts`` are the jobs and ``training`` the one that matters; ``process`` plays a
script; ``failures`` are drawn; ``evidence`` is what a failure leaves behind for the flow; ``timing`` says how long
things take, and ``curves`` what the numbers look like. Nothing here decides anything: that is the flow's part.
"""
