"""Claims and campaigns: what is recorded is not run again, seeds are kept apart, and verdicts follow from intervals."""

import json

import pytest

from plures.cli.main import call
from plures.errors import UsageError
from plures.learn.solver import Solver
from plures.methods.spec import make_method
from plures.runs.config import make_config
from plures.studies import campaign, preset
from plures.studies import claims as claims_room
from plures.studies.campaign import Plan, Stage
from plures.studies.claims import PLAN, Book, Claim, Court, choose, judge, load_claims, objective_of, page, papers

pytest.importorskip("optuna", reason="claims are tested with tuned methods")
TINY = Plan(trials=2, tuned_on=[7], scored_on=[0, 1])
SCENE = {"clients": 4, "rounds": 2, "share": 0.2, "partition": "dirichlet:0.5", "pool_rows": 0}
BASE = {
    "paper": "P",
    "says": "Ditto is above FedAvg.",
    "where": "Table 9",
    "published": "2 against 1",
    "preset": "fedala-table2-mnist",
    "scene": "tiny",
    "above": {"method": "ditto", "column": "personal.mean"},
    "below": {"method": "fedavg", "column": "personal.mean"},
    "explain": [{"change": "one more round", "options": {"rounds": 3}}],
    "guess": "the moon.",
}


def claim_of(**more):
    return Claim(**{**BASE, **more})


# The file


def test_the_file_has_the_claims_that_must_be_there():
    book = load_claims()
    pairs = {(one.above.method, one.below.method, one.scene, one.equal) for one in book.claims.values()}
    for wanted in (("fedala", "fedavg+c", "dirichlet", "flops"), ("fedala", "ditto", "dirichlet", "flops")):
        assert wanted in pairs
    for host in ("fedavg", "fedprox", "ditto", "fedrep"):
        assert (f"{host}+ala", host, "dirichlet", "rounds") in pairs
    for scene in ("labels", "main"):
        assert ("pfedla", "fedavg", scene, "rounds") in pairs and ("pfedla", "local", scene, "rounds") in pairs
    for zeta in (0.1, 0.5, 0.9):
        for other in ("fedavg+ft", "fedmeta"):
            assert ("afml", other, f"zeta-{zeta}", "rounds") in pairs
    assert papers(book) == ["FedALA", "Fed-RoD", "pFedLA", "PLGU", "AFML"] and len(book.claims) >= 30


@pytest.mark.parametrize("name", load_claims().claims)
def test_a_claim_can_be_tested(name):
    """Its methods, scene, options and preset are ones that there are."""
    book = load_claims()
    claim = book.claims[name]
    assert claim.preset in preset.load() and claim.says.endswith(".") and claim.guess.endswith(".")
    plain = make_config(book.scenes[claim.scene])
    assert claim.explain
    for one in claim.explain:
        assert one.above or one.below or one.seeds or make_config(book.scenes[claim.scene] | one.options) != plain
        assert one.seeds is None or not set(range(one.seeds)) & set(PLAN.tuned_on)
        for spec in filter(None, (one.above, one.below)):
            make_method(spec, {}, Solver())
    for side in (claim.above, claim.below):
        make_method(side.method, {}, Solver())
        assert side.column.partition(".")[0] in ("personal", "generic", "new_clients", "bytes")
        assert not side.column.startswith("new_clients") or plain.new_clients


def test_seeds_that_are_scored_were_not_tuned_on():
    assert not set(PLAN.tuned_on) & set(PLAN.scored_on) and len(PLAN.scored_on) >= 3


# Verdicts


@pytest.mark.parametrize(
    ("above", "below", "verdict"),
    [
        ([90, 91, 92], [80, 81, 81.5], "holds"),
        ([80, 81, 81.5], [90, 91, 92], "does not"),
        ([90, 80, 85], [85, 84, 86], "too close to tell"),
        ([90], [80], "not run"),
    ],
)
def test_a_verdict_follows_from_the_interval(above, below, verdict):
    found = judge(claim_of(), above, below, ("a", "b"))
    assert found.verdict == verdict
    assert judge(claim_of(is_cost=True), below, above, ("a", "b")).verdict == verdict


