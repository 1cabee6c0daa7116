"""The lowest layer: paths of a run directory, journal, folded state, provenance, errors.

Standard library only. Every other package may import this one; it imports none of them.
"""
