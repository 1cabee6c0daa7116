"""Launchers: start jobs as processes, behind one protocol. A job's script is rendered separately from its submission.

``base`` has the protocol and its data; ``local``, ``slurm`` and ``kubernetes`` implement it; ``endings`` finds out how
a job under a scheduler ended.
"""
