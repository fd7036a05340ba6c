"""The inputs of the reward kernel, one row per host, and formulas shared by several modes.

A missing number enters as NaN and is replaced by 0; where that matters, a mask says which numbers were given. Masks are
numbers (`masks.py`). Tensors are [N] float64 unless said otherwise; numbers of the configuration are scalar tensors.
"""

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from esper.leyline.actions import LifecycleOp
from esper.leyline.stages import STAGE_POTENTIAL, SeedStage
from esper.leyline.tensor_dataclass import tensor_dataclass
from esper.simic.rewards.masks import above, below, choose, equal, no
from esper.simic.rewards.reward_config import LEGITIMATE_HOLD

NEW_SEED_POTENTIAL = STAGE_POTENTIAL[SeedStage.GERMINATED]
"""Potential rewarded to GERMINATE, before weight, discount and timing."""
RANSOM_CONTRIBUTION, RANSOM_GATE_SIGNAL = 0.1, -0.2
"""Thresholds (points) of `ransoming`: the seed's contribution is above the first, the gate signal below the second."""

if TYPE_CHECKING:
    computed_once = property
else:

    def computed_once(compute: Callable[["Row"], Tensor]) -> property:
        """As `functools.cached_property` without its lock, which `torch.compile` cannot trace."""
        name = f"_{compute.__name__}"

        def found(row: "Row") -> Tensor:
            if name not in row.__dict__:
                row.__dict__[name] = compute(row)
            return row.__dict__[name]

        return property(found, doc=compute.__doc__)


_POTENTIAL_TABLES: dict[torch.device, Tensor] = {}


def potential_table(device: torch.device) -> Tensor:
    """Stage potentials by stage value, float64 [11], cached per device."""
    table = _POTENTIAL_TABLES.get(device)
    if table is None:
        table = _POTENTIAL_TABLES[device] = torch.tensor(STAGE_POTENTIAL, dtype=torch.float64, device=device)
    return table


@tensor_dataclass
class Row:
    """Arguments of one kernel call, and what several terms share, computed on first use.

    Attributes:
        given: the kernel's tensors by name; None = missing in every row.
        w: the packed numbers by name. mode, attribution: static choices of the configuration.
        epoch, last: step from 1, and mask of the last step; [N] or scalars. steps_left: after this one.
        op, stage, seed: effective operation; stage of the target slot before it, and mask of a live seed there.
        dwell, age: steps the target seed was in its stage, and since germination.
        c, g: leave-one-out contribution of the target slot and gain of all players together, points, 0 where missing;
            c_known, g_known: masks of those that were measured.
    """

    given: Mapping[str, Tensor | None]
    w: Mapping[str, Tensor]
    mode: str
    attribution: str
    epoch: Tensor
    last: Tensor
    steps_left: Tensor
    op: Tensor
    stage: Tensor
    seed: Tensor
    dwell: Tensor
    age: Tensor
    c: Tensor
    c_known: Tensor
    g: Tensor
    g_known: Tensor

    def known(self, name: str) -> Tensor:
        """Argument `name`, 0 where it is missing."""
        value = self.given[name]
        if value is None:
            return self.zero
        return value.to(torch.float64).nan_to_num(nan=0.0) if value.is_floating_point() else value.to(torch.float64)

    def on(self, switch: str) -> Tensor:
        """1 unless the configuration sets `disable_<switch>`; a scalar."""
        return no(self.w["disable_" + switch])

    def is_op(self, op: LifecycleOp) -> Tensor:
        """Mask of rows whose effective operation is `op`."""
        return equal(self.op, int(op))

    def in_stage(self, stage: SeedStage) -> Tensor:
        """Mask of a live target seed in `stage`."""
        return equal(self.stage, int(stage)) * self.seed

    @computed_once
    def zero(self) -> Tensor:
        """0 in every row."""
        return torch.zeros_like(self.c)

    @computed_once
    def prune(self) -> Tensor:
        """Mask of PRUNE."""
        return self.is_op(LifecycleOp.PRUNE)

    @computed_once
    def fossilize(self) -> Tensor:
        """Mask of FOSSILIZE."""
        return self.is_op(LifecycleOp.FOSSILIZE)

    @computed_once
    def fossil(self) -> Tensor:
        """Mask of a target seed that is fossilized."""
        return self.in_stage(SeedStage.FOSSILIZED)

    @computed_once
    def held(self) -> Tensor:
        """Mask of a target seed in HOLDING."""
        return self.in_stage(SeedStage.HOLDING)

    @computed_once
    def host_params(self) -> Tensor:
        """Parameters of the host."""
        return self.known("host_params")

    @computed_once
    def growth(self) -> Tensor:
        """Occupied parameters in shares of the host's."""
        return self.occupancy / self.host_floor

    @computed_once
    def host_floor(self) -> Tensor:
        """Denominator of growth: the host's parameters, at least the configured floor."""
        return torch.maximum(self.host_params, self.w["rent_host_params_floor"])

    @computed_once
    def added_params(self) -> Tensor:
        """Parameters beyond the host's."""
        return torch.relu(self.known("total_params") - self.host_params)

    @computed_once
    def occupancy(self) -> Tensor:
        """Seed parameters weighted by alpha; all added parameters where that is missing."""
        measured = number(self.given, "effective_seed_params")
        return choose(equal(measured, measured), measured.nan_to_num(nan=0.0), self.added_params)

    def potential_of(self, name: str) -> Tensor:
        """Potential of the stages in argument `name`; IndexError for an unknown stage."""
        stages = self.given[name]
        assert stages is not None
        return potential_table(stages.device).index_select(0, stages)

    @computed_once
    def stage_potential(self) -> Tensor:
        """Potential of the target's stage."""
        return self.potential_of("stages")

    @computed_once
    def shaping_weight(self) -> Tensor:
        """Weight of stage shaping; 0 without a seed or with `disable_pbrs`."""
        return self.on("pbrs") * self.w["pbrs_weight"] * self.seed

    @computed_once
    def potential(self) -> Tensor:
        """Potential phi(s, e) of the seed as it is, s = stage, e = steps in it."""
        return self.stage_potential + _waiting(self, self.dwell)

    @computed_once
    def ransoming(self) -> Tensor:
        """Mask: removing this seed alone hurts, but removing all seeds would help."""
        return self.seed * above(self.c, RANSOM_CONTRIBUTION) * below(self.g, RANSOM_GATE_SIGNAL)


