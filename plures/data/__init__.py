"""Data: rows with labels, read from a named data set, a file or a folder; their partition among clients; batches.

Models and losses are not here.
"""
