"""Gradient statistics of seeds.

Measured on the last batch of a train pass, on unscaled gradients before clipping, for seeds in TRAINING or BLENDING
that are not frozen. Over the m tensors of a seed (and of its gate, if it has one), in float64:

    vanishing   tensors with norm < 1e-7              exploding   tensors with norm > 10 grad_clip, or not finite
    health      clamp01(1 - 0.5 vanishing/m - 0.8 exploding/m), 0 where the norm of the whole seed is not finite
    ratio       (|g_seed| / sqrt(n_seed)) / (|g_host| / sqrt(n_host) + 1e-8), 0 where either norm is below 1e-8
"""

import numpy as np
import torch
from jaxtyping import Bool, Float
from torch import Tensor

from esper.kasmina.parameters.layout import FlatLayout
from esper.kasmina.parameters.population import Population
from esper.leyline.stages import SeedStage
from esper.leyline.tensor_dataclass import tensor_dataclass
from esper.tolaria.executors.protocol import Structure
from esper.tolaria.executors.running_seeds import TrainedRows

_VANISHING = 1e-7
_EXPLODING_CLIPS = 10.0
_NO_GRADIENT = 1e-8


@tensor_dataclass
class GradientStatistics:
    """Of all slots [N, S], or of some seeds [R]; NaN (and False) where nothing was measured."""

    norm: Float[Tensor, "*seeds"]
    health: Float[Tensor, "*seeds"]
    vanishing: Bool[Tensor, "*seeds"]
    exploding: Bool[Tensor, "*seeds"]
    ratio: Float[Tensor, "*seeds"]


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
    stage = structure.stage[rows.seed_host, rows.seed_slot]
    measured = np.isin(stage, (SeedStage.TRAINING, SeedStage.BLENDING))
    gate_row = np.full(len(stage), -1)
    gate_row[rows.gate_of] = np.arange(len(rows.gate_of))
    host_norm = torch.linalg.vector_norm(host_grad, dim=1, dtype=torch.float64)
    for chosen in _same_kind(population, structure, rows, measured, gate_row):
        first = chosen[0]
        channels = population.points[rows.seed_slot[first]].channels
        blueprint = int(structure.blueprint[rows.seed_host[first], rows.seed_slot[first]])
        layout = population.seed_kinds[channels, blueprint].template.parameters
        norms = tensor_norms(rows.seeds.grad[population.index(chosen)], layout)
        num_params = layout.num_params
        if gate_row[first] >= 0:
            gate_layout = population.gate_kinds[channels].template.parameters
            grad = rows.gates.grad[population.index(gate_row[chosen])]
            norms = torch.cat((norms, tensor_norms(grad, gate_layout)), dim=1)
            num_params += gate_layout.num_params
        place = (population.index(rows.seed_host[chosen]), population.index(rows.seed_slot[chosen]))
        norm_R = host_norm[place[0]]
        rms_R = norm_R / population.host_kind.template.parameters.num_params**0.5
        judged = judge(norms, None, num_params**0.5, norm_R, rms_R, population.optimizer_spec.grad_clip)
        for name, value in vars(judged).items():
            getattr(out, name)[place] = value
    return out


def _same_kind(
    population: Population, structure: Structure, rows: TrainedRows, measured: np.ndarray, gate_row: np.ndarray
) -> list[np.ndarray]:
    """Measured rows, grouped by channels, blueprint and whether they have a gate."""
    channels = np.array([point.channels for point in population.points])[rows.seed_slot]
    blueprint = structure.blueprint[rows.seed_host, rows.seed_slot]
    kind = np.stack((channels, blueprint, gate_row >= 0), axis=1)
    which = np.flatnonzero(measured)
    kinds, group = np.unique(kind[which], axis=0, return_inverse=True)
    return [which[group.reshape(-1) == g] for g in range(len(kinds))]


def tensor_norms(grad: Float[Tensor, "R W"], layout: FlatLayout) -> Float[Tensor, "R M"]:
    """L2 norm of each of the M tensors in each row, float64; columns past the layout are not read."""
    squares = grad[:, : layout.total].to(torch.float64).square()
    sums = torch.zeros(grad.shape[0], layout.num_tensors + 1, dtype=torch.float64, device=grad.device)
    return sums.index_add_(1, layout.segment_ids.to(grad.device), squares)[:, :-1].sqrt()


def judge(
    norms: Float[Tensor, "R M"],
    known: Bool[Tensor, "R M"] | None,
    root_params: float | Float[Tensor, " R"],
    host_norm: Float[Tensor, " R"],
    host_rms: Float[Tensor, " R"],
    grad_clip: float,
) -> GradientStatistics:
    """The statistics of R seeds from the norms of their tensors, float64.

    Args:
        norms: of the gradient of each tensor.
        known: which tensors the seed has; None for all.
        root_params: square root of the number of parameters of the seed.
        host_norm: of the gradient of the seed's host.
        host_rms: the same divided by the square root of the host's number of parameters.
        grad_clip: limit of the norm of a seed's gradient.
    """
    if known is None:
        known = torch.ones_like(norms, dtype=torch.bool)
    norms_RM, count_R = torch.where(known, norms, 0.0), known.sum(dim=1)
    norm_R = torch.linalg.vector_norm(norms_RM, dim=1)
    vanishing_R = (known & (norms_RM < _VANISHING)).sum(dim=1)
    exploding_R = ((norms_RM > _EXPLODING_CLIPS * grad_clip) | ~torch.isfinite(norms_RM)).sum(dim=1)
    health_R = (1.0 - 0.5 * vanishing_R / count_R - 0.8 * exploding_R / count_R).clamp(0.0, 1.0)
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
