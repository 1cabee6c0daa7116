"""Launchers start jobs as processes, behind one protocol. A job's script is rendered apart from its submission.

``base`` has the protocol and its data, ``local`` implements it, ``records`` reads a local job's records.
``flows.launchers`` chooses the launcher of a configuration.
"""
