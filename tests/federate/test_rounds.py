"""Both halves of a federated run without the network between them: what travels, what is refused, what is kept."""

import io
import json
import subprocess
import sys

import numpy as np
import pytest
import torch
from rich.console import Console
from safetensors.torch import load, save

from plures import tree
from plures.cli.view import ProgressReport
from plures.errors import RunFailed, UsageError
from plures.federate import client as client_half
from plures.federate import server, wire
from plures.federate.server import RoundLimits
from plures.federate.wire import Refused
from plures.methods import METHODS
from plures.methods.ditto import Ditto
from plures.methods.fedavg import FedAvg
from plures.methods.messages import one_of
from plures.runs import adapt, checkpoint
from plures.runs.callbacks import Callback
from plures.runs.simulation import open_simulation, resume
from plures.runs.state import RunState
from plures.simulate.shapes import shapes_of
from tests.federate.federation import (
    Here,
    assert_same_state,
    client_of,
    federated,
    nodes_of,
    quiet,
    resumed,
    simulated,
    write_data,
)
from tests.methods.test_every_method import NAMES
from tests.small import scene_of
from tests.test_add_a_method import FILE

SHORT = RoundLimits(deadline=0.5, quorum=0.5, resend=60)
pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    return write_data(tmp_path_factory.mktemp("data"))


@pytest.fixture
def link(data, tmp_path):
    return Here(nodes_of(data, tmp_path / "nodes"))


def play_round(clients, score=False):
    """A round without the loop around it."""
    answers = clients.play(score)
    if answers.scores is not None:
        clients.state.add_scores(answers.scores)
    clients.state.merge(answers)


def unlike(rows):
    """Rows of rounds without times."""
    return [{key: value for key, value in row.items() if "seconds" not in key} for row in rows]


# Equal to the simulation


@pytest.mark.parametrize("method", NAMES)
def test_a_federated_run_is_the_simulation_bit_for_bit(method, link, data, tmp_path):
    found = server.play(federated(method, link, tmp_path / "run", participation=0.75), Callback())
    expected = simulated(method, data, tmp_path / "sim", participation=0.75, pool_rows=0)
    assert_same_state(tmp_path / "run", tmp_path / "sim", lambda name: tmp_path / "nodes" / name, 0)
    for here, there in zip(unlike(found.rounds), unlike(expected.rounds), strict=True):
        if found.summary["generic"] is None:  # the mean of personal models is not made: they stay with the clients
            there |= {"generic_accuracy": None, "generic_on_clients": None, "generic_pooled": None}
        assert here == pytest.approx(there, abs=1e-6)
    for key in ("bytes", "flops"):
        assert found.summary[key] == expected.summary[key]


def test_frozen_weights_are_made_at_both_ends_and_never_sent(link, data, tmp_path):
    server.play(federated("ditto", link, tmp_path / "run", freeze="hidden"), Callback())
    simulated("ditto", data, tmp_path / "sim", freeze="hidden", pool_rows=0)
    assert_same_state(tmp_path / "run", tmp_path / "sim", lambda name: tmp_path / "nodes" / name, 0)
    assert link.sent and not [message for _, message in link.sent if b"hidden.weight" in message]
    [path] = (tmp_path / "nodes" / "hospital-a" / "models").glob("*.safetensors")
    assert "model/hidden.weight" in load(path.read_bytes())


def test_a_client_whose_frozen_weights_are_others_refuses(link, tmp_path):
    said = []
    link.nodes["hospital-a"].say = said.append
    found = federated("fedavg", link, tmp_path / "run", freeze="hidden")
    found.close()
    other = found.experiment.model_copy(update={"frozen": "0" * 64})
    request = found._request(0, True, False, False).model_copy(update={"experiment": other})
    assert b"DataError" in link.nodes["hospital-a"].answer(wire.pack(request, {}))
    assert any("frozen weights of mlp here are not those of the server" in line for line in said)


@pytest.mark.parametrize("name", METHODS)
def test_the_shapes_of_every_method_are_those_of_what_it_sends(name):
    scene = scene_of(name)
    found = shapes_of(scene.method, scene.task, scene.population.sizes())
    began = RunState(scene, None, quiet)
    first = torch.tensor([0])
    for part, call in (("train", scene.method.send), ("serve", scene.method.serve)):
        sent = one_of(call(scene.task, began.server, first), 0)
        form = getattr(found, part)
        assert tree.names(form) == tree.names(sent)
        assert [(x.shape, x.dtype) for x in tree.leaves(form)] == [(x.shape, x.dtype) for x in tree.leaves(sent)]


