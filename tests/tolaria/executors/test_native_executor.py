"""The native executor gives what the streamed one gives up to rounding, and gives each host the bits it has alone."""

import re
from dataclasses import replace

import pytest
import torch
from against_streamed import bench_of, compare, host_of, of_each_split, whole_run
from test_native_losses import OF_NUMBERS, with_numbers
from test_own_blueprints import registered
from torch import nn

from esper.kasmina.hosts.cnn import CNNHost
from esper.kasmina.rules.slot_fields import empty_slots
from esper.leyline.errors import ConfigError, DataError
from esper.leyline.lifecycle import Algorithm, SeedStage
from esper.tasks.datasets import Dataset, RandomFunction, Split
from esper.tolaria.executors import choice
from esper.tolaria.executors.choice import native_problem
from esper.tolaria.executors.native.executor import NativeExecutor
from esper.tolaria.executors.native.machine import cached_library
from tiny import CPU, HOST, SLOTS, VAL_BATCH, Bench, dataset, engine, same_tree


def fern(channels):
    """Of layers that there are rules for, one of which comes twice."""
    act = nn.SiLU()
    return nn.Sequential(nn.Conv2d(channels, 3, 1), act, nn.Conv2d(3, 3, 1), act, nn.Conv2d(3, channels, 3, padding=1))


class Sorted(nn.Module):
    """Sorts the features of each position, for which there is no rule."""

    def forward(self, h):
        return h.sort(dim=1).values


def moss(channels):
    return nn.Sequential(nn.Conv2d(channels, channels, 1), Sorted())


def hooked(channels):
    layer = nn.Conv2d(channels, channels, 1)
    layer.register_forward_hook(lambda layer, given, y: y.sin())
    return nn.Sequential(layer)


def tied(channels):
    module = nn.Sequential(nn.Conv2d(channels, channels, 1), nn.Tanh(), nn.Conv2d(channels, channels, 1))
    module[2].weight = module[0].weight
    return module


OWN = {
    fern: None,
    moss: r"no rule for sort \(test_native_executor\.py, line \d+\)",
    hooked: None,
    tied: None,
}
"""What is built, and why it has no rule."""


