"""Two slots with equal channels and different sizes: what fits one of them only is not grown, and says so."""

import pytest
from test_own_blueprints import registered
from torch import Tensor, nn

import tiny
from esper.kasmina.blueprints import registry
from esper.kasmina.hosts.module_host import ModuleHostSpec
from esper.leyline.errors import ConfigError
from esper.tolaria.build import build_engine
from esper.tolaria.engine_config import EngineConfig


class Shrinking(nn.Module):
    """Four channels at 6x6, then at 3x3."""

    def __init__(self) -> None:
        super().__init__()
        channels = tiny.dataset().train.x.shape[1]
        self.wide, self.narrow = nn.Conv2d(channels, 4, 3, padding=1), nn.Conv2d(4, 4, 3, stride=2, padding=1)
        self.out = nn.Linear(4, tiny.CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        return self.out(self.narrow(self.wide(x).relu()).mean(dim=(2, 3)))


class Large(nn.Conv2d):
    """Pads by reflection, so that it needs more than three rows."""

    def __init__(self, channels: int) -> None:
        super().__init__(channels, channels, 7, padding=3, padding_mode="reflect")


def engine(slots: tuple[str, ...], executor: str):
    x = tiny.dataset().train.x
    of = tiny.task(host=ModuleHostSpec.of(Shrinking, slots, x[:8]), enabled=slots)
    config = EngineConfig(num_envs=2, episode_length=3, slots=slots, run_seed=1, executor=executor)
    return build_engine(config, of, tiny.dataset(), tiny.CPU)


@pytest.mark.parametrize("executor", ["streamed", "fused"])
def test_a_blueprint_that_fits_one_of_two_slots_is_left_out_with_its_name_the_slot_and_the_reason(executor):
    with registered(Large):
        index = registry.names().index("own")
        with pytest.warns(UserWarning, match=r"'own' is not grown .* slot 'narrow': .* cannot be trained on"):
            run = engine(("wide", "narrow"), executor)
        assert index not in run.spec.selectable
        assert not run.executor.costs.selectable[index]
        assert len(run.spec.selectable) == len(registry.selectable(run.spec.family)) - 1
        assert index in engine(("wide",), executor).spec.selectable


def test_a_blueprint_that_fits_no_slot_is_refused_by_its_name():
    with registered(Large), pytest.raises(ConfigError, match="blueprint 'own' cannot be trained on features"):
        engine(("narrow",), "streamed")
