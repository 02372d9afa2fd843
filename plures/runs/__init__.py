"""Runs: from a config to a scene, through the one loop of rounds, to checkpoints, results and a run folder.

How clients are reached is not here: they are simulated (`simulate`) or elsewhere (`federate`).
"""
