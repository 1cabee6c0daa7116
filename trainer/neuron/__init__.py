"""A Trainium node seen through its tools: what they print, parsed and judged. Standard library only, never torch.

Formats are those of the Neuron SDK's documentation (awsdocs-neuron, "System Tools"); nothing here has run on a device.
"""
