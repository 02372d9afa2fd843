"""Clients with tables agree on a schema, and train as a simulation of the same tables does; no row leaves them."""

import csv
import json

import numpy as np
import pytest
import torch

from plures.data import sources
from plures.data.reading import Reading
from plures.errors import RunFailed
from plures.federate import server
from plures.federate.client import Client
from plures.federate.policy import Policy
from plures.runs import checkpoint
from plures.runs.adapt import own_rows
from tests.federate.federation import OPEN, OPTIONS, PATIENT, Here, federated, quiet, simulated

SITES = ("ulm", "bonn", "jena")
WORDS = {"ulm": ["north", "south"], "bonn": ["south", "east"], "jena": ["1", "2"]}  # numbers at one of them
SECRET = "zugspitze"


@pytest.fixture
def tables(tmp_path):
    return write_tables(tmp_path / "tables")


def write_tables(folder):
    """A table for each site: a column is numbers at one of them and words elsewhere, and one site has one class."""
    rng = np.random.default_rng(2)
    folder.mkdir(parents=True)
    for k, site in enumerate(SITES):
        with open(folder / f"{site}.csv", "w", newline="") as file:
            out = csv.writer(file)
            out.writerow(["age", "part", "note", "level", "ill"])
            for row in range(40 + 8 * k):
                age = rng.normal(40 + 10 * k, 5)
                part = rng.choice(WORDS[site])
                ill = "no" if site == "jena" else rng.choice(["no", "yes"])  # one class alone at a site
                out.writerow([round(age, 2) if row % 9 else "", part, f"{SECRET}{row % 3}", round(age / 9, 3), ill])
    return folder


def split_of(tables, seed):
    """Who has which rows of the joined tables, as the clients split theirs."""
    split, at = {"train": [], "test": []}, 0
    for path in sorted(tables.glob("*.csv")):
        data = sources.load(str(path), None, Reading(target="level", drop=("ill",)))
        train, test = own_rows(data, seed, 0.25)
        split["train"].append((train + at).tolist())
        split["test"].append((test + at).tolist())
        at += len(data.y)
    return json.dumps(split)


def nodes(tables, folder, reading, policy=OPEN):
    return {
        path.stem: Client(path.stem, path, folder / path.stem, quiet, policy=policy, reading=reading)
        for path in sorted(tables.glob("*.csv"))
    }


def agreed(tables, tmp_path, target, drop, words):
    reading = Reading(target=target, drop=drop)
    policy = OPEN.model_copy(update={"words": words, "least_rows_of_word": 1, "value_digits": 12})
    sent = []
    found = nodes(tables, tmp_path / "home", reading, policy)

    def keep(name, answer):
        sent.append(answer)
        return answer

    link = Here(found, keep)
    text = server.collect_schema(link, link.clients(), OPTIONS["seed"], 0.25, PATIENT, quiet)
    (tmp_path / "schema.toml").write_text(text)
    return found, link, sent, text


@pytest.mark.parametrize(
    ("target", "drop", "words", "metric"),
    [("level", ("ill",), ["part"], "rmse"), ("ill", ("level",), ["part", "ill"], "balanced")],
)
def test_state_is_that_of_a_simulation_of_the_same_tables(tables, tmp_path, target, drop, words, metric):
    _, link, _, _ = agreed(tables, tmp_path, target, drop, words)
    clients = federated("ditto", link, tmp_path / "run", metric=metric)
    result = server.play(clients, server.Callback())
    split = {"train": [], "test": []}
    at = 0
    for name in sorted(SITES):
        train, test = own_rows(link.nodes[name].data, OPTIONS["seed"], 0.25)
        split["train"].append((train + at).tolist())
        split["test"].append((test + at).tolist())
        at += len(train) + len(test)
    (tmp_path / "split.json").write_text(json.dumps(split))
    options = {"target": target, "drop": ",".join(drop), "split": str(tmp_path / "split.json"), "metric": metric}
    other = simulated("ditto", tables, tmp_path / "sim", data_schema=str(tmp_path / "schema.toml"), **options)
    here, there = (checkpoint.read(tmp_path / name / "checkpoint")[0] for name in ("run", "sim"))
    torch.testing.assert_close(here.server, there.server, atol=1e-6, rtol=0)
    assert result.summary["metric"] == metric
    assert result.summary["personal"]["mean"] == pytest.approx(other.summary["personal"]["mean"], abs=1e-5)


