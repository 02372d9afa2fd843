"""Two sites with tables in real processes over TLS: they agree on a schema, and end in the state of the simulation."""

import pytest

pytest.importorskip("flwr", reason="Flower is not installed: pip install 'plures[deploy]'")

import torch

from plures.runs import checkpoint
from tests.federate.federation import simulated
from tests.federate.test_network import POLICY, Federation, free_port
from tests.federate.test_schema import SECRET, split_of, write_tables

pytestmark = pytest.mark.xdist_group("tables over tls")

SITES = ("bonn", "ulm")
OPTIONS = {"rounds": 2, "seed": 3, "metric": "rmse"}


@pytest.fixture(scope="module")
def federation(tmp_path_factory):
    found = Federation(tmp_path_factory.mktemp("tables"))
    write_tables(found.folder / "tables")
    (found.folder / "tables" / "jena.csv").unlink()
    names = [word for name in SITES for word in ("--client", name)]
    found.call("federate", "init", found.folder / "federation", *names, "--port", free_port())
    for name in SITES:
        policy = found.private(name).parent / "policy.toml"
        policy.write_text(POLICY + 'words = ["part"]\nleast_rows_of_word = 1\n')
    try:
        server = found.start("server", "federate", "server")
        found.wait("server", "listening on https://", server)
        for name in SITES:
            words = ["federate", "client", "--name", name, "--data", f"tables/{name}.csv"]
            process = found.start(name, *words, "--target", "level", "--drop", "ill")
            found.wait(name, "connected to", process)
        yield found
    finally:
        found.close()


def test_tables_over_tls_end_in_the_state_of_the_simulation(federation):
    folder, flags = federation.folder, [str(w) for k, v in OPTIONS.items() for w in (f"--{k}", v)]
    said = federation.call("federate", "schema", "--seed", OPTIONS["seed"], "-o", folder / "schema.toml")
    assert "2 clients read their tables by one schema" in said
    federation.call("federate", "start", "ditto", *flags, "--out", "runs/ditto", "--quiet")
    (folder / "split.json").write_text(split_of(folder / "tables", OPTIONS["seed"]))
    options = {"target": "level", "drop": "ill", "split": str(folder / "split.json"), "lr": 0.05, "batch": 10}
    simulated("ditto", folder / "tables", folder / "sim", data_schema=str(folder / "schema.toml"), **OPTIONS, **options)
    here, there = (checkpoint.read(folder / name / "checkpoint")[0] for name in ("runs/ditto", "sim"))
    torch.testing.assert_close(here.server, there.server, atol=1e-6, rtol=0)
    assert "north" in (folder / "schema.toml").read_text()
    for path in [*(folder / "federation" / "server").rglob("*"), *(folder / "runs").rglob("*"), folder / "schema.toml"]:
        assert not path.is_file() or SECRET.encode() not in path.read_bytes(), path