def test_what_a_client_keeps_of_the_layers_is_not_sent(link, tmp_path):
    federated_run = federated("heurpfedla", link, tmp_path / "run", eval_every=0)
    play_round(federated_run)
    federated_run.close()
    _, message = link.sent[-1]
    sent = {name for name in load(message) if name != "train/layers kept"}
    assert sent in ({"train/hidden.weight", "train/hidden.bias"}, {"train/head.weight", "train/head.bias"})


def test_equal_tensors_travel_once(link, tmp_path):
    federated_run = federated("scaffold", link, tmp_path / "run")
    play_round(federated_run)
    play_round(federated_run, score=True)
    federated_run.close()
    assert all(name.startswith("train/") for name in load(link.sent[-1][1]))  # serve and generic are the same


def test_the_manifest_names_every_tensor_with_shape_type_bytes_and_direction():
    scene = scene_of("fedper")
    rows = wire.manifest(shapes_of(scene.method, scene.task, torch.arange(3)))
    up = {row["name"]: (row["shape"], row["dtype"], row["bytes"]) for row in rows if row["direction"] == "up"}
    assert up == {"upload/hidden.weight": ([8, 64], "float32", 2048), "upload/hidden.bias": ([8], "float32", 32)}
    text = "\n".join(wire.manifest_lines(shapes_of(scene.method, scene.task, torch.arange(3))))
    assert "upload/hidden.weight" in text and "stays with the client: kept/head.weight, kept/head.bias" in text


# What is refused


@pytest.fixture
def asked(link, tmp_path):
    """A run, a request to its first client, and that client's honest answer."""
    found = federated("ditto", link, tmp_path / "run")
    with torch.no_grad():
        message = found.state.scene.method.send(found.state.scene.task, found.state.server, torch.tensor([0]))
    request = found._request(0, train=True, score=False, is_last=False)
    answer = link.nodes["hospital-a"].answer(wire.pack(request, {"train": message.tree}))
    yield found, request, answer
    found.close()


def changed(answer, tensors=None, **fields):
    """An answer with some of it replaced."""
    own, found = wire.unpack(answer, 1 << 30)
    return save({**found, **(tensors or {})}, metadata={"fields": json.dumps({**own, **fields}), "same": "{}"})


def test_an_honest_answer_is_taken(asked):
    found, request, answer = asked
    assert found.check_answer(request, answer).fields.n == 16


BAD_TENSORS = {
    "NaN": ({"upload/head.bias": torch.full((10,), torch.nan)}, "not finite"),
    "infinity": ({"upload/head.bias": torch.full((10,), torch.inf)}, "not finite"),
    "wrong shape": ({"upload/head.bias": torch.zeros(11)}, "is 11 float32, not 10 float32"),
    "wrong type": ({"upload/head.bias": torch.zeros(10, dtype=torch.float64)}, "is 10 float64, not 10 float32"),
    "private tensor": ({"client/model/head.bias": torch.zeros(10)}, "client/model/head.bias (10 float32) is not on"),
    "huge array": ({"upload/head.bias": torch.zeros(1 << 20)}, "at most"),
}


@pytest.mark.parametrize("tensors, why", BAD_TENSORS.values(), ids=BAD_TENSORS)
def test_bad_tensors_are_refused(asked, tensors, why):
    found, request, answer = asked
    with pytest.raises(Refused, match=why.replace("(", r"\(").replace(")", r"\)")):
        found.check_answer(request, changed(answer, tensors))


BAD_FIELDS = {
    "another round": ({"round": 1}, "another experiment, round or client"),
    "another client": ({"client": 1}, "another experiment, round or client"),
    "another experiment": ({"experiment": "0" * 16}, "another experiment, round or client"),
    "a weight that grew": ({"n": 10**6}, "1000000 training rows, and said 16"),
    "a weight out of range": ({"n": -1}, "its field n is wrong"),
    "a loss that is none": ({"loss": float("nan")}, "its field loss is wrong"),
    "no loss": ({"loss": None}, "its loss is missing"),
    "scores that nobody asked for": ({"personal": {"hits": 1.0, "loss": 1.0, "n": 8}}, "were not asked for"),
    "a field of its own": ({"rows": [1, 2, 3]}, "its field rows is wrong"),
}


