"""Settings of the engine: what is refused, and what the message says."""

import pytest
import torch

import tiny
from esper.kasmina.blueprints import registry
from esper.leyline.errors import ConfigError
from esper.leyline.lifecycle import NUM_BUILTIN_BLUEPRINTS, HostFamily
from esper.tasks.datasets import Dataset, Split
from esper.tasks.presets import NULL
from esper.tolaria.build import build_engine, load_dataset
from esper.tolaria.engine_config import EngineConfig
from esper.tolaria.executors.fused import FusedExecutor
from esper.tolaria.executors.scripted import ScriptedExecutor
from esper.tolaria.executors.streamed import StreamedExecutor
from tiny import CPU

SLOTS = ("r0c0", "r0c1")


def config(**changes):
    return EngineConfig(**{"slots": SLOTS, **changes})


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"num_envs": 0}, "num_envs is 0"),
        ({"episode_length": 0}, "episode_length is 0"),
        ({"episode_length": 4096}, "at most 4095"),
        ({"slots": ()}, "slots is \\[\\]; it must be a list of at least 1 item"),
        ({"slots": ("r0c0", "r0c0")}, "each slot may be named once"),
        ({"run_seed": -1}, "seed is -1"),
        ({"run_seed": 2**63}, "at most 9223372036854775807"),
        ({"host_offset": -1}, "host_offset is -1"),
        ({"host_offset": 2**32 - 8, "num_envs": 9}, "host_offset"),
    ],
)
def test_an_impossible_setting_is_refused_with_a_way_out(changes, message):
    with pytest.raises(ConfigError, match=message):
        config(**changes)


def test_the_limits_themselves_are_allowed():
    assert config(num_envs=1, episode_length=4095, run_seed=2**63 - 1).episode_length == 4095
    assert config(host_offset=2**32 - 8, num_envs=8).num_envs == 8


def test_an_engine_tells_controllers_what_it_is():
    spec = tiny.engine(3, 7, host_offset=4, rules={"auto_g2": False}).spec
    assert (spec.num_envs, spec.episode_length, spec.run_seed) == (3, 7, 5)
    assert spec.host_ids().tolist() == [4, 5, 6]
    assert spec.slot_ids == tiny.SLOTS
    assert spec.auto_gates == (True, False, True)
    assert spec.min_training_epochs == 1
    assert spec.selectable == registry.selectable(HostFamily.CNN)
    assert spec.blueprint_names == registry.names()


def test_a_task_decides_how_its_hosts_are_run():
    assert isinstance(tiny.engine().executor, StreamedExecutor)
    scripted = tiny.engine(of=NULL, executor="auto")
    assert isinstance(scripted.executor, ScriptedExecutor)
    assert scripted.config.executor == "auto"  # a script needs none
    assert scripted.spec.num_blueprints == NUM_BUILTIN_BLUEPRINTS
    assert load_dataset(NULL, 0, CPU, None) is None


def images_of(height, width):
    split = Split(torch.zeros(4, 1, height, width), torch.arange(4) % tiny.CLASSES)
    return Dataset(identity={"name": "blank"}, train=split, val=split, test=split, num_classes=tiny.CLASSES)


@pytest.mark.parametrize(
    ("height", "width", "kind", "name"),
    [(64, 64, FusedExecutor, "fused"), (64, 65, StreamedExecutor, "streamed")],
)  # 4 channels, 16 examples: up to 1 MiB
def test_without_a_compiler_auto_runs_small_activations_fused_and_the_engine_says_what_it_took(
    height, width, kind, name, monkeypatch
):
    monkeypatch.setattr("esper.tolaria.executors.choice.compiler", lambda: None)
    asked = config(num_envs=2, episode_length=2, executor="auto")
    engine = build_engine(asked, tiny.task(), images_of(height, width), CPU)
    assert isinstance(engine.executor, kind)
    assert engine.config.executor == name
    assert asked.executor == "auto"


def test_a_slot_that_the_host_does_not_have_is_refused():
    with pytest.raises(ConfigError, match="'r5c0'"):
        tiny.engine(slots=("r0c0", "r5c0"))


def test_slots_of_an_engine_are_those_of_the_configuration():
    engine = build_engine(config(num_envs=1, episode_length=2), tiny.task(), tiny.dataset(), CPU)
    assert engine.spec.num_slots == 2
    assert engine.executor.costs.seed_params.shape[0] == 2
