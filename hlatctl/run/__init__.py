"""The lowest layer: run directory paths, journal, folded state, provenance, errors.

Standard library only. Every other room may import this one; it imports none of them.
"""
