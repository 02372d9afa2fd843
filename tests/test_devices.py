"""Devices: every tensor of a run is where it belongs, for every method. `tests/pretended.py` says how that is seen."""

import numpy as np
import pytest
import torch

import plures
from plures import devices, seeds, tree
from plures.data import sources
from plures.data.population import Population
from plures.errors import RunFailed, UsageError
from plures.learn.metrics import find_metric
from plures.methods.fedavg import FedAvg
from plures.methods.spec import make_method
from plures.runs import folders
from plures.runs.callbacks import Callback, say_nothing
from plures.runs.config import make_config
from plures.runs.scene import Scene, announce, as_configured
from plures.runs.simulation import Simulation, open_simulation, simulate
from plures.simulate.client_store import ClientStore
from plures.simulate.work import Work
from tests.methods.test_every_method import NAMES, assert_same_tensors
from tests.pretended import PRETENDED, There, pretending
from tests.small import small_split, task_of

SIZES = (4, 8, 11, 6)
IN_DOUBLE = ["scaffold", "feddyn", "fedfomo:models=2", "apple:models=2", "pfedhn", "fedmeta", "fedavg"]
SOME = ["fedavg", "fedala:cap=2", "pfedhn", "fedrod"]
# Every add-on once, and the variants of methods that make tensors of their own.
WITH_ADDONS = [
    *["ditto+ala:cap=2", "fedrod+prox", "fedrod+scaffold", "fedrod+feddyn", "fedavg+brm+ft", "fedavg+c:c_epochs=1"],
    *["fedavg+sam", "fedavg+fedopt", "fedavg+public", "fedavg+keep", "pfedhn:private=head/statistics"],
    *["fedrod:head=hyper", "fedrod:loss=meta-bsm", "perfedavg:order=exact", "afml:latent=unit"],
]
EVERY = [name.replace("cap=12", "cap=2") for name in (*NAMES, *WITH_ADDONS)]  # few steps are enough to see a place


def scene_of(method, device, model="mlp", **options):
    """A run in which all happens: cohorts, clients that never take part, new clients, all kinds of scores, a pool."""
    given = {"batch": 8, "rounds": 2, "participation": 0.5, "new_clients": 1, "new_epochs": 1, "eval_every": 2}
    config = make_config(given | {"method": str(method), "device": device, "executor": "vectorised"} | options)
    data, split, task = sources.load("digits"), small_split(SIZES), task_of(model, 0)
    x, y = torch.from_numpy(data.x), torch.from_numpy(data.y)
    population = Population(x, y, split.train, split.test, 10, config.seed, task.smallest_batch)
    population = as_configured(population, config).with_validation(config.validation).with_pool(12)
    population, new = population.split_new(config.new_clients)
    chosen = make_method(method, {}, config.solver()) if isinstance(method, str) else method
    chosen = chosen.with_solver(config.solver())
    found = announce(config, chosen, task, population)
    return Scene(config, *found, split, new_clients=new, others=(find_metric("balanced", "classes"),))


def run_all(scene, folder=None):
    """A whole run; its state is given with its result."""

    class Watch(Callback):
        def started(self, state):
            self.state = state

    watch = Watch()
    if folder is not None:
        folder.mkdir()
        folders.write_start(folder, scene)
    return simulate(scene, folder, say_nothing, watch), watch.state


def tensors_of(state):
    return tree.leaves((state.server, state.store.initial, state.store._rows, state.scene.task.initial))


def on_cpu(state):
    [(_, rows)] = state.store.written_rows(1 << 20)
    found = (state.server, rows)
    return {name: x.cpu() for name, x in zip(tree.names(found), tree.leaves(found), strict=True)}


@pytest.mark.parametrize("name", EVERY)
def test_every_tensor_of_a_run_is_on_its_device(name, monkeypatch):
    with pretending(monkeypatch):
        result, state = run_all(scene_of(name, "cuda", "norm" if name in SOME else "mlp"))
        assert all(isinstance(x, There) for x in tensors_of(state))
        found = result.summary
        assert found["engine"]["traced"] == 0 and found["engine"]["eager"] > 0
        assert found["new_clients"]["n"] == 1 and found["personal"] is not None
        assert not any(isinstance(x, There) for model in result.models.values() for x in model.values())


