"""Every blueprint in every slot of three built-in tasks: the real hosts at their real widths, on random inputs."""

from functools import lru_cache
from itertools import product
from typing import NamedTuple

import pytest
import torch
from torch import Tensor, nn

from esper.kasmina.blending import blend
from esper.kasmina.blueprints import GateNetwork, blueprint_at, selectable
from esper.kasmina.hosts.host import Host
from esper.kasmina.parameters.initialization import deterministic_build
from esper.leyline.lifecycle import STYLE_ALGORITHM, Algorithm, HostFamily
from esper.tasks import presets
from esper.tasks.registry import TaskSpec, task_by_name

IMAGES = {"digits": (1, 8, 8), "cifar_impaired": (3, 32, 32)}  # the second one has convolutions 1x1
TEXTS = {"tinyshakespeare": presets.TINYSHAKESPEARE.objective.vocabulary}
TASKS = {name: task_by_name(name) for name in (*IMAGES, *TEXTS)}
ALGORITHMS = sorted(set(STYLE_ALGORITHM))
BATCH, TOKENS = 4, 6
CASES = [
    (name, blueprint_at(index, task.family).name) for name, task in TASKS.items() for index in selectable(task.family)
]
every_case = pytest.mark.parametrize(("name", "blueprint"), CASES)


class Example(NamedTuple):
    """A host in the mode of training (without dropout), inputs and targets."""

    task: TaskSpec
    host: Host
    x: Tensor
    y: Tensor


@lru_cache
def example(name: str) -> Example:
    task, generator = TASKS[name], torch.Generator().manual_seed(1)
    if name in IMAGES:
        x = torch.randn(BATCH, *IMAGES[name], generator=generator)
        y = torch.arange(BATCH)
    else:
        x = torch.randint(TEXTS[name], (BATCH, TOKENS), generator=generator)
        y = x.roll(-1, dims=1)
    host = deterministic_build(lambda: task.host.build(task.enabled, x[:1]))
    return Example(task, host.train(task.family is HostFamily.CNN), x, y)


class Seed(nn.Module):
    """A new seed with its gate network."""

    def __init__(self, family: HostFamily, blueprint: str, channels: int) -> None:
        super().__init__()
        (own,) = (b for b in (blueprint_at(i, family) for i in selectable(family)) if b.name == blueprint)
        self.delta, self.gate = own.build(channels), GateNetwork(channels)


def seeds(name: str, blueprint: str) -> nn.ModuleDict:
    host = example(name).host
    return deterministic_build(
        lambda: nn.ModuleDict({p.slot_id: Seed(host.family, blueprint, p.channels) for p in host.enabled})
    )


def loss(name: str, grown: nn.ModuleDict, algorithm: Algorithm = Algorithm.ADD, alpha: Tensor | None = None) -> Tensor:
    """Of the host with these seeds, which are isolated from it; `alpha` is that of all of them, None while hidden."""
    task, host, x, y = example(name)

    def apply(slot: str, h: Tensor) -> Tensor:
        if slot not in grown:
            return h
        seen = h.detach()
        gate = grown[slot].gate(seen) if algorithm is Algorithm.GATE else None
        return blend(h, grown[slot].delta(seen), algorithm, alpha, gate)

    scores = task.objective.scores(host(x, apply), y)
    return scores.loss.sum() / scores.weight.sum()


def grads(of: Tensor, module: nn.Module) -> dict[str, Tensor]:
    names, parameters = zip(*module.named_parameters(), strict=True)
    found = torch.autograd.grad(of, parameters, materialize_grads=True, allow_unused=True)
    return dict(zip(names, found, strict=True))


@every_case
def test_new_seeds_in_all_slots_barely_change_the_features(name, blueprint):
    _, host, x, _ = example(name)
    grown, visited = seeds(name, blueprint), []

    def apply(slot: str, h: Tensor) -> Tensor:
        delta = grown[slot].delta(h)
        assert delta.shape == h.shape == (BATCH, *host.features(next(p for p in host.enabled if p.slot_id == slot)))
        assert delta.abs().max() <= 0.1 * max(1.0, float(h.abs().max()))
        visited.append(slot)
        return h + delta

    with torch.no_grad():
        changed = host(x, apply)
        assert tuple(visited) == host.execution_order()
        unchanged = host(x, lambda slot, h: h)
    assert (changed - unchanged).abs().max() <= 0.3 * max(1.0, float(unchanged.abs().max()))


@every_case
def test_every_parameter_of_every_seed_has_a_gradient_within_two_steps(name, blueprint):
    for algorithm, alpha in product(ALGORITHMS, (None, torch.tensor(0.5))):
        grown, reached = seeds(name, blueprint), set()
        for _ in range(2):
            found = grads(loss(name, grown, algorithm, alpha), grown)
            assert all(grad.isfinite().all() for grad in found.values())
            reached |= {parameter for parameter, grad in found.items() if grad.count_nonzero()}
            with torch.no_grad():
                for parameter, grad in found.items():
                    grown.get_parameter(parameter).sub_(0.02 * grad / grad.norm().clamp(min=1e-6))
        gates = algorithm is Algorithm.GATE
        expected = {parameter for parameter, _ in grown.named_parameters() if gates or ".gate." not in parameter}
        assert reached <= expected
        assert expected - reached <= without_effect(name, grown, algorithm), (algorithm, alpha)


def without_effect(name: str, grown: nn.ModuleDict, algorithm: Algorithm) -> set[str]:
    """Biases of `norm` that batch norm removes: they shift a channel, and a 1x1 convolution passes a shift on."""
    if TASKS[name].family is not HostFamily.CNN or TASKS[name].host.kernel != 1 or algorithm is not Algorithm.ADD:
        return set()
    return {parameter for parameter, _ in grown.named_parameters() if parameter.endswith(".delta.norm.bias")}


@every_case
def test_seeds_never_cut_the_gradient_of_their_host(name, blueprint):
    host, grown = example(name).host, seeds(name, blueprint)
    alone = grads(loss(name, nn.ModuleDict()), host)
    assert all(grad.count_nonzero() for grad in alone.values())
    for algorithm in ALGORITHMS:
        hidden = grads(loss(name, grown, algorithm), host)
        assert all(torch.equal(hidden[parameter], grad) for parameter, grad in alone.items())
        active = grads(loss(name, grown, algorithm, torch.tensor(1.0)), host)
        assert all(grad.isfinite().all() and grad.count_nonzero() for grad in active.values())
