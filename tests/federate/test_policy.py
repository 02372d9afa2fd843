"""What a server cannot get from a client, written from the side of a server that tries."""

import json

import numpy as np
import pytest
import torch
from safetensors.torch import load, save

from plures.data import sources
from plures.errors import UsageError
from plures.federate import ledger, server, wire
from plures.federate.client import Client
from plures.federate.policy import FILE, Policy, default_text, read_policy
from plures.methods import METHODS
from plures.runs import checkpoint
from plures.runs.callbacks import Callback
from plures.runs.config import make_config
from plures.runs.scene import method_of, task_of
from tests.federate.federation import OPEN, Here, federated, nodes_of

pytestmark = pytest.mark.usefixtures("one_thread")

N_ROWS = 240


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    """Three hospitals with enough rows for the default policy, and unequal classes."""
    folder, digits = tmp_path_factory.mktemp("data"), sources.load("digits")
    rng = np.random.default_rng(0)
    order = rng.permutation(len(digits.y))
    for number, name in enumerate(("a", "b", "c")):
        own = order[number::3][:N_ROWS]
        own = own[(digits.y[own] != number) | (rng.random(len(own)) < 0.3)]
        is_test = (np.arange(len(own)) % 3 == 2).astype(np.int64)
        np.savez(folder / f"{name}.npz", x=digits.x[own], y=digits.y[own], is_test=is_test)
    return folder


class Curious:
    """A server that asks one client for what it likes."""

    def __init__(self, client: Client, **config) -> None:
        self.client, self.said = client, []
        client.say = self.said.append
        values = {"method": "fedavg", "model": "mlp", "rounds": 100, "batch": 10, "lr": 0.1, "seed": 3}
        self.config = values | config
        self.experiment = self.new()

    def new(self, id: str = "0" * 16, **config) -> wire.Experiment:
        self.config |= config
        return wire.Experiment(id=id, config=dict(self.config), n_clients=3, n_classes=10, n_tokens=0)

    def model(self) -> dict[str, torch.Tensor]:
        data = self.client.data
        return dict(task_of(make_config(self.config), torch.from_numpy(data.x[0]), 10, 0).initial)

    def ask(self, parts, experiment=None, round=0, version=0, train=True, score=False, **others):
        """The fields and the tensors of the answer."""
        fields = wire.RoundRequest(
            experiment=experiment or self.experiment,
            client=0,
            round=round,
            version=version,
            missed=[],
            train=train,
            score=score,
            last=False,
        )
        message = wire.pack(fields, parts)
        if others:
            tensors = load(message)
            values = json.loads(fields.model_dump_json()) | others
            message = save(tensors, metadata={"fields": json.dumps(values), "same": "{}"})
        return wire.unpack(self.client.answer(message), 1 << 30)


def curious(data, tmp_path, policy=Policy(), **config):  # noqa: B008
    return Curious(Client("a", data / "a.npz", tmp_path / "a", print, policy=policy), **config)


# What a client keeps


def after_ditto(data, tmp_path):
    """A server after two rounds of Ditto, and the private model that the client has by then."""
    asker = curious(data, tmp_path, method="ditto")
    model = asker.model()
    for round in range(2):
        fields, _ = asker.ask({"train": model}, round=round, version=round)
        assert fields["kind"] == "round"
    path = tmp_path / "a" / "state" / asker.experiment.id / "000002"
    return asker, model, {name: x.numpy().tobytes() for name, x in checkpoint.read_state(path).items()}


def test_another_method_under_the_same_number_gets_no_private_model(data, tmp_path):
    asker, model, private = after_ditto(data, tmp_path)
    fields, tensors = asker.ask({"train": model}, asker.new(method="mtl", lr=0.0), round=2, version=2)
    assert (fields["kind"], fields["code"], tensors) == ("error", "setting", {})
    fields, tensors = asker.ask({"train": model}, asker.new(method="mtl", lr=1e-3), round=2, version=2)
    assert (fields["kind"], fields["code"], tensors) == ("error", "experiment", {})
    assert "what we keep of that experiment is not used for it" in asker.said[-1]
    assert len(private) == len(model)


