"""A controller of hand-written rules: grow early, judge late, keep what earns its price.

In each step a host does the first of these that is legal, in the first slot:

    PRUNE       a seed that does not earn its price when it is judged, or that never passes its gate
    FOSSILIZE   a seed that earns its price when it is judged
    GERMINATE   in an empty slot, while the seed can still be judged, with the blueprint that was pruned least often
                (ties in rotation)
    ADVANCE     a seed whose gate needs it

A seed earns its price if its measured contribution is above what its parameters cost in J. It is judged in HOLDING,
after a share of the time from its birth to the end of the episode: what a young seed contributes says little about what
it will (docs/experiments.md). `HeuristicRules` has the numbers; `esper search --heuristic` tunes them for a task.

Accuracies are percentage points, times are control steps.

Shape legend: N = hosts, S = slots, L = blueprints in rotation, B = blueprints, O = operations in the order above.
"""

from dataclasses import dataclass
from typing import final

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from esper.leyline.errors import ConfigError
from esper.leyline.lifecycle import (
    HAS_MODULE,
    TEMPO_NAMES,
    TEMPO_TICKS,
    AlphaMode,
    Head,
    HostFamily,
    LifecycleOp,
    SeedStage,
    stages_mask,
)
from esper.leyline.messages import EngineSpec, Observation, SlotState, StoredStep
from esper.leyline.tensor_dataclass import tensor_dataclass
from esper.tamiyo.scripted import FirstWanted

FAST = 0
GATE_PATIENCE = 3  # multiples of min_training_epochs after which a seed that fails its gate is pruned
FULL = 1.0 - 1e-6

ROTATION = {
    HostFamily.CNN: (4, 5, 3, 1, 2),  # depthwise, bottleneck, norm, conv_light, attention
    HostFamily.TRANSFORMER: (4, 8, 10, 2, 3, 9),  # depthwise, lora, mlp_small, attention, norm, lora_large
}

_O, _S = LifecycleOp, SeedStage
_PRIORITY = (_O.PRUNE, _O.FOSSILIZE, _O.GERMINATE, _O.ADVANCE, _O.WAIT)


@dataclass(frozen=True, kw_only=True)
class HeuristicRules:
    """The choices and numbers of the heuristic; the defaults gain on waiting in every built-in task that was tried.

    Attributes:
        blueprints: indices, in rotation; none for `ROTATION` of the family.
        slots: indices in the order in which they are grown; none for all, the lowest first.
        tempo: of all seeds, an index of that head.
        first_step: no seed germinates before.
        patience: share of the time from a seed's birth to the end after which it is judged, 0 to 1.
        price: points that a seed must contribute for each unit by which it raises ln(parameters). 3 is the price in J.
        fossilize_above: points that its contribution must exceed its price by.
    """

    blueprints: tuple[int, ...] = ()
    slots: tuple[int, ...] = ()
    tempo: int = FAST
    first_step: int = 1
    patience: float = 0.5
    price: float = 3.0
    fossilize_above: float = 0.0

    def words(self, spec: EngineSpec) -> str:
        """The rules in one line."""
        blueprints = [spec.blueprint_names[index] for index in self.blueprints] or ["the usual blueprints"]
        slots = [spec.slot_ids[index] for index in self.slots] or ["all slots"]
        return (
            f"{', '.join(blueprints)} in {', '.join(slots)}, {TEMPO_NAMES[self.tempo]}, from step {self.first_step}, "
            f"judged after {self.patience:.0%} of the time, kept {self.fossilize_above:g} points above a price of "
            f"{self.price:g}"
        )


DEFAULT_RULES = HeuristicRules()


@tensor_dataclass
class HeuristicMemory:
    """Per host: prunes of each blueprint, next place in the rotation."""

    prune_count: Int[Tensor, "N B"]
    rotation: Int[Tensor, " N"]