@pytest.mark.parametrize("name", SOME)
def test_a_device_computes_what_the_cpu_computes(name, monkeypatch):
    """The pretended one has the kernels of the CPU: what differs is how clients are grouped, and thus rounding."""
    _, expected = run_all(scene_of(name, "cpu", "norm", engine="eager"))
    with pretending(monkeypatch):
        _, state = run_all(scene_of(name, "cuda", "norm"))
        assert_same_tensors(on_cpu(state), on_cpu(expected))


@pytest.mark.parametrize("name", IN_DOUBLE)
def test_a_device_without_float64_holds_none(name, monkeypatch):
    with pretending(monkeypatch, without_double=True):
        _, state = run_all(scene_of(name, "mps"))
        expected = run_all(scene_of(name, "cpu", engine="eager"))[1]
        assert_same_tensors(on_cpu(state), on_cpu(expected))
        assert all(isinstance(x, There) or x.dim() == 0 for x in tensors_of(state))


@pytest.mark.parametrize("options", [{"executor": "one_by_one"}, {"attack": "random"}, {"optimizer": "adam"}])
def test_other_ways_to_run_stay_on_the_device(options, monkeypatch):
    with pretending(monkeypatch):
        scene = scene_of("ditto", "cuda", "norm", **options)
        run_all(scene._replace(attackers=(0,) if "attack" in options else ()))


# Methods in which one tensor is in the wrong place: each must be found.


class WrongInMerge(FedAvg):
    def merge(self, task, server, ids, uploads, sizes):
        mean = super().merge(task, server, ids, uploads, sizes)
        return tree.map(lambda x: x + torch.from_numpy(np.zeros(x.shape, np.float32)), mean)


class WrongInTraining(FedAvg):
    def train(self, task, received, client, shard):
        zeros = tree.map(lambda x: torch.zeros(x.shape, device="cpu"), received)
        return super().train(task, tree.add(received, zeros), client, shard)


class WrongInEvaluation(FedAvg):
    def predict(self, task, personal, x):
        return task.logits(personal, x) + torch.zeros(10, device="cpu")


class WrongAtNewClients(FedAvg):
    def adapt(self, task, received, shard, epochs):
        return super().adapt(task, tree.map(lambda x: x * torch.ones(x.shape, device="cpu"), received), shard, epochs)


class WrongIndex(FedAvg):
    def send(self, task, server, ids):
        torch.arange(100)[torch.tensor([1, 2], device="cpu")]
        return super().send(task, server, ids)


class ReadsNumbers(FedAvg):
    def merge(self, task, server, ids, uploads, sizes):
        return tree.mean(uploads, torch.tensor(sizes.numpy().tolist()))


WRONG = [WrongInMerge, WrongInTraining, WrongInEvaluation, WrongAtNewClients, WrongIndex, ReadsNumbers]


@pytest.mark.parametrize("wrong", WRONG)
def test_a_tensor_in_the_wrong_place_is_found(wrong, monkeypatch):
    run_all(scene_of(wrong(), "cpu"))  # on the CPU nothing is wrong with it
    with pretending(monkeypatch), pytest.raises(RuntimeError, match=r"both devices|numpy\(\) is not"):
        run_all(scene_of(wrong(), "cuda"))


def test_data_move_once(monkeypatch):
    with pretending(monkeypatch) as mode:
        scene = scene_of("fedavg", "cuda", rounds=3)
        run_all(scene)
    assert mode.moved.count(tuple(scene.population.x.shape)) == 1
    assert mode.moved.count((8, 64)) == 1  # a weight of the model, whose state the server starts from


def test_a_resumed_run_ends_as_if_it_had_not_stopped(tmp_path, monkeypatch):
    with pretending(monkeypatch):
        whole, _ = run_all(scene_of("ditto", "cuda", rounds=3))

        class Stop(Callback):
            def played(self, state, row):
                raise KeyboardInterrupt

        scene = scene_of("ditto", "cuda", rounds=3)
        (tmp_path / "run").mkdir()
        folders.write_start(tmp_path / "run", scene)
        with pytest.raises(plures.errors.Interrupted):
            simulate(scene, tmp_path / "run", say_nothing, Stop())
        again = simulate(scene, tmp_path / "run", say_nothing, Callback(), resume=True)
    assert again.summary["digest"] == whole.summary["digest"]


