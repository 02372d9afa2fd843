"""Both engines give the same, in double precision to 1e-10, and what cannot be traced runs eager and says so."""

import json
import subprocess
import sys

import pytest
import torch
from torch import nn

import plures
from plures import engine, tree
from plures.engine import Engine, private
from plures.errors import UsageError
from plures.methods import METHODS
from plures.runs.config import make_config
from plures.runs.scene import make_scene
from plures.runs.simulation import Simulation
from tests.methods.test_every_method import QUICK
from tests.small import played

DOUBLE = {"clients": 5, "partition": "dirichlet:0.5", "rounds": 2, "precision": "float64", "eval_every": 0}
WITH_ADDONS = [
    "ditto+ala:cap=12",
    "fedrod:head=hyper",
    "fedavg+sam",
    "fedrod+feddyn",
    "fedavg+brm",
    "fedrod:loss=meta-bsm",
]
PASSES = ["clean", "join-products", "channels-last", "winograd", "embedding-sums", "factored-gradients"]
PASSES += ["direct-calls", "look-ahead", "repeats"]


def end_state(method, engine, **options):
    """All tensors of server and clients after two rounds."""
    config = make_config({"method": method, **DOUBLE, "engine": engine, **options})
    run = played(Simulation(make_scene(config), None, print), 2)
    [(_, rows)] = run.state.store.written_rows(1 << 20)
    return tree.by_path("server", run.state.server) | tree.by_path("clients", rows), run.executor.usage


def assert_equal_to(a, b, tolerance):
    assert a.keys() == b.keys()
    for name in a:
        if a[name].is_floating_point():
            far = float((a[name] - b[name]).abs().max()) if a[name].numel() else 0.0
            assert far <= tolerance * max(1.0, float(b[name].abs().max()) if b[name].numel() else 0.0), name


@pytest.mark.parametrize("method", [*[QUICK.get(name, name) for name in METHODS], *WITH_ADDONS])
def test_eager_and_traced_agree_in_double_precision(method):
    traced, usage = end_state(method, "traced")
    eager, other = end_state(method, "eager")
    assert usage.eager == 0 and other.traced == 0 and usage.traced == other.eager
    assert other.why == (() if not other.eager else ("the engine is eager",))
    assert_equal_to(traced, eager, 1e-10)


@pytest.mark.parametrize("name", PASSES)
def test_each_pass_can_be_switched_off(name):
    without, usage = end_state("ditto", f"traced:{name}=off")
    assert usage.eager == 0
    assert_equal_to(without, end_state("ditto", "traced")[0], 1e-10)


@pytest.mark.parametrize("name", ["channels-last", "winograd", "direct-calls"])
def test_passes_for_convolutions_change_rounding_alone(name, tmp_path):
    rng = torch.Generator().manual_seed(0)
    images, labels = torch.randn(60, 1, 28, 28, generator=rng), torch.randint(0, 3, (60,), generator=rng)
    torch_data = (images.numpy(), labels.numpy())
    options = {"model": "cnn4", "clients": 3, "rounds": 1, "partition": "iid", "precision": "float64", "eval_every": 0}
    one, other = (plures.run("fedavg", data=torch_data, engine=e, **options) for e in ("traced", f"traced:{name}=off"))
    for client, model in one.models.items():
        for key, x in model.items():
            torch.testing.assert_close(x, other.models[client][key], rtol=1e-9, atol=1e-11)


def test_passes_are_those_that_can_be_named():
    with pytest.raises(UsageError, match="unknown pass of the engine 'winogradd'; did you mean 'winograd'"):
        Engine.parse("traced:winogradd=off")
    with pytest.raises(UsageError, match="unknown engine 'trace'; did you mean 'traced'"):
        plures.run("fedavg", engine="trace", rounds=1)
    with pytest.raises(UsageError, match="winograd=off"):
        Engine.parse("traced:winograd=no")
    assert Engine.parse("traced:winograd=off,clean=off") == Engine("traced", ("clean", "winograd"))


