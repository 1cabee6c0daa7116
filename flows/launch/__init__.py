"""Launchers: how a job becomes processes. One protocol, text rendered apart from submission.

``base`` has the protocol and its plain data, ``local`` implements it, ``records`` reads what a local job leaves on
disk. ``flows.launchers`` chooses one for a configuration.
"""
