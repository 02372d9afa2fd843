"""Studies: several runs that belong together, as comparisons of methods and the tables of the papers.

A single run is not here: see `runs`.
"""