def test_methods_are_tuned_by_what_is_claimed():
    columns = {"personal.mean": "personal", "personal.worst5": "worst5", "generic.worst5": "generic"}
    assert {column: objective_of(column) for column in columns} == columns
    assert objective_of("new_clients.before") == "personal"


def test_claims_are_chosen_by_paper_and_by_name():
    book = load_claims()
    assert set(choose(book, [])) == set(book.claims)
    assert {one.paper for one in choose(book, ["PLGU"]).values()} == {"PLGU"}
    assert list(choose(book, ["zero-shot"])) == ["zero-shot"]
    with pytest.raises(UsageError, match="did you mean 'zero-shot'"):
        choose(book, ["zero-shots"])


# Campaigns


@pytest.fixture(scope="module")
def tested(tmp_path_factory):
    """Two small claims, tested; and the lines that were said."""
    folder = tmp_path_factory.mktemp("claims")
    equal = claim_of(equal="flops", says="Ditto is above FedAvg at equal FLOPs.")
    book = Book({"plain": claim_of(), "equal": equal}, {"tiny": SCENE})
    lines: list[str] = []
    court = Court(book, folder, {"workers": 1}, lines.append, TINY)
    found = {name: court.test(claim) for name, claim in book.claims.items()}
    return folder, book, found, lines


def test_what_is_recorded_is_not_run_again(tested, monkeypatch):
    folder, book, found, lines = tested
    assert len(lines) == 2 + 2 * 3  # two tunings; for each seed both methods, and FedAvg within Ditto's FLOPs

    def never(*_):
        raise AssertionError("nothing is missing")

    monkeypatch.setattr(campaign, "start", never)
    monkeypatch.setattr(campaign, "tune_methods", never)
    court = Court(book, folder, {"workers": 1}, never, TINY)
    for name, claim in book.claims.items():
        assert court.test(claim) == court.known(claim) == found[name]
    assert court.missing(list(book.claims.values())) == {}
    assert not list((folder / "work").iterdir())


def test_a_campaign_that_stopped_goes_on(tested, tmp_path):
    folder, book, found, _ = tested
    records = json.loads((folder / "tiny.json").read_text())
    gone = next(name for name in records["runs"] if "seed=1" in name and "equal" not in name)
    del records["runs"][gone]
    (tmp_path / "tiny.json").write_text(json.dumps(records))
    lines: list[str] = []
    court = Court(book, tmp_path, {"workers": 1}, lines.append, TINY)
    assert court.known(book.claims["plain"]) is None
    assert court.missing([book.claims["plain"]]) != {}
    assert court.test(book.claims["plain"]) == found["plain"]
    assert len(lines) == 1 and gone in lines[0]


def test_equal_flops_gives_the_other_method_more_rounds(tested):
    folder = tested[0]
    runs = json.loads((folder / "tiny.json").read_text())["runs"]
    for name, one in runs.items():
        if "equal=flops" in name:
            first = runs[f"{name.split('first=')[1]}"]
            assert one["rounds"] > 2 and 0.5 < one["flops"] / first["flops"] <= 1.001


def test_the_page_says_what_was_found_and_what_was_not_tried(tested, monkeypatch):
    folder, book, found, _ = tested
    court = Court(book, folder, {"workers": 1}, lambda line: None, TINY)
    text = page(court)
    assert "Of 2 claims 2 have been run" in text and found["plain"].specs[0] in text
    assert f"**{found['plain'].verdict}**" in text and "`--clients 4 --rounds 2" in text
    same = claim_of(says="FedAvg is above FedAvg.", above=BASE["below"])
    court.book = Book({"same": same}, book.scenes)
    assert "Why is not tried. A guess: the moon." in page(court)
    (tried,) = court.explain(same)
    assert tried.verdict == "too close to tell"
    assert "With one change (one more round): difference +0.00" in page(court)
    assert "A guess at why: the moon." in page(court)
    assert court.known_changes(same) == {"one more round": tried}
    court.book = Book({"same": same.model_copy(update={"shown": "they are the same."})}, book.scenes)
    assert "What these runs show: they are the same." in page(court) and "the moon" not in page(court)
    empty = Book({"plain": claim_of()}, {"tiny": SCENE})
    assert "Of 1 claims 0 have been run" in page(Court(empty, folder / "none", {}, print, TINY))


