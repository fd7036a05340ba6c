"""Learned policies as files: what starts from one, what is refused, and hosts that it was never trained on."""

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch

import small_runs
import tiny
from esper.leyline.errors import CheckpointError
from esper.runs.assembly.assemble import assemble
from esper.runs.assembly.clients import LEARNED_FORMAT, read_learned, write_learned
from esper.runs.assembly.presets import config_of_run, resolve
from esper.runs.evaluation.controllers import baseline, trained
from esper.runs.state_file import write_state
from esper.tasks.registry import registered, task_by_name
from small_runs import contents, main

CPU = torch.device("cpu")
State = dict[str, torch.Tensor]
PPO = {"feature_width": 8, "hidden_width": 16, "num_layers": 2, "num_minibatches": 1, "update_epochs": 1}


@pytest.fixture(scope="module")
def policy(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The policy of a run with three slots after two rounds, in a file; it has other sizes than the presets."""
    folder = tmp_path_factory.mktemp("policy")
    sizes = [f"ppo.{name}={value}" for name, value in PPO.items()]
    assert small_runs.train(folder / "run", "null", 2, "--set", *sizes) == 0
    config = config_of_run(folder / "run")
    engine = assemble(config, CPU).engine
    client = trained(folder / "run", config).controller.make(engine.spec)
    write_learned(folder / "mine.safetensors", client.policy(), {"tasks": ["faulty_null"]})
    return folder / "mine.safetensors"


def test_what_is_written_is_read(policy: Path) -> None:
    learned = read_learned(policy)
    assert {name.split(".")[0] for name in learned} == {"network", "observations"}
    assert learned["observations.slot.mean"].any()
    write_learned(policy.with_name("copy.safetensors"), learned, {"tasks": ["faulty_null"]})
    assert policy.with_name("copy.safetensors").read_bytes() == policy.read_bytes()


def test_a_run_starts_from_the_policy_of_a_file_on_other_slots_and_takes_its_sizes(policy: Path) -> None:
    learned = read_learned(policy)
    with registered(tiny.task(name="two_slots", enabled=("r0c0", "r0c1"))):
        config = resolve({"task": "two_slots", "num_envs": 2, "episode_length": 3, "policy": str(policy)})
        client = assemble(config, CPU).client
    own = client.policy()
    assert own.keys() == learned.keys()
    assert all(torch.equal(x, own[name]) for name, x in learned.items())
    assert (client.config.feature_width, client.config.hidden_width, client.config.num_layers) == (8, 16, 2)
    assert client.state_dict()["counters"].tolist() == [0, 0, 0]
    assert not client.state_dict()["optimizer.exp_avg"].any()


@pytest.mark.slow
def test_a_run_that_started_from_a_file_continues_without_it(policy: Path, tmp_path: Path) -> None:
    start = tmp_path / "start.safetensors"
    start.write_bytes(policy.read_bytes())
    whole, stopped = (tmp_path / name for name in ("whole", "stopped"))
    assert small_runs.train(whole, "null", 2, "--policy", str(start)) == 0
    assert config_of_run(whole).ppo.hidden_width == 16
    assert small_runs.train(stopped, "null", 1, "--policy", str(start)) == 0
    start.unlink()
    assert small_runs.resume(stopped, "--rounds", "2") == 0
    digests = [small_runs.summary(path)["state_digest"] for path in (whole, stopped)]
    assert digests[0] == digests[1]
    config = config_of_run(stopped)
    untrained = baseline("untrained", config).make(assemble(replace(config, policy=""), CPU).engine.spec)
    assert untrained.policy()["network.norm.weight"].eq(1.0).all()  # no file is needed for it, either


def test_the_policy_of_a_run_and_its_file_decide_alike(policy: Path, tmp_path: Path) -> None:
    run = policy.parent / "run"
    command = ["evaluate", str(run), str(policy), "--num-envs", "3", "--out", str(tmp_path / "out")]
    assert main(command) == 0
    rows = {row["name"]: row for row in json.loads((tmp_path / "out/evaluation.json").read_text())["controllers"]}
    assert rows["trained"]["hosts"] == rows["mine.safetensors"]["hosts"]
    assert rows["trained"]["ops"] == rows["mine.safetensors"]["ops"]
    assert rows["trained"]["ops"]["GERMINATE"] > 0


def test_a_policy_plays_hosts_of_another_number_of_slots_without_being_changed(policy: Path, tmp_path: Path) -> None:
    before = policy.read_bytes()
    with registered(
        replace(task_by_name("faulty_null"), name="one_scripted_slot", enabled=("r0c0",), best_schedule=None)
    ):
        command = ["evaluate", str(policy), "--task", "one_scripted_slot", "--num-envs", "3", "--episode-length", "5"]
        assert main([*command, "--out", str(tmp_path / "out")]) == 0
    found = json.loads((tmp_path / "out/evaluation.json").read_text())
    assert {row["name"] for row in found["controllers"]} == {"mine.safetensors", "wait_only"}
    assert sum(found["controllers"][0]["ops"].values()) == 3 * 5 - 1  # one host is rolled back in one step
    assert policy.read_bytes() == before


def test_another_file_under_the_same_name_is_another_controller(policy: Path, tmp_path: Path) -> None:
    config = resolve({"task": "faulty_null"})
    changed = {name: x + 1 if x.is_floating_point() else x for name, x in read_learned(policy).items()}
    write_learned(tmp_path / policy.name, changed, {})
    assert baseline(str(policy), config).identity != baseline(str(tmp_path / policy.name), config).identity


def _edited(path: Path, learned: State) -> None:
    write_learned(path, learned, {})
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)


DAMAGES: list[tuple[Callable[[Path, State], object], str]] = [
    (lambda path, learned: None, "there is no policy file "),
    (lambda path, learned: path.write_text("no tensors"), "mine.safetensors cannot be read: "),
    (_edited, "mine.safetensors does not match its checksum"),
    (
        lambda path, learned: write_state(path, {"format": "esper learned policy 0"}, learned),
        "is not a learned policy of this version (its format is 'esper learned policy 0', expected",
    ),
    (
        lambda path, learned: write_state(path, {"format": LEARNED_FORMAT}, {"weight": torch.zeros(3)}),
        "mine.safetensors has no policy among ['weight']",
    ),
    (
        lambda path, learned: write_learned(path, learned | {"network.host_net.weight": torch.zeros(8, 7)}, {}),
        "'network.host_net.weight' is (8, 7) torch.float32, expected (8, 25)",
    ),
    (
        lambda path, learned: write_learned(path, {n: x for n, x in learned.items() if n.startswith("network.")}, {}),
        "has no policy of this version: the state of the policy lacks ['observations.host.mean', ",
    ),
]


@pytest.mark.parametrize(("damage", "said"), DAMAGES)
def test_a_file_that_is_no_policy_is_refused_in_one_paragraph_by_every_command(
    policy: Path,
    tmp_path: Path,
    capfd: pytest.CaptureFixture[str],
    damage: Callable[[Path, State], object],
    said: str,
) -> None:
    bad, run = tmp_path / "mine.safetensors", tmp_path / "run"
    damage(bad, read_learned(policy))
    before = contents(tmp_path)
    size = ("--num-envs", "1", "--episode-length", "2")
    for command in (["evaluate", str(bad)], ["train", "--out", str(run), "--rounds", "1", "--policy", str(bad)]):
        assert main([*command, "--task", "faulty_null", *size]) == 2
        *_, line = capfd.readouterr().err.splitlines()
        assert line.startswith("esper: ")
        assert said in line
        assert str(bad) in line
        assert "; " in line, "the way out"
    assert contents(tmp_path) == before
    with pytest.raises(CheckpointError):
        assemble(resolve({"task": "faulty_null", "policy": str(bad)}), CPU)
