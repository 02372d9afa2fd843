"""What operators do with a federation: let clients in and out, new keys, clocks, the audit log."""

import email.utils
import io
import json
import re
import shutil
import socket
import sys
import tarfile
import time

import pytest

pytest.importorskip("flwr", reason="Flower is not installed: pip install 'plures[deploy]'")

from cryptography import x509

from plures.cli.main import call
from plures.errors import DataError, RunFailed, UsageError
from plures.federate import audit, credentials, join, operate, server
from plures.federate.client import Client
from plures.federate.pace import Pace
from plures.runs.callbacks import Callback
from tests.federate.federation import OPEN, Here, client_of, federated, nodes_of, resumed, write_data


class Fleet:
    """Flower's list of nodes."""

    def __init__(self) -> None:
        self.there: dict[bytes, str] = {}

    def nodes(self):
        return [type("Node", (), {"public_key": k, "name": n, "node_id": n}) for k, n in self.there.items()]

    def register(self, name, key):
        self.there[key] = name

    def unregister(self, node):
        self.there = {key: name for key, name in self.there.items() if name != node}


@pytest.fixture
def home(tmp_path):
    return credentials.make_home(tmp_path / "federation", ["a", "b"], 8000, "127.0.0.1", [], False)


def test_the_server_knows_the_keys_of_all_folders_and_no_others(home, capsys):
    fleet = Fleet()
    operate._synchronize(home, fleet)
    assert sorted(fleet.there.values()) == ["a", "b"]
    operate.remove("a", home.folder)
    operate._synchronize(home, fleet)
    assert list(fleet.there.values()) == ["b"] and home.clients() == ["b"]
    assert "a may no longer take part" in capsys.readouterr().out
    credentials.make_home(home.folder, ["a"], 0, "", [], False)
    operate._synchronize(home, fleet)
    assert sorted(fleet.there.values()) == ["a", "b"]


def test_a_folder_with_a_bad_key_keeps_nobody_else_out(home, capsys):
    (home.folder / "clients" / "a" / "node.key.pub").write_text("no key")
    fleet = Fleet()
    operate._synchronize(home, fleet)
    assert list(fleet.there.values()) == ["b"] and "a cannot take part" in capsys.readouterr().out


def test_a_new_key_replaces_the_old_one(home, tmp_path):
    fleet, old = Fleet(), home.public_key("a")
    operate._synchronize(home, fleet)
    operate.rotate("a", None, home.folder)
    operate._synchronize(home, fleet)
    assert home.public_key("a") != old and set(fleet.there) == {home.public_key("a"), home.public_key("b")}
    other = credentials.make_home(tmp_path / "other", ["a"], 0, "127.0.0.1", [], False)
    operate.rotate("a", other.folder / "clients" / "a" / "node.key.pub", home.folder)
    assert home.public_key("a") == other.public_key("a")
    assert not (home.folder / "clients" / "a" / "node.key").exists()


@pytest.mark.parametrize("name", ["c", "../b", "", "."])
def test_a_client_that_is_not_there_cannot_be_removed_or_get_keys(home, name):
    for act in (lambda: operate.remove(name, home.folder), lambda: operate.rotate(name, None, home.folder)):
        with pytest.raises(UsageError, match="has no client"):
            act()
    assert home.clients() == ["a", "b"]


def test_a_new_certificate_has_the_same_names_and_the_same_authority(home):
    def certificate():
        return x509.load_pem_x509_certificate((home.folder / "server.crt").read_bytes())

    before, authority = certificate(), (home.folder / "ca.crt").read_bytes()
    operate.rotate(None, None, home.folder)
    after = certificate()
    assert after.serial_number != before.serial_number and after.issuer == before.issuer
    names = [one.extensions.get_extension_for_class(x509.SubjectAlternativeName).value for one in (before, after)]
    assert names[0] == names[1] and (home.folder / "ca.crt").read_bytes() == authority
    after.verify_directly_issued_by(x509.load_pem_x509_certificate(authority))
    assert (home.folder / "server.key").stat().st_mode & 0o777 == 0o600


# Clocks


def test_a_clock_that_flower_would_refuse_is_told_with_its_skew():
    now = 1_800_000_000.0
    head = f"HTTP/1.1 404 Not Found\r\ndate: {email.utils.formatdate(now, usegmt=True)}\r\n\r\n"
    for skew, words in ((30, "30 seconds ahead of the server's"), (-400, "400 seconds behind the server's")):
        with pytest.raises(UsageError, match=f"our clock is {words}.*timedatectl"):
            join._check_clock(head, now + skew)
    for skew in (0, 3, -200):
        join._check_clock(head, now + skew)
    join._check_clock("HTTP/1.1 200 OK\r\n\r\n", now)
    join._check_clock("date: once upon a time\r\n", now)


# The audit log


