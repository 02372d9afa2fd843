"""Layer scores: how personal each layer of a model is, by its distance per weight from a reference model."""

import torch
from torch import Tensor

from plures.learn.task import Task
from plures.tree import Params, is_statistic


def scored_layers(task: Task, params: Params, norm_layers: bool) -> dict[str, str]:
    """Name of a tensor -> the layer whose score it has. A norm layer without a score has that of the layer before."""
    layers = task.layers_in(params)
    own = [layer for layer in layers if norm_layers or not task.is_norm(task.layers[layer][0])] or layers
    scored_by: dict[str, str] = {}
    last = own[0]
    for layer in layers:
        last = layer if layer in own else last
        scored_by[layer] = last
    return {name: scored_by[task.layer_of(name)] for name in params}


def scores(
    task: Task,
    own: Params,
    reference: Params,
    layer_of: dict[str, str],
    measure: str,
    scale: str,
    trained: Tensor | bool = True,
) -> Tensor:
    """[layer]: the distance per weight of each layer, scaled to a mean of one, to a sum of one, or not at all.

    Scores are uniform if all distances are zero, or if `own` is not trained yet.
    """
    layers = list(dict.fromkeys(layer_of.values()))
    distances = []
    for layer in layers:
        # A norm layer without a score takes the layer's score but does not contribute to it.
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


def mark_highest(each: Tensor, n: int) -> Tensor:
    """[layer]: 1 for the n layers with the highest scores, else 0; among equal scores, lower layers come first."""
    rank = (-each).argsort(stable=True).argsort()
    return (rank < n).to(each.dtype)


def expand_to_tensors(each: Tensor, layer_of: dict[str, str]) -> Params:
    """For every tensor, the number of its layer."""
    layers = list(dict.fromkeys(layer_of.values()))
    return {name: each[layers.index(layer)] for name, layer in layer_of.items()}
