"""What a pass trains: the seeds that run, the statistics of their gradients, and the optimizer step.

Statistics are of the last batch of a train pass, of unscaled gradients before clipping, for seeds in TRAINING or
BLENDING that are not frozen. Over the m tensors of a seed (and of its gate, if it has one), in float64:

    vanishing   tensors with norm < 1e-7              exploding   tensors with norm > 10 grad_clip, or not finite
    health      clamp01(1 - 0.5 vanishing/m - 0.8 exploding/m), 0 where the norm of the whole seed is not finite
    ratio       (|g_seed| / sqrt(n_seed)) / (|g_host| / sqrt(n_host) + 1e-8), 0 where either norm is below 1e-8
"""

from dataclasses import dataclass
from typing import final

import numpy as np
import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from esper.kasmina.blending import blend, seed_input
from esper.kasmina.parameters.dropout import Draws
from esper.kasmina.parameters.layout import FlatLayout, Template
from esper.kasmina.parameters.optimizers import OptimizerSpec, clip_factor, step_rows
from esper.kasmina.parameters.population import Population, TrainingCopy
from esper.leyline.lifecycle import TRAINED, Algorithm, AlphaMode, HostFamily, SeedStage
from esper.tolaria.engine_config import LossScaler
from esper.tolaria.executors.protocol import GradientStatistics, Structure


@dataclass(frozen=True)
class Bound:
    """A template, the row it runs on, and the random numbers that it draws."""

    template: Template
    params: Tensor
    buffers: Tensor
    draws: Draws | None = None

    def __call__(self, h: Tensor) -> Tensor:
        """Run on `h`."""
        self.template.bind(self.params, self.buffers, self.draws)
        return self.template(h)


@final
@dataclass(frozen=True)
class RunningSeed:
    """One seed of one host in one pass.

    A `hidden` seed (alpha 0) leaves the features unchanged and is trained by a straight-through gradient; an `isolated`
    one sends no gradient upstream through its input.
    """

    seed: Bound
    gate: Bound | None
    algorithm: Algorithm
    alpha: Tensor
    hidden: bool
    isolated: bool

    def train(self, h: Tensor) -> Tensor:
        """Features after the slot, in a train pass."""
        return self._blended(h, seed_input(h, isolated=self.isolated), None if self.hidden else self.alpha)

    def evaluate(self, h: Tensor) -> Tensor:
        """Features after the slot, in a validation pass."""
        return self._blended(h, seed_input(h, isolated=False), self.alpha)

    def _blended(self, h: Tensor, x: Tensor, alpha: Tensor | None) -> Tensor:
        gate = self.gate(x) if self.gate is not None else None
        return blend(h, self.seed(x), self.algorithm, alpha, gate)


SlotsOfHost = dict[str, RunningSeed]


@dataclass(frozen=True, kw_only=True)
class TrainedRows:
    """The seeds and gates that a pass trains: host and slot of each seed, and the working copies."""

    seed_host: np.ndarray
    seed_slot: np.ndarray
    gate_of: np.ndarray
    """Row among the trained seeds of each trained gate."""
    seeds: TrainingCopy
    gates: TrainingCopy


def trained_mask(structure: Structure) -> np.ndarray:
    """[N, S]: seeds trained in the next train pass: TRAINING to FOSSILIZED and not frozen by a downward ramp."""
    trained: np.ndarray = np.isin(structure.stage, tuple(TRAINED)) & (structure.alpha_mode != AlphaMode.DOWN)
    trained &= ~structure.stopped[:, None]
    return trained


def isolated_mask(population: Population, structure: Structure) -> np.ndarray:
    """[N, S]: seeds that send no gradient into the host: all seeds of a CNN; in other families the inactive ones."""
    isolated: np.ndarray = (structure.alpha <= 0.0) | (population.family is HostFamily.CNN)
    return isolated


def blend_order(structure: Structure) -> np.ndarray:
    """[N, S]: how a seed blends, as a rank: ADD, MULTIPLY, GATE, each first hidden and then active."""
    ranks: np.ndarray = 2 * structure.algorithm + (structure.alpha > 0.0)
    return ranks


