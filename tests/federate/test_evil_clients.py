"""One client must not ruin the run of the others: huge updates, claims of many rows or classes, odd data."""

import numpy as np
import pytest
import torch

from plures.data import sources
from plures.federate import server, wire
from plures.federate.server import Caps, RoundLimits
from plures.methods import METHODS
from plures.runs.callbacks import Callback
from plures.runs.config import make_config
from tests.federate.federation import Here, federated, nodes_of, quiet
from tests.federate.test_rounds import changed
from tests.methods.test_every_method import QUICK

pytestmark = pytest.mark.usefixtures("one_thread")

HONEST = ("a", "b", "d")
SIZES = (1e4, 1e30, 3e38)
# Their servers take a mean of what clients upload; the others learn from it, or keep it.
AVERAGED = """fedavg fedprox scaffold feddyn fedsam perfedavg fedmeta fedpermeta pfedme ditto fedper fedrep lgfedavg
fedbn fedphp partialfed apfl fedala fedrod plgu-lf plgu-grep afml""".split()


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    folder, digits = tmp_path_factory.mktemp("data"), sources.load("digits")
    order = np.random.default_rng(1).permutation(len(digits.y))
    for number, name in enumerate((*HONEST, "y", "z")):
        own = order[number::5][:90]
        np.savez(folder / f"{name}.npz", x=digits.x[own], y=digits.y[own], is_test=np.arange(90) % 3 == 2)
    return folder


def bend(name, answer):
    """`y` uploads ever larger numbers, and `z` claims ten million rows, of which nobody believes it."""
    fields, tensors = wire.unpack(answer, 1 << 30)
    if name == "z" and fields["kind"] == "hello":
        return changed(answer, n_train=10**7)
    if name == "y" and tensors:
        size = SIZES[fields["round"] % 3]
        return changed(answer, {key: torch.full_like(x, size) for key, x in tensors.items() if x.is_floating_point()})
    return answer


def played(method, data, folder, say=quiet, **names):
    nodes = {name: node for name, node in nodes_of(data, folder / "nodes").items() if name in names["who"]}
    # SCAFFOLD and FedDyn count on all clients: without one they need more rounds to end where they would.
    options = {"rounds": 12 if method in ("scaffold", "feddyn") else 3, "lr": 0.1, "batch": 10, "eval_every": 0}
    run = federated(method, Here(nodes, bend), folder / "run", say=say, **options)
    found = server.play(run, Callback())
    accuracies = {row["name"]: row["personal_accuracy"] for row in found.clients}
    return float(np.mean([accuracies[name] for name in HONEST])), found


@pytest.mark.parametrize("method", METHODS)
def test_huge_updates_and_claims_of_one_client_change_little_for_the_others(method, data, tmp_path):
    name, said = QUICK.get(method, method), []
    together, found = played(name, data, tmp_path / "together", said.append, who=(*HONEST, "y", "z"))
    if method != "local":  # which uploads nothing
        assert {one["client"] for one in found.summary["refusals"]} == {"y"}
        assert found.summary["refused_updates"] == found.summary["rounds"]
    assert "z is left out: it claims 10000000 rows, and at most" in " ".join(said)
    assert np.isfinite([row["loss"] for row in found.rounds]).all()
    if method in AVERAGED:
        alone, _ = played(name, data, tmp_path / "alone", who=HONEST)
        assert together >= alone - 0.02


# What is believed at the start

CLAIMS = {
    "rows": ({"n_train": 10**9}, "it claims 1000000000 rows"),
    "test rows": ({"n_test": 10**8}, "it claims 100000000 rows"),
    "classes": ({"n_classes": 10**6}, "it claims 1000000 classes, and at most 1000 are believed (--most-classes)"),
    "tokens": ({"n_tokens": 10**6}, "it claims 1000000 tokens"),
    "shape": ({"shape": [1, 9, 9]}, "its rows have shape (1, 9, 9) (float32), those of most others (1, 8, 8)"),
    "type": ({"dtype": "int64"}, "its rows have shape (1, 8, 8) (int64)"),
    "labels": ({"label_axes": 2}, "its rows have shape"),
    "name": ({"name": "b"}, "cannot take part: it says that its name is b"),
    "negative": ({"n_train": -1}, "cannot take part: its field n_train is wrong"),
    "huge shape": ({"shape": [10**9] * 8}, "its rows have shape"),
    "words": ({"n_train": "many"}, "cannot take part: its field n_train is wrong"),
}