def test_state_beyond_the_limit_is_in_a_file_and_rows_come_to_the_device(tmp_path, monkeypatch):
    with pretending(monkeypatch), PRETENDED:
        initial = {"w": torch.ones(3)}
        store = ClientStore(initial, 5, 0, tmp_path, PRETENDED)
        store.put(torch.tensor([1]), {"w": torch.full((1, 3), 2.0)})
        assert store.on_disk and not isinstance(store._rows["w"], There)
        rows = store.rows(torch.tensor([1, 2]))["w"]
        assert isinstance(rows, There) and rows.tolist() == [[2.0] * 3, [1.0] * 3]


def test_random_numbers_are_the_same_everywhere(monkeypatch):
    key = torch.tensor([5, 6])
    draw = torch.vmap(lambda key: (seeds.uniform(key, (4,)), seeds.normal(key, (4,))))
    expected = draw(key)
    with pretending(monkeypatch), PRETENDED:
        found = draw(key.to(PRETENDED))
        assert all(isinstance(x, There) for x in found)
    assert [x.tolist() for x in found] == [x.tolist() for x in expected]


def test_outside_of_a_run_tensors_are_made_as_ever(monkeypatch):
    with pretending(monkeypatch):
        with devices.here(PRETENDED):
            with devices.here(devices.CPU):
                assert torch.zeros(1).device.type == "cpu"
            assert isinstance(torch.zeros(1), There)
        assert torch.zeros(1).device.type == "cpu"


# What users meet


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA device")
def test_a_device_that_is_not_there_is_refused_before_a_folder_is_made(tmp_path):
    with pytest.raises(UsageError, match=r"device cuda: torch .* finds no CUDA device on this machine; use"):
        plures.run("fedavg", device="cuda", clients=4, rounds=1, out=tmp_path / "run")
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize("device", ["cuda", "mps"])
def test_a_name_is_looked_up_with_torch(device, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.backends.mps, "is_available", lambda: True)
    assert devices.find(device) == torch.device(device)


def test_the_number_of_a_device_must_be_there(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    assert devices.find("cuda:1").index == 1
    with pytest.raises(UsageError, match="cuda:2: there is none of that number; this machine has cuda:0, cuda:1"):
        devices.find("cuda:2")


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"device": "gpu"}, "device is cpu, cuda, cuda:1"),
        ({"device": "cuda", "workers": 2}, "is one process, got 2 workers"),
        ({"device": "cuda", "executor": "ray"}, "ray computes on the CPU"),
        ({"device": "mps", "precision": "float64"}, "mps has no float64"),
    ],
)
def test_what_does_not_go_together_is_refused(options, words):
    with pytest.raises(UsageError, match=words):
        make_config(options)


def test_a_device_is_part_of_a_runs_identity_and_its_number_is_not():
    cpu, first, second = (make_config({"device": name}).identity() for name in ("cpu", "cuda", "cuda:1"))
    assert cpu == make_config({}).identity() and cpu != first and first == second


def test_too_little_memory_is_said_in_words(monkeypatch):
    def full(*_):
        raise torch.OutOfMemoryError("CUDA out of memory")

    simulation = Simulation(scene_of("fedavg", "cpu"), None, say_nothing)
    monkeypatch.setattr(Work, "compute", full)
    with pytest.raises(RunFailed, match=r"too little memory for \d clients at once; choose a smaller --stack"):
        simulation.play()


def test_a_folder_of_another_machine_can_be_looked_at_here(tmp_path, monkeypatch):
    """And it is not resumed here, where its device is not."""
    with pretending(monkeypatch):
        _, state = run_all(scene_of("ditto", "cuda", rounds=1), tmp_path / "run")
        expected = on_cpu(state)
    monkeypatch.undo()
    with open_simulation(tmp_path / "run", scene=scene_of("ditto", "cuda", rounds=1)) as opened:
        assert_same_tensors(on_cpu(opened.state), expected, tolerance=0)
    if not torch.cuda.is_available():
        with pytest.raises(UsageError, match="finds no CUDA device"):
            simulate(scene_of("ditto", "cuda", rounds=1), tmp_path / "run", say_nothing, Callback(), resume=True)
