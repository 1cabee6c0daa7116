"""What the page of `hlatctl ui` shows, as plain data: rows, one run's details, curves, comparisons, heat maps.

This package doesn't know the web; ``flows.live`` serves the data. Numbers that are not finite stay NaN here; JSON has
null for them.
"""