def test_lines_of_the_audit_log_are_whole_and_only_added(tmp_path):
    path = tmp_path / audit.FILE
    for k in range(3):
        audit.write(path, "a", f"round {k}", 'bytes "10"\n')
    path.write_text(path.read_text() + '{"at": "torn')
    assert [line["asked"] for line in audit.read(path)] == ["round 0", "round 1", "round 2"]
    assert path.stat().st_mode & 0o777 == 0o600


def test_a_client_notes_what_it_was_asked_even_if_it_refuses(tmp_path):
    write_data(tmp_path, {"a": 30})
    client = Client("a", tmp_path / "a.npz", tmp_path / "own", lambda line: None, policy=OPEN)
    client.answer(b"rubbish")
    client.answer(operate.wire.pack(operate.wire.HelloRequest(seed=0, test_share=0.25), {}))
    lines = audit.read(tmp_path / "own" / audit.FILE)
    assert [(line["asked"], line["answered"].split()[-1]) for line in lines] == [
        ("what is not a request of ours", "(Refused)"),
        ("hello", "bytes"),
    ]
    assert json.loads((tmp_path / "own" / audit.FILE).read_text().splitlines()[0])["at"] <= time.strftime("%Y-%m-%dT~")


def test_a_client_whose_log_cannot_be_written_answers_nothing(tmp_path):
    write_data(tmp_path, {"a": 30})
    client = Client("a", tmp_path / "a.npz", tmp_path / "own", lambda line: None, policy=OPEN)
    (tmp_path / "own" / audit.FILE).mkdir(parents=True)
    answer = client.answer(operate.wire.pack(operate.wire.HelloRequest(seed=0, test_share=0.25), {}))
    assert b"RunFailed" in answer and b"n_train" not in answer


# Backups


@pytest.fixture
def run(home, tmp_path):
    """A federated run of two clients in this process, which the federation lists."""
    data = write_data(tmp_path / "data", {"a": 30, "b": 24})
    nodes = nodes_of(data, tmp_path / "nodes")
    (home.folder / "server").mkdir()
    found = federated("ditto", Here(nodes), tmp_path / "run", rounds=4)
    operate._list_run(home.folder, tmp_path / "run")
    for _ in range(2):
        found.state.merge(found.play(False))
        found.state.save(found.manifest())
    return found, nodes


def test_a_server_that_moves_goes_on_with_its_runs_to_the_same_end(home, run, tmp_path):
    audit.write(home.folder / "server" / audit.FILE, "a", "hello", "30 rows")
    (home.folder / "clients" / "a" / "private").mkdir()
    (home.folder / "clients" / "a" / "private" / "state").write_text("a client's own")
    operate.back_up(tmp_path / "backup.tar.gz", home.folder)
    assert (tmp_path / "backup.tar.gz").stat().st_mode & 0o777 == 0o600
    operate.restore(tmp_path / "backup.tar.gz", tmp_path / "moved", "fl.example.org:444")
    moved = credentials.open_home(tmp_path / "moved")
    assert (moved.clients(), moved.host, moved.open_port) == (["a", "b"], "fl.example.org", 444)
    assert moved.public_key("a") == home.public_key("a") and moved.operator_key == home.operator_key
    assert (moved.folder / "ca.crt").read_bytes() == (home.folder / "ca.crt").read_bytes()
    assert "fl.example.org" in (moved.folder / "clients" / "a" / "client.toml").read_text()
    assert (moved.folder / "ca.key").stat().st_mode & 0o777 == 0o600
    assert not list(moved.folder.rglob("private")) and audit.read(moved.folder / "server" / audit.FILE)
    certificate = x509.load_pem_x509_certificate((moved.folder / "server.crt").read_bytes())
    assert "fl.example.org" in str(certificate.extensions.get_extension_for_class(x509.SubjectAlternativeName).value)
    (there,) = operate._runs(moved.folder)
    assert there.is_relative_to(moved.folder.resolve())
    _, nodes = run
    state = tmp_path / "states"
    for place in ("here", "there"):
        shutil.copytree(tmp_path / "nodes", state / place)
    ends = []
    for place, folder in (("here", tmp_path / "run"), ("there", there)):
        for name, node in nodes.items():
            nodes[name] = client_of(tmp_path / "data" / f"{name}.npz", state / place)
            assert node.name == name
        ends.append(server.play(resumed(folder, Here(nodes)), Callback()).summary["digest"])
    assert ends[0] == ends[1]


