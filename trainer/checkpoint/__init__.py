"""Checkpoints of a run: when they are saved and loaded, how they are written, which are trusted, where they lie."""