@final
class Heuristic:
    """The rules as a script; raises ConfigError if the run allows no blueprint of the rotation."""

    def __init__(self, spec: EngineSpec, rules: HeuristicRules = DEFAULT_RULES) -> None:
        wanted = rules.blueprints or ROTATION[spec.family]
        rotation = [index for index in wanted if index in spec.selectable]
        if not rotation:
            raise ConfigError(
                f"the heuristic grows blueprints {', '.join(map(str, wanted))} but this run allows "
                f"{', '.join(map(str, spec.selectable))}; allow one of them or use another controller."
            )
        device, every = spec.device, range(spec.num_slots)
        slots = rules.slots or tuple(every)
        self._rules = rules
        self._first = FirstWanted(_PRIORITY, (*slots, *(slot for slot in every if slot not in slots)), device)
        self._may_grow = torch.tensor([slot in slots for slot in every], device=device)
        self._num_blueprints = spec.num_blueprints
        self._gate_patience = GATE_PATIENCE * spec.min_training_epochs
        to_holding = spec.min_training_epochs + TEMPO_TICKS[rules.tempo] + 2
        self._last_start = spec.episode_length - to_holding
        self._rotation = torch.tensor(rotation, device=device)
        self._place = torch.arange(len(rotation), device=device)
        self._live = torch.tensor(stages_mask(HAS_MODULE), device=device)

    def begin(self, episode: int, hosts: Int[Tensor, " N"]) -> HeuristicMemory:
        """No prunes; the rotation starts at its first blueprint."""
        del episode
        zeros = torch.zeros_like(hosts)
        return HeuristicMemory(prune_count=zeros[:, None].expand(-1, self._num_blueprints).clone(), rotation=zeros)

    def decide(self, obs: Observation, memory: HeuristicMemory) -> Int[Tensor, "N 8"]:
        """One operation per host: the first of `_PRIORITY` that is wanted and legal."""
        return self._first.actions(self._wanted(obs), obs.legal, self._next_blueprint(memory), self._rules.tempo)

    def remember(self, memory: HeuristicMemory, step: StoredStep) -> HeuristicMemory:
        """Count prunes that took effect; the rotation continues after the last blueprint grown."""
        slot_N1 = step.act.actions[:, Head.SLOT, None]
        pruned_N = step.valid & (step.effective_op == _O.PRUNE)
        victim_N1 = step.obs.slots.blueprint.gather(1, slot_N1).clamp(min=0)
        grown_N = step.valid & (step.effective_op == _O.GERMINATE)
        place_N = (self._rotation == step.act.actions[:, Head.BLUEPRINT, None]).to(torch.int8).argmax(dim=1)
        return HeuristicMemory(
            prune_count=memory.prune_count.scatter_add(1, victim_N1, pruned_N[:, None].to(torch.int64)),
            rotation=torch.where(grown_N, (place_N + 1) % len(self._place), memory.rotation),
        )

    def _wanted(self, obs: Observation) -> Bool[Tensor, "N O S"]:
        """Which operations are wanted on which slot, legal or not. Comparisons with NaN (not measured) are False."""
        slots, rules = obs.slots, self._rules
        measured_NS = (slots.stage == _S.HOLDING) & (slots.contribution_step == obs.t)
        judged_NS = measured_NS & (slots.age >= rules.patience * (slots.age + obs.episode_length - obs.t))
        earns_NS = slots.contribution - self._price(slots, obs.hosts.host_params) > rules.fossilize_above
        refused_NS = (slots.stage == _S.TRAINING) & (slots.epochs_in_stage >= self._gate_patience)
        in_time = rules.first_step <= obs.t <= self._last_start
        blended_NS = (slots.alpha_target >= FULL) & (slots.alpha_mode == AlphaMode.HOLD)
        return torch.stack(
            (
                judged_NS & ~earns_NS | refused_NS,
                judged_NS & earns_NS,
                (self._may_grow & in_time).expand_as(judged_NS),
                (slots.stage != _S.BLENDING) | blended_NS,
                torch.ones_like(judged_NS),
            ),
            dim=1,
        )

    def _price(self, slots: SlotState, host_params: Int[Tensor, " N"]) -> Float[Tensor, "N S"]:
        """What each seed costs beside the others, in points."""
        params_NS = slots.params * self._live[slots.stage]
        all_N1 = (host_params + params_NS.sum(dim=1))[:, None].clamp(min=1)
        return -self._rules.price * torch.log1p(-params_NS / all_N1)

    def _next_blueprint(self, memory: HeuristicMemory) -> Int[Tensor, " N"]:
        """The least pruned blueprint; ties go to the first from `rotation` on."""
        counts_NL = memory.prune_count.index_select(1, self._rotation)
        length = len(self._place)
        turn_NL = (self._place - memory.rotation[:, None]) % length
        return self._rotation[(counts_NL * length + turn_NL).argmin(dim=1)]
