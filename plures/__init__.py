"""Plures: personalized federated learning. Out of one model, many."""

__version__ = "0.1.0"
