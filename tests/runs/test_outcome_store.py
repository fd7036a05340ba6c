"""Outcomes in a folder: found again to the bit, and only where nothing has changed."""

import dataclasses
import json
from pathlib import Path

import numpy as np
import pytest
import torch

import small_runs
from esper.leyline.architecture import Architecture
from esper.leyline.errors import ConfigError, DataError
from esper.runs.assembly.assemble import dataset_of
from esper.runs.assembly.presets import resolve
from esper.runs.assembly.run_config import RunConfig
from esper.runs.evaluation.controllers import baseline, derived
from esper.runs.evaluation.outcomes import OutcomeStore, key_of, run_controller
from esper.runs.evaluation.results import Outcome
from small_runs import contents, main

CPU = torch.device("cpu")
PLANTED = Architecture.of_lines(["r0c0 norm ADD"])
assert small_runs


def tiny_config(**changes: object) -> RunConfig:
    return resolve({"task": "tiny", "episode_length": 4, "executor": "streamed", **changes})


def key(config: RunConfig | None = None, name: str = "heuristic", seed: int = 7, hosts: int = 2) -> dict[str, object]:
    config = config or tiny_config()
    return key_of(config, dataset_of(config, CPU), baseline(name, config), run_seed=seed, num_envs=hosts)


@pytest.fixture(scope="module")
def outcome() -> Outcome:
    config = tiny_config()
    data = dataset_of(config, CPU)
    return run_controller(config, data, CPU, baseline("heuristic", config), run_seed=7, num_envs=2)


def same(one: object, other: object) -> bool:
    if isinstance(one, np.ndarray):
        assert isinstance(other, np.ndarray)
        floats = one.dtype.kind == "f"
        return one.dtype == other.dtype and np.array_equal(one, other, equal_nan=floats)
    if dataclasses.is_dataclass(one):
        return all(same(getattr(one, f.name), getattr(other, f.name)) for f in dataclasses.fields(one))
    return one == other


def test_an_outcome_comes_back_to_the_bit(tmp_path: Path, outcome: Outcome) -> None:
    scripted = resolve({"task": "null", "episode_length": 3})
    alone = run_controller(scripted, None, CPU, baseline("random", scripted), run_seed=1, num_envs=2)
    for own, expected in ((tiny_config(), outcome), (scripted, alone)):
        store = OutcomeStore(tmp_path / "new" / "folder")
        assert store.get(key(own)) is None
        store.put(key(own), expected)
        found = OutcomeStore(tmp_path / "new" / "folder").get(key(own))
        assert found is not None
        assert same(found, expected)
        assert (found.cost is None) == (own is scripted)  # its hosts are not networks


def test_whatever_decides_an_outcome_changes_its_key() -> None:
    config = tiny_config()
    grown = [derived("static_common", config, "x", [of], np.ones(1)) for of in (Architecture(), PLANTED)]
    keys = [
        key(), key(name="wait_only"), key(seed=8), key(hosts=3), key(tiny_config(episode_length=5)),
        key(tiny_config(lifecycle={"min_training_epochs": 2})), key(tiny_config(seed=1)),
        *(key_of(config, None, one, run_seed=7, num_envs=2) for one in grown),
    ]  # fmt: skip
    assert len({json.dumps(one, sort_keys=True) for one in keys}) == len(keys)
    assert key(tiny_config(rounds=99, num_envs=4, blocks=2)) == key()


@pytest.mark.parametrize("damage", ["cut", "flip", "empty", "other"])
def test_a_damaged_or_foreign_file_is_refused(tmp_path: Path, outcome: Outcome, damage: str) -> None:
    store = OutcomeStore(tmp_path)
    store.put(key(), outcome)
    path = store.path(key())
    raw = path.read_bytes()
    if damage == "other":
        store.put(key(seed=8), outcome)
        path.write_bytes(store.path(key(seed=8)).read_bytes())
    else:
        flipped = raw[: len(raw) // 2] + bytes([raw[len(raw) // 2] ^ 1]) + raw[len(raw) // 2 + 1 :]
        path.write_bytes({"cut": raw[:-5], "flip": flipped, "empty": b""}[damage])
    with pytest.raises(DataError, match=r"damaged or was not written by esper .* delete it, and it is computed again"):
        store.get(key())


def test_a_folder_with_other_files_is_left_alone(tmp_path: Path) -> None:
    (tmp_path / "thesis.tex").write_text("")
    with pytest.raises(ConfigError, match=r"holds other files \(thesis.tex\)"):
        OutcomeStore(tmp_path)
    with pytest.raises(ConfigError, match="cannot be used"):
        OutcomeStore(tmp_path / "thesis.tex" / "below")
    assert [path.name for path in tmp_path.iterdir()] == ["thesis.tex"]


def test_a_comparison_continues_where_it_was_stopped(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    size = ["--task", "tiny", "--episode-length", "3", "--num-envs", "2", "--out", str(tmp_path / "out")]
    assert main(["evaluate", "heuristic", *size]) == 0
    first = contents(tmp_path / "out" / "outcomes")
    assert len(first) == 2  # and wait_only
    report = json.loads((tmp_path / "out" / "evaluation.json").read_text())
    assert {row["name"] for row in report["controllers"]} == {"heuristic", "wait_only"}
    capfd.readouterr()
    assert main(["evaluate", "heuristic", "random", *size]) == 0
    out, err = capfd.readouterr()
    assert "2 of 3 outcomes were found in" in err
    assert "random, 2 hosts of tiny" in err
    assert "heuristic, 2 hosts" not in err
    after = contents(tmp_path / "out" / "outcomes")
    assert {name: after[name] for name in first} == first
    again = json.loads((tmp_path / "out" / "evaluation.json").read_text())
    rows = {row["name"]: row for row in again["controllers"]}
    assert all(rows[row["name"]] == row for row in report["controllers"])
    assert main(["evaluate", "heuristic", "random", *size]) == 0
    assert capfd.readouterr().out == out
