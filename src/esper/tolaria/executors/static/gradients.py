"""Gradient statistics of seeds by masks: computed for every blueprint in every slot, selected by each host's own."""

from collections.abc import Mapping

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
    static_slots: Mapping[str, StaticSlot],
    masks: SeedMasks,
    slots: SlotState,
    host_grad: Float[Tensor, "N P"],
) -> GradientStatistics:
    """Statistics of the gradients in the slabs."""
    p = population
    out = not_measured(p.num_envs, p.num_slots, p.device)
    measured = in_stages(slots.stage, _MEASURED) & masks.trainable
    host_norm = torch.linalg.vector_norm(host_grad, dim=1, dtype=torch.float64)
    host_rms = host_norm / p.host_kind.template.parameters.num_params**0.5
    for s, point in enumerate(p.points):
        slot, gate = static_slots[point.slot_id], p.gate_kinds[point.channels].template.parameters
        gated = masks.gate_trainable[:, s]
        gate_norms, gate_known = tensor_norms(_gradient(slot.gate), gate), gated[:, None].expand(-1, gate.num_tensors)
        for seed in slot.seeds:
            layout = seed.rows.stacked.parameters
            seed_norms = tensor_norms(_gradient(seed), layout)
            norms = torch.cat((seed_norms, gate_norms), dim=1)
            known = torch.cat((torch.ones_like(seed_norms, dtype=torch.bool), gate_known), dim=1)
            root = (layout.num_params + gated.to(torch.float64) * gate.num_params).sqrt()
            judged = judge(norms, known, root, host_norm, host_rms, p.optimizer_spec.grad_clip)
            for name, value in vars(judged).items():
                column = getattr(out, name)[:, s]
                torch.where(seed.own & measured[:, s], value, column, out=column)
    return out


def _gradient(candidate: Candidate) -> Tensor:
    assert candidate.update is not None, "gradients are measured in a train pass"
    return candidate.update.grad
