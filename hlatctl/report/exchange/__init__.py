"""Scores in the formats of other evaluators: lm-evaluation-harness, lighteval and OLMES.

``exported`` collects a milestone's scores, ``imported`` checks and names the figures of a file, and ``lm_eval``,
``lighteval`` and ``olmes`` each handle one format. ``source`` finds foreign files and limits their size. Nothing here
creates a run.
"""