def test_a_change_may_have_more_seeds(tested):
    folder, book, found, _ = tested
    lines: list[str] = []
    court = Court(book, folder, {"workers": 1}, lines.append, TINY)
    claim = claim_of(explain=[{"change": "one more seed", "seeds": 3}])
    assert court.known_changes(claim) == {}
    (tried,) = court.explain(claim)
    assert len(lines) == 2 and all("seed=2" in line for line in lines)
    assert tried.above[:2] == found["plain"].above and len(tried.above) == len(tried.below) == 3
    assert court.known_changes(claim) == {"one more seed": tried}


def test_a_change_may_be_of_a_method(tested):
    """It takes the place of the tuned one, as it stands."""
    folder, book, _, _ = tested
    court = Court(book, folder, {"workers": 1}, lambda line: None, TINY)
    change = {"change": "FedAvg does not learn", "below": "fedavg:lr=1e-9"}
    claim = claim_of(explain=[change])
    (tried,) = court.explain(claim)
    assert tried.specs == (court.known(claim).specs[0], "fedavg:lr=1e-9")
    assert tried.above == court.known(claim).above and tried.below != court.known(claim).below
    never_holds = claim_of(above=BASE["below"], explain=[change | {"above": "fedavg:lr=1e-9"}])
    court.book = Book({"one": never_holds}, book.scenes)
    assert court.explain(never_holds)[0].difference.mean == 0
    text = "(FedAvg does not learn, by `fedavg:lr=1e-9` and `fedavg:lr=1e-9` as it stands): difference +0.00"
    assert text in page(court)


def test_a_run_that_fails_is_recorded_and_counts_as_nothing(tmp_path):
    stage = Stage("tiny", SCENE, TINY, tmp_path, lambda line: None)
    assert "failed" in stage.score("fedavg:lr=1e30", 0)
    assert Stage("tiny", SCENE, TINY, tmp_path, print).known_run("fedavg:lr=1e30", 0)["failed"]


def test_records_that_cannot_be_read_are_told(tmp_path):
    (tmp_path / "tiny.json").write_text("{")
    with pytest.raises(UsageError, match="cannot be read"):
        Stage("tiny", SCENE, TINY, tmp_path, print)


# The command, and the pages


def test_the_command_tests_claims_and_tells_what_is_missing(tested, monkeypatch, capsys):
    folder, book, found, _ = tested
    monkeypatch.setattr("plures.cli.tuning.load_claims", lambda: book)
    monkeypatch.setattr(claims_room.Court.__init__, "__defaults__", (TINY,))
    assert call(["claims", "plain", "--out", str(folder), "--workers", "1", "--quiet"]) == 0
    assert found["plain"].verdict in capsys.readouterr().out
    assert call(["claims", "--out", str(folder / "none"), "--workers", "1", "--dry-run"]) == 0
    assert "whole runs" in capsys.readouterr().out
    assert call(["claims", "nonsense"]) == 2


@pytest.mark.parametrize(("script", "name"), [("make_claims", "claims"), ("make_leaderboard", "leaderboard")])
def test_pages_are_what_records_say(script, name, docs_script):
    module = docs_script(script)
    made = claims_room.page(module.court()) if name == "claims" else module.page()
    assert (module.HERE / f"{name}.md").read_text("utf-8") == made, f"run docs/{script}.py write"
    if name == "leaderboard":
        assert (module.HERE / "tuned.md").read_text("utf-8") == module.check_page()