def test_without_the_fingerprint_the_private_model_would_leave(data, tmp_path, monkeypatch):
    """So that the test before this one can fail: MTL uploads what it reads from the disk."""
    monkeypatch.setattr(ledger.Ledger, "bind", lambda *_: None)
    asker = curious(data, tmp_path, policy=OPEN, method="ditto")
    model = asker.model()
    for round in range(2):
        asker.ask({"train": model}, round=round, version=round)
    kept = checkpoint.read_state(tmp_path / "a" / "state" / asker.experiment.id / "000002")
    _, tensors = asker.ask({"train": model}, asker.new(method="mtl", lr=0.0), round=2, version=2)
    assert all(torch.equal(tensors[f"upload/{name}"], kept[f"client/model/{name}"]) for name in model)


@pytest.mark.parametrize(
    "change", [{"lr": 0.2}, {"epochs": 2}, {"seed": 4}, {"rounds": 99}, {"settings": {"lam": 1.0}}]
)
def test_other_settings_under_the_same_number_are_refused(data, tmp_path, change):
    asker, model, _ = after_ditto(data, tmp_path)
    fields, tensors = asker.ask({"train": model}, asker.new(**change), round=2, version=2)
    assert (fields["kind"], fields["code"], tensors) == ("error", "experiment", {})


def test_the_fingerprint_survives_a_restart_of_the_client(data, tmp_path):
    _, model, _ = after_ditto(data, tmp_path)
    again = curious(data, tmp_path, method="ditto")
    assert again.ask({"train": model}, round=2, version=2)[0]["state"] == "kept"
    fields, _ = again.ask({"train": model}, again.new(method="mtl"), round=2, version=2)
    assert fields["code"] == "experiment"


@pytest.mark.parametrize("number", [{"keep": 10**9}, {"version": 10**9}, {"version": 99}, {"round": 10**9}])
def test_no_number_of_the_server_erases_what_a_client_keeps(data, tmp_path, number):
    asker, model, _ = after_ditto(data, tmp_path)
    place = tmp_path / "a" / "state" / asker.experiment.id
    before = sorted(path.name for path in checkpoint.folders(place))
    fields, _ = asker.ask({"train": model}, **({"round": 2, "version": 2} | number))
    if fields["kind"] == "error":
        assert sorted(path.name for path in checkpoint.folders(place)) == before
    assert set(before) <= {path.name for path in checkpoint.folders(place)}


def test_versions_that_were_not_accepted_are_kept_within_bounds(tmp_path):
    for number in range(1, 30):
        checkpoint.write_parts(tmp_path, number, [("state.safetensors", {"x": torch.zeros(1)})], {"plures": "0.2.0"})
        ledger.prune_versions(tmp_path, version=0)
    assert len(checkpoint.folders(tmp_path)) == ledger.MOST_VERSIONS


def test_a_state_of_which_nothing_is_known_is_not_used(data, tmp_path):
    """It may be of any method: a client that was started by an earlier version wrote no fingerprint."""
    asker, model, _ = after_ditto(data, tmp_path)
    (tmp_path / "a" / "state" / asker.experiment.id / ledger.ABOUT).unlink()
    again = curious(data, tmp_path, method="ditto")
    assert again.ask({"train": model}, round=2, version=2)[0]["code"] == "experiment"


# Rows


def invert(sent, tensors):
    """The row that one step on one row was made on: of a linear layer, gradient of weights over that of biases."""
    weight = sent["hidden.weight"] - tensors["upload/hidden.weight"]
    bias = sent["hidden.bias"] - tensors["upload/hidden.bias"]
    k = int(bias.abs().argmax())
    return weight[k] / bias[k]


