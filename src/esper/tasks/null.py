"""Scripted dynamics with a known best policy: no networks, no gradients, only the lifecycle.

    host         a(t) = 50 (1 - e^{-t/10})
    maturity     m = 1 - e^{-p/10}                       p = train passes of the seed
    strength     v = alpha * m * q[blueprint] * c[algorithm]
    coalition A  f(A) = clamp(a(t) + sum_{i in A} v_i + w sum_{i<j in A} v_i v_j + noise, 0, 100)
    loss         ln(10) (1 - f / 100)

`conv_small` harms, `conv_heavy` never passes the health check of its gate and blocks the next germination until it is
pruned, `bottleneck` is best. Accuracies and strengths are percentage points.

Shape legend: N = hosts, S = slots, K = coalitions, B = 13 blueprints, b = those of `BLUEPRINTS`.
"""

import math
from dataclasses import dataclass
from functools import lru_cache
from typing import Annotated, NamedTuple

import torch
from jaxtyping import Bool, Float, Int
from pydantic import Field
from torch import Tensor

from esper.leyline.errors import ConfigError
from esper.leyline.lifecycle import (
    CANONICAL_ACTION,
    NUM_BUILTIN_BLUEPRINTS,
    TEMPO_TICKS,
    TRAINED,
    AlphaMode,
    Head,
    LifecycleOp,
    SeedStage,
    canonical_action,
    stages_mask,
)
from esper.leyline.random import MAX_EPISODE_LENGTH, Stream, permutation, to_normal, words
from esper.leyline.settings import NotNegative, check_fields
from esper.leyline.tensor_dataclass import tensor_dataclass

NUM_CLASSES = 10
TIME_CONSTANT = 10.0
HOST_CEILING = 50.0
GATE_PARAMS = 145  # of a gate network at 16 channels


@dataclass(frozen=True)
class ScriptedBlueprint:
    """What a blueprint is worth: index in the blueprint head, quality (pp), gradient health, parameters (C = 16)."""

    index: int
    quality: float
    health: float
    params: int


BLUEPRINTS = {
    "conv_light": ScriptedBlueprint(1, 4.0, 1.0, 2_352),
    "attention": ScriptedBlueprint(2, 2.0, 1.0, 144),
    "norm": ScriptedBlueprint(3, 1.0, 1.0, 33),
    "depthwise": ScriptedBlueprint(4, 3.0, 1.0, 448),
    "bottleneck": ScriptedBlueprint(5, 6.0, 1.0, 880),
    "conv_small": ScriptedBlueprint(6, -2.0, 1.0, 304),
    "conv_heavy": ScriptedBlueprint(7, 8.0, 0.5, 4_688),
}
BEST_BLUEPRINT = "bottleneck"


class Fault(NamedTuple):
    """An injected validation loss: host `host` (global number) reports `loss` in step `t` of every episode."""

    host: int
    t: int
    loss: float


def _by_index(column: str) -> tuple[float, ...]:
    values = {row.index: float(getattr(row, column)) for row in BLUEPRINTS.values()}
    return tuple(values.get(i, 0.0) for i in range(NUM_BUILTIN_BLUEPRINTS))


_QUALITY, _HEALTH = _by_index("quality"), _by_index("health")
_PerBlueprint = Annotated[
    tuple[float, ...], Field(min_length=NUM_BUILTIN_BLUEPRINTS, max_length=NUM_BUILTIN_BLUEPRINTS)
]


@dataclass(frozen=True, kw_only=True)
class NullSpec:
    """Constants of the script.

    Attributes:
        interaction: w, how much two seeds add to each other (per pp²). sigma: standard deviation of the noise (pp).
        host_params: declared size of the host. max_slots: how many slots can be enabled.
        quality: q of each blueprint index. health: gradient health of each blueprint index.
        algorithm_factor: c of NONE, ADD, MULTIPLY, GATE. faults: injected validation losses.
        permuted: whether each host draws in each episode which blueprint has which of the qualities (`qualities`).
    """

    interaction: float = 0.0
    sigma: NotNegative = 0.0
    host_params: int = 10_000
    max_slots: int = 16
    quality: _PerBlueprint = _QUALITY
    health: _PerBlueprint = _HEALTH
    algorithm_factor: Annotated[tuple[float, ...], Field(min_length=4, max_length=4)] = (0.0, 1.0, 0.5, 0.8)
    faults: tuple[Fault, ...] = ()
    permuted: bool = False

    def __post_init__(self) -> None:
        check_fields(self, "null")


