"""What a step was like, one row per host: the arguments of the kernel as float64, and what several terms share.

A fact is computed when the first term asks for it and then kept, so a mode pays only for the facts it reads.
Missing numbers are NaN in the arguments; every fact says in its name or docstring what stands in for them, because
a mask is a number (`masks.py`), and `mask * value` carries a NaN through any mask.
"""

from collections.abc import Mapping

import torch
from torch import Tensor

from esper.leyline.actions import LifecycleOp
from esper.leyline.record import record
from esper.leyline.stages import STAGE_POTENTIAL, SeedStage
from esper.simic.rewards.config import LEGITIMATE_HOLD
from esper.simic.rewards.derived import derived
from esper.simic.rewards.masks import Mask, above, below, both, choose, equal, is_known, only, without_nan

RANSOM_CONTRIBUTION, RANSOM_GATE_SIGNAL = 0.1, -0.2
"""Points beyond which a seed that helps on its own and harms in company is taken for a hostage taker."""

_POTENTIAL_TABLES: dict[torch.device, Tensor] = {}


def potential_table(device: torch.device) -> Tensor:
    """Stage potentials by stage value, float64 [11], made once per device; a constant of a compiled kernel."""
    table = _POTENTIAL_TABLES.get(device)
    if table is None:
        table = _POTENTIAL_TABLES[device] = torch.tensor(STAGE_POTENTIAL, dtype=torch.float64, device=device)
    return table


