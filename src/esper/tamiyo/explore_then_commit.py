"""A controller that measures blueprints on each host first and then grows the best one.

    explore   germinate blueprints that were not tried yet, in the order of the head, until `TRIES` have been; measure
              each in its first step in HOLDING; when all slots are full, prune all seeds but the best
    commit    prune seeds far below the best if time is left for another, germinate the best, fossilize the others

A blueprint is worth the contribution of its first seed, so all are compared at the same age. One that does not pass its
gate in time is worth nothing. Contributions are percentage points, times are control steps.

Shape legend: N = hosts, S = slots, B = blueprints, P = operations by priority.
"""

import math
from typing import final

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from esper.leyline.actions import TEMPO_TICKS, Head, LifecycleOp
from esper.leyline.messages import EngineSpec, Observation, StoredStep
from esper.leyline.stages import GROWING, SeedStage, stages_mask
from esper.leyline.tensor_dataclass import tensor_dataclass
from esper.tamiyo.scripted import canonical_actions

TRIES = 4
EXPLORED_SHARE = 0.5
REPLACE_BELOW = 0.9
FOSSILIZE_ABOVE = 0.5
GATE_PATIENCE = 2  # multiples of min_training_epochs after which a seed that fails its gate is given up
FAST = 0
COOLDOWN = 7  # steps from PRUNE to the next germination with the default embargo

_O, _S = LifecycleOp, SeedStage
_PRIORITY = (_O.GERMINATE, _O.PRUNE, _O.FOSSILIZE, _O.ADVANCE, _O.WAIT)


@tensor_dataclass
class Worths:
    """Per host: contribution of each blueprint (NaN before it is measured), and which were germinated."""

    worth: Float[Tensor, "N B"]
    tried: Bool[Tensor, "N B"]


@final
class ExploreThenCommit:
    """The rules as a script.

    Args:
        spec: gives the times and the blueprints.
        tries: blueprints that each host tries.
        explored_share: share of the episode after which no untried blueprint is germinated.
        replace_below: seeds worth less than this share of the best blueprint are replaced.
    """

    def __init__(
        self,
        spec: EngineSpec,
        *,
        tries: int = TRIES,
        explored_share: float = EXPLORED_SHARE,
        replace_below: float = REPLACE_BELOW,
    ) -> None:
        device = spec.device
        self._tries, self._replace_below = min(tries, len(spec.selectable)), replace_below
        self._explore_until = explored_share * spec.episode_length
        grown = spec.min_training_epochs + TEMPO_TICKS[FAST] + 2  # steps from germination to the first contribution
        self._last_start = spec.episode_length - grown - spec.num_slots
        self._patience = GATE_PATIENCE * spec.min_training_epochs
        self._numbers = torch.arange(spec.num_blueprints, device=device)
        self._selectable = torch.zeros(spec.num_blueprints, dtype=torch.bool, device=device)
        self._selectable[list(spec.selectable)] = True
        self._growing = torch.tensor(stages_mask(GROWING), device=device)
        self._canonical = canonical_actions(device)
        self._priority = torch.tensor(_PRIORITY, device=device)

    def begin(self, episode: int, hosts: Int[Tensor, " N"]) -> Worths:
        """Nothing is known."""
        del episode
        worth = torch.full((len(hosts), len(self._numbers)), math.nan, device=hosts.device)
        return Worths(worth=worth, tried=torch.zeros_like(worth, dtype=torch.bool))

    def decide(self, obs: Observation, memory: Worths) -> Int[Tensor, "N 8"]:
        """One operation per host: the first of `_PRIORITY` that is wanted and legal."""
        worth_NB = self._learned(obs, memory.worth)
        untried_NB = self._selectable & ~memory.tried
        exploring_N = (memory.tried.sum(dim=1) < self._tries) & (obs.t <= self._explore_until)
        best_N, best_index_N = worth_NB.nan_to_num(nan=-math.inf).max(dim=1)
        wanted_NPS = self._wanted(obs, worth_NB, best_N, exploring_N)
        legal_NPS = obs.legal.index_select(1, self._priority)
        first_N = (wanted_NPS & legal_NPS).flatten(1).to(torch.int8).argmax(dim=1)
        op_N, slot_N = self._priority[first_N // obs.num_slots], first_N % obs.num_slots
        actions = self._canonical[op_N]
        germinate_N = op_N == _O.GERMINATE
        blueprint_N = torch.where(exploring_N, untried_NB.to(torch.int8).argmax(dim=1), best_index_N)
        actions[:, Head.SLOT] = slot_N * (op_N != _O.WAIT)
        actions[:, Head.BLUEPRINT] = blueprint_N * germinate_N
        actions[:, Head.TEMPO].masked_fill_(germinate_N, FAST)
        return actions

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
        settled_N1 = ~(growing_NS & worth_NS.isnan()).any(dim=1, keepdim=True)
        exploring_N1, best_N1 = exploring_N[:, None], best_N[:, None]
        full_N1 = settled_N1 & ~dormant_NS.any(dim=1, keepdim=True)
        surplus_NS = (worth_NS < best_N1) | (obs.num_slots == 1)
        poor_NS = (worth_NS < self._replace_below * best_N1) & (obs.t + COOLDOWN <= self._last_start)
        replaced_NS = torch.where(exploring_N1, full_N1 & surplus_NS, settled_N1 & poor_NS)
        prune_NS = growing_NS & (replaced_NS | worth_NS.isneginf())
        keep_NS = settled_N1 & ~exploring_N1 & ~poor_NS & (worth_NS > FOSSILIZE_ABOVE)
        starts_N1 = exploring_N1 | (settled_N1 & (best_N1 > FOSSILIZE_ABOVE))
        germinate_NS = starts_N1.expand_as(dormant_NS) & (obs.t <= self._last_start)
        always_NS = torch.ones_like(dormant_NS)
        return torch.stack((germinate_NS, prune_NS, keep_NS, always_NS, always_NS), dim=1)
