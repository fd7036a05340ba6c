"""Trained weights: files and state dicts that are taken, what is refused, copies that share nothing."""

import copy
import os
import pickle
import warnings
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor, nn

from esper.kasmina.hosts.module_host import ModuleHostSpec
from esper.kasmina.hosts.weights import Weights, started
from esper.kasmina.parameters.initialization import deterministic_build
from esper.kasmina.parameters.optimizers import OptimizerSpec
from esper.kasmina.parameters.population import Population
from esper.leyline.errors import ConfigError
from user_networks import Backbone, ResNet8, Tied

IMAGES = torch.randn(8, 3, 12, 12, generator=torch.Generator().manual_seed(0))


def trained(build: Callable[[], nn.Module] = ResNet8) -> nn.Module:
    """A network that is like no new one: weights moved, statistics of a batch."""
    network = deterministic_build(build, seed=9)
    with torch.no_grad():
        for parameter in network.parameters():
            parameter.add_(0.1)
        if build is ResNet8:
            network.train()(IMAGES)
    return network


NET = trained()
STATE = NET.state_dict()


def starts(model: Callable[[], nn.Module] | nn.Module, weights: Weights | None = None) -> dict[str, Tensor]:
    """The tensors of a network that a host starts with."""
    return started(model, weights)[0]().state_dict()


def same(found: dict[str, Tensor], expected: dict[str, Tensor]) -> bool:
    return found.keys() == expected.keys() and all(torch.equal(found[name], expected[name]) for name in expected)


def test_every_host_of_every_episode_starts_with_the_weights_and_buffers():
    spec = ModuleHostSpec.of(started(ResNet8, STATE)[0], ["layer1"], IMAGES)
    host = deterministic_build(lambda: spec.build(["layer1"], IMAGES[:1]))
    population = Population(host, OptimizerSpec(), num_envs=3, run_seed=5, device=torch.device("cpu"))
    for episode in (0, 7):
        population.reset(episode)
        for row, buffers in zip(population.host.params, population.host.buffers, strict=True):
            template = population.host_kind.template
            found = template.parameters.unpack(row) | template.buffers.unpack(buffers)
            assert {f"network.{name}" for name in STATE if "num_batches" not in name} == found.keys()
            assert all(torch.equal(value, STATE[name.removeprefix("network.")]) for name, value in found.items())


def files(folder: Path) -> dict[str, Weights]:
    """What holds the weights of `NET`, by the way in which it does."""
    parallel = {f"module.{name}": value for name, value in STATE.items()}
    contents = {
        "plain": STATE,
        "wrapped": {"epoch": 3, "state_dict": STATE, "optimizer": {"state": {}, "param_groups": [{"lr": 0.1}]}},
        "parallel": {"model": parallel},
        "compiled": {f"_orig_mod.{name}": value for name, value in parallel.items()},
        "of_a_trainer": {"state_dict": {f"net.{name}": value for name, value in STATE.items()}},
        "half": {name: value.bfloat16().float() for name, value in STATE.items()},
    }
    for name, content in contents.items():
        torch.save(content, folder / f"{name}.pt")
    save_file(STATE, folder / "plain.safetensors")
    return {name: folder / f"{name}.pt" for name in contents} | {"safetensors": str(folder / "plain.safetensors")}


def test_a_file_of_torch_or_safetensors_gives_its_weights_in_any_usual_wrapping(tmp_path):
    given = files(tmp_path)
    half = given.pop("half")
    for weights in (*given.values(), STATE, {"net": STATE, "step": torch.tensor(4)}):
        assert same(starts(ResNet8, weights), STATE)
    assert not same(starts(ResNet8, half), STATE)


def test_the_digest_is_that_of_the_weights_and_not_of_their_order_or_file(tmp_path):
    reversed_ = dict(reversed(STATE.items()))
    torch.save(reversed_, tmp_path / "a.pt")
    one, other = started(ResNet8, STATE)[1], started(ResNet8, tmp_path / "a.pt")[1]
    assert one == other
    assert one is not None
    changed = {name: value + (name == "head.bias") for name, value in STATE.items()}
    assert started(ResNet8, changed)[1] != one
    assert started(NET, None)[1] == started(trained(), None)[1]
    assert started(ResNet8, None)[1] is None


def test_a_network_starts_copies_that_share_nothing_with_it_and_is_not_changed():
    network = trained().eval()
    network.fc = nn.Linear(4, 4)  # no call of the class gives this
    network.head.requires_grad_(False)
    before = copy.deepcopy(network.state_dict())
    model, digest = started(network, None)
    built = [model(), model()]
    with torch.no_grad():
        network.head.weight.zero_()
    network.train()(IMAGES)
    for one in (*built, model()):
        assert same(one.state_dict(), before)
        assert [p.requires_grad for p in one.head.parameters()] == [False, False]
    assert not {p.data_ptr() for p in built[0].parameters()} & {p.data_ptr() for p in built[1].parameters()}
    assert digest == started(built[0], None)[1]


def test_weights_that_are_given_are_copied():
    network = trained()
    model = started(ResNet8, network.state_dict())[0]
    with torch.no_grad():
        network.head.weight.zero_()
    assert torch.equal(model().head.weight, NET.head.weight)


def test_tied_weights_stay_tied_and_frozen_ones_frozen():
    tied = trained(Tied)
    for model in (started(tied, None)[0], started(Tied, tied.state_dict())[0]):
        assert model().out.weight is not tied.out.weight
        built = model()
        assert built.out.weight is built.embed.weight
        assert torch.equal(built.out.weight, tied.out.weight)
    backbone = trained(Backbone)
    spec = ModuleHostSpec.of(started(backbone, None)[0], ["r0c1"], torch.randn(8, 1, 6, 6))
    host = spec.build(["r0c1"], torch.zeros(1, 1, 6, 6))
    assert torch.equal(host.network.r1c0.weight, backbone.r1c0.weight)
    assert not host.network.r1c0.weight.requires_grad