@pytest.mark.parametrize("fields, why", BAD_FIELDS.values(), ids=BAD_FIELDS)
def test_bad_fields_are_refused(asked, fields, why):
    found, request, answer = asked
    with pytest.raises(Refused, match=why):
        found.check_answer(request, changed(answer, **fields))


def test_a_missing_tensor_is_refused(asked):
    found, request, answer = asked
    fields, tensors = wire.unpack(answer, 1 << 30)
    del tensors["upload/head.bias"]
    less = save(tensors, metadata={"fields": json.dumps(fields), "same": "{}"})
    with pytest.raises(Refused, match=r"upload/head\.bias is missing"):
        found.check_answer(request, less)


def test_a_pickle_is_refused_and_not_opened(asked, tmp_path):
    class Evil:
        def __reduce__(self):
            return (open, (str(tmp_path / "opened"), "w"))

    found, request, _ = asked
    file = io.BytesIO()
    np.save(file, np.array([Evil()], dtype=object), allow_pickle=True)
    for content in (file.getvalue(), b"", b"\xff" * 100, save({"x": torch.zeros(1)})):
        with pytest.raises(Refused, match="not a message of ours"):
            found.check_answer(request, content)
    node = found.link.nodes["hospital-a"]
    assert b"Refused" in node.answer(file.getvalue())
    assert not (tmp_path / "opened").exists()


def test_whole_numbers_that_name_no_client_are_refused():
    with pytest.raises(Refused, match="upload/wanted names a client that does not exist"):
        server._check_numbers({"wanted": torch.tensor([0, 4])}, 4)


def test_a_refused_answer_is_counted_and_named_and_ends_nothing(link, tmp_path):
    def bend(name, answer):
        if name == "hospital-b" and in_round(answer, 1):
            return changed(answer, {"upload/head.bias": torch.full((10,), torch.nan)})
        return answer

    link.bend = bend
    said = []
    found = server.play(federated("fedavg", link, tmp_path / "run", say=said.append), Callback())
    assert found.summary["refused_updates"] == 1
    assert found.summary["refusals"] == [
        {"round": 2, "client": "hospital-b", "why": "upload/head.bias has numbers that are not finite"}
    ]
    assert [row["refused"] for row in found.rounds] == [0, 1, 0]
    assert any("the answer of hospital-b is refused" in line for line in said)


def test_a_method_that_uploads_what_is_not_on_the_list_is_stopped_at_the_client(link, tmp_path, monkeypatch):
    federated_run = federated("ditto", link, tmp_path / "run", terms=SHORT)
    honest = Ditto.train

    def leaky(self, task, received, client, shard, terms=None):
        kept, upload, metrics = honest(self, task, received, client, shard)
        if len(shard.rows) > 1:  # not while the list is made
            upload = upload | {"own.head.bias": kept.model["head.bias"]}
        return kept, upload, metrics

    monkeypatch.setattr(Ditto, "train", leaky)
    with pytest.raises(RunFailed, match="0 of 4 clients gave an update"):
        server.play(federated_run, Callback())
    assert {one["why"] for one in federated_run.state.refusals} == {"it had an error (Refused); its own log says more"}


def test_words_of_an_error_stay_with_the_client(link, tmp_path, monkeypatch):
    said = []
    link.nodes["hospital-a"].say = said.append
    federated_run = federated("fedavg", link, tmp_path / "run", terms=SHORT)

    def failing(self, task, received, client, shard, terms=None):
        raise ValueError("patient 4711 has a row of nan")

    monkeypatch.setattr(FedAvg, "train", failing)
    monkeypatch.setattr(client_half, "shapes_of", lambda *_: federated_run.shapes)
    with pytest.raises(RunFailed):
        play_round(federated_run)
    federated_run.close()
    assert federated_run.state.refusals[0]["why"] == "it had an error (ValueError); its own log says more"
    assert any("patient 4711" in line for line in said)


def test_a_model_from_outside_is_not_imported_unless_the_client_allows_it(link, tmp_path):
    said = []
    link.nodes["hospital-a"].say = said.append
    found = federated("fedavg", link, tmp_path / "run")
    found.close()
    values = found.experiment.config | {"model": "os:system"}
    request = found._request(0, True, False, False).model_copy(
        update={"experiment": found.experiment.model_copy(update={"config": values})}
    )
    assert b"UsageError" in link.nodes["hospital-a"].answer(wire.pack(request, {}))
    assert any("allow it with --model os:system" in line for line in said)


