"""Messages to people about a run: read from its journal, sent by a process alongside its driver.

- ``notes``: which events deserve a message, and its text.
- ``notifier``: reads the journal, sends each message once, and keeps what is unsent in ``notify.json``.
- ``services``: sends one message with Apprise.
- ``follower``: the process.
"""
