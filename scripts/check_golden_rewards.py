"""Check both implementations of the rewards against recorded cases, or write an excerpt of such a file.

    python scripts/check_golden_rewards.py recorded/reward_shaped.json ...
    python scripts/check_golden_rewards.py --excerpt tests/golden recorded/reward_*.json

Exit code 1 if an error is above 1e-6.
"""

import argparse
import json
import sys
from pathlib import Path
from typing import Any

from esper.leyline.errors import EsperError

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "tests"))  # the reference in plain floats lies there
from reference.rewards.golden import check_golden, row_of_case
from reference.rewards.row import HostRow

TOLERANCE = 1e-6
FEWEST_CASES = 40
MARKS = (-0.5, -0.2, 0.0, 0.1, 1.0)


def main() -> int:
    """Check every file; returns 1 if one is out of tolerance."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("paths", nargs="+", type=Path, help="files of recorded cases")
    parser.add_argument("--excerpt", type=Path, metavar="DIR", help="write an excerpt of each file instead of checking")
    options = parser.parse_args()
    try:
        if options.excerpt is not None:
            for path in options.paths:
                write_excerpt(path, options.excerpt / path.name)
            return 0
        return 0 if all([check(path) for path in options.paths]) else 1
    except EsperError as error:
        print(error, file=sys.stderr)
        return 2


def check(path: Path) -> bool:
    """Print the errors of one file; returns whether they are within tolerance."""
    report = check_golden(path)
    print(
        f"{path.name}: cases {report.cases}, max_abs_error_scalar {report.scalar:.3g}, "
        f"max_abs_error_batched {report.batched:.3g}"
    )
    return max(report.scalar, report.batched) <= TOLERANCE


def write_excerpt(source: Path, target: Path) -> None:
    """Write each case with a new feature, then the first other cases up to 40; one case per line."""
    content: dict[str, Any] = json.loads(source.read_text())
    cases, seen, chosen = content["cases"], set[str](), []
    for number, case in enumerate(cases):
        features = features_of(case)
        if not features <= seen:
            chosen.append(number)
            seen |= features
    others = [number for number in range(len(cases)) if number not in set(chosen)]
    kept = sorted(chosen + others[: max(0, FEWEST_CASES - len(chosen))])
    head = [f"{json.dumps(name)}: {json.dumps(value)}" for name, value in content.items() if name != "cases"]
    body = ",\n".join(json.dumps(cases[number], separators=(",", ":")) for number in kept)
    target.parent.mkdir(parents=True, exist_ok=True)
    target.write_text("{" + ",\n".join(head) + ',\n"cases": [\n' + body + "\n]}\n")
    print(f"{target}: {len(kept)} of {len(cases)} cases, {len(seen)} features")


def features_of(case: dict[str, Any]) -> set[str]:
    """Features of a case: op and stage, ranges of its measurements, terms that are not zero, the end of the episode."""
    x = row_of_case(case["inputs"])
    paid = {f"pays {name} {'+' if v > 0 else '-'}" for name, v in case.get("components", {}).items() if v}
    stage, op = x.stage if x.has_seed else 0, f"op {x.action}"
    features = {f"{op} stage {stage}", f"{op} end {x.last_step}", f"preset {case.get('preset')}"}
    features |= {f"g {_range(x.counterfactual_improvement)}", f"pools {len(x.deferred_pools)}"}
    if "bounded_attribution" in case.get("components", {}):
        features |= {f"{op} c {_range(x.seed_contribution)}", f"p {_range(x.total_improvement)}"}
    return features | paid | _clocks(x) | ({"opens a pool"} if "new_drip" in case else set())


def _clocks(x: HostRow) -> set[str]:
    if not x.has_seed:
        return {"no seed"}
    return {f"entered {x.epochs_in_stage == 0}", f"age {min(x.seed_age, 5)}", f"early {x.epoch - x.seed_age < 10}"}


def _range(value: float) -> str:
    return "missing" if value != value else str([value > mark for mark in MARKS] + [value in MARKS])


if __name__ == "__main__":
    sys.exit(main())
