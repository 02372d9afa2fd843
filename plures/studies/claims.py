"""Claims: what the papers say is above what, each as an entry of claims.toml, and whether it holds here.

For each claim both methods are tuned with the same budget on seeds that are not scored, then run on the scored seeds.
The difference has a 95 % interval over these seeds: the claim holds if all of it is above zero, does not if all of it
is below, and else it is too close to tell. Where it does not hold, comparisons with one thing changed follow.
"""

import tomllib
from importlib import resources
from pathlib import Path
from typing import Any, Literal, NamedTuple

from pydantic import BaseModel, ConfigDict, Field

from plures.errors import unknown
from plures.studies import stats
from plures.studies.campaign import Plan, Say, Stage
from plures.studies.reproduce import value_at
from plures.studies.tune import Objective

Verdict = Literal["holds", "does not", "too close to tell", "not run"]
PLAN = Plan(trials=10, tuned_on=[10, 11], scored_on=[0, 1, 2, 3, 4])


class Side(BaseModel):
    """One side of a claim: a method, and a number of its summary."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    method: str
    column: str = Field(description="where the number is in summary.json")


class Explanation(BaseModel):
    """One thing that is changed where a claim does not hold."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    change: str = Field(description="what is changed, in words")
    options: dict[str, Any] = Field({}, description="options of both runs that are others")
    above: str | None = Field(None, description="a method in place of the tuned one; it is run as it stands here")
    below: str | None = Field(None, description="the same for the other side")
    seeds: int | None = Field(None, ge=2, description="how many seeds are scored, from 0 on, if not as many as else")


