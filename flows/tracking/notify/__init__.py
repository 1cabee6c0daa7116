"""Messages to people about a run: read from its journal, sent by a process beside its driver.

- ``notes``: which events deserve a message, and its text.
- ``numbers``: what a message says about the run's progress.
- ``book``: what was read and what is unsent, in ``notify.json``.
- ``notifier``: reads, waits, and sends each message once.
- ``services``: sends one message with Apprise.
- ``follower``: the process.
"""