def test_what_is_no_backup_or_would_overwrite_is_refused(home, tmp_path):
    operate.back_up(tmp_path / "backup", home.folder)
    with pytest.raises(UsageError, match="is there already"):
        operate.back_up(tmp_path / "backup", home.folder)
    with pytest.raises(UsageError, match="is not empty"):
        operate.restore(tmp_path / "backup", home.folder, None)
    (tmp_path / "torn").write_bytes((tmp_path / "backup").read_bytes()[:500])
    with tarfile.open(tmp_path / "evil", "w:gz") as archive:
        entry = tarfile.TarInfo("../outside")
        entry.size = 1
        archive.addfile(entry, io.BytesIO(b"x"))
    with tarfile.open(tmp_path / "other", "w:gz") as archive:
        archive.addfile(tarfile.TarInfo("something"), io.BytesIO(b""))
    for name in ("torn", "evil", "other", "nothing"):
        with pytest.raises(DataError, match="is not a backup of a federation"):
            operate.restore(tmp_path / name, tmp_path / "new", None)
        assert not (tmp_path / "new").exists() and not (tmp_path / "outside").exists()


# How often clients ask for messages


def test_a_client_sleeps_through_most_of_a_round_and_asks_more_rarely_the_longer_there_is_none():
    now = [0.0]
    pace = Pace(lambda: now[0])

    def after_round_of(seconds):
        pace.note_answer()
        now[0] += seconds
        pace.note_message()
        now[0] += 5.0  # it trains, which is no waiting
        pace.note_answer()
        return pace.delay(0.1, 3.0)

    assert after_round_of(0.1) == 0.1
    assert after_round_of(2.0) == pytest.approx(1.4)
    now[0] += 1.4
    assert pace.delay(0.1, 3.0) == pytest.approx(1.4 / 12)
    assert after_round_of(80.0) == 3.0
    now[0] += 24.0
    pace.wait = 0.0
    assert pace.delay(0.1, 3.0) == pytest.approx(2.0)


def test_the_key_of_a_removed_client_is_not_taken_again(home, capsys):
    old = (home.folder / "clients" / "a" / "node.key.pub").read_bytes()
    operate.remove("a", home.folder)
    credentials.make_home(home.folder, ["a"], 0, "", [], False)
    (home.folder / "clients" / "a" / "node.key.pub").write_bytes(old)
    fleet = Fleet()
    operate._synchronize(home, fleet)
    assert list(fleet.there.values()) == ["b"] and "its key has been removed" in capsys.readouterr().out


def test_a_client_that_another_process_registers_at_the_same_time_is_no_error(home):
    class Racing(Fleet):
        def register(self, name, key):
            super().register(name, key)
            raise RunFailed("public key already in use")

    fleet = Racing()
    operate._synchronize(home, fleet)
    assert sorted(fleet.there.values()) == ["a", "b"]


def test_a_run_that_was_killed_and_is_resumed_without_a_server_is_told_how_to_start_one(tmp_path):
    """It first ends the Flower run of the process that was killed."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    home = credentials.make_home(tmp_path / "federation", ["a"], port, "127.0.0.1", [], False)
    with pytest.raises(RunFailed, match="start it with `plures federate server`"):
        operate._run_with_link(home.folder, lambda link, number: None, 10.0, killed_run="5")


# Status


def test_status_counts_refusals_and_silence_and_knows_version_and_last_answer(home, run, capsys):
    path = home.folder / "server" / audit.FILE
    for answered in ("30 rows", "nothing", "900 bytes", "refused: its loss is nan", "nothing"):
        audit.write(path, "a", "round 1", answered)
    refused_at = next(line["at"] for line in audit.read(path) if line["answered"].startswith("refused"))
    operate.print_status(home.folder, as_json=True)
    found = json.loads(capsys.readouterr().out)
    known = {"last_seen": refused_at, "version": found["plures"], "refused": 1, "silent": 2}
    assert found["details"]["a"] == known
    assert found["details"]["b"] == known | {"last_seen": None, "refused": 0, "silent": 0}
    assert [(one["state"], one["round"], one["rounds"]) for one in found["runs"]] == [("stopped", 2, 4)]
    operate.print_status(home.folder, as_json=False)
    assert f"last answer {refused_at}, 1 refused, 2 silent, Plures {found['plures']}" in capsys.readouterr().out


# Run folders of strangers


@pytest.mark.parametrize(
    "words", [["start", "--resume", "run"], ["adapt", "run", "--client", "c"]], ids=["resume", "adapt"]
)
def test_code_that_the_folder_of_a_federated_run_names_is_run_with_trust_alone(
    words, run, tmp_path, monkeypatch, capsys
):
    monkeypatch.chdir(tmp_path)
    monkeypatch.delitem(sys.modules, "gift_net", raising=False)
    (tmp_path / "gift_net.py").write_text("open('opened', 'w').close()")
    config = tmp_path / "run" / "config.toml"
    text = config.read_text().partition("# check")[0]  # a stranger can write any sum
    config.write_text(re.sub('model = "[a-z]+"', 'model = "gift_net:Net"', text))
    assert call(["federate", *words]) == 2
    assert "run names code that would be run: model 'gift_net:Net'" in capsys.readouterr().err
    assert not (tmp_path / "opened").exists()
    assert call(["federate", *words, "--trust"]) == 2  # the gift has no model in it
    assert (tmp_path / "opened").exists()
