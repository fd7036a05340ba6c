"""The inputs of the reward kernel, one row per host, and formulas shared by several modes.

A missing number is NaN: comparisons with it are false, and `torch.where` keeps it out of sums and products. Tensors are
[N] unless said otherwise; numbers of the configuration are scalar tensors.
"""

from collections.abc import Mapping

import torch
from torch import Tensor

from esper.leyline.actions import LifecycleOp
from esper.leyline.stages import STAGE_POTENTIAL, SeedStage
from esper.leyline.tensor_dataclass import tensor_dataclass
from esper.simic.rewards.config import LEGITIMATE_HOLD, MIN_CONTRIBUTION

NEW_SEED_POTENTIAL = STAGE_POTENTIAL[SeedStage.GERMINATED]
"""Potential rewarded to GERMINATE, before weight, discount and timing."""
RANSOM_CONTRIBUTION, RANSOM_GATE_SIGNAL = 0.1, -0.2
"""Thresholds (points) of `ransoming`: the seed's contribution is above the first, the gate signal below the second."""

_POTENTIAL_TABLES: dict[torch.device, Tensor] = {}


def potential_table(device: torch.device) -> Tensor:
    """Stage potentials by stage value, float64 [11], cached per device."""
    table = _POTENTIAL_TABLES.get(device)
    if table is None:
        table = _POTENTIAL_TABLES[device] = torch.tensor(STAGE_POTENTIAL, dtype=torch.float64, device=device)
    return table


@tensor_dataclass
class Row:
    """Arguments of one kernel call.

    Attributes:
        given: the kernel's tensors by name; None = missing in every row.
        w: the packed numbers by name. mode, attribution: static choices of the configuration.
        epoch, last: step from 1, and whether it ends the episode; [N] or scalars. steps_left: after this one.
        val_acc: accuracy of the whole model, 0 where missing.
        op, stage, seed: effective operation; stage of the target slot before it, and whether a live seed is there.
        dwell, age: steps the target seed was in its stage, and since germination.
        c, g: leave-one-out contribution of the target slot and gain of all players together, points, NaN where missing.
    """

    given: Mapping[str, Tensor | None]
    w: Mapping[str, Tensor]
    mode: str
    attribution: str
    epoch: Tensor
    last: Tensor
    steps_left: Tensor
    val_acc: Tensor
    op: Tensor
    stage: Tensor
    seed: Tensor
    dwell: Tensor
    age: Tensor
    c: Tensor
    g: Tensor

    def number(self, name: str) -> Tensor:
        """Argument `name` as float64, NaN where it is missing."""
        value = self.given[name]
        return torch.full_like(self.val_acc, torch.nan) if value is None else value.to(torch.float64)

    def known(self, name: str) -> Tensor:
        """Argument `name` as float64, 0 where it is missing."""
        value = self.given[name]
        if value is None:
            return torch.zeros_like(self.val_acc)
        return value.to(torch.float64).nan_to_num(nan=0.0) if value.is_floating_point() else value.to(torch.float64)

    def off(self, switch: str) -> Tensor:
        """Whether a switch of the configuration is off; a scalar."""
        return self.w[switch] == 0


def row_of(
    given: Mapping[str, Tensor | None],
    w: Mapping[str, Tensor],
    epoch: Tensor,
    max_epochs: Tensor,
    mode: str,
    attribution: str,
) -> Row:
    """The row of a call; `given` has the names of the kernel's arguments."""
    tensors = {name: value for name, value in given.items() if value is not None}
    missing = torch.full_like(tensors["val_accs"], torch.nan, dtype=torch.float64)
    return Row(
        given=given,
        w=w,
        mode=mode,
        attribution=attribution,
        epoch=epoch,
        last=epoch == max_epochs,
        steps_left=max_epochs - epoch,
        val_acc=tensors["val_accs"].to(torch.float64).nan_to_num(nan=0.0),
        op=tensors["actions"],
        stage=tensors["stages"],
        seed=tensors["has_seed_mask"],
        dwell=tensors["epochs_in_stage"].to(torch.float64),
        age=tensors["seed_ages"].to(torch.float64),
        c=tensors["seed_contributions"].to(torch.float64),
        g=tensors.get("counterfactual_improvements", missing).to(torch.float64),
    )


