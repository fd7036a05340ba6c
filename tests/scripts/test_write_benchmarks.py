"""The page of benchmarks, of which one section is written by a script."""

import json
import runpy
import sys
from dataclasses import asdict, fields
from importlib import import_module
from pathlib import Path

import pytest

import executors
import paired
import write_benchmarks as script
from write_benchmarks import BEGIN, END, MEASUREMENTS, ROOT, Measurement, Options, main, section

PAGE = f"# Title\n\nby hand\n\n{BEGIN}\nold numbers\n{END}\n\nmore by hand\n"


def measurement(text, code=0):
    """A command that writes `text` to the path after --json."""
    program = f"import sys; open(sys.argv[2], 'w').write({text!r}); sys.exit({code})"
    return Measurement("one", ("-c", program), (lambda report: [("a", "b"), ("x", str(report["n"]))],))


def test_the_page_gets_the_table_and_the_command(tmp_path, monkeypatch):
    page = tmp_path / "page.md"
    page.write_text(PAGE)
    monkeypatch.setattr(script, "MEASUREMENTS", (measurement(json.dumps({"n": 7, "environment": {"torch": "9"}})),))
    assert main(Options(page=page)) == 0
    found = page.read_text()
    assert "| x | 7 |" in found
    assert "torch 9" in found
    assert found.startswith("# Title\n\nby hand\n\n")
    assert found.endswith("\n\nmore by hand\n")
    assert "old numbers" not in found


def test_a_measurement_that_fails_leaves_the_page_as_it_was(tmp_path, monkeypatch, capsys):
    page = tmp_path / "page.md"
    page.write_text(PAGE)
    monkeypatch.setattr(script, "MEASUREMENTS", (measurement("{}", code=1),))
    assert main(Options(page=page)) == 2
    assert page.read_text() == PAGE
    assert "exit code 1" in capsys.readouterr().err


@pytest.mark.parametrize("path", sorted({m.command[0] for m in MEASUREMENTS}))
def test_every_command_exists_and_says_what_it_takes(path, monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", [path, "--help"])
    with pytest.raises(SystemExit) as ended:
        runpy.run_path(str(ROOT / path), run_name="__main__")
    assert ended.value.code == 0
    assert "--json" in capsys.readouterr().out


def sample(cls, **changes):
    """A row with 1.5 in every number, as the scripts write it."""
    return asdict(cls(**({field.name: 1.5 for field in fields(cls)} | changes)))


def report_of(path):
    """A result of the script with one row, made of the script's own record of a row."""
    if "executors" in path:
        by_name = {name: {"native": 0.5} for name in ("share", "coalitions", "auto_speed", "growth")}
        facts = sample(executors.Facts, memory_gib=0.39, **by_name)
        return {"rows": {"train": sample(paired.Row, name="train", first="streamed", second="native")}, "facts": facts}
    row = import_module(Path(path).stem).Row
    names = {"setting", "operation", "name", "form", "dtype", "executor"} & {field.name for field in fields(row)}
    shares = {"share": {"train": 0.5, "decide": 0.25, "update": 0.25}} if "benchmark_hot_path" in path else {}
    rows = [sample(row, **dict.fromkeys(names, "train"), **shares)]
    return {"rows": rows, "results": rows}


@pytest.mark.parametrize("measurement", MEASUREMENTS, ids=lambda m: m.title)
def test_every_table_is_made_of_what_its_script_writes(measurement):
    page = section(measurement, report_of(measurement.command[0]))
    assert page.startswith(f"## {measurement.title}\n\n`.venv/bin/python {measurement.command[0]}")
    for lines in page.split("\n\n")[2:]:
        assert len({line.count("|") for line in lines.splitlines()}) == 1  # as many cells as headers
        assert len(lines.splitlines()) > 2
