"""The best host of a run: chosen by J among all rounds, kept whole, and refused if it was damaged."""

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

import esper
import small_runs
import tiny
from esper.export.network import load
from esper.runs.training import best_host
from esper.runs.training.best_host import FILE, BestHost, better, read, save
from esper.simic.rewards.reward_config import RewardConfig
from esper.tolaria.engine import VectorizedEngine
from hosts_to_export import ARCHITECTURES, grown
from small_runs import interrupted_at, main

WEIGHTS = RewardConfig()
BEST = BestHost(
    round=7,
    host=2,
    objective=61.5,
    val=62.5,
    loss=1.5,
    growth=1.25,
    architecture=("r0c0 conv_light ADD",),
    state={"place": torch.tensor([6, 12]), "executor.population.host.params": torch.arange(3.0)[None]},
)


@pytest.fixture(scope="module")
def run(shared_run: Callable[..., Path]) -> Path:
    """Three rounds of two hosts, of which the best is not in the last round."""
    return shared_run("tiny", 3)


def episodes(run: Path) -> list[dict[str, float]]:
    lines = [json.loads(line) for line in (run / "events.jsonl").read_text().splitlines()]
    return [line for line in lines if line["kind"] == "episode"]


def test_the_host_with_the_highest_j_is_taken_only_if_it_beats_the_best_so_far(monkeypatch):
    engine, stats = grown(*ARCHITECTURES)
    # 100 J = accuracy - 3 ln(growth): the smallest of three equal networks
    stats = replace(stats, committed_acc=np.full(3, 50.0), fossil_params=np.array([375, 0, 750]), episode=4)
    found = better(None, engine, stats, WEIGHTS)
    assert found is not None
    assert (found.round, found.host, found.objective, found.val) == (5, 1, 50.0, 50.0)
    assert found.architecture == ARCHITECTURES[1].lines
    assert found.test is None
    monkeypatch.setattr(VectorizedEngine, "state_of", lambda *_: pytest.fail("copied without need"))
    for best in (found, replace(found, objective=50.5)):
        assert better(best, engine, stats, WEIGHTS) is best
    for unknown in ("committed_acc", "committed_loss"):
        assert better(None, engine, replace(stats, **{unknown: np.full(3, np.nan)}), WEIGHTS) is None


def test_what_is_read_is_what_was_saved(tmp_path, on_disk):
    assert read(tmp_path) is None
    save(tmp_path, BEST)
    save(tmp_path, replace(BEST, test=60.25))
    assert on_disk(tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == [FILE]
    found = read(tmp_path)
    assert found == replace(BEST, test=60.25)
    assert tiny.same_tree(found.state, BEST.state)


def test_a_run_keeps_the_best_host_of_all_rounds_and_tests_it_at_the_end(run):
    lines = episodes(run)
    best = max(lines, key=lambda line: line["objective"])
    assert best["round"] < 3
    found, kept = small_runs.summary(run)["best_host"], read(run / "checkpoints")
    assert kept.about | {"perplexity": None} == found
    assert (found["round"], found["host"]) == (best["round"], best["host"])
    assert found["objective"] == pytest.approx(best["objective"])
    assert found["val"] == pytest.approx(best["committed_accuracy"])
    assert found["growth"] == pytest.approx(best["growth_ratio"])


@pytest.mark.slow
def test_the_best_host_is_exported_unless_the_last_round_is_asked_for(run, tmp_path, capfd):
    found, last = small_runs.summary(run)["best_host"], max(episodes(run)[-2:], key=lambda line: line["objective"])
    assert main(["export", str(run), "--out", str(tmp_path / "best")]) == 0
    assert f"host {found['host']} of round {found['round']}, 100·J {found['objective']:.2f}" in capfd.readouterr().out
    network = load(tmp_path / "best")
    assert network.description.architecture.lines == tuple(found["architecture"])
    assert network.description.val == pytest.approx(found["val"])
    data = tiny.dataset().test
    accuracy = 100.0 * float((network.module(data.x).argmax(dim=1) == data.y).float().mean())
    assert (found["test"], network.description.test) == pytest.approx((accuracy, accuracy))

    timeline = esper.load(tmp_path / "best").timeline
    lines = [json.loads(line) for line in (run / "events.jsonl").read_text().splitlines()]
    own = [line for line in lines if (line["round"], line["host"]) == (found["round"], found["host"])]
    born = [(line["t"], line["slot"]) for line in own if line["kind"] == "stage_changed" and line["to"] == "TRAINING"]
    assert [(row.step, row.slot) for row in timeline if row.event == "training"] == born
    assert born
    assert all(row.points is not None for row in timeline)
    assert (timeline[-1].step, timeline[-1].event, timeline[-1].points) == (6, "end", network.description.val)

    assert main(["export", str(run), "--out", str(tmp_path / "last"), "--last"]) == 0
    of_last = load(tmp_path / "last").description
    assert (of_last.origin.round, of_last.origin.host) == (3, last["host"])
    assert of_last.val == pytest.approx(last["committed_accuracy"])


def test_a_run_that_was_stopped_keeps_its_best_host_and_goes_on_with_it(run, tmp_path, monkeypatch):
    path = tmp_path / "run"
    with interrupted_at(3, 2):
        assert small_runs.train(path, "tiny", 3) == 130
    kept = read(path / "checkpoints")
    assert kept.test is None
    written = []
    monkeypatch.setattr(best_host, "save", lambda folder, best: written.append(best))
    assert small_runs.resume(path) == 0
    assert small_runs.summary(path) == small_runs.summary(run)
    assert [best.test for best in written] == [small_runs.summary(run)["best_host"]["test"]]


def test_a_run_whose_best_host_was_damaged_is_not_continued_without_a_word(tmp_path, capfd):
    path = tmp_path / "run"
    with interrupted_at(2, 2):
        assert small_runs.train(path, "tiny", 2) == 130
    (path / "checkpoints" / FILE).write_bytes(b"nothing")
    assert small_runs.resume(path) == 2
    assert "away to go on without the best host" in capfd.readouterr().err
