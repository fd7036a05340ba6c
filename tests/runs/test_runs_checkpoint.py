"""Checkpoints: complete or absent, and never trusted."""

import os
import pickle
import re
import resource
from dataclasses import asdict, replace
from pathlib import Path

import pytest
import torch

import tiny
from esper.leyline.errors import CheckpointError
from esper.leyline.tensor_dataclass import state_digest
from esper.runs.assembly.presets import resolve
from esper.runs.assembly.run_config import run_shape
from esper.runs.report import Cost
from esper.runs.state_file import write_state
from esper.runs.training.checkpoint import Header, checkpoints, load, load_newest, require_same_shape, save, set_aside
from esper.tasks.datasets.arrays import from_arrays
from esper.tasks.losses import Classification

HEADER = Header(
    rounds_done=3,
    step=0,
    cursor={"metrics.jsonl": 120, "events.jsonl": 4000},
    total=Cost(env_steps=96, steps=24, reads=24, seconds=1.5, update_seconds=0.25),
    begun=Cost(),
    shape={"task": "null", "slots": ["r0c0", "r0c1"]},
    config={"seed": 0, "ppo": {"lr": 5e-4}},
)
STATE = {
    "policy.weight": torch.arange(6, dtype=torch.float32).reshape(2, 3),
    "policy.nan": torch.tensor([float("nan"), -0.0, float("inf")]),
    "policy.counters": torch.tensor([1, 2**40]),
    "engine.flag": torch.tensor([True, False]),
    "engine.scalar": torch.tensor(0.1, dtype=torch.float64),
    "engine.empty": torch.zeros(0, 4),
}


def at(rounds: int, step: int = 0) -> Header:
    return replace(HEADER, rounds_done=rounds, step=step)


def test_what_is_loaded_is_what_was_saved(tmp_path):
    found = load(save(tmp_path, HEADER, STATE))
    assert found.header == HEADER
    assert found.state.keys() == STATE.keys()
    assert state_digest(found.state) == state_digest(STATE)


def test_the_newest_three_are_kept_in_the_order_of_the_run(tmp_path):
    for header in (at(1), at(1, 12), at(2), at(2, 3), at(10, 4)):
        save(tmp_path, header, STATE)
    names = [path.stem for path in checkpoints(tmp_path)]
    assert names == ["round-00010-step-0004", "round-00002-step-0003", "round-00002"]
    assert sorted(path.stem for path in tmp_path.iterdir()) == sorted(names)


def test_a_checkpoint_is_on_the_disk_before_it_has_its_name(tmp_path, on_disk):
    save(tmp_path, HEADER, STATE)
    assert on_disk(tmp_path)


def test_drafts_and_strangers_are_no_checkpoints(tmp_path):
    for name in (".draft-round-00009.safetensors", "damaged-round-00008.safetensors", "round-7", "notes"):
        (tmp_path / name).mkdir()
    save(tmp_path, HEADER, STATE)
    assert [path.stem for path in checkpoints(tmp_path)] == ["round-00003"]
    assert not (tmp_path / ".draft-round-00009.safetensors").exists()  # of a process that was killed
    assert (tmp_path / "notes").exists()
    assert checkpoints(tmp_path / "nowhere") == []


@pytest.mark.parametrize(
    ("field", "value", "said"),
    [
        ("step", {}, "step is {}; it must be a whole number"),
        ("rounds_done", -1, "rounds_done is -1; it must be at least 0"),
        ("total", None, "total is null; it must be a table"),
        ("total", {"seconds": float("nan")}, "total.seconds is"),
        ("trend", {"recent": ["x"]}, 'trend.recent[0] is "x"; it must be a number'),
        ("cursor", {"../elsewhere": 1}, "cursor.../elsewhere"),
        ("other", 1, "unknown key other"),
    ],
)
def test_a_header_whose_checksum_is_right_is_checked_all_the_same(tmp_path, field, value, said):
    path = save(tmp_path, HEADER, STATE)
    write_state(path, asdict(HEADER) | {field: value}, STATE)
    with pytest.raises(CheckpointError, match=re.escape(said)):
        load(path)


def test_a_pipe_in_the_place_of_a_checkpoint_is_not_waited_for(tmp_path):
    path = save(tmp_path, HEADER, STATE)
    path.unlink()
    os.mkfifo(path)
    with pytest.raises(CheckpointError, match="not a regular file"):
        load(path)


def test_a_checkpoint_has_the_permissions_of_other_new_files(tmp_path):
    (tmp_path / "other").touch()
    assert save(tmp_path, HEADER, STATE).stat().st_mode == (tmp_path / "other").stat().st_mode