def test_no_row_and_no_word_that_is_not_allowed_leaves_a_client(tables, tmp_path):
    _, link, sent, text = agreed(tables, tmp_path, "level", ("ill",), ["part"])
    server.play(federated("fedavg", link, tmp_path / "run"), server.Callback())
    everything = b"".join(sent)
    assert b"north" in everything and "north" in text  # allowed
    assert SECRET.encode() not in everything and SECRET not in text
    for node in link.nodes.values():
        for row, level in zip(node.data.x, node.plan.table.columns["level"].texts, strict=False):
            assert row.tobytes() not in everything and f'"{level}"'.encode() not in everything


def test_words_of_few_rows_are_not_told_by_default(tables, tmp_path):
    reading, policy = (
        Reading(target="level", drop=("ill", "note")),
        OPEN.model_copy(update={"words": ["*"], "least_rows_of_word": 1000}),
    )
    link = Here(nodes(tables, tmp_path / "home", reading, policy))
    text = server.collect_schema(link, link.clients(), 0, 0.25, PATIENT, quiet)
    assert "north" not in text
    assert Policy().words == [] and Policy().least_rows_of_word == 5


def test_joined_schema_has_the_mean_of_all_training_rows(tables, tmp_path):
    found, _, _, text = agreed(tables, tmp_path, "level", ("ill",), ["part"])
    ages = []
    for node in found.values():
        train, _ = own_rows(node.data, OPTIONS["seed"], 0.25)
        cells = node.plan.table.columns["age"]
        ages += [float(cells.texts[cells.codes[row]]) for row in train if cells.texts[cells.codes[row]]]
    [mean] = [line for line in text.splitlines() if line.startswith("mean")]
    assert float(mean.partition("= ")[2]) == pytest.approx(np.mean(ages))
    assert '"1"' in text and '"north"' in text  # a column of numbers at one site and words elsewhere is words


def test_class_names_are_not_told_unless_allowed(tables, tmp_path):
    link = Here(nodes(tables, tmp_path / "home", Reading(target="ill", drop=("level",))))
    with pytest.raises(RunFailed, match=r"refuses the request by its own rules \(words\)"):
        server.collect_schema(link, link.clients(), 0, 0.25, PATIENT, quiet)


def test_clients_without_a_schema_are_left_out_with_a_word(tables, tmp_path):
    link, said = Here(nodes(tables, tmp_path / "home", Reading(target="level", drop=("ill",)))), []
    with pytest.raises(RunFailed, match="no client can take part"):
        federated("fedavg", link, tmp_path / "run", say=said.append)
    assert all("(schema)" in line for line in said)


def test_schema_is_kept_when_a_client_starts_again(tables, tmp_path):
    found, *_ = agreed(tables, tmp_path, "level", ("ill",), ["part"])
    again = nodes(tables, tmp_path / "home", Reading(target="level", drop=("ill",)))
    for name, node in again.items():
        assert node.schema_hash == found[name].schema_hash and torch.equal(
            torch.from_numpy(node.data.x), torch.from_numpy(found[name].data.x)
        )


def test_tables_that_do_not_fit_are_named(tables, tmp_path):
    text = (tables / "ulm.csv").read_text()
    (tables / "ulm.csv").write_text(text.replace("age", "years"))
    link = Here(nodes(tables, tmp_path / "home", Reading(target="level", drop=("ill",))))
    with pytest.raises(RunFailed, match="bonn and ulm do not both have the column 'age'"):
        server.collect_schema(link, link.clients(), 0, 0.25, PATIENT, quiet)


@pytest.mark.parametrize(
    "text",
    ["", "a = [", "[target]\nkind = 'number'", "x = " + "[" * 5000, "[target]\nkind='number'\ncolumns=['age']\n"],
)
def test_hostile_schemas_are_refused(tables, tmp_path, text):
    found, _, _, good = agreed(tables, tmp_path, "level", ("ill",), ["part"])
    node = found["ulm"]
    before = node.schema_hash
    fields, _ = server.wire.unpack(node.answer(server.wire.pack(server.wire.SchemaOffer(text=text), {})), 10**6)
    assert fields["kind"] == "error" and node.schema_hash == before
    other = good.replace('"age"', '"height"')
    fields, _ = server.wire.unpack(node.answer(server.wire.pack(server.wire.SchemaOffer(text=other), {})), 10**6)
    assert fields["kind"] == "error" and fields["code"] == "schema"
