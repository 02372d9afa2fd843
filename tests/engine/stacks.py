"""Stacks of clients for tests of passes: what a pass leaves of a step, and whether a stack learns as its clients do."""

import torch

from plures import engine, tree
from plures.methods.messages import Same
from plures.runs.config import make_config
from plures.runs.scene import make_scene
from plures.simulate.stacking import run_group
from plures.simulate.work import train_function


def trained(model, style, n=3):
    """What n clients upload after three steps of FedAvg on digits."""
    scene = make_scene(make_config({"method": "fedavg", "model": model, "clients": n, "partition": "iid", "steps": 3}))
    task, method = scene.task, scene.method
    state = tree.map(lambda x: torch.stack([x] * n), method.init_client(task, task.initial))
    shards = scene.population.shards(range(n), "train", "train", 0)
    return run_group(style, train_function(method, task), Same(task.initial), state, shards)[1]


def assert_trains_as_alone(model, n=3):
    """A stack, whose step is traced, learns what one client after another learns."""
    engine._steps.clear()
    stacked = trained(model, "vectorised", n)
    assert [step.why_eager for step in engine._steps.values()] == [""]
    alone = trained(model, "one_by_one", n)
    for key, x in alone.items():
        assert torch.allclose(x, stacked[key], rtol=1e-4, atol=1e-6), key


def seen_after(monkeypatch, module, name="apply"):
    """A list that gets, for every graph that a pass has rewritten, the functions that it calls."""
    graphs = []
    real = getattr(module, name)

    def apply(graph, *others):
        real(graph, *others)
        graphs.append([node.target for node in graph.nodes])

    monkeypatch.setattr(module, name, apply)
    return graphs