class Sorting(nn.Module):
    """Torch runs one of its kernels client by client, because it has no rule to batch it."""

    def __init__(self, shape, n_classes):
        super().__init__()
        self.hidden, self.head = nn.Linear(64, 6), nn.Linear(6, n_classes)

    def forward(self, x):
        return self.head(torch.nn.functional.rrelu(self.hidden(x.flatten(1)), 0.2, 0.2))


def test_a_step_that_cannot_be_traced_runs_eager_and_the_summary_says_why(monkeypatch, tmp_path):
    def refuse(*args):
        raise engine.NotTraced("a test does not want it")

    monkeypatch.setattr(engine, "_steps", {})
    monkeypatch.setattr(engine, "trace_step", refuse)
    said = []
    scene = make_scene(make_config({"clients": 4, "rounds": 3, "partition": "iid"}))
    (tmp_path / "run").mkdir()
    result = plures.runs.simulation.start(scene, tmp_path / "run", said.append)
    found = result.summary["engine"]
    assert found["traced"] == 0 and found["eager"] > 0 and found["why"] == ["a test does not want it"]
    assert [line for line in said if "a test does not want it" in line] == said  # told once, in three rounds
    assert json.loads((tmp_path / "run" / "summary.json").read_text())["engine"] == found


def test_numbers_of_steps_are_the_same_for_any_number_of_workers_and_after_a_resume(tmp_path):
    options = {"clients": 6, "rounds": 4, "checkpoint_every": 1}
    alone, spread = (plures.run("fedala:cap=12", workers=n, **options).summary["engine"] for n in (1, 2))
    assert alone == spread and alone["traced"] > 0

    class Stop(plures.Callback):
        def played(self, state, row):
            if row.round == 2:
                raise KeyboardInterrupt

    with pytest.raises(plures.errors.Interrupted):
        plures.run("fedala:cap=12", out=tmp_path / "run", callback=Stop(), **options)
    assert plures.resume(tmp_path / "run").summary["engine"] == alone


def test_one_by_one_is_eager_by_its_nature():
    found = plures.run("fedavg", executor="one_by_one", rounds=1, clients=3).summary["engine"]
    assert found["traced"] == 0 and found["eager"] > 0 and found["why"] == ["clients run one by one"]


# Without private names of torch

# Torch itself needs these names, so they are hidden from the file that looks them up, and from nothing else. One
# process imports torch, and forks one for each name, which imports the package without it.
WITHOUT = """
import json, os, sys
import torch, torch._dynamo
from plures import registry
real = registry.find_dotted
torch.set_num_threads(1)

def run_without(path):
    def find(asked):
        if asked == path:
            raise AttributeError(asked)
        return real(asked)

    registry.find_dotted = find
    from plures.engine import private
    import plures
    assert private.missing == [path] * bool(path), private.missing
    said = []
    class Hear(plures.Callback):
        def started(self, state):
            state.say = said.append
    found = plures.run("fedala:cap=3", clients=3, rounds=3, share=0.2, eval_every=0, callback=Hear()).summary
    print(json.dumps([path, found["engine"], found["personal"]["mean"], found["flops"], said]), flush=True)

for path in sys.argv[1:]:
    child = os.fork()
    if child == 0:
        try:
            run_without(path)
        finally:
            os._exit(0)
    os.waitpid(child, 0)
"""


@pytest.fixture(scope="module")
def without_names():
    command = [sys.executable, "-c", WITHOUT, "", *private.used]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300)
    return {path: found for path, *found in map(json.loads, done.stdout.splitlines())}, done.stderr


@pytest.mark.xdist_group("private names")
@pytest.mark.parametrize("path", private.used)
def test_without_a_private_name_of_torch_everything_runs(path, without_names):
    runs, errors = without_names
    assert path in runs, errors
    usage, mean, flops, said = runs[path]
    _, expected_mean, expected_flops, nothing = runs[""]
    needed = ("_functorch", "TorchDispatchMode")
    if any(word in path for word in needed):
        assert usage["traced"] == 0 and len(usage["why"]) == 1 and path in usage["why"][0]
        assert len([line for line in said if path in line]) == 1
    assert nothing == [] and flops == expected_flops
    assert mean == pytest.approx(expected_mean, abs=1e-6)
