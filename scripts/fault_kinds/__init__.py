"""The kinds of faults that `scripts/faults.py` tries: one file each, with what they share in `processes` and `disk`."""