@pytest.mark.parametrize("fields, words", CLAIMS.values(), ids=CLAIMS)
@pytest.mark.parametrize("who", ["a", "d"])
def test_a_client_that_claims_too_much_is_left_out_and_the_others_go_on(fields, words, who, data, tmp_path):
    said = []
    nodes = {name: node for name, node in nodes_of(data, tmp_path).items() if name in HONEST}
    link = Here(nodes, lambda name, answer: changed(answer, **fields) if name == who else answer)
    config = make_config({"method": "fedavg"})
    found = server.collect_hellos(link, list(HONEST), config, RoundLimits(), said.append)
    assert list(found) == [name for name in HONEST if name != who]
    assert any(line.startswith(who) and words in line for line in said)


def test_the_operator_sets_what_is_believed(data, tmp_path):
    link = Here({name: node for name, node in nodes_of(data, tmp_path).items() if name in HONEST})
    config = make_config({"method": "fedavg"})
    found = server.collect_hellos(link, list(HONEST), config, RoundLimits(), quiet, Caps(rows=59))
    assert found == {}


def test_no_client_has_more_weight_than_the_operator_allows(data, tmp_path, monkeypatch):
    seen = []
    link = Here({name: node for name, node in nodes_of(data, tmp_path / "nodes").items() if name in HONEST})
    link.bend = lambda name, answer: changed(answer, n_train=5000) if name == "d" and b"hello" in answer else answer
    run = federated("fedavg", link, tmp_path / "run", lr=0.1, batch=10, caps=Caps(share=0.4))
    method = type(run.state.scene.method)
    honest = method.merge
    monkeypatch.setattr(method, "merge", lambda *arguments: seen.append(arguments[-1]) or honest(*arguments))
    link.bend = lambda name, answer: changed(answer, n=5000) if name == "d" else answer
    run.state.merge(run.play(False))
    assert seen[0].tolist() == [60, 60, 80]
    run.close()


@pytest.mark.parametrize("share, is_told", [(1.0, True), (0.4, False)])
def test_a_client_with_most_of_the_rows_is_told_unless_its_weight_is_bounded(share, is_told, data, tmp_path):
    """Half a million rows are believed, and would be nearly all of a mean."""
    said = []
    link = Here({name: node for name, node in nodes_of(data, tmp_path).items() if name in HONEST})
    link.bend = lambda name, answer: changed(answer, n_train=500_000) if name == "d" else answer
    config = make_config({"method": "fedavg"})
    found = server.collect_hellos(link, list(HONEST), config, RoundLimits(), said.append, Caps(share=share))
    assert set(found) == set(HONEST)
    assert any("d claims 100.0% of all training rows" in line and "--most-share" in line for line in said) == is_told


def test_an_enormous_loss_is_refused_and_not_in_the_record(data, tmp_path):
    link = Here({name: node for name, node in nodes_of(data, tmp_path / "nodes").items() if name in HONEST})
    link.bend = lambda name, answer: changed(answer, loss=1e308) if name == "d" and b"hello" not in answer else answer
    options = {"lr": 0.1, "batch": 10, "eval_every": 0, "rounds": 1}
    found = server.play(federated("fedavg", link, tmp_path / "run", **options), Callback())
    assert found.rounds[0]["loss"] < 10 and found.rounds[0]["refused"] == 1
    assert found.summary["refusals"][0] == {"round": 1, "client": "d", "why": "its loss is 1e+308"}