def test_a_network_with_weights_that_were_computed_in_a_pass_is_copied():
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        network = nn.Sequential(nn.utils.weight_norm(nn.Linear(6, 6)), nn.Linear(6, 2))
    network(torch.randn(2, 6))
    with pytest.raises(RuntimeError):
        copy.deepcopy(network)
    assert same(starts(network), network.state_dict())


def test_lazy_layers_take_the_shapes_of_the_weights():
    def lazy() -> nn.Module:
        return nn.Sequential(nn.LazyLinear(6), nn.ReLU(), nn.LazyLinear(2))

    network = lazy()
    network(torch.randn(2, 4))
    assert same(starts(lazy, network.state_dict()), network.state_dict())
    assert ModuleHostSpec.of(started(lazy, network.state_dict())[0], ["1"], torch.randn(8, 4)).num_params() == 44


class Executes:
    """A pickle that would write a file when it is read."""

    def __reduce__(self) -> tuple[Callable[..., object], tuple[object, ...]]:
        return os.mkdir, (os.environ["EXECUTED"],)


def written(path: Path, content: object) -> Path:
    torch.save(content, path)
    return path


def test_nothing_in_a_file_is_executed(tmp_path, monkeypatch):
    monkeypatch.setenv("EXECUTED", str(tmp_path / "executed"))
    (tmp_path / "raw.pt").write_bytes(pickle.dumps({"a": Executes()}, protocol=2))
    for path in (written(tmp_path / "a.pt", {"a": torch.zeros(2), "b": Executes()}), tmp_path / "raw.pt"):
        with pytest.raises(ConfigError, match=r"hold an object of .*mkdir, and to load it would execute its code"):
            started(ResNet8, path)
    assert not (tmp_path / "executed").exists()


def test_files_that_hold_no_weights_are_refused_with_the_way_out(tmp_path):
    whole = written(tmp_path / "whole.pt", NET)
    damaged = tmp_path / "damaged.pt"
    damaged.write_bytes((written(tmp_path / "state.pt", STATE)).read_bytes()[:2000])
    (tmp_path / "text.pt").write_text("no weights")
    (tmp_path / "text.safetensors").write_text("no weights")
    os.mkfifo(tmp_path / "pipe.pt")
    again = r"write the file again with torch.save\(network.state_dict\(\), path\)"
    for path, said in (
        (
            whole,
            rf"hold an object of user_networks.ResNet8, and to load it would execute its code; {again}, or load it",
        ),
        (damaged, rf"damaged.pt are damaged, or no file of torch.save \(.*\); {again}"),
        (tmp_path / "text.pt", rf"are damaged, or no file of torch.save \(.*\); {again}"),
        (tmp_path / "text.safetensors", rf"cannot be read: .*; {again}"),
        (tmp_path / "pipe.pt", "is not a regular file; name a file of torch.save or safetensors"),
        (tmp_path, "is not a regular file"),
        (tmp_path / "none.pt", "none.pt does not exist"),
        (written(tmp_path / "list.pt", [1, 2]), "is of type list, expected names and tensors as of network.state_dict"),
        (written(tmp_path / "numbers.pt", {"lr": 0.1}), "is of type dict with 'lr', expected names and tensors"),
    ):
        with pytest.raises(ConfigError, match=said) as caught:
            started(ResNet8, path)
        assert "\n" not in str(caught.value)


def without(name: str) -> dict[str, Tensor]:
    return {key: value for key, value in STATE.items() if key != name}


MISFITS: list[tuple[object, str]] = [
    (without("head.bias"), r"do not fit ResNet8: missing 'head.bias'. All \d+ names and shapes of its state_dict"),
    ({**STATE, "fc.weight": STATE["head.weight"]}, "do not fit ResNet8: unexpected 'fc.weight'. All"),
    (
        {**STATE, "head.weight": torch.zeros(5, 32), "head.bias": torch.zeros(5)},
        r"'head.weight' is \[5, 32\] instead of \[10, 32\], 'head.bias' is \[5\] instead of \[10\]. All",
    ),
    (Tied().state_dict(), r"missing 'stem.0.weight', .* and \d+ more; unexpected 'embed.weight', 'mix.weight',.*and 1"),
    (
        without("head.bias"),
        "v.shape == own.k..shape}, strict=False., where own = network.state_dict.., and give model=network",
    ),
    ({**STATE, "head.bias": torch.full((10,), torch.nan)}, "'head.bias' of weights is NaN or infinite"),
    ({"model": STATE, "model_ema": STATE}, r"several networks, 'model', 'model_ema'; give one of them, e.g. weights="),
    ({}, "weights is of type dict, expected names and tensors"),
]


@pytest.mark.parametrize(("weights", "said"), MISFITS, ids=[said[:30] for _, said in MISFITS])
def test_weights_that_do_not_fit_are_refused_with_their_names(weights, said):
    with pytest.raises(ConfigError, match=said):
        ModuleHostSpec.of(started(ResNet8, weights)[0], ["layer1"], IMAGES)


class Holding(nn.Module):
    """Holds something that cannot be copied."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.file = nn.Linear(2, 2), open(os.devnull)  # noqa: SIM115


def test_a_network_that_cannot_be_copied_is_refused():
    network = Holding()
    with network.file, pytest.raises(ConfigError, match=r"Holding cannot be copied \(TypeError: .*; give its class"):
        started(network, None)
