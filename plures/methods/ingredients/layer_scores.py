"""How personal each layer of a model is: its distance from a reference, a weight, as a share of all layers."""

import torch
from torch import Tensor

from plures.learn.task import Task
from plures.tree import Params, is_statistic


def scored_layers(task: Task, params: Params, norm_layers: bool) -> dict[str, str]:
    """For every tensor the layer whose score it has. A norm layer, if not scored itself, goes with the one before."""
    layers = task.layers_in(params)
    own = [layer for layer in layers if norm_layers or not task.is_norm(task.layers[layer][0])] or layers
    follows: dict[str, str] = {}
    last = own[0]
    for layer in layers:
        last = layer if layer in own else last
        follows[layer] = last
    return {name: follows[task.layer_of(name)] for name in params}


def scores(
    task: Task,
    own: Params,
    reference: Params,
    layer_of: dict[str, str],
    measure: str,
    scale: str,
    trained: Tensor | bool = True,
) -> Tensor:
    """[layer]: distance by weights, scaled to mean one, to sum one, or not at all.

    Uniform where all are zero, or where `own` was not trained yet, so that its distance says nothing.
    """
    layers = list(dict.fromkeys(layer_of.values()))
    distances = []
    for layer in layers:
        # A norm layer that follows a layer has its score but does not weigh in it.
        names = [name for name in layer_of if task.layer_of(name) == layer and not is_statistic(name)]
        squares = torch.stack([(own[name] - reference[name]).square().sum() for name in names]).sum()
        n_weights = sum(own[name].numel() for name in names)
        distances.append(squares.sqrt() / (n_weights if measure == "mean" else n_weights**0.5))
    each = torch.stack(distances)
    total = each.sum()
    wanted = {"mean1": float(len(layers)), "sum1": 1.0}.get(scale)
    scaled = each if wanted is None else wanted * each / torch.where(total > 0, total, torch.ones_like(total))
    uniform = torch.full_like(each, 1.0 if wanted is None else wanted / len(layers))
    return torch.where((total > 0) & trained, scaled, uniform)


def most(each: Tensor, n: int) -> Tensor:
    """[layer]: 1 for the n layers with the largest scores (of equals the lower one), else 0."""
    rank = (-each).argsort(stable=True).argsort()
    return (rank < n).to(each.dtype)


def by_tensor(each: Tensor, layer_of: dict[str, str]) -> Params:
    """The number of its layer for every tensor."""
    layers = list(dict.fromkeys(layer_of.values()))
    return {name: each[layers.index(layer)] for name, layer in layer_of.items()}