@tensor_dataclass
class Tables:
    """The constants as lookup tables on a device. `params` are those of the seed without its gate."""

    quality: Float[Tensor, " B"]
    health: Float[Tensor, " B"]
    params: Int[Tensor, " B"]
    algorithm_factor: Float[Tensor, " 4"]
    has_module: Bool[Tensor, " 11"]
    measured: Bool[Tensor, " 11"]


@lru_cache(maxsize=64)
def tables(spec: NullSpec, device: torch.device) -> Tables:
    """The tables of `spec`, built once per device."""
    return Tables(
        quality=torch.tensor(spec.quality, device=device),
        health=torch.tensor(spec.health, device=device),
        params=torch.tensor([int(params) for params in _by_index("params")], device=device),
        algorithm_factor=torch.tensor(spec.algorithm_factor, device=device),
        has_module=torch.tensor(stages_mask(TRAINED), device=device),
        measured=torch.tensor(stages_mask(frozenset({SeedStage.TRAINING, SeedStage.BLENDING})), device=device),
    )


def host_accuracy(t: int) -> float:
    """Accuracy of every host alone after step t: 50 (1 - e^{-t/10}) pp."""
    return HOST_CEILING * -math.expm1(-t / TIME_CONSTANT)


@lru_cache(maxsize=8)
def _host_accuracies(device: torch.device) -> Float[Tensor, " T"]:
    return torch.tensor([host_accuracy(t) for t in range(MAX_EPISODE_LENGTH + 1)], device=device)


def host_accuracies(steps: Int[Tensor, " N"]) -> Float[Tensor, " N"]:
    """`host_accuracy` of hosts that were trained for so many steps."""
    return _host_accuracies(steps.device)[steps]


def trained(spec: NullSpec, stage: Int[Tensor, "N S"], alpha_mode: Int[Tensor, "N S"]) -> Bool[Tensor, "N S"]:
    """Slots whose seed gains a pass in a train pass: TRAINING to FOSSILIZED and not frozen by a downward ramp."""
    return tables(spec, stage.device).has_module[stage] & (alpha_mode != AlphaMode.DOWN)


def maturity(passes: Int[Tensor, "N S"]) -> Float[Tensor, "N S"]:
    """How grown a seed is, in [0, 1): m = 1 - e^{-p/10}."""
    return -torch.expm1(passes / -TIME_CONSTANT)


def strengths(
    spec: NullSpec,
    alpha: Float[Tensor, "N S"],
    passes: Int[Tensor, "N S"],
    blueprint: Int[Tensor, "N S"],
    algorithm: Int[Tensor, "N S"],
    quality: Float[Tensor, "N B"] | None = None,
) -> Float[Tensor, "N S"]:
    """What each seed adds in pp, v = alpha m q[blueprint] c[algorithm]; 0 without a seed (blueprint -1, alpha 0).

    `quality` are those of each host (`qualities`); None for the ones of `spec`.
    """
    table, index = tables(spec, alpha.device), blueprint.clamp(min=0)
    quality_NS = table.quality[index] if quality is None else quality.gather(1, index)
    return alpha * maturity(passes) * quality_NS * table.algorithm_factor[algorithm]


def qualities(spec: NullSpec, run_seed: int, hosts: Int[Tensor, " N"], episode: int | Tensor) -> Float[Tensor, "N B"]:
    """Quality of every blueprint index on each host (global number) in an episode, in pp.

    With `spec.permuted` the qualities of the blueprints in `BLUEPRINTS` are permuted; health and parameters stay.
    """
    quality_B = tables(spec, hosts.device).quality
    quality_NB = quality_B.expand(len(hosts), -1)
    if not spec.permuted:
        return quality_NB
    grown_b = _grown(hosts.device)
    order_Nb = permutation(run_seed, Stream.INSTANCE, hosts, len(grown_b), episode=episode)
    return quality_NB.index_copy(1, grown_b, quality_B[grown_b][order_Nb])


@lru_cache(maxsize=8)
def _grown(device: torch.device) -> Tensor:
    return torch.tensor([row.index for row in BLUEPRINTS.values()], device=device)


def scripted_noise(
    spec: NullSpec, run_seed: int, hosts: Int[Tensor, " N"], episode: int | Tensor, t: int
) -> Float[Tensor, " N"]:
    """Noise sigma z(host, t) in pp, the same for all coalitions of a step."""
    drawn = words(run_seed, Stream.SCRIPTED_NOISE, hosts, episode=episode, t=t)
    return spec.sigma * to_normal(drawn[..., 0], drawn[..., 1])