@record
class Facts:
    """Arguments of one call and the shared facts; all [N], float64, int64 or bool, unless said otherwise.

    Attributes:
        arguments: the kernel's tensors by name; None = missing in every row.
        weights: the packed numbers by name, each a float64 scalar tensor.
        epoch, max_epochs: float64, [N] or a scalar tensor.
        mode, attribution_formula: static choices of the configuration.
    """

    arguments: Mapping[str, Tensor | None]
    weights: Mapping[str, Tensor]
    epoch: Tensor
    max_epochs: Tensor
    mode: str
    attribution_formula: str

    def number(self, name: str, missing: float) -> Tensor:
        """Argument `name` as float64; `missing` in every row where it was not passed. NaN stays NaN."""
        value = self.arguments[name]
        if value is None:
            return torch.full_like(self.val_acc, missing)
        return value.to(torch.float64)

    def known(self, name: str) -> Tensor:
        """Argument `name` with 0 in the place of what is missing."""
        value = self.arguments[name]
        if value is None:
            return self.zero
        return without_nan(value.to(torch.float64)) if value.is_floating_point() else value.to(torch.float64)

    def exact(self, name: str) -> Tensor:
        """Argument `name`, which every call passes, as it is: int64 or bool."""
        value = self.arguments[name]
        assert value is not None
        return value

    def code(self, name: str) -> Tensor:
        """Argument `name`, a value of an enumeration, in the type that is compared fastest: int64, eager float64."""
        value = self.exact(name)
        return value if torch.compiler.is_compiling() else value.to(torch.float64)

    def is_op(self, op: LifecycleOp) -> Mask:
        """Rows whose effective operation is `op`."""
        return equal(self.op, int(op))

    def is_stage(self, stage: SeedStage) -> Mask:
        """Rows whose target slot is in `stage` before the op."""
        return equal(self.stage, int(stage))

    @derived
    def zero(self) -> Tensor:
        """0 in every row."""
        return torch.zeros_like(self.val_acc)

    @derived
    def one(self) -> Tensor:
        """1 in every row."""
        return torch.ones_like(self.val_acc)

    @derived
    def shaping_on(self) -> Mask:
        """Stage shaping is not switched off; a scalar, like the next two."""
        return equal(self.weights["disable_pbrs"], 0)

    @derived
    def terminal_on(self) -> Mask:
        """The reward of the last step is not switched off."""
        return equal(self.weights["disable_terminal_reward"], 0)

    @derived
    def anti_gaming_on(self) -> Mask:
        """Penalties against gaming are not switched off."""
        return equal(self.weights["disable_anti_gaming"], 0)

    @derived
    def val_acc(self) -> Tensor:
        """Accuracy of the whole model, points; 0 where missing."""
        value = self.arguments["val_accs"]
        assert value is not None
        return without_nan(value.to(torch.float64))

    @derived
    def op(self) -> Tensor:
        """Effective operation."""
        return self.code("actions")

    @derived
    def prune(self) -> Mask:
        """The operation is PRUNE."""
        return self.is_op(LifecycleOp.PRUNE)

    @derived
    def fossilize(self) -> Mask:
        """The operation is FOSSILIZE."""
        return self.is_op(LifecycleOp.FOSSILIZE)

    @derived
    def germinate(self) -> Mask:
        """The operation is GERMINATE."""
        return self.is_op(LifecycleOp.GERMINATE)

    @derived
    def last_step(self) -> Mask:
        """The episode ends with this step."""
        return equal(self.epoch, self.max_epochs)

    @derived
    def seed(self) -> Mask:
        """The target slot holds a live seed; given as bool, or as bytes (`cpu_kernel.py`)."""
        value = self.exact("has_seed_mask")
        if value.dtype != torch.bool:
            value = value.to(torch.float32)  # the cast from bytes that is done by vectors
        return value.to(torch.float64)

    @derived
    def stage(self) -> Tensor:
        """Stage of the target slot before the op."""
        return self.code("stages")

    @derived
    def fossil(self) -> Mask:
        """The target seed is permanent already."""
        return both(self.seed, self.is_stage(SeedStage.FOSSILIZED))

    @derived
    def holding(self) -> Mask:
        """The target seed waits for a decision."""
        return both(self.seed, self.is_stage(SeedStage.HOLDING))

    @derived
    def dwell_epochs(self) -> Tensor:
        """Steps the target seed was observed in its stage before this one, e."""
        return self.number("epochs_in_stage", 0.0)

    @derived
    def dwell_price(self) -> Tensor:
        """What waiting in a stage costs: 0.05 per step, at most 0.3."""
        return torch.clamp(-0.05 * self.dwell_epochs, min=-0.3)

    @derived
    def age(self) -> Tensor:
        """Steps since germination of the target seed."""
        return self.number("seed_ages", 0.0)

    @derived
    def raw_contribution(self) -> Tensor:
        """Leave-one-out contribution with its NaN."""
        return self.number("seed_contributions", torch.nan)

    @derived
    def contribution(self) -> Tensor:
        """Leave-one-out contribution c of the target slot, points; 0 where not measured (`has_contribution`)."""
        return without_nan(self.raw_contribution)

    @derived
    def has_contribution(self) -> Mask:
        """The contribution was measured in this step."""
        return is_known(self.raw_contribution)

    @derived
    def raw_gate_signal(self) -> Tensor:
        """Gain of all players with its NaN."""
        return self.number("counterfactual_improvements", torch.nan)

    @derived
    def gate_signal(self) -> Tensor:
        """Gain g of all players together, points; 0 where not measured (`has_gate_signal`)."""
        return without_nan(self.raw_gate_signal)

    @derived
    def has_gate_signal(self) -> Mask:
        """The gate signal was measured in this step."""
        return is_known(self.raw_gate_signal)

    @derived
    def positive_gate_signal(self) -> Mask:
        """All players together help."""
        return above(self.gate_signal, 0)

    @derived
    def negative_contribution(self) -> Mask:
        """The measured contribution is below zero."""
        return below(self.contribution, 0)

    @derived
    def harmful(self) -> Mask:
        """A live seed without which the model would be better: g < 0."""
        return both(self.seed, below(self.gate_signal, 0))

    @derived
    def ransoming(self) -> Mask:
        """Removing the seed alone hurts, although the model would be better without any."""
        return both(above(self.contribution, RANSOM_CONTRIBUTION), below(self.gate_signal, RANSOM_GATE_SIGNAL))

    @derived
    def potentials(self) -> Tensor:
        """Stage potentials by stage value, [11]."""
        table: Tensor = potential_table(self.val_acc.device)
        return table

    def potential_of(self, stage: Tensor) -> Tensor:
        """Potential of each stage; compiled, a comparison per stage, because a look-up is done element by element.

        What is no stage raises IndexError from the look-up, and has potential 0 where it is compared.
        """
        if not torch.compiler.is_compiling():
            return self.potentials.index_select(0, stage)
        found = self.zero
        for value, potential in enumerate(STAGE_POTENTIAL):
            if potential:
                found = found + potential * equal(stage, value)
        return found

    @derived
    def stage_potential(self) -> Tensor:
        """Potential of the target slot's stage."""
        return self.potential_of(self.exact("stages"))

    @derived
    def previous_potential(self) -> Tensor:
        """Potential of the target slot's previous stage."""
        return self.potential_of(self.exact("previous_stages"))

    @derived
    def potential_now(self) -> Tensor:
        """Potential phi(s, e) = stage potential + min(bonus * e, cap)."""
        return self.stage_potential + self.progress_bonus(self.dwell_epochs)

    @derived
    def potential_before(self) -> Tensor:
        """Potential at the last observation: that of the previous stage at its end where e = 0, else phi(s, e - 1)."""
        entered = equal(self.dwell_epochs, 0)
        stage_part = choose(entered, self.previous_potential, self.stage_potential)
        epochs = choose(entered, self.number("previous_epochs", 0.0), self.dwell_epochs - 1)
        return stage_part + self.progress_bonus(epochs)

    def progress_bonus(self, epochs: Tensor) -> Tensor:
        """Part of the potential that grows with the steps spent in a stage."""
        return torch.minimum(epochs * self.weights["epoch_progress_bonus"], self.weights["max_progress_bonus"])

    @derived
    def shaping_weight(self) -> Tensor:
        """Weight of stage shaping; 0 where there is no seed, or no shaping."""
        return only(self.weights["pbrs_weight"], self.shaping_on, self.seed)

    @derived
    def shaping(self) -> Tensor:
        """F = weight * (gamma * phi(now) - phi(before)), potential-based (Ng, Harada and Russell, ICML 1999)."""
        return self.shaping_weight * (self.weights["gamma"] * self.potential_now - self.potential_before)

    @derived
    def potential_repaid(self) -> Tensor:
        """What PRUNE gives back of stage shaping."""
        return self.shaping_weight * self.potential_now

    @derived
    def legitimacy(self) -> Tensor:
        """Share of a fossilization bonus that the time in HOLDING has earned."""
        return torch.clamp(self.dwell_epochs * (1 / LEGITIMATE_HOLD), max=1.0)

    @derived
    def host_params(self) -> Tensor:
        """Parameters of the host."""
        return self.known("host_params")

    @derived
    def num_fossilized(self) -> Tensor:
        """Permanent seeds of the host."""
        return self.known("num_fossilized")

    @derived
    def host_floor(self) -> Tensor:
        """What growth is measured against: the host's parameters, or a floor under them."""
        return torch.maximum(self.host_params, self.weights["rent_host_params_floor"])

    @derived
    def added_params(self) -> Tensor:
        """Parameters beyond the host's."""
        return torch.relu(self.known("total_params") - self.host_params)

    @derived
    def occupancy(self) -> Tensor:
        """Parameters the slots occupy, weighted by alpha; all added parameters where that is missing."""
        if self.arguments["effective_seed_params"] is None:
            return self.added_params
        measured = self.number("effective_seed_params", torch.nan)
        return choose(is_known(measured), without_nan(measured), self.added_params)

    @derived
    def growth(self) -> Tensor:
        """Occupancy relative to the host."""
        return self.occupancy / self.host_floor

    def combine(self, progress: Tensor, contribution: Tensor) -> Tensor:
        """Mean of two positive signals that is small where either is, 0 where one is 0; without meaning below 0."""
        if self.mode == "escrow":
            return torch.sqrt(torch.relu(progress * contribution))
        if self.attribution_formula == "minimum":
            return torch.minimum(progress, contribution)
        return 2 * progress * contribution / torch.clamp(progress + contribution, min=1e-8)