class Claim(BaseModel):
    """A sentence of a paper that can be tested."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    paper: str
    says: str = Field(description="the sentence, in our words")
    where: str = Field(description="table or figure")
    published: str = Field(description="its numbers")
    preset: str = Field(description="the table at the paper's size, for `plures reproduce`")
    scene: str = Field(description="the size at which it is tested here")
    above: Side
    below: Side
    is_cost: bool = Field(False, description="whether the smaller number is the better one")
    equal: Literal["rounds", "flops"] = Field("rounds", description="what both may spend as much of")
    explain: list[Explanation] = Field(description="what is changed, one thing at a time, until it holds")
    shown: str | None = Field(None, description="what the runs with a change show, where none of them makes it hold")
    guess: str = Field(description="what may be the reason if none of that is, and nothing is shown")


class Book(NamedTuple):
    """All claims by name, and the scenes that they are tested in."""

    claims: dict[str, Claim]
    scenes: dict[str, dict[str, Any]]


def load_claims() -> Book:
    """The claims of claims.toml."""
    content = tomllib.loads(resources.files("plures.studies").joinpath("claims.toml").read_text(encoding="utf-8"))
    return Book({name: Claim(**one) for name, one in content["claims"].items()}, content["scenes"])


def papers(book: Book) -> list[str]:
    return list(dict.fromkeys(claim.paper for claim in book.claims.values()))


def choose(book: Book, words: list[str]) -> dict[str, Claim]:
    """The claims of some papers, or of these names; all without words."""
    known = {*papers(book), *book.claims}
    for word in words:
        if word not in known:
            raise unknown("paper or claim", word, known)
    return {name: one for name, one in book.claims.items() if not words or one.paper in words or name in words}


def objective_of(column: str) -> Objective:
    """What a method is tuned by, where this number is claimed."""
    if column.startswith("generic"):
        return "generic"
    return "worst5" if column.endswith("worst5") else "personal"


class Finding(NamedTuple):
    """What came of a claim, or of the comparison that is to explain it."""

    above: list[float]  # one for each scored seed; per cent, unless it is a cost
    below: list[float]
    specs: tuple[str, str]
    difference: stats.Spread
    verdict: Verdict


def judge(claim: Claim, above: list[float], below: list[float], specs: tuple[str, str]) -> Finding:
    """The difference with its interval, and the verdict; of a cost, the difference is how much less it is."""
    each = [(b - a) if claim.is_cost else (a - b) for a, b in zip(above, below, strict=True)]
    found = stats.spread(each)
    if found.n < 2:
        return Finding(above, below, specs, found, "not run")
    low, high = found.mean - found.half_width, found.mean + found.half_width
    verdict: Verdict = "holds" if low > 0 else "does not" if high < 0 else "too close to tell"
    return Finding(above, below, specs, found, verdict)


class Court:
    """Tests claims, from records and by running what is missing."""

    def __init__(self, book: Book, folder: Path, shared: dict[str, Any], say: Say, plan: Plan = PLAN) -> None:
        """`shared` are options of all runs that change no number, such as workers and data_dir."""
        self.book, self.plan = book, plan
        self.stages = {name: Stage(name, options | shared, plan, folder, say) for name, options in book.scenes.items()}

    def test(self, claim: Claim) -> Finding:
        """Tune, run and judge; what is recorded is not run again."""
        stage = self.stages[claim.scene]
        specs = (
            stage.tune(claim.above.method, objective_of(claim.above.column)),
            stage.tune(claim.below.method, objective_of(claim.below.column)),
        )
        runs = []
        for seed in self.plan.scored_on:
            first = stage.score(specs[0], seed)
            if claim.equal == "rounds":
                runs.append((first, stage.score(specs[1], seed)))
            else:
                runs.append((first, stage.score_within(specs[1], seed, specs[0], claim.equal)))
        return _judge_runs(claim, runs, specs)

    def explain(self, claim: Claim) -> list[Finding]:
        """The same methods with one thing changed, one after another, until the claim holds with one of them."""
        stage = self.stages[claim.scene]
        out: list[Finding] = []
        for one in claim.explain:
            specs = self._specs(claim, one)
            assert specs is not None
            runs = [tuple(stage.score(spec, seed, one.options) for spec in specs) for seed in self._seeds(one)]
            out.append(_judge_runs(claim, runs, specs))
            if out[-1].verdict == "holds":
                break
        return out

    def known(self, claim: Claim, change: Explanation | None = None) -> Finding | None:
        """What records say of a claim, or of it with one thing changed; None if anything is missing."""
        stage, specs = self.stages[claim.scene], self._specs(claim, change)
        if specs is None:
            return None
        first = other = None if change is None else change.options
        if claim.equal != "rounds" and change is None:
            other = {"equal": claim.equal, "first": specs[0]}
        runs = [
            (stage.known_run(specs[0], seed, first), stage.known_run(specs[1], seed, other))
            for seed in self._seeds(change)
        ]
        if any(one is None for pair in runs for one in pair):
            return None
        return _judge_runs(claim, runs, specs)

    def _seeds(self, change: Explanation | None) -> list[int]:
        return self.plan.scored_on if change is None or change.seeds is None else list(range(change.seeds))

    def known_changes(self, claim: Claim) -> dict[str, Finding]:
        """What was changed, in words -> what records say of it."""
        found = {one.change: self.known(claim, one) for one in claim.explain}
        return {change: one for change, one in found.items() if one is not None}

    def _specs(self, claim: Claim, change: Explanation | None = None) -> tuple[str, str] | None:
        """Both methods as they are run: as tuned, or as the change names them; None if one has not been tuned."""
        stage = self.stages[claim.scene]
        above = stage.known_spec(claim.above.method, objective_of(claim.above.column))
        below = stage.known_spec(claim.below.method, objective_of(claim.below.column))
        if change is not None:
            above, below = change.above or above, change.below or below
        return None if above is None or below is None else (above, below)

    def missing(self, claims: list[Claim]) -> dict[tuple[str, str, Objective], float]:
        """(scene, method, objective) -> about how many whole runs are missing."""
        out: dict[tuple[str, str, Objective], float] = {}
        for claim in claims:
            if self.known(claim) is None:
                for side in (claim.above, claim.below):
                    key = (claim.scene, side.method, objective_of(side.column))
                    is_tuned = self.stages[claim.scene].known_spec(key[1], key[2]) is not None
                    tuning = 0.0 if is_tuned else self.plan.runs_of_tuning()
                    out[key] = max(out.get(key, 0.0), tuning + len(self.plan.scored_on))
        return out


def _judge_runs(claim: Claim, runs: list[Any], specs: tuple[str, str]) -> Finding:
    """From the numbers of both sides for each seed; a run that failed, or lacks the number, counts as 0."""
    scale = 1.0 if claim.is_cost else 100.0
    sides = (claim.above, claim.below)
    above, below = ([scale * (value_at(pair[k], sides[k].column) or 0.0) for pair in runs] for k in (0, 1))
    return judge(claim, above, below, specs)


# The page


def row(name: str, claim: Claim, found: Finding | None) -> list[str]:
    """A claim in a table: name, ours, difference, verdict."""
    if found is None:
        return [name, "-", "-", "not run"]
    a, b = stats.spread(found.above), stats.spread(found.below)
    numbers = f"{_number(a.mean, claim)} against {_number(b.mean, claim)}"
    return [name, numbers, _interval(found, claim), found.verdict]


def _number(value: float, claim: Claim) -> str:
    return f"{value:.3g}" if claim.is_cost else f"{value:.2f}"


def _interval(found: Finding, claim: Claim) -> str:
    mean, half = found.difference.mean, found.difference.half_width
    sign = "" if claim.is_cost else "+"
    form = ".3g" if claim.is_cost else ".2f"
    return f"{mean:{sign}{form}} [{mean - half:{sign}{form}}, {mean + half:{sign}{form}}]"


def page(court: Court) -> str:
    """docs/claims.md, from records."""
    book, plan = court.book, court.plan
    found = {name: court.known(claim) for name, claim in book.claims.items()}
    counts = {
        word: sum(f is not None and f.verdict == word for f in found.values())
        for word in ("holds", "does not", "too close to tell")
    }
    tuned_on, scored_on = (", ".join(map(str, seeds)) for seeds in (plan.tuned_on, plan.scored_on))
    lines = [
        "# The papers' claims, one by one",
        "",
        "Each claim is an entry of `plures/studies/claims.toml`: the sentence of the paper in our words, its table or "
        "figure, its numbers, and what must be above what. Every number here was written by "
        "`python docs/make_claims.py write` from runs that `python docs/make_claims.py run --data-dir DIR` (or "
        "`plures claims --data-dir DIR --out docs/results/claims`) recorded; it goes on where it stopped.",
        "",
        f"Both methods of a claim are tuned with the same budget, {plan.trials} trials on validation rows of seeds "
        f"{tuned_on}, and scored on the test rows of seeds {scored_on}. The difference is in points, mean over the "
        "scored seeds, with its 95 % interval (Student's t). The claim *holds* if the whole interval is above zero, "
        "*does not* if all of it is below, and else it is *too close to tell*. The sizes are small, so that all of it "
        "can be made in hours; at a paper's size an order may be another one (`plures reproduce PRESET --scale full`).",
        "",
        f"Of {len(found)} claims {sum(f is not None for f in found.values())} have been run: {counts['holds']} hold, "
        f"{counts['does not']} do not, {counts['too close to tell']} are too close to tell.",
        "",
    ]
    for paper in papers(book):
        lines += [
            f"## {paper}",
            "",
            "| claim | where | published | ours, % | difference | verdict |",
            "|---|---|---|---|---|---|",
        ]
        own = {name: claim for name, claim in book.claims.items() if claim.paper == paper}
        for name, claim in own.items():
            cells = row(name, claim, found[name])
            line = [claim.says, claim.where, claim.published, *cells[1:3], f"**{cells[3]}**"]
            lines.append("| " + " | ".join(line) + " |")
        lines.append("")
        for name, claim in own.items():
            lines += _details(court, name, claim, found[name])
    lines += ["## Sizes", "", "| scene | options |", "|---|---|"]
    for scene, options in book.scenes.items():
        words = " ".join(f"--{key.replace('_', '-')} {value}" for key, value in options.items())
        lines.append(f"| {scene} | `{words}` |")
    return "\n".join(lines) + "\n"


def _details(court: Court, name: str, claim: Claim, found: Finding | None) -> list[str]:
    """How a claim was run; and where it does not hold, what the one change did."""
    if found is None:
        return []
    equal = "" if claim.equal == "rounds" else f", with equal {claim.equal}"
    out = [
        f"- *{claim.says}* Run as `{found.specs[0]}` and `{found.specs[1]}` in scene {claim.scene}{equal}; at the "
        f"paper's size: `plures reproduce {claim.preset} --scale full`."
    ]
    if found.verdict != "holds":
        tried = court.known_changes(claim)
        for change, one in tried.items():
            named = [f"`{spec}`" for spec, tuned in zip(one.specs, found.specs, strict=True) if spec != tuned]
            run_as = f", by {' and '.join(named)} as it stands" if named else ""
            out.append(f"  With one change ({change}{run_as}): difference {_interval(one, claim)}, {one.verdict}.")
        if tried and claim.shown is not None:
            out.append(f"  What these runs show: {claim.shown}")
        elif not any(one.verdict == "holds" for one in tried.values()):
            out.append(f"  A guess at why: {claim.guess}" if tried else f"  Why is not tried. A guess: {claim.guess}")
    return [*out, ""]