def coalition_accuracy(
    spec: NullSpec,
    steps: Int[Tensor, " N"],
    strength: Float[Tensor, "N S"],
    sets: Bool[Tensor, "N K S"],
    noise: Float[Tensor, " N"] | None = None,
) -> Float[Tensor, "N K"]:
    """f(A) of each coalition in pp.

    The sum over pairs is ((sum v)² - sum v²) / 2.

    Args:
        spec: gives w.
        steps: for which each host was trained.
        strength: v of each slot.
        sets: slots that are switched on in each coalition.
        noise: added to all coalitions of a host; None for none.
    """
    on_NKS = strength[:, None] * sets
    sum_NK = on_NKS.sum(dim=-1)
    accuracy_NK = sum_NK + host_accuracies(steps)[:, None]
    if spec.interaction:
        accuracy_NK = accuracy_NK + 0.5 * spec.interaction * (sum_NK.square() - on_NKS.square().sum(dim=-1))
    if noise is not None:
        accuracy_NK = accuracy_NK + noise[:, None]
    return accuracy_NK.clamp(0.0, 100.0)


def validation_loss(accuracy: Float[Tensor, " N"]) -> Float[Tensor, " N"]:
    """ln(10) (1 - accuracy / 100) in nats."""
    return math.log(NUM_CLASSES) * (1.0 - accuracy / 100.0)


def inject_faults(spec: NullSpec, loss: Float[Tensor, " N"], hosts: Int[Tensor, " N"], t: int) -> Float[Tensor, " N"]:
    """`loss` with the faults of step t in place; `hosts` are global numbers."""
    for fault in spec.faults:
        if fault.t == t:
            loss = loss.masked_fill(hosts == fault.host, fault.loss)
    return loss


def gradient_health(
    spec: NullSpec, stage: Int[Tensor, "N S"], alpha_mode: Int[Tensor, "N S"], blueprint: Int[Tensor, "N S"]
) -> Float[Tensor, "N S"]:
    """Health of each seed in TRAINING or BLENDING that is not frozen, NaN elsewhere.

    Where it is not NaN the other statistics are constants: norm 1, ratio 1, neither vanishing nor exploding.
    """
    table = tables(spec, stage.device)
    measured_NS = table.measured[stage] & (alpha_mode != AlphaMode.DOWN)
    return table.health[blueprint.clamp(min=0)].masked_fill(~measured_NS, math.nan)


def params(spec: NullSpec, blueprint: Int[Tensor, "*N"], has_gate: Bool[Tensor, "*N"]) -> Int[Tensor, "*N"]:
    """Parameters of seed and gate at 16 channels; 0 for noop and for no seed (-1)."""
    return tables(spec, blueprint.device).params[blueprint.clamp(min=0)] + GATE_PARAMS * has_gate


class BestStep(NamedTuple):
    """One line of the best schedule: from step `earliest` on, `action` (eight head values in table order)."""

    earliest: int
    action: tuple[int, ...]


_TICKS = TEMPO_TICKS[CANONICAL_ACTION[Head.TEMPO]]


def germinations(episode_length: int, min_training_epochs: int, num_slots: int) -> list[int]:
    """Steps 1 + i (M + 1) of the seeds that can be fossilized, and be measured so, within the episode."""
    if min_training_epochs < 1:
        raise ConfigError(f"min_training_epochs is {min_training_epochs}; it must be at least 1.")
    steps = [1 + i * (min_training_epochs + 1) for i in range(num_slots)]
    return [e for e in steps if e + min_training_epochs + _TICKS + 1 < episode_length]


def best_schedule(
    episode_length: int, min_training_epochs: int, num_slots: int, blueprint: int = BLUEPRINTS[BEST_BLUEPRINT].index
) -> tuple[BestStep, ...]:
    """Germinate `blueprint` in slot i at 1 + i (M + 1), fossilize it at its first legal step, else wait.

    Where both fall on one step (M = 4) germination goes first: a seed gains by age, not by being fossilized.
    """
    steps = []
    for slot, e in enumerate(germinations(episode_length, min_training_epochs, num_slots)):
        steps.append((e, 0, slot, LifecycleOp.GERMINATE, blueprint))
        steps.append((e + min_training_epochs + _TICKS + 1, 1, slot, LifecycleOp.FOSSILIZE, 0))
    return tuple(
        BestStep(e, canonical_action(op, slot=slot, blueprint=blueprint)) for e, _, slot, op, blueprint in sorted(steps)
    )
