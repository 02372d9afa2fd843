"""Learning at one client: a module as a task, `fit` and `measure` over its batches, optimizers, and FLOPs.

Nothing here knows a method, a server or more than one client.
"""
