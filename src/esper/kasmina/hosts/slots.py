"""Slots: named places in a host's forward pass, and the ones that a run uses.

id r<row>c<column>       action order: by (row, column)       execution order: by place in the forward pass
"""

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from enum import StrEnum

from esper.leyline.errors import ConfigError, nearest

_SLOT_ID = re.compile(r"r(0|[1-9][0-9]*)c(0|[1-9][0-9]*)")


class Surface(StrEnum):
    """Position of a slot relative to its block."""

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
        slot_id: e.g. "r0c1". channels: of the features there. surface: its position in its block.
        order: index among all points in action order. position: place in the forward pass, in [0, 1].
    """

    slot_id: str
    channels: int
    surface: Surface
    order: int
    position: float


def parse_slot_id(slot_id: str) -> tuple[int, int]:
    """Row and column of "r<row>c<column>", decimal without leading zeros; sorts in action order.

    Raises:
        ConfigError: anything else.
    """
    match = _SLOT_ID.fullmatch(slot_id)
    if match is None:
        raise ConfigError(f"{slot_id!r} is no slot id; expected r<row>c<column> without leading zeros, e.g. 'r0c1'.")
    return int(match[1]), int(match[2])


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
        parse_slot_id(slot_id)
        if slot_id not in offered:
            raise ConfigError(f"the host has no slot {slot_id!r}; {nearest(slot_id, offered)}")
    if len(set(wanted)) < len(wanted):
        raise ConfigError(f"slots {', '.join(wanted)}: each slot can be enabled only once; remove the repetition.")
    return tuple(sorted((offered[slot_id] for slot_id in wanted), key=lambda point: point.order))