@pytest.mark.parametrize("harm", ["flip", "header", "cut", "empty", "remove"])
def test_a_file_that_was_harmed_is_found_out(tmp_path, harm):
    path = save(tmp_path, HEADER, STATE)
    content = path.read_bytes()
    harmed = {"flip": flipped(content, -1), "header": flipped(content, content.index(b"rounds_done") + 16),
              "cut": content[: len(content) // 2]}  # fmt: skip
    path.unlink() if harm == "remove" else path.write_bytes(harmed.get(harm, b""))
    with pytest.raises(CheckpointError, match="round-00003"):
        load(path)


def flipped(content: bytes, place: int) -> bytes:
    changed = bytearray(content)
    changed[place] ^= 1
    return bytes(changed)


class Bomb:
    """What must never be unpickled."""

    def __reduce__(self) -> tuple[object, tuple[str]]:
        return pytest.fail, ("a checkpoint was unpickled",)


def test_nothing_is_unpickled(tmp_path):
    path = tmp_path / "round-00003.safetensors"
    path.write_bytes(pickle.dumps(Bomb()))
    with pytest.raises(CheckpointError, match="cannot be read"):
        load(path)


def test_the_newest_whole_one_is_found_and_the_damaged_ones_are_named(tmp_path):
    for header in (at(1), at(2), at(3)):
        save(tmp_path, header, STATE)
    for name in ("round-00003.safetensors", "round-00002.safetensors"):
        (tmp_path / name).write_bytes(b"")
    found, damaged, complaints = load_newest(tmp_path)
    assert found is not None
    assert found.path.stem == "round-00001"
    assert [path.stem for path in damaged] == ["round-00003", "round-00002"]
    assert "round-00003.safetensors" in complaints[0]
    set_aside(damaged)
    assert [path.stem for path in checkpoints(tmp_path)] == ["round-00001"]
    assert len(list(tmp_path.glob("damaged-round-00003*"))) == 1
    save(tmp_path, at(3), STATE)
    set_aside([tmp_path / "round-00003.safetensors"])  # once more: what was set aside before stays
    assert len(list(tmp_path.glob("damaged-round-00003*"))) == 2


def test_another_shape_is_named():
    require_same_shape({"a": 1}, {"a": 1}, Path("x"))
    with pytest.raises(CheckpointError, match="made with a = 1, but this run has 2"):
        require_same_shape({"a": 1}, {"a": 2}, Path("x"))
    with pytest.raises(CheckpointError, match="made with a = 1, but this run has nothing"):
        require_same_shape({"a": 1}, {}, Path("x"))
    with pytest.raises(CheckpointError, match="made with b = nothing, but this run has 3"):
        require_same_shape({}, {"b": 3}, Path("x"))


def test_a_checkpoint_of_other_examples_is_refused_but_the_folder_may_move(tmp_path):
    config, spec = resolve({"task": "digits"}), tiny.engine().spec

    def shape_of(x: torch.Tensor, folder: str) -> dict[str, object]:
        data = from_arrays("mine", (x, torch.arange(30) % 3), None, None, objective=Classification(3), run_seed=0)
        return run_shape(config, spec, {**data.identity, "source": str(tmp_path / folder)})

    x = torch.zeros(30, 2)
    require_same_shape(shape_of(x, "here"), shape_of(x.clone(), "there"), Path("x"))
    changed = x.clone()
    changed[7, 1] = 1e-3
    with pytest.raises(CheckpointError, match=r"made with data.sha256_train = "):
        require_same_shape(shape_of(x, "here"), shape_of(changed, "here"), Path("x"))


def test_a_checkpoint_that_cannot_be_written_leaves_the_others(tmp_path):
    save(tmp_path, HEADER, STATE)
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (100, limits[1]))  # as a disk that is full
    try:
        with pytest.raises(CheckpointError, match="cannot be written"):
            save(tmp_path, at(4), STATE)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert [path.stem for path in tmp_path.iterdir()] == ["round-00003"]
    assert load(checkpoints(tmp_path)[0]).header == HEADER


def test_links_among_the_checkpoints_are_removed_and_what_they_lead_to_is_not(tmp_path):
    folder, mine = tmp_path / "checkpoints", tmp_path / "mine"
    mine.mkdir()
    (mine / "thesis").write_text("mine")
    folder.mkdir()
    for name in (*(f"round-0000{n}.safetensors" for n in (1, 2, 9)), ".draft-round-00009", ".round-00009.draft-0"):
        (folder / name).symlink_to(mine)
    for rounds in (7, 8, 9):
        save(folder, at(rounds), STATE)
    assert sorted(path.stem for path in folder.iterdir()) == ["round-00007", "round-00008", "round-00009"]
    assert not any(path.is_symlink() for path in folder.iterdir())
    assert (mine / "thesis").read_text() == "mine"


def test_a_digest_is_of_names_types_shapes_and_values():
    x = torch.arange(4.0)
    base = state_digest({"a": x})
    assert state_digest({"a": x.clone()}) == base
    others = [{"b": x}, {"a": x.to(torch.float64)}, {"a": x.reshape(2, 2)}, {"a": x + 1}, {"a": x, "b": x}]
    assert len({base, *(state_digest(other) for other in others)}) == 6
    assert state_digest({"a": torch.tensor([0.0])}) != state_digest({"a": torch.tensor([-0.0])})
    assert state_digest({"a": x, "b": x + 1}) == state_digest({"b": x + 1, "a": x})
