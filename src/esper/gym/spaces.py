"""The spaces of an environment, and the masks of its actions.

    observation  [31 S + 25 + B S]  features of `tamiyo.features`, then which blueprint each slot holds, as one-hots
    action       [8]                the heads of `leyline.lifecycle.HEADS`, in their order

Shape legend: N = hosts, S = slots, B = blueprints, D = width of an observation, V = values of all heads, concatenated.
"""

from functools import lru_cache

import numpy as np
import torch
import torch.nn.functional as F
from gymnasium.spaces import Box, MultiDiscrete
from jaxtyping import Bool, Float, Int
from torch import Tensor

from esper.kasmina.rules.conditions import resolve_target_slot
from esper.leyline.lifecycle import CANONICAL_ACTION, Head, LifecycleOp
from esper.leyline.messages import EngineSpec, HostState, SlotState
from esper.tamiyo.features import HOST_FEATURES, SLOT_FEATURES, features_of
from esper.tamiyo.heads import available_masks, choices_given_op, layout_of, relevance, tables_of


def observation_space(spec: EngineSpec) -> Box:
    """Of one host: the range of each feature, float32 [D]."""
    columns = (*HOST_FEATURES, *SLOT_FEATURES * spec.num_slots)
    kinds = spec.num_slots * spec.num_blueprints
    low, high = [column.low for column in columns] + kinds * [0.0], [column.high for column in columns] + kinds * [1.0]
    return Box(np.array(low, dtype=np.float32), np.array(high, dtype=np.float32), dtype=np.float32)


def action_space(spec: EngineSpec) -> MultiDiscrete:
    """Of one host: the number of values of each of the eight heads."""
    return MultiDiscrete(np.array(spec.head_sizes))


def observation_of(
    slots: SlotState, hosts: HostState, t: int, episode_length: int, num_blueprints: int
) -> Float[Tensor, "N D"]:
    """What a learner sees of each host."""
    features, blueprint = features_of(slots, hosts, t, episode_length)
    held = F.one_hot(blueprint + 1, num_blueprints + 1)[..., 1:]  # -1 is an empty slot
    return torch.cat((features, held.flatten(1)), dim=1)


def action_mask(
    legal: Bool[Tensor, "N 6 S"], has_gate: Bool[Tensor, "N S"], selectable: Bool[Tensor, " B"]
) -> Bool[Tensor, "N V"]:
    """The values of each head that some legal action has, heads side by side; at least one of each head.

    A head that no legal operation reads has its canonical value alone.
    """
    tables = tables_of(legal, selectable)
    mask = available_masks(choices_given_op(legal, selectable), legal, has_gate, tables)
    layout = layout_of(tables.sizes, legal.device)
    empty = (layout.member @ mask) == 0.0
    canonical = (layout.first + _canonical(legal.device)[:, None]).flatten()
    mask.index_add_(0, canonical, empty.to(mask.dtype))
    return mask.t() > 0.0


def legal_actions(
    actions: Int[Tensor, "N 8"],
    legal: Bool[Tensor, "N 6 S"],
    has_gate: Bool[Tensor, "N S"],
    selectable: Bool[Tensor, " B"],
) -> tuple[Int[Tensor, "N 8"], Bool[Tensor, " N"]]:
    """The actions that are executed, and where one was illegal, which is WAIT then.

    Heads that the operation does not read get their canonical value.
    """
    op, canonical = actions[:, Head.OP], _canonical(actions.device)
    _, allowed = resolve_target_slot(actions, legal, has_gate)
    allowed = allowed & (selectable[actions[:, Head.BLUEPRINT]] | (op != LifecycleOp.GERMINATE))
    taken = torch.where(relevance(op) & allowed[:, None], actions, canonical)
    taken[:, Head.OP] = op * allowed  # WAIT is 0
    return taken, ~allowed


@lru_cache(maxsize=8)
def _canonical(device: torch.device) -> Int[Tensor, " 8"]:
    return torch.tensor(CANONICAL_ACTION, device=device)
