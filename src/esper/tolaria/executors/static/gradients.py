"""Gradient statistics of seeds by masks: of every kind in every slot; each host takes its own. See `gradients`."""

from collections.abc import Iterable, Mapping

import torch
from jaxtyping import Float
from torch import Tensor

from esper.kasmina.parameters.population import Population
from esper.kasmina.rules.guards import in_stages
from esper.leyline.messages import SlotState
from esper.leyline.stages import SeedStage
from esper.tolaria.executors.gradients import GradientStatistics, judge, not_measured, tensor_norms
from esper.tolaria.executors.static.slots import Candidate, SeedMasks, StaticSlot

_MEASURED = frozenset({SeedStage.TRAINING, SeedStage.BLENDING})


def static_gradient_statistics(
    population: Population,
    passing: Mapping[str, StaticSlot],
    masks: SeedMasks,
    slots: SlotState,
    host_grad: Float[Tensor, "N P"],
) -> GradientStatistics:
    """Statistics of the gradients that lie in the slabs now."""
    p = population
    out = not_measured(p.num_envs, p.num_slots, p.device)
    measured = in_stages(slots.stage, _MEASURED) & masks.trainable
    host_norm = torch.linalg.vector_norm(host_grad, dim=1, dtype=torch.float64)
    host_rms = host_norm / p.host_kind.template.parameters.num_params**0.5
    for s, point in enumerate(p.points):
        slot, gate = passing[point.slot_id], p.gate_kinds[point.channels].template.parameters
        gated = masks.gate_trainable[:, s]
        gate_norms = tensor_norms(_gradient(slot.gate), gate)
        for seed in slot.seeds:
            layout = seed.rows.stacked.parameters
            norms = torch.cat((tensor_norms(_gradient(seed), layout), gate_norms), dim=1)
            known = torch.cat((torch.ones_like(norms[:, gate.num_tensors :], dtype=torch.bool),
                               gated[:, None].expand(-1, gate.num_tensors)), dim=1)  # fmt: skip
            root = (layout.num_params + gated.to(torch.float64) * gate.num_params).sqrt()
            judged = judge(norms, known, root, host_norm, host_rms, p.optimizer_spec.grad_clip)
            _take(out, s, vars(judged).items(), seed.own & measured[:, s])
    return out


def _gradient(candidate: Candidate) -> Tensor:
    assert candidate.learning is not None, "gradients are measured in a train pass"
    return candidate.learning.grad


def _take(out: GradientStatistics, s: int, judged: Iterable[tuple[str, Tensor]], mine: Tensor) -> None:
    for name, value in judged:
        column = getattr(out, name)[:, s]
        torch.where(mine, value, column, out=column)