def blend_of_rank(rank: int) -> tuple[Algorithm, bool]:
    """The algorithm of a rank, and whether the seed is active."""
    return Algorithm(rank // 2), bool(rank % 2)


def begin_hosts(population: Population) -> TrainingCopy:
    """Copy the rows of all hosts."""
    p = population
    return p.host.begin(torch.arange(p.num_envs, device=p.device), [p.host.params.shape[1]] * p.num_envs)


def begin_training(population: Population, structure: Structure) -> TrainedRows:
    """Copy the rows that will be trained, as wide as the widest of them.

    They are sorted by slot, blueprint, isolation, `blend_order` and host, so that seeds that run alike are adjacent.
    """
    hosts, slots = np.nonzero(trained_mask(structure))
    isolated, blends = isolated_mask(population, structure), blend_order(structure)
    by_seed = (values[hosts, slots] for values in (blends, isolated, structure.blueprint))
    order = np.lexsort((hosts, *by_seed, slots))
    hosts, slots = hosts[order], slots[order]
    flat = hosts * population.num_slots + slots
    gated = (structure.algorithm == Algorithm.GATE) & structure.has_gate
    gate_of = np.flatnonzero(gated[hosts, slots])
    channels = [population.points[s].channels for s in slots]
    blueprints = structure.blueprint[hosts, slots].tolist()
    seed_kinds = [population.seed_kinds[c, b] for c, b in zip(channels, blueprints, strict=True)]
    gate_kinds = [population.gate_kinds[channels[i]] for i in gate_of]
    seed_widths = [kind.start.parameters.total for kind in seed_kinds]
    gate_widths = [kind.start.parameters.total for kind in gate_kinds]
    return TrainedRows(
        seed_host=hosts,
        seed_slot=slots,
        gate_of=gate_of,
        seeds=population.seeds.begin(population.index(flat), seed_widths),
        gates=population.gates.begin(population.index(flat[gate_of]), gate_widths),
    )


def finish_training(population: Population, rows: TrainedRows) -> None:
    """Write the trained rows back."""
    population.seeds.finish(rows.seeds)
    population.gates.finish(rows.gates)


def running_seeds(
    population: Population, structure: Structure, alpha: Tensor, rows: TrainedRows | None
) -> list[SlotsOfHost]:
    """The seeds of each host that a pass runs; in a train pass (with `rows`) the trained ones run on the copies.

    `alpha` [N, S] is on the device; seeds that are neither active nor trained are left out.
    """
    leaf: dict[tuple[int, int], Tensor] = {}
    gate_leaf: dict[tuple[int, int], Tensor] = {}
    if rows is not None:
        places = list(zip(rows.seed_host.tolist(), rows.seed_slot.tolist(), strict=True))
        leaf = dict(zip(places, rows.seeds.leaves, strict=True))
        gate_leaf = {places[i]: row for i, row in zip(rows.gate_of.tolist(), rows.gates.leaves, strict=True)}
    active, isolated = structure.alpha > 0.0, isolated_mask(population, structure)
    runs = active if rows is None else active | trained_mask(structure)
    hosts: list[SlotsOfHost] = [{} for _ in range(population.num_envs)]
    for n, s in zip(*np.nonzero(runs), strict=True):
        point = population.points[s]
        kind = population.seed_kinds[point.channels, int(structure.blueprint[n, s])]
        kind.template.train(rows is not None)
        algorithm = Algorithm(int(structure.algorithm[n, s]))
        flat = n * population.num_slots + s
        gate = None
        if algorithm is Algorithm.GATE:
            gate_kind = population.gate_kinds[point.channels]
            row = gate_leaf.get((n, s), population.gates.params[flat])
            gate = _bound(gate_kind.template, row, population.gates.buffers[flat])
        row, buffers = leaf.get((n, s), population.seeds.params[flat]), population.seeds.buffers[flat]
        draws = population.draws(slice(n, n + 1), int(s), trains=rows is not None) if kind.template.draws else None
        hosts[n][point.slot_id] = RunningSeed(
            seed=_bound(kind.template, row, buffers, draws),
            gate=gate,
            algorithm=algorithm,
            alpha=alpha[n, s],
            hidden=not active[n, s],
            isolated=bool(isolated[n, s]),
        )
    return hosts


def _bound(template: Template, params: Tensor, buffers: Tensor, draws: Draws | None = None) -> Bound:
    """The template on the row, cut to its length; a leaf has that length already."""
    used = params if params.requires_grad else params[: template.parameters.total]
    return Bound(template, used, buffers[: template.buffers.total], draws)


_VANISHING = 1e-7
_EXPLODING_CLIPS = 10.0
_NO_GRADIENT = 1e-8


def not_measured(num_envs: int, num_slots: int, device: torch.device) -> GradientStatistics:
    """Statistics of a pass in which no seed was trained."""
    missing = torch.full((num_envs, num_slots), torch.nan, device=device)
    never = torch.zeros(num_envs, num_slots, dtype=torch.bool, device=device)
    return GradientStatistics(
        norm=missing, health=missing.clone(), vanishing=never, exploding=never.clone(), ratio=missing.clone()
    )


def gradient_statistics(
    population: Population, structure: Structure, rows: TrainedRows, host_grad: Float[Tensor, "N P"]
) -> GradientStatistics:
    """Statistics of the gradients in the working copies."""
    device = population.device
    out = not_measured(population.num_envs, population.num_slots, device)
    stage, blueprint = (of[rows.seed_host, rows.seed_slot] for of in (structure.stage, structure.blueprint))
    gate_row = np.full(len(stage), -1)
    gate_row[rows.gate_of] = np.arange(len(rows.gate_of))
    host_norm = torch.linalg.vector_norm(host_grad, dim=1, dtype=torch.float64)
    alike: dict[tuple[int, int, bool], list[int]] = {}
    for i in np.flatnonzero(np.isin(stage, (SeedStage.TRAINING, SeedStage.BLENDING))).tolist():
        channels = population.points[rows.seed_slot[i]].channels
        alike.setdefault((channels, int(blueprint[i]), bool(gate_row[i] >= 0)), []).append(i)
    for (channels, index, gated), some in alike.items():
        chosen, layout = np.array(some), population.seed_kinds[channels, index].start.parameters
        norms = tensor_norms(rows.seeds.grad[population.index(chosen)], layout)
        num_params = layout.num_params
        if gated:
            gate_layout = population.gate_kinds[channels].start.parameters
            grad = rows.gates.grad[population.index(gate_row[chosen])]
            norms = torch.cat((norms, tensor_norms(grad, gate_layout)), dim=1)
            num_params += gate_layout.num_params
        place = (population.index(rows.seed_host[chosen]), population.index(rows.seed_slot[chosen]))
        norm_R = host_norm[place[0]]
        rms_R = norm_R / population.host_kind.start.parameters.num_params**0.5
        judged = judge(norms, num_params**0.5, norm_R, rms_R, population.optimizer_spec.grad_clip)
        for name, value in vars(judged).items():
            getattr(out, name)[place] = value
    return out


def tensor_norms(grad: Float[Tensor, "R W"], layout: FlatLayout) -> Float[Tensor, "R M"]:
    """L2 norm of each of the M tensors in each row, float64; columns past the layout are not read."""
    squares = grad[:, : layout.total].to(torch.float64).square()
    sums = torch.zeros(grad.shape[0], len(layout.tensors) + 1, dtype=torch.float64, device=grad.device)
    return sums.index_add_(1, layout.segment_ids.to(grad.device, non_blocking=True), squares)[:, :-1].sqrt()


def judge(
    norms: Float[Tensor, "R M"],
    root_params: float,
    host_norm: Float[Tensor, " R"],
    host_rms: Float[Tensor, " R"],
    grad_clip: float,
) -> GradientStatistics:
    """The statistics of R seeds from the norms of their tensors, float64.

    Args:
        norms: of the gradient of each tensor.
        root_params: square root of the number of parameters of each seed.
        host_norm: of the gradient of the seed's host.
        host_rms: the same divided by the square root of the host's number of parameters.
        grad_clip: limit of the norm of a seed's gradient.
    """
    count = norms.shape[1]
    norm_R = torch.linalg.vector_norm(norms, dim=1)
    vanishing_R = (norms < _VANISHING).sum(dim=1)
    exploding_R = ((norms > _EXPLODING_CLIPS * grad_clip) | ~torch.isfinite(norms)).sum(dim=1)
    health_R = (1.0 - 0.5 * vanishing_R / count - 0.8 * exploding_R / count).clamp(0.0, 1.0)
    health_R = torch.where(torch.isfinite(norm_R), health_R, 0.0)
    no_gradient_R = (norm_R < _NO_GRADIENT) | (host_norm < _NO_GRADIENT)
    ratio_R = (norm_R / root_params) / (host_rms + 1e-8)
    ratio_R = torch.where(no_gradient_R, 0.0, torch.where(torch.isfinite(ratio_R), ratio_R, torch.nan))
    return GradientStatistics(
        norm=norm_R.float(),
        health=health_R.float(),
        vanishing=vanishing_R > 0,
        exploding=exploding_R > 0,
        ratio=ratio_R.float(),
    )


class StackedOptimizer:
    """Unscales, clips and steps everything that a train pass trains; made once per pass.

    Each host is clipped by its own norm, each seed by its own norm including its gate.

    Args:
        population: whose rows are trained. hosts: all of its hosts. rows: seeds and gates.
        scaler: precision of training. decay_mask: elements of a host that are decayed.
        lr_factors: what multiplies the learning rates in this step, as `HostData.lr_factors` gives it.
    """

    def __init__(
        self,
        population: Population,
        hosts: TrainingCopy,
        rows: TrainedRows,
        scaler: LossScaler,
        decay_mask: Bool[Tensor, " P"],
        lr_factors: Float[Tensor, "N C"] | None = None,
    ) -> None:
        self._spec: OptimizerSpec = population.optimizer_spec
        self._hosts, self._seeds, self._gates = hosts, rows.seeds, rows.gates
        self._scaler, self._decay_mask = scaler, decay_mask
        self._seed_host: Int[Tensor, " R"] = population.index(rows.seed_host)
        self._gate_of: Int[Tensor, " G"] = population.index(rows.gate_of)
        self._host_lr: float | Tensor = self._spec.host_lr
        self._seed_lr: float | Tensor = self._spec.seed_lr
        self._gate_lr: float | Tensor = self._spec.seed_lr
        if lr_factors is not None:
            self._host_lr = self._host_lr * lr_factors[:, :1]
            self._seed_lr = self._seed_lr * lr_factors[self._seed_host, population.index(1 + rows.seed_slot), None]
            self._gate_lr = self._seed_lr[self._gate_of]

    @torch.no_grad()
    def unscale(self) -> None:
        """Undo the loss scale of fp16; nothing otherwise."""
        if self._scaler.enabled:
            inverse_N = 1.0 / self._scaler.scale
            self._hosts.grad.mul_(inverse_N[:, None])
            self._seeds.grad.mul_(inverse_N[self._seed_host][:, None])
            self._gates.grad.mul_(inverse_N[self._seed_host[self._gate_of]][:, None])

    @torch.no_grad()
    def step(self) -> None:
        """Clip and step. Under fp16, hosts with gradients that are not finite are skipped."""
        host_norm = torch.linalg.vector_norm(self._hosts.grad, dim=1)
        seed_square, gate_square = (
            torch.linalg.vector_norm(own.grad, dim=1).square() for own in (self._seeds, self._gates)
        )
        seed_norm = seed_square.index_add_(0, self._gate_of, gate_square).sqrt()
        finite = self._finite(host_norm, seed_norm)
        spec = self._spec
        host_clip, seed_clip = (clip_factor(norm, spec.grad_clip) for norm in (host_norm, seed_norm))
        gate_clip = seed_clip[self._gate_of]
        self._step(self._hosts, host_clip, self._host_lr, self._decay_mask, finite)
        if len(self._seed_host):
            finite_R = None if finite is None else finite[self._seed_host]
            self._step(self._seeds, seed_clip, self._seed_lr, None, finite_R)
            if len(self._gate_of):
                finite_G = None if finite_R is None else finite_R[self._gate_of]
                self._step(self._gates, gate_clip, self._gate_lr, None, finite_G)

    def _finite(self, host_norm_N: Tensor, seed_norm_R: Tensor) -> Tensor | None:
        if not self._scaler.enabled:
            return None
        bad_seed = torch.zeros_like(host_norm_N).index_add_(0, self._seed_host, (~torch.isfinite(seed_norm_R)).float())
        finite = torch.isfinite(host_norm_N) & (bad_seed == 0)
        self._scaler.update(finite)
        return finite

    def _step(
        self, working: TrainingCopy, factor_R: Tensor, lr: float | Tensor, decay: Tensor | None, active: Tensor | None
    ) -> None:
        working.grad.mul_(factor_R[:, None])
        step_rows(self._spec, working.params, working.grad, working.optimizer, lr, decay, active)