def test_a_method_from_outside_is_not_imported_unless_the_client_allows_it(link, data, tmp_path, monkeypatch):
    (tmp_path / "own_for_a_test.py").write_text(FILE)
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    said = []
    for client in link.nodes.values():
        client.say = said.append
    with pytest.raises(RunFailed, match="no client can take part"):
        server.play(federated("own_for_a_test:FedHalf", link, tmp_path / "refused", terms=SHORT), Callback())
    assert any("allow it with --method own_for_a_test:FedHalf" in line for line in said)
    for client in link.nodes.values():
        client.own_methods = ("own_for_a_test:FedHalf",)
    server.play(federated("own_for_a_test:FedHalf", link, tmp_path / "run"), Callback())
    simulated("own_for_a_test:FedHalf", data, tmp_path / "sim")
    assert_same_state(tmp_path / "run", tmp_path / "sim", lambda name: tmp_path / "nodes" / name, 0)


def test_methods_that_need_public_rows_are_refused(link, tmp_path):
    with pytest.raises(UsageError, match="rows of each class that everybody may see"):
        federated("fedrod:loss=meta-bsm", link, tmp_path / "run")


def test_a_client_with_unlike_rows_is_left_out_and_the_others_go_on(link, tmp_path):
    said = []
    np.savez(tmp_path / "odd.npz", x=np.zeros((9, 5), np.float32), y=np.arange(9) % 3)
    link.nodes["odd"] = client_of(tmp_path / "odd.npz", tmp_path / "nodes")
    found = federated("fedavg", link, tmp_path / "run", say=said.append)
    found.close()
    assert [one.name for one in found.about.clients] == ["hospital-a", "hospital-b", "hospital-c", "hospital-d"]
    assert "odd is left out: its rows have shape (5,) (float32), those of most others (1, 8, 8)" in " ".join(said)


# Silence, death and coming back


def in_round(answer, number):
    fields, _ = wire.unpack(answer, 1 << 30)
    return fields.get("round") == number and fields["loss"] is not None


def test_a_client_that_never_answers_is_left_behind_and_told_when_it_is_back(link, tmp_path):
    told = []
    link.nodes["hospital-c"].say = told.append
    link.bend = lambda name, answer: None if name == "hospital-c" and in_round(answer, 1) else answer
    found = server.play(federated("ditto", link, tmp_path / "run", terms=SHORT), Callback())
    assert found.summary["silent"] == [{"round": 2, "client": "hospital-c"}]
    assert found.summary["refused_updates"] == 0
    assert "the server completed round 2 without us; our state is that of round 1" in told


def test_many_missed_rounds_are_told_in_few_words():
    assert client_half._rounds([7]) == "round 7"
    assert client_half._rounds([1, 2, 3, 7, 9, 10]) == "rounds 1 to 3, 7, 9 to 10"


def test_too_few_answers_end_the_run_in_a_state_to_go_on_from(link, tmp_path):
    link.bend = lambda name, answer: answer if name == "hospital-a" or b"hello" in answer else None
    federated_run = federated("fedavg", link, tmp_path / "run", terms=SHORT)
    with pytest.raises(
        RunFailed, match=r"1 of 4 clients .* 2 are needed.*resume it with: plures federate start --resume"
    ):
        server.play(federated_run, Callback())


def test_a_lost_message_is_sent_again_and_late_and_second_answers_are_ignored(monkeypatch):
    class Scripted:
        """Loses the first message; then the answers to both come, that to the second one twice."""

        n_sent, answers = 0, [[("1", None)], [("1", b"late"), ("2", b"first"), ("2", b"second")]]

        def push(self, client, message):
            self.n_sent += 1
            return str(self.n_sent)

        def pull(self, numbers, most):
            return self.answers.pop(0)

    monkeypatch.setattr(server, "LOST_SECONDS", 0)
    link, taken = Scripted(), []
    silent = server.gather(
        link, {"a": lambda: b"message"}, lambda name, answer: taken.append(answer), RoundLimits(), 100
    )
    assert (silent, taken, link.n_sent) == ([], [b"first"], 2)


