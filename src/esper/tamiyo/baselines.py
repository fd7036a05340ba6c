"""Controllers to compare a learned one with, by name.

    wait_only             never grows: the score of the host alone
    random                any legal action, uniformly
    fixed_schedule        one seed at fixed steps (schedule `single`)
    fixed_schedule_fill   one seed in every slot at fixed steps (schedule `fill`)
    heuristic             hand-written rules
    explore_then_commit   measures some blueprints on each host, then grows the best of them
    static_final          waits, on hosts that start with the final architecture of another controller

The heuristic grows early, judges late and keeps what earns its price. In each step a host does the first of these that
is legal, in the first slot:

    PRUNE       a seed that does not earn its price when it is judged, or that never passes its gate
    FOSSILIZE   a seed that earns its price when it is judged
    GERMINATE   in an empty slot, while the seed can still be judged, with the blueprint that was pruned least often
                (ties in rotation)
    ADVANCE     a seed whose gate needs it

A seed earns its price if its measured contribution is above what its parameters cost in J. It is judged in HOLDING,
after a share of the time from its birth to the end of the episode: what a young seed contributes says little about what
it will (docs/experiments.md). `HeuristicRules` has the numbers; `esper search --heuristic` tunes them for a task.

Accuracies are percentage points, times are control steps.

Shape legend: N = hosts, S = slots, V = values of a head, L = blueprints in rotation, B = blueprints, O = operations of
the heuristic in the order above.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, final

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from esper.leyline.errors import ConfigError, EsperError, RegistryError, in_words, nearest, registering
from esper.leyline.lifecycle import (
    GROWING,
    HAS_MODULE,
    HEADS,
    NUM_HEADS,
    TEMPO_NAMES,
    TEMPO_TICKS,
    AlphaMode,
    Head,
    HostFamily,
    LifecycleOp,
    SeedStage,
    Style,
    stages_mask,
)
from esper.leyline.messages import EngineSpec, Observation, PolicyProtocol, SlotState, StoredStep
from esper.leyline.random import Stream, uniform
from esper.leyline.tensor_dataclass import tensor_dataclass
from esper.tamiyo.schedules import (
    FirstWanted,
    FixedSchedules,
    NoMemory,
    Remaining,
    Schedule,
    Script,
    ScriptedPolicy,
    Stateless,
    canonical_actions,
    fill,
    single,
)

FAST = 0
GATE_PATIENCE = 3  # multiples of min_training_epochs after which a seed that fails its gate is pruned
FULL = 1.0 - 1e-6

ROTATION = {
    HostFamily.CNN: (4, 5, 3, 1, 2),  # depthwise, bottleneck, norm, conv_light, attention
    HostFamily.TRANSFORMER: (4, 8, 10, 2, 3, 9),  # depthwise, lora, mlp_small, attention, norm, lora_large
}

_O, _S = LifecycleOp, SeedStage
_HEURISTIC_PRIORITY = (_O.PRUNE, _O.FOSSILIZE, _O.GERMINATE, _O.ADVANCE, _O.WAIT)


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
        self._first = FirstWanted(_HEURISTIC_PRIORITY, (*slots, *(slot for slot in every if slot not in slots)), device)
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
        """One operation per host: the first of `_HEURISTIC_PRIORITY` that is wanted and legal."""
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


TRIES = 4  # blueprints that each host tries
EXPLORED_SHARE = 0.5  # share of the episode after which no untried blueprint is germinated
REPLACE_BELOW = 0.9  # seeds worth less than this share of the best blueprint are replaced
FOSSILIZE_ABOVE = 0.5
EXPLORER_PATIENCE = 2  # multiples of min_training_epochs after which a seed that fails its gate is given up
COOLDOWN = 7  # steps from PRUNE to the next germination with the default embargo

_EXPLORER_PRIORITY = (_O.GERMINATE, _O.PRUNE, _O.FOSSILIZE, _O.ADVANCE, _O.WAIT)


@tensor_dataclass
class Worths:
    """Per host: contribution of each blueprint (NaN before it is measured), and which were germinated."""

    worth: Float[Tensor, "N B"]
    tried: Bool[Tensor, "N B"]


@final
class ExploreThenCommit:
    """The rules as a script, with the times and the blueprints of `spec`."""

    def __init__(self, spec: EngineSpec) -> None:
        device = spec.device
        self._tries = min(TRIES, len(spec.selectable))
        self._explore_until = EXPLORED_SHARE * spec.episode_length
        grown = spec.min_training_epochs + TEMPO_TICKS[FAST] + 2  # steps from germination to the first contribution
        self._last_start = spec.episode_length - grown - spec.num_slots
        self._patience = EXPLORER_PATIENCE * spec.min_training_epochs
        self._numbers = torch.arange(spec.num_blueprints, device=device)
        self._selectable = spec.selectable_mask()
        self._growing = torch.tensor(stages_mask(GROWING), device=device)
        self._first = FirstWanted(_EXPLORER_PRIORITY, range(spec.num_slots), device)

    def begin(self, episode: int, hosts: Int[Tensor, " N"]) -> Worths:
        """Nothing is known."""
        del episode
        worth = torch.full((len(hosts), len(self._numbers)), math.nan, device=hosts.device)
        return Worths(worth=worth, tried=torch.zeros_like(worth, dtype=torch.bool))

    def decide(self, obs: Observation, memory: Worths) -> Int[Tensor, "N 8"]:
        """One operation per host: the first of `_EXPLORER_PRIORITY` that is wanted and legal."""
        worth_NB = self._learned(obs, memory.worth)
        untried_NB = self._selectable & ~memory.tried
        exploring_N = (memory.tried.sum(dim=1) < self._tries) & (obs.t <= self._explore_until)
        best_N, best_index_N = worth_NB.nan_to_num(nan=-math.inf).max(dim=1)
        blueprint_N = torch.where(exploring_N, untried_NB.to(torch.int8).argmax(dim=1), best_index_N)
        return self._first.actions(self._wanted(obs, worth_NB, best_N, exploring_N), obs.legal, blueprint_N, FAST)

    def remember(self, memory: Worths, step: StoredStep) -> Worths:
        """Add what this step measured and the blueprint that it germinated."""
        grown_N = step.valid & (step.effective_op == _O.GERMINATE)
        grown_NB = (self._numbers == step.act.actions[:, Head.BLUEPRINT, None]) & grown_N[:, None]
        return Worths(worth=self._learned(step.obs, memory.worth), tried=memory.tried | grown_NB)

    def _learned(self, obs: Observation, worth_NB: Tensor) -> Float[Tensor, "N B"]:
        """`worth` with the blueprints that are measured in this step for the first time."""
        slots = obs.slots
        measured_NS = (slots.stage == _S.HOLDING) & (slots.contribution_step == obs.t)
        refused_NS = (slots.stage == _S.TRAINING) & (slots.epochs_in_stage >= self._patience)
        value_NS = slots.contribution.nan_to_num().masked_fill(refused_NS, -math.inf)
        of_NSB = (slots.blueprint[..., None] == self._numbers) & (measured_NS | refused_NS)[..., None]
        found_NB = torch.where(of_NSB, value_NS[..., None], -math.inf).amax(dim=1)
        return torch.where(worth_NB.isnan() & of_NSB.any(dim=1), found_NB, worth_NB)

    def _wanted(self, obs: Observation, worth_NB: Tensor, best_N: Tensor, exploring_N: Tensor) -> Bool[Tensor, "N P S"]:
        """Which operations are wanted on which slot, legal or not."""
        stage = obs.slots.stage
        growing_NS, dormant_NS = self._growing[stage], stage == _S.DORMANT
        worth_NS = worth_NB.gather(1, obs.slots.blueprint.clamp(min=0))
        measured_N1 = ~(growing_NS & worth_NS.isnan()).any(dim=1, keepdim=True)
        exploring_N1, best_N1 = exploring_N[:, None], best_N[:, None]
        full_N1 = measured_N1 & ~dormant_NS.any(dim=1, keepdim=True)
        surplus_NS = (worth_NS < best_N1) | (obs.num_slots == 1)
        poor_NS = (worth_NS < REPLACE_BELOW * best_N1) & (obs.t + COOLDOWN <= self._last_start)
        replaced_NS = torch.where(exploring_N1, full_N1 & surplus_NS, measured_N1 & poor_NS)
        prune_NS = growing_NS & (replaced_NS | worth_NS.isneginf())
        keep_NS = measured_N1 & ~exploring_N1 & ~poor_NS & (worth_NS > FOSSILIZE_ABOVE)
        starts_N1 = exploring_N1 | (measured_N1 & (best_N1 > FOSSILIZE_ABOVE))
        germinate_NS = starts_N1.expand_as(dormant_NS) & (obs.t <= self._last_start)
        always_NS = torch.ones_like(dormant_NS)
        return torch.stack((germinate_NS, prune_NS, keep_NS, always_NS, always_NS), dim=1)


STATIC = "static_final"


class WaitOnly(Stateless):
    """Always waits."""

    def __init__(self, spec: EngineSpec) -> None:
        self._wait = canonical_actions(spec.device)[LifecycleOp.WAIT]

    def decide(self, obs: Observation, memory: NoMemory) -> Int[Tensor, "N 8"]:
        """WAIT."""
        del memory
        return self._wait.expand(obs.num_envs, -1).clone()


@tensor_dataclass
class Draws:
    """Keys of the random draws: global host numbers and the episode."""

    hosts: Int[Tensor, " N"]
    episode: Int[Tensor, ""]


@final
class UniformRandom:
    """Draws op, slot and each head that the op reads uniformly among the legal values."""

    def __init__(self, spec: EngineSpec) -> None:
        self._run_seed = spec.run_seed
        self._heads = torch.arange(NUM_HEADS, device=spec.device)
        self._masks = _value_masks(spec)

    def begin(self, episode: int, hosts: Int[Tensor, " N"]) -> Draws:
        """Keys of the draws of this episode."""
        return Draws(hosts=hosts, episode=torch.tensor(episode, device=hosts.device))

    def decide(self, obs: Observation, memory: Draws) -> Int[Tensor, "N 8"]:
        """One uniform per host and head: op, then slot given op, then the other heads."""
        u_N8 = uniform(
            self._run_seed, Stream.RANDOM_BASELINE, memory.hosts[:, None],
            episode=memory.episode, t=obs.t, block=self._heads,
        ).to(torch.float64)  # fmt: skip
        op_N = pick(obs.legal.any(dim=2), u_N8[:, Head.OP])
        row_N1S = op_N[:, None, None].expand(-1, 1, obs.num_slots)
        slot_N = pick(obs.legal.gather(1, row_N1S).squeeze(1), u_N8[:, Head.SLOT]) * (op_N != LifecycleOp.WAIT)
        masks_N8V = self._masks[op_N]
        has_gate_N = obs.has_gate.gather(1, slot_N[:, None]).squeeze(1)
        masks_N8V[:, Head.STYLE, Style.GATED_GATE] &= has_gate_N | (op_N != LifecycleOp.SET_ALPHA_TARGET)
        actions = pick(masks_N8V, u_N8)
        actions[:, Head.SLOT], actions[:, Head.OP] = slot_N, op_N
        return actions

    def remember(self, memory: Draws, step: StoredStep) -> Draws:
        """Unchanged: draws are keyed by the step."""
        del step
        return memory


def _value_masks(spec: EngineSpec) -> Bool[Tensor, "6 8 V"]:
    """Values of each head given the op: all where the op reads it (never op, slot), else the canonical one."""
    values = max(spec.head_sizes)

    def mask(op: LifecycleOp, head: Head) -> list[bool]:
        allowed: set[int] = {HEADS[head].canonical}
        if op in HEADS[head].used_by and head not in (Head.SLOT, Head.OP):
            allowed = set(spec.selectable) if head is Head.BLUEPRINT else set(range(HEADS[head].size))
        return [value in allowed for value in range(values)]

    return torch.tensor([[mask(op, head) for head in Head] for op in LifecycleOp], device=spec.device)


def pick(mask: Bool[Tensor, "*N V"], u: Float[Tensor, "*N"]) -> Int[Tensor, "*N"]:
    """Inverse CDF of the uniform distribution over a mask: the value number floor(u * count) of the allowed ones.

    Exact in float64, because u is a multiple of 2^-24 and counts are small.
    """
    rank = mask.cumsum(dim=-1)
    return (rank <= (u * rank[..., -1]).unsqueeze(-1)).sum(dim=-1)


def scheduled(schedule: Schedule, spec: EngineSpec) -> ScriptedPolicy[Remaining]:
    """A controller that follows `schedule`."""
    return ScriptedPolicy(FixedSchedules([schedule], spec), spec)


PolicyMaker = Callable[[EngineSpec], PolicyProtocol | Script[Any]]
_MAKERS: dict[str, PolicyMaker] = {
    "wait_only": WaitOnly,
    "random": UniformRandom,
    "fixed_schedule": lambda spec: scheduled(single(spec), spec),
    "fixed_schedule_fill": lambda spec: scheduled(fill(spec), spec),
    "heuristic": Heuristic,
    "explore_then_commit": ExploreThenCommit,
    STATIC: WaitOnly,  # the comparison gives the hosts a structure (`VectorizedEngine.architectures`)
}
BASELINES = tuple(_MAKERS)
"""Those of this package."""


def register_policy(name: str) -> Callable[[PolicyMaker], PolicyMaker]:
    """Decorate a class, or a function of the `EngineSpec`, that gives a script or a policy, to be used like a baseline.

    Raises:
        RegistryError: the name is taken.
    """
    return registering("policy", name, _MAKERS, lambda make: make)


def policy_names() -> tuple[str, ...]:
    """All names that `make_baseline` knows."""
    return tuple(_MAKERS)


def make_baseline(name: str, spec: EngineSpec) -> PolicyProtocol:
    """The baseline or registered policy `name` for the engine of `spec`; raises RegistryError if there is none."""
    if name not in _MAKERS:
        raise RegistryError(f"unknown baseline {name!r}; {nearest(name, _MAKERS)}")
    return policy_of(_MAKERS[name], spec, name)


def policy_of(make: PolicyMaker, spec: EngineSpec, name: str) -> PolicyProtocol:
    """What `make` gives for an engine, a script as a policy; raises ConfigError with the name of what fails."""
    try:
        made = make(spec)
    except EsperError:
        raise
    except Exception as error:  # any error of the user's code
        raise ConfigError(f"the policy {name} cannot be made from an EngineSpec: {in_words(error)}") from error
    if isinstance(made, PolicyProtocol):
        return made
    if missing := [method for method in ("begin", "decide", "remember") if not hasattr(made, method)]:
        raise ConfigError(
            f"the policy {name} is a {type(made).__name__} without {', '.join(missing)}; see docs/extending.md."
        )
    return ScriptedPolicy(made, spec)
