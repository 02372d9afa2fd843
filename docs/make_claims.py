"""Tests the papers' claims, and writes docs/claims.md from what was recorded.

    python docs/make_claims.py run [PAPER or CLAIM ...] [--data-dir DIR]    tune and run what is missing
    python docs/make_claims.py write                                        the page

Records are in docs/results/claims, one file for each scene; a campaign that was stopped goes on.
"""

import argparse
from pathlib import Path
from typing import Any

from plures.studies.claims import Court, choose, load_claims, page

HERE = Path(__file__).parent
RECORDS = HERE / "results" / "claims"


def court(data_dir: str | None = None, workers: int = 2) -> Court:
    shared: dict[str, Any] = {"workers": workers} | ({"data_dir": data_dir} if data_dir else {})
    return Court(load_claims(), RECORDS, shared, lambda line: print(line, flush=True))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=["run", "write"])
    parser.add_argument("claims", nargs="*", metavar="PAPER|CLAIM")
    parser.add_argument("--data-dir")
    parser.add_argument("--workers", type=int, default=2, help="of each run; they change no number")
    given = parser.parse_args()
    judge = court(given.data_dir, given.workers)
    if given.what == "run":
        for claim in choose(judge.book, given.claims).values():
            if judge.test(claim).verdict != "holds":
                judge.explain(claim)
    (HERE / "claims.md").write_text(page(judge), "utf-8")


if __name__ == "__main__":
    main()