def nearest(client, row):
    """The largest difference of a number to the most similar row of the client."""
    return float((torch.from_numpy(client.data.x).reshape(len(client.data.x), -1) - row).abs().amax(1).min())


def test_one_step_on_one_row_would_give_that_row(data, tmp_path):
    """So that the tests after this one can fail."""
    asker = curious(data, tmp_path, policy=OPEN, batch=1, steps=1)
    model = asker.model()
    _, tensors = asker.ask({"train": model})
    assert nearest(asker.client, invert(model, tensors)) < 1e-4


ONE_ROW = {
    "one row, one step": ({"batch": 1, "steps": 1}, "batch"),
    "one row, an epoch": ({"batch": 1}, "batch"),
    "one step": ({"batch": 10, "steps": 1}, "rows"),
    "one large step": ({"batch": 1000, "steps": 1}, "steps"),
    "one row of a meta-gradient": ({"method": "fedmeta:inner_lr=0,support=0.99"}, "rows"),
    "few rows left": ({"method": "fedfomo:aside=0.9"}, "rows"),
    "few rows for the model": ({"method": "partialfed:model_rows=0.1,warm_up=0"}, "rows"),
    "no work": ({"local_work": "uniform:0-1"}, "rows"),
    "no learning rate": ({"lr": 0.0}, "setting"),
    "a rate so small that updates are gradients": ({"lr": 1e-9}, "setting"),
    "a row for testing, the others for training": ({"test_share": 0.001}, "setting"),
    "a cluster to connect to": ({"address": "ray://10.0.0.1"}, "setting"),
}


@pytest.mark.parametrize("config, code", ONE_ROW.values(), ids=ONE_ROW)
def test_no_update_is_made_of_few_rows(data, tmp_path, config, code):
    asker = curious(data, tmp_path, **config)
    fields, tensors = asker.ask({"train": Curious.model(curious(data, tmp_path))})
    assert (fields["kind"], fields["code"], tensors) == ("error", code, {})
    assert "is refused" in asker.said[-1] and not (tmp_path / "a" / "state").exists()


def test_the_attack_on_what_is_allowed_gives_no_row(data, tmp_path):
    asker = curious(data, tmp_path)
    model = asker.model()
    _, tensors = asker.ask({"train": model})
    assert nearest(asker.client, invert(model, tensors)) > 0.1


# Numbers of rows of each class


def constant(model, label):
    """A model that names one class for all rows."""
    zeros = {name: torch.zeros_like(x) for name, x in model.items()}
    return zeros | {"head.bias": 50 * torch.nn.functional.one_hot(torch.tensor(label), 10).float()}


def told_for_constant_models(asker):
    model, found = asker.model(), []
    for label in range(10):
        one = constant(model, label)
        fields, _ = asker.ask({"serve": one, "generic": one}, round=label + 1, train=False, score=True)
        found.append((fields["personal"], fields["generic"]))
    return found


def class_counts(asker):
    data = asker.client.data
    return np.bincount(data.y[data.n_train :], minlength=10).tolist()


def test_constant_models_would_give_all_class_counts(data, tmp_path):
    """So that the test after this one can fail."""
    asker = curious(data, tmp_path, policy=OPEN)
    assert [personal["hits"] for personal, _ in told_for_constant_models(asker)] == class_counts(asker)


def test_constant_models_give_no_class_count(data, tmp_path):
    asker = curious(data, tmp_path)
    counts, told = class_counts(asker), told_for_constant_models(asker)
    assert len(set(counts)) > 3
    for scores in zip(*told, strict=True):
        assert len({(one["hits"], one["loss"]) for one in scores}) == 1  # the same, whatever class the model names
        assert scores[0]["hits"] % 5 == 0 and scores[0]["loss"] is None


def test_scores_of_few_test_rows_are_not_told(data, tmp_path):
    asker = curious(data, tmp_path, policy=Policy(least_test_rows=101))
    model = asker.model()
    fields, _ = asker.ask({"serve": model, "generic": model}, round=1, train=False, score=True)
    assert fields["personal"] is None and fields["generic"] is None


