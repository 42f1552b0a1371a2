"""Experiments: command-line programs over the library, one file each, run as `python -m experiments.NAME`."""
import os

# XLA compares two tuning hints of a program from the persistent cache (+prefer-no-gather, +prefer-no-scatter) with the
# machine's features and prints pages of harmless errors about them; it reads this when jax is first imported.
os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")
