"""The rehearsal: a simulated cluster on a virtual clock, behind the real launcher protocol.

The flow that runs on it is the real one, and so is everything it writes. ``world`` is what there is and what breaks;
``scripts`` are the jobs, ``training`` the one that matters; ``process`` plays a script; ``failures`` are drawn;
``evidence`` is what a failure leaves behind, for the flow to judge; ``timing`` says how long things take and ``curves``
what the numbers look like. ``forecast`` plays many courses at once. Nothing here decides anything: that is the flow's.
"""
