"""Blueprints of users: what they draw is keyed, what mixes examples is run apart, and what cannot be run is refused."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager

import pytest
import torch
from against_streamed import compare
from torch import Tensor, nn

from esper.kasmina.blueprints import AbstractBlueprint, registry
from esper.kasmina.parameters.dropout import Moment
from esper.kasmina.parameters.stacking import stack_layers, vmapped, way_to_stack
from esper.leyline.errors import ConfigError, StackingError
from esper.leyline.lifecycle import HostFamily, SeedStage
from esper.tolaria.executors.fused import FusedExecutor
from esper.tolaria.executors.native.executor import NativeExecutor
from esper.tolaria.executors.streamed import StreamedExecutor
from tiny import Bench, bit_equal, engine, same_tree, task

TRAINING, HOLDING = SeedStage.TRAINING, SeedStage.HOLDING


class Own(AbstractBlueprint):
    name = "own"
    family = HostFamily.CNN

    def __init__(self, build: Callable[[int], nn.Module]) -> None:
        self._build = build

    def build(self, channels: int) -> nn.Module:
        return self._build(channels)


@contextmanager
def registered(build: Callable[[int], nn.Module]) -> Iterator[None]:
    registry.register(Own(build))
    try:
        yield
    finally:
        registry.unregister("own")


class Scaled(nn.Module):
    """A convolution, and a factor per channel in a parameter that no rule for layers knows."""

    def __init__(self, channels: int, *layers: nn.Module) -> None:
        super().__init__()
        self.conv, self.layers = nn.Conv2d(channels, channels, 1), nn.Sequential(*layers)
        self.factor = nn.Parameter(torch.full((channels,), 0.5))

    def forward(self, h: Tensor) -> Tensor:
        return self.layers(self.conv(h)) * self.factor[:, None, None]


class Centred(nn.Module):
    """In training its outputs have mean zero over the batch, so examples of hosts must not meet."""

    def __init__(self, conv: nn.Module) -> None:
        super().__init__()
        self.conv = conv

    def forward(self, h: Tensor) -> Tensor:
        y = self.conv(h)
        return y - y.mean(dim=0) if self.training else y


class Functional(nn.Module):
    def __init__(self, function: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.function = function

    def forward(self, h: Tensor) -> Tensor:
        return self.function(h)


def dropping(channels: int) -> nn.Module:
    return nn.Sequential(nn.Dropout(0.5), nn.Conv2d(channels, channels, 1), nn.Dropout2d(0.3))


def dropping_unknown(channels: int) -> nn.Module:
    return Scaled(channels, nn.Dropout(0.5), nn.ReLU(), nn.Dropout(0.2))


# -- dropout ----------------------------------------------------------------------------------------------------------


def trained(num_envs: int, seed: int = 0, **settings: int) -> Bench:
    """Two epochs with a seed that drops, while the global generator is somewhere."""
    bench = Bench(num_envs, **settings)
    bench.grow("r0c0", "own", HOLDING, alpha=1.0)
    bench.grow("r0c1", "own", TRAINING)
    with torch.random.fork_rng():
        torch.default_generator.manual_seed(seed)
        before = torch.get_rng_state()
        bench.train(2)
        assert torch.equal(torch.get_rng_state(), before)
    assert bench.population.moment == Moment(run_seed=5, episode=3, t=2)
    return bench


def test_dropout_depends_neither_on_the_global_generator_nor_on_the_other_hosts():
    with registered(dropping):
        several, again, alone = trained(3), trained(3, seed=1), trained(1, host_offset=2)
        assert same_tree(several.executor.state_dict(), again.executor.state_dict())
        assert bit_equal(several.population.seeds.params[6:], alone.population.seeds.params)
        assert bit_equal(several.population.host.params[2:], alone.population.host.params)


@pytest.mark.parametrize(
    ("build", "executor"),
    [
        (dropping, NativeExecutor),
        pytest.param(dropping, FusedExecutor, marks=pytest.mark.slow),
        (dropping_unknown, FusedExecutor),
    ],
)
def test_hosts_that_run_together_drop_what_they_drop_alone(build, executor):
    def grow(bench: Bench) -> None:
        bench.grow("r0c0", "own", HOLDING, alpha=1.0, hosts=[0, 2])
        bench.grow("r0c1", "own", TRAINING, hosts=[1])
        bench.grow("r0c1", "conv_light", TRAINING, hosts=[2])

    with registered(build):
        compare(executor, grow)


# -- what mixes examples ----------------------------------------------------------------------------------------------


def test_modules_that_mix_examples_only_in_training_or_in_the_gradient_are_run_host_by_host():
    example, conv = torch.zeros(1, 4, 3, 3), nn.Conv2d(4, 4, 1)
    assert way_to_stack("own", nn.Sequential(conv, nn.ReLU()), example) is stack_layers
    assert way_to_stack("own", Centred(conv), example) is vmapped
    leaning = nn.Sequential(conv, Functional(lambda y: y + (y.mean(dim=0) - y.mean(dim=0).detach())))
    assert way_to_stack("own", leaning, example) is vmapped
    with registered(lambda channels: Centred(nn.Conv2d(channels, channels, 1))):
        compare(FusedExecutor, lambda bench: bench.grow("r0c1", "own", HOLDING, alpha=1.0), epochs=1)


def test_blueprints_that_cannot_be_stacked_are_refused_or_run_host_by_host():
    with registered(lambda channels: Centred(nn.ReLU())):
        with pytest.raises(StackingError, match=r"blueprint 'own' gives other results .* use executor 'streamed'"):
            FusedExecutor(Bench(2).executor.data)
        with pytest.warns(
            UserWarning, match="the fused executor cannot run these hosts; a slower one will: blueprint 'own'"
        ):
            run = engine(2, 4, executor="auto", amp="bf16")
        assert type(run.executor) is StreamedExecutor


# -- what cannot grow -------------------------------------------------------------------------------------------------


class PooledNorm(nn.Module):
    """Shifts each channel by its mean over the image, normalized over the batch."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(channels)

    def forward(self, h: Tensor) -> Tensor:
        return h + self.norm(h.mean(dim=(2, 3)))[:, :, None, None]


def test_a_blueprint_that_normalizes_single_values_needs_batches_of_two():
    with registered(PooledNorm):
        of = task(batch_train=32, last_batch="keep")
        assert registry.names().index("own") in engine(of=of).spec.selectable
        with pytest.raises(ConfigError, match=r"blueprint 'own' .* \(1, .*more than 1 value.*give a larger batch"):
            engine(of=task(batch_train=1))


class Shuffled(nn.Conv2d):
    def __init__(self, channels: int) -> None:
        super().__init__(channels, channels, 1)
        self.register_buffer("order", torch.randperm(1000))


OWN = torch.Generator()


@pytest.mark.parametrize(
    ("build", "message"),
    [
        (lambda c: Functional(lambda h: h + torch.randn(h.shape, generator=OWN)), "other outputs in a second pass"),
        (lambda c: nn.Sequential(nn.ReLU(inplace=True), nn.Conv2d(c, c, 1)), "'own' edits its input in place"),
        (lambda c: nn.Conv2d(c, c, 9), r"'own' cannot be trained on features \(2, 4, 6, 6\): .*Kernel size"),
        (lambda c: nn.Conv2d(c, 1, 1), r"'own' maps features \(2, .* to \(2, 1, "),
        (Shuffled, "buffer 'order' of Shuffled is torch.int64 and random"),
    ],
)
def test_a_blueprint_that_cannot_be_trained_is_refused_before_the_run(build, message):
    with registered(build), pytest.raises(ConfigError, match=message):
        Bench(1)