def row_of(
    given: Mapping[str, Tensor | None],
    w: Mapping[str, Tensor],
    epoch: Tensor,
    max_epochs: Tensor,
    mode: str,
    attribution: str,
) -> Row:
    """The row of a call; `given` has the names of the kernel's arguments."""
    c, g = number(given, "seed_contributions"), number(given, "counterfactual_improvements")
    return Row(
        given=given,
        w=w,
        mode=mode,
        attribution=attribution,
        epoch=epoch,
        last=(epoch == max_epochs).to(torch.float64),
        steps_left=max_epochs - epoch,
        op=number(given, "actions"),
        stage=number(given, "stages"),
        seed=number(given, "has_seed_mask"),
        dwell=number(given, "epochs_in_stage"),
        age=number(given, "seed_ages"),
        c=c.nan_to_num(nan=0.0),
        c_known=equal(c, c),
        g=g.nan_to_num(nan=0.0),
        g_known=equal(g, g),
    )


def number(given: Mapping[str, Tensor | None], name: str) -> Tensor:
    """Argument `name` as float64, NaN where it is missing."""
    value = given[name]
    if value is None:
        value = given["seed_contributions"]
        assert value is not None
        return torch.full_like(value, torch.nan, dtype=torch.float64)
    return value.to(torch.float64)


# Shared formulas


def combine(x: Row, progress: Tensor, contribution: Tensor) -> Tensor:
    """Mean of two nonnegative signals; small where either is small, 0 where one is 0."""
    if x.mode == "escrow":
        return torch.sqrt(torch.relu(progress * contribution))
    if x.attribution == "minimum":
        return torch.minimum(progress, contribution)
    return 2 * progress * contribution / torch.clamp(progress + contribution, min=1e-8)


def _waiting(x: Row, epochs: Tensor) -> Tensor:
    """Part of the potential that grows with the steps in a stage: min(bonus * e, cap)."""
    return torch.minimum(epochs * x.w["epoch_progress_bonus"], x.w["max_progress_bonus"])


def shaping(x: Row) -> Tensor:
    """F = weight * (gamma * phi(now) - phi(before)), potential-based (Ng, Harada and Russell, ICML 1999)."""
    entered = equal(x.dwell, 0)
    before = choose(entered, x.potential_of("previous_stages"), x.stage_potential)
    before = before + _waiting(x, choose(entered, x.known("previous_epochs"), x.dwell - 1))
    return x.shaping_weight * (x.w["gamma"] * x.potential - before)


def legitimacy(x: Row) -> Tensor:
    """Share of the fossilization bonus, by time in HOLDING."""
    return torch.clamp(x.dwell * (1 / LEGITIMATE_HOLD), max=1.0)


def at_the_end(x: Row, value: Tensor) -> Tensor:
    """`value` in the last step, unless `disable_terminal_reward`."""
    return x.last * x.on("terminal_reward") * value