# Shared formulas


def combine(x: Row, progress: Tensor, contribution: Tensor) -> Tensor:
    """Mean of two nonnegative signals; small where either is small, 0 where one is 0."""
    if x.mode == "escrow":
        return torch.sqrt(torch.relu(progress * contribution))
    if x.attribution == "minimum":
        return torch.minimum(progress, contribution)
    return 2 * progress * contribution / torch.clamp(progress + contribution, min=1e-8)


def dwell_potential(x: Row, stage: Tensor, epochs: Tensor) -> Tensor:
    """Potential phi(s, e) = stage potential + min(bonus * e, cap); IndexError for an unknown stage."""
    waiting = torch.minimum(epochs * x.w["epoch_progress_bonus"], x.w["max_progress_bonus"])
    return potential_table(stage.device).index_select(0, stage) + waiting


def shaping_weight(x: Row) -> Tensor:
    """Weight of stage shaping; 0 without a seed or with `disable_pbrs`."""
    return torch.where(x.seed & x.off("disable_pbrs"), x.w["pbrs_weight"], 0.0)


def shaping(x: Row) -> Tensor:
    """F = weight * (gamma * phi(now) - phi(before)), potential-based (Ng, Harada and Russell, ICML 1999)."""
    entered, previous_stage = x.dwell == 0, x.given["previous_stages"]
    assert previous_stage is not None
    stage = torch.where(entered, previous_stage, x.stage)
    before = dwell_potential(x, stage, torch.where(entered, x.known("previous_epochs"), x.dwell - 1))
    return shaping_weight(x) * (x.w["gamma"] * dwell_potential(x, x.stage, x.dwell) - before)


def potential_repaid(x: Row) -> Tensor:
    """Stage potential that PRUNE gives back."""
    return shaping_weight(x) * dwell_potential(x, x.stage, x.dwell)


def held(x: Row) -> Tensor:
    """The target seed is in HOLDING."""
    return x.seed & (x.stage == int(SeedStage.HOLDING))


def legitimacy(x: Row) -> Tensor:
    """Share of the fossilization bonus, by time in HOLDING."""
    return torch.clamp(x.dwell * (1 / LEGITIMATE_HOLD), max=1.0)


def contributes(x: Row) -> Tensor:
    """The target seed contributes at least MIN_CONTRIBUTION."""
    return x.c >= MIN_CONTRIBUTION


def host_floor(x: Row) -> Tensor:
    """Denominator of growth: the host's parameters, at least the configured floor."""
    return torch.maximum(x.known("host_params"), x.w["rent_host_params_floor"])


def added_params(x: Row) -> Tensor:
    """Parameters beyond the host's."""
    return torch.relu(x.known("total_params") - x.known("host_params"))


def occupancy(x: Row) -> Tensor:
    """Seed parameters weighted by alpha; all added parameters where that is missing."""
    measured = x.number("effective_seed_params")
    return torch.where(measured.isnan(), added_params(x), measured)


def at_the_end(x: Row, value: Tensor) -> Tensor:
    """`value` in the last step, unless `disable_terminal_reward`."""
    return torch.where(x.last & x.off("disable_terminal_reward"), value, 0.0)


def is_op(x: Row, op: LifecycleOp) -> Tensor:
    """Rows whose effective operation is `op`."""
    return x.op == int(op)


def ransoming(x: Row) -> Tensor:
    """Removing this seed alone hurts, but removing all seeds would help."""
    return x.seed & (x.c > RANSOM_CONTRIBUTION) & (x.g < RANSOM_GATE_SIGNAL)
