"""The page of results from a comparison of two controllers on four hosts."""

import json
from pathlib import Path

import write_results
from small_runs import main as command_line
from write_results import Options, by_kind, comparison, each_seed, grown, main


def seed(slot, blueprint):
    return {"slot": slot, "blueprint": blueprint}


def controller(name, values, structures, **changes):
    difference = {"mean": -1.5, "low": -2.0, "high": -1.0}
    row = {
        "name": name, "objective": sum(values) / 4, "objective_iqm": {"mean": values[1]}, "difference": difference,
        "committed": 80.0, "test": 79.5, "growth": 2.0, "training_flops": 3e6, "hosts": {"objective": values},
        "architectures": [{"slots": slots} for slots in structures],
        "instances": {"classes": [5, 5, 10, 10], "view": [0, 1, 0, 0]},
    }  # fmt: skip
    return row | changes


TRAINED = controller(
    "trained", [90.0, 80.0, 70.0, 76.0],
    [[seed("r0c0", "bottleneck")], [], [seed("r0c0", "norm"), seed("r0c1", "norm")], [seed("r0c0", "norm")]],
)  # fmt: skip
WAITING = controller("wait_only", [80.0, 80.0, 60.0, 66.0], [[]] * 4)
REPORT = {"verdict": "trained is better.", "reference": "trained", "controllers": [TRAINED, WAITING]}


def test_differences_are_those_of_the_trained_controller_from_the_others():
    lines = comparison(REPORT).splitlines()
    assert lines[0] == "trained is better."
    assert lines[-2] == "| trained | 79.00 | 80.00 |  | 80.0 | 79.5 | 2.00x | 3 M |"
    assert lines[-1] == "| wait_only | 71.50 | 80.00 | +1.50 [+1.00, +2.00] | 80.0 | 79.5 | 2.00x | 3 M |"


def test_hosts_are_grouped_by_classes_and_view():
    lines = by_kind([TRAINED, WAITING]).splitlines()
    assert lines[2] == "| controller |  5 classes, view 0 (1) |  5 classes, view 1 (1) | 10 classes, view 0 (2) |"
    assert lines[-2:] == ["| trained | 90.0 | 80.0 | 73.0 |", "| wait_only | 80.0 | 80.0 | 63.0 |"]


def test_structures_are_counted_by_kind():
    lines = grown([TRAINED]).splitlines()
    assert lines[-3:] == [
        "|  5 classes, view 0 | bottleneck in r0c0: 1 |",
        "|  5 classes, view 1 | none: 1 |",
        "| 10 classes, view 0 | norm in r0c0 and norm in r0c1: 1; norm in r0c0: 1 |",
    ]


def test_the_page_keeps_what_stands_around_the_markers(tmp_path: Path):
    page, evaluation, run = tmp_path / "results.md", tmp_path / "evaluation.json", tmp_path / "run"
    page.write_text("before\n{}\nold\n{}\nafter\n".format(*write_results.MARKERS))
    evaluation.write_text(json.dumps(REPORT))
    short = ["--rounds", "2", "--num-envs", "4", "--episode-length", "8"]
    assert command_line(["train", "--task", "mixed_digits", "--out", str(run), *short]) == 0
    assert main(Options(evaluation=evaluation, runs=(run,), page=page)) == 0
    text = page.read_text()
    assert text.startswith("before\n")
    assert text.endswith("after\n")
    assert "old" not in text
    assert "trained is better." in text
    pictures = {f"results_{name}.png" for name in ("learning", "frontier", "timelines")}
    assert {path.name for path in tmp_path.glob("*.png")} == pictures


def test_each_seed_has_a_column_of_its_own():
    report = REPORT | {"num_envs": 4, "seed": 1_000_001}
    lines = each_seed([report, report | {"seed": 1_000_002}]).splitlines()
    assert "on 4 new hosts of the seed above the column" in lines[2]
    assert lines[4] == "| against | 1000001 | 1000002 |"
    assert lines[-2:] == ["| (100·J) | 79.00 | 79.00 |", "| wait_only | +1.50 [+1.00, +2.00] | +1.50 [+1.00, +2.00] |"]
    assert each_seed([]) == ""