def test_a_server_that_was_killed_is_resumed_as_if_it_had_not(link, data, tmp_path):
    first = federated("ditto", link, tmp_path / "run")
    for score in (False, True):
        play_round(first, score)
        first.state.save(first.manifest())
    play_round(first, score=True)  # the clients are in round 3, and nobody has written it down
    first.close()
    progress = ProgressReport(Console(file=io.StringIO()), "ditto", tmp_path / "run" / "log.txt", quiet=False)
    server.play(resumed(tmp_path / "run", link), progress)
    told = (tmp_path / "run" / "log.txt").read_text()
    assert "resumed after round 2" in told and all(f"round {r}/3" in told for r in (2, 3))
    simulated("ditto", data, tmp_path / "sim")
    assert_same_state(tmp_path / "run", tmp_path / "sim", lambda name: tmp_path / "nodes" / name, 0)


def test_a_client_that_was_killed_goes_on_with_its_state(link, data, tmp_path):
    found = federated("ditto", link, tmp_path / "run")
    play_round(found)
    link.nodes |= nodes_of(data, tmp_path / "nodes")  # all of them start again
    play_round(found)
    play_round(found)
    found.state.save(found.manifest())
    found.close()
    simulated("ditto", data, tmp_path / "sim")
    assert_same_state(tmp_path / "run", tmp_path / "sim", lambda name: tmp_path / "nodes" / name, 0)


def test_a_client_that_lost_its_state_begins_anew_and_says_so(link, tmp_path):
    said = []
    found = federated("ditto", link, tmp_path / "run", say=said.append)
    play_round(found)
    (state,) = checkpoint.folders(tmp_path / "nodes" / "hospital-a" / "state" / found.about.id)
    (state / "state.safetensors").write_bytes(b"torn")
    play_round(found)
    found.close()
    assert "round 2: hospital-a lost its state and started from the initial state" in said


def test_old_versions_of_a_state_are_forgotten(link, tmp_path):
    server.play(federated("ditto", link, tmp_path / "run", rounds=5), Callback())
    kept = checkpoint.folders(next((tmp_path / "nodes" / "hospital-a" / "state").iterdir()))
    assert [path.name for path in kept] == ["000004", "000005"]


def test_every_client_ends_with_its_own_model_on_its_own_disk(link, data, tmp_path):
    found = federated("fedrod", link, tmp_path / "run")
    server.play(found, Callback())
    simulated("fedrod", data, tmp_path / "sim")
    with open_simulation(tmp_path / "sim") as simulation:
        expected = tree.by_path("model", simulation.personal_model(0))
    own = load((tmp_path / "nodes" / "hospital-a" / "models" / f"{found.about.id}.safetensors").read_bytes())
    torch.testing.assert_close(own, expected)


def test_a_new_client_makes_its_own_model_as_it_would_from_a_simulation(link, data, tmp_path):
    server.play(federated("fedrep", link, tmp_path / "run"), Callback())
    extra = write_data(tmp_path / "extra", {"late": 30})
    link.nodes["late"] = client_of(extra / "late.npz", tmp_path / "nodes")
    again = resumed(tmp_path / "run", link)
    found = server.adapt(again, "late", epochs=2)
    again.close()
    simulated("fedrep", data, tmp_path / "sim")
    with open_simulation(tmp_path / "sim") as simulation:
        expected = adapt.from_rows(simulation.state, extra / "late.npz", 2)
    assert found["curve"] == pytest.approx(expected.summary["curve"])
    own = load((tmp_path / "nodes" / "late" / "models" / f"{again.about.id}.safetensors").read_bytes())
    torch.testing.assert_close(own, tree.by_path("model", expected.model))


def test_other_commands_say_where_the_models_of_a_federated_run_are(link, tmp_path):
    federated("fedavg", link, tmp_path / "run").close()
    with pytest.raises(UsageError, match="plures federate start --resume"):
        resume(tmp_path / "run", quiet, Callback())


def test_without_flower_a_sentence_says_how_to_install_it():
    code = "import sys; sys.modules['flwr'] = None; from plures.cli.main import call; sys.exit(call(sys.argv[1:]))"
    found = subprocess.run(
        [sys.executable, "-c", code, "federate", "status"], capture_output=True, text=True, timeout=120
    )
    assert found.returncode == 2
    assert found.stderr == "plures: `plures federate` needs Flower; install it with: pip install 'plures[deploy]'\n"
