"""A controller of hand-written rules: wait for a plateau, grow one seed at a time, keep seeds that contribute.

Each host treats its first growing slot. Without one it germinates once training is stable and has stopped improving,
with the blueprint that was pruned least often (ties in rotation). `HeuristicRules` has its numbers; `esper search
--heuristic` tunes them for a task.

    TRAINING   prune a seed that hurts or never passes its gate, else advance
    BLENDING   prune a seed that hurts, advance at full weight, else wait
    HOLDING    fossilize a seed that contributes and left the host better than at germination, else prune

Accuracies are percentage points, times are control steps.

Shape legend: N = hosts, S = slots, L = blueprints in rotation, B = blueprints.
"""

from dataclasses import dataclass
from typing import final

import torch
from jaxtyping import Bool, Int
from torch import Tensor

from esper.leyline.errors import ConfigError
from esper.leyline.lifecycle import (
    GROWING,
    TEMPO_NAMES,
    AlphaMode,
    Head,
    HostFamily,
    LifecycleOp,
    SeedStage,
    stages_mask,
)
from esper.leyline.messages import EngineSpec, Observation, StoredStep
from esper.leyline.tensor_dataclass import tensor_dataclass
from esper.tamiyo.schedules import STANDARD
from esper.tamiyo.scripted import canonical_actions, op_is_legal

HOSTAGE_CONTRIBUTION = 0.1
GATE_PATIENCE = 3  # multiples of min_training_epochs after which a seed that fails its gate is pruned
FULL = 1.0 - 1e-6

ROTATION = {
    HostFamily.CNN: (1, 7, 2, 3, 4),  # conv_light, conv_heavy, attention, norm, depthwise
    HostFamily.TRANSFORMER: (8, 10, 2, 3, 9),  # lora, mlp_small, attention, norm, lora_large
}

_NEVER = -(2**20)
_O, _S = LifecycleOp, SeedStage


@dataclass(frozen=True, kw_only=True)
class HeuristicRules:
    """The choices and numbers of the heuristic; the defaults suit no task in particular.

    Attributes:
        blueprints: indices, in rotation; none for `ROTATION` of the family.
        slots: indices in the order in which they are grown; none for all, the lowest first.
        tempo: of all seeds, an index of that head.
        first_step: no seed germinates before.
        plateau_epochs: epochs without improvement before a germination; 0 does not wait for a stable host either.
        patience: epochs in a stage after which a seed is pruned if validation accuracy fell by more than `drop` points.
        fossilize_above: contribution in points that a seed must have in HOLDING; others are pruned.
        cooldown: steps from a prune to the next germination.
    """

    blueprints: tuple[int, ...] = ()
    slots: tuple[int, ...] = ()
    tempo: int = STANDARD
    first_step: int = 5
    plateau_epochs: int = 3
    patience: int = 5
    drop: float = 2.0
    fossilize_above: float = 0.5
    cooldown: int = 5

    def words(self, spec: EngineSpec) -> str:
        """The rules in one line."""
        blueprints = [spec.blueprint_names[index] for index in self.blueprints] or ["the usual blueprints"]
        slots = [spec.slot_ids[index] for index in self.slots] or ["the lowest slot"]
        return (
            f"{', '.join(blueprints)} in {', '.join(slots)}, {TEMPO_NAMES[self.tempo]}, from step {self.first_step}"
            f"{f' on a plateau of {self.plateau_epochs}' if self.plateau_epochs else ''}, pruned after a drop of "
            f"{self.drop:g} in {self.patience} epochs, kept above {self.fossilize_above:g} points, "
            f"{self.cooldown} steps of rest"
        )


DEFAULT_RULES = HeuristicRules()


@tensor_dataclass
class HeuristicMemory:
    """Per host: step of the last prune, prunes of each blueprint, next place in the rotation."""

    last_prune: Int[Tensor, " N"]
    prune_count: Int[Tensor, "N B"]
    rotation: Int[Tensor, " N"]


