"""Simulation: client functions run over cohorts, one by one or stacked, in this process, in workers or in Ray.

What a run is made of, and what it leaves behind, is not here: see `runs`.
"""
