"""Checks of a Trainium node, from the output of its tools. Standard library only, never torch.

Formats are from the Neuron SDK's documentation (awsdocs-neuron, "System Tools"). Nothing here has run on a device.
"""
