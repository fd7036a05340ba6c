"""esper report, from a recorded run to its files."""

import json
import re
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from small_runs import contents, main


@pytest.fixture(scope="module")
def run(shared_run: Callable[..., Path], tmp_path_factory: pytest.TempPathFactory) -> Path:
    return Path(shutil.copytree(shared_run("null", 2), tmp_path_factory.mktemp("report") / "run"))


def payload(page: Path, name: str) -> object:
    found = re.search(f'id="payload-{name}">(.*?)</script>', page.read_text("utf-8"))
    assert found
    return json.loads(found[1])


def test_a_run_becomes_one_page_and_pictures_and_stays_as_it_was(run, tmp_path, capsys):
    pytest.importorskip("matplotlib")
    before = contents(run)
    assert main(["report", str(run), "--out", str(tmp_path / "x.html"), "--figures"]) == 0
    out, err = capsys.readouterr()
    assert err == ""
    assert "x.html: 0." in out
    after = contents(run)
    measured = json.loads(after.pop("importance.json"))
    assert after == before
    shown = payload(tmp_path / "x.html", "importance")["run"]
    assert (shown["controller"], shown["policy"], shown["why"]) == ("after 2 rounds", measured["policy"], None)
    assert [row["group"] for row in shown["groups"]] == [row["group"] for row in measured["groups"]]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["run.png", "run.svg", "x.html"]
    (shown,) = payload(tmp_path / "x.html", "runs")
    assert (shown["run"], shown["finished"], shown["last"]["round"]) == ("run", True, 2)
    hosts = payload(tmp_path / "x.html", "hosts")["run"][0]["hosts"]
    assert [host["host"] for host in hosts] == [0, 1, 2]
    assert hosts[1]["rollbacks"] == 1  # this task breaks host 1 in step 5
    assert len(hosts[0]["steps"]["val_acc"]) == 8


def test_what_is_left_of_a_damaged_run_is_shown_with_a_sentence(run, tmp_path, capsys):
    damaged = tmp_path / "damaged"
    shutil.copytree(run, damaged)
    part = next((damaged / "record").glob("steps-*.parquet"))
    part.write_bytes(part.read_bytes()[:-9])
    (damaged / "summary.json").unlink()
    assert main(["report", str(damaged)]) == 0
    assert f"{part.name} is damaged" in capsys.readouterr().err
    assert any(part.name in text for text in payload(damaged / "report.html", "anomalies")["warnings"])
    (shown,) = payload(damaged / "report.html", "runs")
    assert (shown["finished"], shown["last"]["round"]) == (False, 2)


def test_a_run_that_was_killed_at_once_is_an_empty_page(run, tmp_path):
    killed = tmp_path / "killed"
    killed.mkdir()
    for name in ("config.toml", "about.json"):
        shutil.copy(run / name, killed)
    assert main(["report", str(killed)]) == 0
    assert payload(killed / "report.html", "runs")[0]["last"] is None
    assert "no checkpoint yet" in payload(killed / "report.html", "importance")["killed"]["why"]


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ([], "no run is given"),
        (["."], "is not a run directory"),
        (["{run}", "--num-envs", "1"], "expected at least 2, or 0"),
        (["{run}", "--out", "{tmp}/missing/x.html"], "cannot be written"),
    ],
)
def test_what_cannot_be_done_is_refused_with_what_to_do(run, tmp_path, capsys, arguments, words, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert main(["report", *(text.format(run=run, tmp=tmp_path) for text in arguments)]) == 2
    assert words in capsys.readouterr().err
