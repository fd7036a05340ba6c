"""Hosts that start with fossilized seeds, to train a grown structure from the first step."""

import torch
from jaxtyping import Int

from esper.kasmina.rules.lifecycle import SeedCosts
from esper.kasmina.rules.slot_fields import select
from esper.leyline.messages import HostState, SlotState
from esper.leyline.stages import Algorithm, AlphaCurve, AlphaMode, SeedStage
from esper.leyline.tensor_dataclass import replace


def planted(
    slots: SlotState,
    hosts: HostState,
    blueprint: Int[torch.Tensor, "N S"],
    algorithm: Int[torch.Tensor, "N S"],
    costs: SeedCosts,
) -> tuple[SlotState, HostState]:
    """Put fossilized seeds into empty slots; `blueprint` is -1 where the slot stays empty."""
    here = blueprint >= 0
    gated = algorithm == Algorithm.GATE
    column = torch.arange(blueprint.shape[1], device=blueprint.device)
    params = costs.seed_params[column, blueprint.clamp(min=0)] + gated * costs.gate_params
    count = here.sum(dim=1)
    slots = select(
        here,
        {
            "stage": int(SeedStage.FOSSILIZED),
            "prev_stage": int(SeedStage.HOLDING),
            "serial": here.cumsum(dim=1) - 1,
            "blueprint": blueprint,
            "algorithm": algorithm,
            "has_gate": gated,
            "params": params,
            "germ_curve": int(AlphaCurve.LINEAR),
            "alpha": 1.0,
            "alpha_target": 1.0,
            "alpha_mode": int(AlphaMode.HOLD),
            "alpha_curve": int(AlphaCurve.LINEAR),
        },
        slots,
    )
    return slots, replace(hosts, n_germinated=hosts.n_germinated + count, n_fossilized=hosts.n_fossilized + count)
