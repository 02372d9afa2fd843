"""Data: rows with labels, from a name, a file or a folder, and how they are dealt to clients and cut into batches.

What a model makes of the rows is not here.
"""
