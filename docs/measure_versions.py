"""Every method on digits by its defaults, with the version of Plures on the path: recorded for docs/defaults.md.

    python docs/measure_versions.py [METHOD ...]
    PYTHONPATH=CHECKOUT python docs/measure_versions.py [METHOD ...]     an older version

It uses nothing but `plures.run`, so that older versions can be measured, too. Records are in docs/results.
"""

import json
import sys
from pathlib import Path

import plures

HERE = Path(__file__).parent
RECORD = HERE / "results" / "versions.json"
SPLITS = ("dirichlet:0.1", "labels:4")
PAGES = sorted(path.stem for path in (HERE / "methods").glob("*.md") if path.stem not in ("README", "addons"))


def main() -> None:
    known = json.loads(RECORD.read_text("utf-8")) if RECORD.exists() else {}
    of_this = known.setdefault(plures.__version__, {})
    for method in sys.argv[1:] or [*PAGES, "fedrod:head=hyper"]:
        for split in SPLITS:
            if f"{method} {split}" not in of_this:
                found = plures.run(method, data="digits", partition=split, rounds=30, eval_every=0, pool_rows=0)
                of_this[f"{method} {split}"] = found.summary["personal"]["mean"]
                RECORD.write_text(json.dumps(known, indent=1) + "\n", "utf-8")
                print(f"{plures.__version__} {method} {split}: {100 * of_this[f'{method} {split}']:.2f}", flush=True)


if __name__ == "__main__":
    main()