def test_a_round_is_scored_no_more_often_than_the_policy_says(data, tmp_path):
    asker = curious(data, tmp_path, policy=Policy(scorings_per_round=2))
    model = asker.model()
    codes = []
    for k in range(4):
        other = {name: x + k for name, x in model.items()}
        codes.append(asker.ask({"serve": other, "generic": other}, round=1, train=False, score=True)[0].get("code"))
    assert codes == [None, None, "scorings", "scorings"]


def test_the_training_loss_is_rounded(data, tmp_path):
    asker = curious(data, tmp_path)
    loss = asker.ask({"train": asker.model()})[0]["loss"]
    assert loss == pytest.approx(round(loss, 2), abs=1e-12)


# How often, which methods, and for how long


def test_more_requests_in_a_minute_than_allowed_are_refused(data, tmp_path):
    asker = curious(data, tmp_path, policy=Policy(requests_per_minute=2))
    now = [1000.0]
    asker.client.ledger.clock = lambda: now[0]
    hello = [wire.pack(wire.HelloRequest(seed=0, test_share=0.2 + k / 100), {}) for k in range(4)]
    kinds = [wire.unpack(asker.client.answer(one), 1 << 20)[0] for one in hello[:3]]
    assert [one.get("code") for one in kinds] == [None, None, "rate"]
    now[0] += 61
    assert "code" not in wire.unpack(asker.client.answer(hello[3]), 1 << 20)[0]


def test_more_starts_in_an_hour_than_allowed_are_refused(data, tmp_path):
    asker = curious(data, tmp_path, policy=Policy(starts_per_hour=2))
    model = asker.model()
    found = [asker.ask({"train": model}, asker.new(f"{k:016x}"))[0] for k in range(3)]
    assert [one.get("code") for one in found] == [None, None, "starts"]
    assert asker.ask({"train": model}, asker.new(f"{1:016x}"), round=1, version=1)[0]["kind"] == "round"


def test_rounds_must_lie_between_two_starts(data, tmp_path):
    asker = curious(data, tmp_path, policy=Policy(rounds_between_starts=2))
    model = asker.model()
    assert asker.ask({"train": model}, asker.new("a" * 16))[0]["kind"] == "round"
    assert asker.ask({"train": model}, asker.new("b" * 16))[0]["code"] == "starts"
    assert asker.ask({"train": model}, asker.new("a" * 16), round=1, version=1)[0]["kind"] == "round"
    assert asker.ask({"train": model}, asker.new("b" * 16))[0]["kind"] == "round"


def test_only_methods_of_the_policy_are_answered(data, tmp_path):
    policy = Policy(methods=["fedavg", "ft"])
    for number, (method, code) in enumerate([("fedavg+ft", None), ("ditto", "method"), ("fedavg+ala", "method")]):
        asker = curious(data, tmp_path, policy=policy, method=method)
        assert asker.ask({"train": asker.model()}, asker.new(f"{number:016x}"))[0].get("code") == code


def test_a_client_deletes_old_experiments_by_its_own_rules(data, tmp_path):
    asker = curious(data, tmp_path, policy=Policy(keep_experiments=2))
    model = asker.model()
    for k in range(4):
        assert asker.ask({"train": model}, asker.new(f"{k:016x}"))[0]["kind"] == "round"
    assert sorted(path.name[-1] for path in (tmp_path / "a" / "state").iterdir()) == ["2", "3"]
    later = curious(data, tmp_path, policy=Policy(keep_days=1))
    later.client.ledger.clock = lambda: 1e11
    later.ask({"train": model}, later.new("f" * 16))
    assert [path.name[-1] for path in (tmp_path / "a" / "state").iterdir()] == ["f"]


