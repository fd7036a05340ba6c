"""Slots: named places in a host's forward pass, and the ones that a run uses.

host            id                                action order        execution order
built in        r<row>c<column>, e.g. "r0c1"      row, column         place in the forward pass
user's module   path of a submodule, "layer2.1"   as the user lists   place in the forward pass
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from enum import StrEnum

from esper.leyline.errors import ConfigError, nearest


class Surface(StrEnum):
    """Position of a slot relative to its block."""

    OUTPUT = "output"
    """The output of a submodule."""
    PRE_POOL = "pre_pool"
    """After the ReLU of a block, before its pooling."""
    POST_POOL = "post_pool"
    """After the pooling of a block."""
    BLOCK_END = "block_end"
    """After the last layer of a segment."""


@dataclass(frozen=True, kw_only=True)
class InjectionPoint:
    """A place where a seed can grow.

    Attributes:
        slot_id: e.g. "r0c1". channels: C of features [C, H, W], D of [T, D]. surface: its position in its block.
        order: index among all points in action order. position: place in the forward pass, in [0, 1].
    """

    slot_id: str
    channels: int
    surface: Surface
    order: int
    position: float


def enabled_points(points: Sequence[InjectionPoint], slot_ids: Iterable[str]) -> tuple[InjectionPoint, ...]:
    """The points of a run in action order, for `slot_ids` in any order.

    Raises:
        ConfigError: `slot_ids` is empty, names a slot twice, or names one that the host does not offer.
    """
    wanted = list(slot_ids)
    offered = {point.slot_id: point for point in points}
    if not wanted:
        raise ConfigError(f"no slots are enabled; choose at least one of {', '.join(offered)}.")
    for slot_id in wanted:
        if slot_id not in offered:
            raise ConfigError(f"the host has no slot {slot_id!r}; {nearest(slot_id, offered)}")
    if len(set(wanted)) < len(wanted):
        raise ConfigError(f"slots {', '.join(wanted)}: each slot can be enabled only once; remove the repetition.")
    return tuple(sorted((offered[slot_id] for slot_id in wanted), key=lambda point: point.order))