class Users(nn.Module):
    """[B, 1, 6, 6] -> logits [B, 3], by layers of all kinds."""

    def __init__(self) -> None:
        super().__init__()
        self.r0c0 = nn.Sequential(nn.Conv2d(1, 4, 3, padding=1), nn.GroupNorm(2, 4), nn.SiLU())
        self.r1c0 = nn.Conv2d(4, 4, (3, 1), padding="same", padding_mode="reflect")
        self.r0c1 = nn.Sequential(nn.Conv2d(4, 8, 3, 2, 1, groups=2), nn.BatchNorm2d(8), nn.Hardswish(inplace=True))
        self.mix = nn.MultiheadAttention(8, 2, batch_first=True)
        self.drop, self.head = nn.Dropout(0.25), nn.Linear(8, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = self.r0c1(self.r1c0(self.r0c0(x))).flatten(2).transpose(1, 2)
        h = h + self.mix(h, h, h)[0]
        return self.head(self.drop(h.mean(1)))


SETTINGS = {
    "usual": lambda: {},
    "a loss of its own": lambda: {"data": with_numbers(), "objective": OF_NUMBERS["logits"]},
    "a network of the users": lambda: {"host": host_of(Users)},
}


@pytest.mark.parametrize("threads", [1, 2])
@pytest.mark.parametrize("settings", SETTINGS.values(), ids=SETTINGS)
def test_a_host_has_the_bits_it_has_alone_whatever_its_neighbours_and_threads(settings, threads):
    alone, many = Bench(1, **settings()), Bench(17, **settings())
    many.grow("r0c0", "norm", SeedStage.BLENDING, alpha=0.3, hosts=list(range(1, 17)))
    found = []
    for bench, hosts, count in ((alone, [0], 1), (many, [0, *range(5, 17)], threads)):
        bench.grow("r0c1", "conv_heavy", SeedStage.HOLDING, alpha=1.0, hosts=hosts)
        bench.executor = NativeExecutor(bench.executor.data, threads=count)
        told = bench.train(2)
        coalitions, measured = bench.measure()
        p, valid = bench.population, coalitions.valid[0]
        rows = [x[:1] for x in (p.host.params, p.host.buffers)] + [x[:3] for x in (p.seeds.params, p.seeds.buffers)]
        found.append([told.loss[:1], *rows, measured.loss[:1], measured.accuracy[0][valid]])
    assert all(torch.equal(a, b) for a, b in zip(*found, strict=True))


@pytest.mark.parametrize(("build", "reason"), OWN.items(), ids=lambda value: getattr(value, "__name__", ""))
def test_a_blueprint_of_the_users_own_grows_too(build, reason):
    def grow(bench):
        bench.grow("r0c0", "own", SeedStage.BLENDING, alpha=0.5, hosts=[1], algorithm=Algorithm.GATE)
        bench.grow("r1c0", "conv_light", SeedStage.TRAINING, hosts=[0, 1])

    with registered(build):
        compare(NativeExecutor, grow)
        refused = NativeExecutor(Bench(1).executor.data).refused
    assert refused.keys() == ({"own"} if reason else set())
    assert reason is None or re.search(reason, refused["own"])


@pytest.mark.parametrize("augmentation", [None, RandomFunction(lambda x: x)], ids=["stored", "made by PyTorch"])
def test_a_batch_of_one_on_a_map_of_one_position_is_refused_as_by_pytorch(augmentation):
    images = replace(dataset(train=1, val=VAL_BATCH + 1), augmentation=augmentation)
    data = of_each_split(images, lambda of: Split(of.x[..., :2, :2], of.y))
    for executor in ("streamed", "native"):
        host = CNNHost(HOST, ("r0c1",), image_size=(2, 2))
        bench = bench_of(executor, 2, host=host, data=data, last_batch="keep")
        bench.executor.committed("test", bench.slots)  # running statistics need no batch
        with pytest.raises(ValueError, match="Expected more than 1 value per channel when training"):
            bench.train()


def test_where_all_hosts_have_a_blueprint_without_a_rule_they_are_run_one_by_one():
    with registered(moss):
        streamed, other = Bench(2), Bench(2)
        for bench in (streamed, other):
            bench.grow("r0c0", "own", SeedStage.BLENDING, alpha=0.5)
        totals = NativeExecutor(other.executor.data).train_epoch(1, other.slots)
    assert torch.equal(totals.loss, streamed.executor.train_epoch(1, streamed.slots).loss)
    assert same_tree(other.population.state_dict(), streamed.population.state_dict())


def test_a_program_is_written_once_for_each_structure():
    bench = Bench(4)
    bench.grow("r0c0", "conv_light", SeedStage.TRAINING, hosts=[0, 2])
    native = NativeExecutor(bench.executor.data)
    for t in (1, 2):
        native.train_epoch(t, bench.slots)
    cache = native._networks.training.cache_info()
    assert (cache.misses, cache.hits) == (2, 6)
    assert cache.maxsize is not None  # a long run meets more structures than memory could hold


def test_examples_that_are_edited_between_passes_are_refused():
    bench = Bench(1)
    native = NativeExecutor(bench.executor.data)
    native.train_epoch(1, bench.slots)
    bench.data.train.x.mul_(0.5)
    with pytest.raises(DataError, match="changed"):
        native.train_epoch(2, bench.slots)


def test_a_run_repeats_itself_to_the_bit():
    assert same_tree(whole_run("native")[2], whole_run.__wrapped__("native")[2])


def with_label(split: str, label: int) -> Dataset:
    """The tiny data, in which the sixth example of a split has this label."""
    data = dataset()
    of = data.split(split)
    return replace(data, **{split: Split(of.x, of.y.index_fill(0, torch.tensor([5]), label))})


@pytest.mark.parametrize("wrong", [-2, 3])
@pytest.mark.parametrize("split", ["train", "val"])
def test_a_label_without_a_class_is_refused(split, wrong):
    data = with_label(split, wrong)
    with pytest.raises(
        DataError, match=rf"the {split} split has labels from -?\d to \d, but the host knows .* 0 to 2; correct"
    ):
        NativeExecutor(Bench(1, data=data).executor.data)


def test_labels_of_the_test_split_are_looked_at_when_it_is_run():
    data = with_label("test", 3)
    native = NativeExecutor(Bench(1, data=data).executor.data)
    with pytest.raises(DataError, match="the test split has labels from 0 to 3"):
        native.committed("test", empty_slots(1, len(SLOTS), CPU))


# -- which executor is taken ------------------------------------------------------------------------------------------


def taken(**config):
    return engine(2, 4, **config).config.executor


def test_auto_runs_small_hosts_natively_where_there_is_a_compiler(monkeypatch):
    assert taken(executor="auto") == "native"
    monkeypatch.setattr(choice, "compiler", lambda: None)
    assert taken(executor="auto") == "fused"


def test_auto_does_not_run_natively_what_cannot_be():
    assert taken(executor="auto", amp="bf16") == "fused"


def test_hosts_in_which_products_take_all_of_the_time_are_not_run_natively_by_auto(monkeypatch):
    intensity = NativeExecutor(Bench(1).executor.data).intensity()
    monkeypatch.setattr(choice, "_NATIVE_INTENSITY", intensity)
    assert taken(executor="auto") == "native"
    monkeypatch.setattr(choice, "_NATIVE_INTENSITY", 0.99 * intensity)
    assert taken(executor="auto") == "fused"
    assert taken(executor="native") == "native"


def test_native_is_refused_where_it_cannot_be_with_the_way_out():
    with pytest.raises(ConfigError, match=r"hosts are trained in torch\.bfloat16, and compiled C"):
        engine(2, 4, executor="native", amp="bf16")


def test_native_is_refused_on_a_gpu():
    data = Bench(1).executor.data
    assert native_problem(data) is None
    data.population.device = torch.device("cuda:0")
    assert "the device is cuda:0, and compiled C++ runs on a CPU; use executor 'fused'" in native_problem(data)


@pytest.fixture
def broken_compiler(tmp_path, monkeypatch):
    """A compiler that is there and fails."""
    path = tmp_path / "c++"
    path.write_text("#!/bin/sh\necho 'error: no space left' >&2; exit 1\n")
    path.chmod(0o755)
    monkeypatch.setenv("CXX", str(path))
    cached_library.cache_clear()


def test_native_without_a_working_compiler_says_what_the_compiler_said(broken_compiler):
    with pytest.raises(ConfigError, match=r"could not compile .* \(error: no space left\); install one"):
        engine(2, 4, executor="native")


def test_auto_says_that_the_compiler_fails_and_takes_another(broken_compiler):
    with pytest.warns(
        UserWarning, match=r"the native executor cannot run these hosts; a slower one will: .*no space left"
    ):
        assert taken(executor="auto") == "fused"