def test_a_client_with_few_rows_takes_no_part(tmp_path):
    np.savez(tmp_path / "few.npz", x=np.zeros((15, 4), np.float32), y=np.arange(15) % 2)
    said = []
    client = Client("few", tmp_path / "few.npz", tmp_path / "few", said.append)
    found = server.collect_hellos(Here({"few": client}), ["few"], make_config({}), server.RoundLimits(), said.append)
    assert found == {}
    assert "few cannot take part: it refuses the request by its own rules (rows); its own log says more" in said
    assert "least_rows = 20 in policy.toml" in said[0]


def test_a_run_outside_the_policy_is_refused_before_it_begins(data, tmp_path):
    said = []
    found = server.collect_hellos(
        Here(nodes_of(data, tmp_path, Policy())), ["a"], make_config({"batch": 2}), server.RoundLimits(), said.append
    )
    assert found == {} and "own rules (batch)" in said[0]


# The file


def test_the_file_that_a_client_starts_with_says_the_defaults(tmp_path):
    assert read_policy(tmp_path) == Policy()
    text = (tmp_path / FILE).read_text()
    assert all(f"# {name} = " in text for name in Policy.model_fields if name != "limits")
    bare = "\n".join(line.removeprefix("# ") for line in text.splitlines() if " = " in line or line == "# [limits]")
    (tmp_path / FILE).write_text(bare)
    assert read_policy(tmp_path) == Policy() and default_text() == text


def test_mistakes_in_the_file_are_told(tmp_path):
    for text, words in (
        ("least_bach = 3", "there is no rule 'least_bach'; rules are methods"),
        ("least_batch = 0", "least_batch: input should be greater than or equal to 1, got 0"),
        ("[limits]\nlr = [1.0]", "limits.lr must be a least and a most value"),
        ("least_batch =", "is not TOML"),
    ):
        (tmp_path / FILE).write_text(text)
        with pytest.raises(UsageError, match=words):
            read_policy(tmp_path)
    (tmp_path / FILE).write_text("least_batch = 3\n")
    assert read_policy(tmp_path).changes() == "least_batch = 3"


# Legitimate runs


@pytest.mark.parametrize("method", METHODS)
def test_every_method_with_its_defaults_passes_the_default_policy(method, data, tmp_path):
    link = Here(nodes_of(data, tmp_path / "nodes", Policy()))
    options = {"rounds": 2, "lr": 0.05, "batch": 10}
    found = server.play(federated(method, link, tmp_path / "run", **options), Callback())
    assert found.summary["refusals"] == [] and found.summary["silent"] == []
    assert found.summary["personal"]["scored"] == 3


def test_default_options_of_a_run_are_within_the_policy(data, tmp_path):
    config = make_config({})
    Policy().check_config(config, method_of(config), 20, 1)


# Who may ask


def test_only_requests_that_an_operator_has_signed_for_this_client_are_answered(data, tmp_path):
    pytest.importorskip("cryptography", reason="it comes with the extra deploy")
    from plures.federate import credentials  # here: it needs the extra `deploy`

    for name in ("home", "other"):
        credentials.make_home(tmp_path / name, ["a"], 8000, "127.0.0.1", [], False)
    keys = credentials.operator_keys(tmp_path / "home" / "clients" / "a", Policy().operators)
    key, stranger = (credentials.open_home(tmp_path / name).operator_key for name in ("home", "other"))
    hello = wire.pack(wire.HelloRequest(seed=0, test_share=0.25), {})
    client = curious(data, tmp_path).client

    def code(message):
        return wire.unpack(client.answer(message, lambda x: credentials.unseal(keys, "a", x)), 1 << 20)[0].get("code")

    assert code(credentials.seal(key, "a", hello)) is None
    others = [hello, credentials.seal(stranger, "a", hello), credentials.seal(key, "b", hello)]
    others.append(credentials.seal(key, "a", hello)[:-1])
    others.append(credentials.SEALED)
    assert [code(message) for message in others] == ["operator"] * 5
    assert credentials.unseal([], "a", credentials.seal(key, "a", hello)) == hello
