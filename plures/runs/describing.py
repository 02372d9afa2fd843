"""Makes the description of a method for a scene, by its shapes."""

import torch

from plures import tree
from plures.methods.base import Federation, Method
from plures.methods.messages import one_of
from plures.methods.spec import all_settings, setting_fields
from plures.runs.describe import Description, Setting, Tensors
from plures.runs.scene import Scene
from plures.simulate.shapes import Shapes, shapes_of


def describe(scene: Scene) -> Description:
    """What travels and what stays, for the clients and the model of a scene."""
    method, task = scene.method, scene.task
    shapes = shapes_of(method, task, scene.population.sizes())
    down, up = first_traffic(scene, shapes)
    return Description(
        settings_of_method(method),
        shapes.is_each,
        _tensors(shapes.train, down),
        _tensors(shapes.upload, up),
        _tensors(shapes.kept, tree.n_bytes(shapes.kept)),
        tree.n_bytes(shapes.server),
        method.needs_classes,
    )


def first_traffic(scene: Scene, shapes: Shapes) -> tuple[int, int]:
    """Bytes down and up, per client, in the first round: some methods send less when they see what is in a message."""
    method, task, population = scene.method, scene.task, scene.population
    with torch.no_grad():
        server = method.init_server(task, task.initial, Federation(population.sizes(), torch.tensor(0)))
        message = method.send(task, server, torch.tensor(population.eligible()[:1]))
    return method.n_bytes(task, one_of(message, 0), shapes.upload)


def settings_of_method(method: Method) -> list[Setting]:
    """Every setting with its value, the outermost first."""
    values = all_settings(method)
    fields = setting_fields(method).items()
    return [Setting(name, values[name], list(f.metadata["choices"]), f.metadata["help"]) for name, f in fields]


def _tensors(of: tree.Tree, n_bytes: int) -> Tensors:
    shapes = zip(tree.names(of), tree.leaves(of), strict=True)
    return Tensors(n_bytes, {name: list(x.shape) for name, x in shapes})