@tensor_dataclass
class Candidate:
    """The first growing slot of each host; `slot` has no meaning where `exists` is False."""

    exists: Bool[Tensor, " N"]
    slot: Int[Tensor, " N"]


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
        self._rules = rules
        self._slots = torch.tensor(rules.slots or range(spec.num_slots), device=spec.device)
        self._num_blueprints = spec.num_blueprints
        self._gate_patience = GATE_PATIENCE * spec.min_training_epochs
        self._rotation = torch.tensor(rotation, device=spec.device)
        self._place = torch.arange(len(rotation), device=spec.device)
        self._growing = torch.tensor(stages_mask(GROWING), device=spec.device)
        self._canonical = canonical_actions(spec.device)

    def begin(self, episode: int, hosts: Int[Tensor, " N"]) -> HeuristicMemory:
        """No prunes; the rotation starts at its first blueprint."""
        del episode
        zeros = torch.zeros_like(hosts)
        return HeuristicMemory(
            last_prune=torch.full_like(hosts, _NEVER),
            prune_count=zeros[:, None].expand(-1, self._num_blueprints).clone(),
            rotation=zeros,
        )

    def decide(self, obs: Observation, memory: HeuristicMemory) -> Int[Tensor, "N 8"]:
        """One operation per host; WAIT where the intended one is not legal."""
        candidate = self._candidate(obs.slots.stage)
        germinate_N = ~candidate.exists & _wants_a_seed(obs, memory, self._rules)
        op_N = torch.where(candidate.exists, self._treat(obs, candidate), _O.GERMINATE * germinate_N)
        open_NS = obs.legal[:, _O.GERMINATE].index_select(1, self._slots)
        slot_N = torch.where(candidate.exists, candidate.slot, self._slots[open_NS.to(torch.int8).argmax(dim=1)])
        op_N = op_N * op_is_legal(obs.legal, op_N, slot_N)  # WAIT is 0
        actions = self._canonical[op_N]
        actions[:, Head.SLOT] = slot_N * (op_N != _O.WAIT)
        actions[:, Head.BLUEPRINT] = self._next_blueprint(memory) * (op_N == _O.GERMINATE)
        actions[:, Head.TEMPO].masked_fill_(op_N == _O.GERMINATE, self._rules.tempo)
        return actions

    def remember(self, memory: HeuristicMemory, step: StoredStep) -> HeuristicMemory:
        """Count prunes that took effect; the rotation continues after the last blueprint grown."""
        slot_N1 = step.act.actions[:, Head.SLOT, None]
        pruned_N = step.valid & (step.effective_op == _O.PRUNE)
        victim_N1 = step.obs.slots.blueprint.gather(1, slot_N1).clamp(min=0)
        grown_N = step.valid & (step.effective_op == _O.GERMINATE)
        place_N = (self._rotation == step.act.actions[:, Head.BLUEPRINT, None]).to(torch.int8).argmax(dim=1)
        return HeuristicMemory(
            last_prune=memory.last_prune.masked_fill(pruned_N, step.t),
            prune_count=memory.prune_count.scatter_add(1, victim_N1, pruned_N[:, None].to(torch.int64)),
            rotation=torch.where(grown_N, (place_N + 1) % len(self._place), memory.rotation),
        )

    def _candidate(self, stage: Int[Tensor, "N S"]) -> Candidate:
        growing_NS = self._growing[stage]
        return Candidate(exists=growing_NS.any(dim=1), slot=growing_NS.to(torch.int8).argmax(dim=1))

    def _treat(self, obs: Observation, candidate: Candidate) -> Int[Tensor, " N"]:
        """Operation for the candidate. Comparisons with NaN (not measured) are False."""
        at, val_acc = candidate.slot[:, None], obs.hosts.val_acc

        def of(field: Tensor) -> Tensor:
            return field.gather(1, at).squeeze(1)

        slots = obs.slots
        stage, epochs, contribution = of(slots.stage), of(slots.epochs_in_stage), of(slots.contribution)
        training, blending, holding = stage == _S.TRAINING, stage == _S.BLENDING, stage == _S.HOLDING
        rules = self._rules
        hurts = (epochs >= rules.patience) & (val_acc - of(slots.acc_at_stage_start) < -rules.drop)
        refused = training & (epochs >= self._gate_patience)
        give_up = ((training | blending) & hurts | refused) & of(obs.legal[:, _O.PRUNE])
        blended = blending & (of(slots.alpha_target) >= FULL) & (of(slots.alpha_mode) == AlphaMode.HOLD)
        advance = ((stage == _S.GERMINATED) | training | blended) & ~give_up
        judged = holding & (of(slots.contribution_step) == obs.t)
        hostage = (contribution > HOSTAGE_CONTRIBUTION) & (val_acc - of(slots.acc_at_germination) < 0.0)
        keep = judged & (contribution > rules.fossilize_above) & ~hostage
        prune = give_up | (judged & ~keep)
        return _O.PRUNE * prune + _O.FOSSILIZE * keep + _O.ADVANCE * advance  # at most one is True

    def _next_blueprint(self, memory: HeuristicMemory) -> Int[Tensor, " N"]:
        """The least pruned blueprint; ties go to the first from `rotation` on."""
        counts_NL = memory.prune_count.index_select(1, self._rotation)
        length = len(self._place)
        turn_NL = (self._place - memory.rotation[:, None]) % length
        return self._rotation[(counts_NL * length + turn_NL).argmin(dim=1)]


def _wants_a_seed(obs: Observation, memory: HeuristicMemory, rules: HeuristicRules) -> Bool[Tensor, " N"]:
    rested = obs.t - memory.last_prune >= rules.cooldown
    ready = obs.hosts.stabilized & (obs.hosts.plateau_count >= rules.plateau_epochs)
    return rested & (ready | (rules.plateau_epochs == 0)) & (obs.t >= rules.first_step)
