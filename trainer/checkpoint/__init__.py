"""Checkpoints of a run: saving and loading them, writing, verification and deletion, and where they are stored."""
