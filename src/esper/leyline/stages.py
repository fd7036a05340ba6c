"""The stages of a slot, the transitions between them, and the shaping potential of each stage.

    DORMANT -> GERMINATED -> TRAINING -> BLENDING -> HOLDING -> FOSSILIZED
                    \\            \\           \\  ^______/  \\
                     `-----------'-----------'------------'--> PRUNED -> EMBARGOED -> RESETTING -> DORMANT

Value 5 is unused; a loaded state that contains it is refused.
"""

from enum import IntEnum


class SeedStage(IntEnum):
    """Values of `SlotState.stage`."""

    UNKNOWN = 0
    DORMANT = 1
    GERMINATED = 2
    TRAINING = 3
    BLENDING = 4
    HOLDING = 6
    FOSSILIZED = 7
    PRUNED = 8
    EMBARGOED = 9
    RESETTING = 10


NUM_STAGE_VALUES = 11
"""Size of a table indexed by the stage value."""

STAGE_CLASS = (0, 1, 2, 3, 4, 0, 5, 6, 7, 8, 9)
"""Contiguous index of each stage value for one-hots; the unused value 5 maps to UNKNOWN and is never stored."""

NUM_STAGE_CLASSES = 10

STAGE_POTENTIAL = (0.0, 0.0, 1.0, 2.0, 3.5, 0.0, 5.5, 6.0, 0.0, 0.0, 0.0)
"""Shaping potential of each stage value."""

_S = SeedStage
HAS_MODULE = frozenset({_S.GERMINATED, _S.TRAINING, _S.BLENDING, _S.HOLDING, _S.FOSSILIZED})
"""Stages in which a slot owns a seed module; such a slot is *live*."""
GROWING = HAS_MODULE - {_S.FOSSILIZED}
"""Live stages that are not permanent."""
COOLDOWN = frozenset({_S.PRUNED, _S.EMBARGOED, _S.RESETTING})
BLENDED = frozenset({_S.BLENDING, _S.HOLDING, _S.FOSSILIZED})
"""Stages in which a seed may be active (alpha may be positive)."""


class AlphaMode(IntEnum):
    """Direction of the current ramp of alpha."""

    HOLD = 0
    UP = 1
    DOWN = 2


class AlphaCurve(IntEnum):
    """Shape of a ramp; NONE without a module."""

    NONE = 0
    LINEAR = 1
    COSINE = 2
    SIGMOID = 3


class Algorithm(IntEnum):
    """How the output of a seed enters the features of its host; NONE if there never was a seed."""

    NONE = 0
    ADD = 1
    MULTIPLY = 2
    GATE = 3


class Cause(IntEnum):
    """Reason of a transition."""

    NONE = 0
    OP = 1
    AUTO = 2
    ADVANCE = 3
    SCHEDULED = 4
    COOLDOWN = 5
    ROLLBACK = 6


class HostFamily(IntEnum):
    """Family of host networks, which determines the blueprints that fit."""

    CNN = 0
    TRANSFORMER = 1


def stages_mask(stages: frozenset[SeedStage]) -> tuple[bool, ...]:
    """The set as a lookup table over the stage values 0..10."""
    return tuple(value in stages for value in range(NUM_STAGE_VALUES))
