"""Passes over the graph of a traced step, one file each: they make it faster and leave its numbers but for rounding.

A pass is `apply(graph, n)`, where n, a prime, stands for the number of clients. None knows a method or a model.
"""

from collections.abc import Callable

from torch import fx

from plures.engine.choice import Engine
from plures.engine.passes import (
    channels_last,
    clean,
    client_by_client,
    draws,
    embedding_sums,
    factored_gradients,
    join_products,
    late_updates,
    pooled,
    products,
    winograd,
)

Apply = Callable[[fx.Graph, int], None]


def apply_all(graph: fx.Graph, n: int, engine: Engine, is_stacked: bool, has_gradients: bool) -> None:
    """All passes that are on, in their order. Some are for stacks of clients, one is for gradients."""
    if engine.has("clean"):
        clean.apply(graph, n)
    if engine.has("join-products"):
        join_products.apply(graph, n)
    if not is_stacked:
        return
    if engine.has("draws"):
        draws.apply(graph, n)
    if engine.has("client-by-client"):
        client_by_client.apply(graph, n, engine.has("channels-last") and engine.has("winograd"))
    if engine.has("channels-last"):
        channels_last.apply(graph, n)
        if engine.has("client-by-client"):
            pooled.apply(graph, n)
            client_by_client.apply_to_first_layers(graph, n)
        if engine.has("winograd"):
            winograd.apply(graph, n)
    if engine.has("embedding-sums"):
        embedding_sums.apply(graph, n)
    if engine.has("factored-gradients") and has_gradients:
        factored_gradients.apply(graph, n)
    if engine.has("clean"):
        clean.apply(graph, n)
    if engine.has("products"):
        products.apply(graph, n)
    if engine.has("late-updates") and has_gradients:
        late_updates.apply(graph, n)
