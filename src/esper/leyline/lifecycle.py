"""The vocabulary of the lifecycle: the stages of a slot, and the action space of one operation and its parameters.

    DORMANT -> GERMINATED -> TRAINING -> BLENDING -> HOLDING -> FOSSILIZED
                    \\            \\           \\  ^______/  \\
                     `-----------'-----------'------------'--> PRUNED -> EMBARGOED -> RESETTING -> DORMANT

Value 5 is unused; a loaded state that contains it is refused.

An action has eight heads. `HEADS` holds the size of each, the operations that read it, and its canonical value for all
others. Masks, canonical actions, causal credit and reports are derived from it.

    example   slot=1 blueprint=conv_light style=SIGMOID_ADD tempo=STANDARD alpha_target=FULL ... op=GERMINATE
    stored    [1,    1,                   2,                1,             2,             0, 0,  1]
"""

from enum import IntEnum
from typing import NamedTuple


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
TRAINED = HAS_MODULE - {_S.GERMINATED}
"""Stages in which a seed runs in a train pass."""
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


class LifecycleOp(IntEnum):
    """The operations, by value of the op head."""

    WAIT = 0
    GERMINATE = 1
    SET_ALPHA_TARGET = 2
    PRUNE = 3
    FOSSILIZE = 4
    ADVANCE = 5


OP_NAMES = tuple(op.name for op in LifecycleOp)
NUM_OPS = len(OP_NAMES)


class Head(IntEnum):
    """Index of each head in every `[..., 8]` tensor."""

    SLOT = 0
    BLUEPRINT = 1
    STYLE = 2
    TEMPO = 3
    ALPHA_TARGET = 4
    ALPHA_SPEED = 5
    ALPHA_CURVE = 6
    OP = 7


NUM_HEADS = len(Head)


class Style(IntEnum):
    """Curve of the first ramp and algorithm; one head, because factored masks cannot forbid pairs."""

    LINEAR_ADD = 0
    LINEAR_MULTIPLY = 1
    SIGMOID_ADD = 2
    GATED_GATE = 3


STYLE_ALGORITHM = (Algorithm.ADD, Algorithm.MULTIPLY, Algorithm.ADD, Algorithm.GATE)
STYLE_CURVE = (AlphaCurve.LINEAR, AlphaCurve.LINEAR, AlphaCurve.SIGMOID, AlphaCurve.LINEAR)
FIRST_RAMP_STEEPNESS = 12.0

TEMPO_TICKS = (3, 5, 8)
"""FAST, STANDARD, SLOW: ticks of a seed's first ramp."""
TEMPO_NAMES = ("FAST", "STANDARD", "SLOW")
ALPHA_TARGETS = (0.5, 0.7, 1.0)
ALPHA_TARGET_NAMES = ("HALF", "SEVENTY", "FULL")
ALPHA_SPEED_TICKS = (0, 3, 5, 8)
ALPHA_SPEED_NAMES = ("INSTANT", "FAST", "MEDIUM", "SLOW")
ALPHA_CURVES = (
    AlphaCurve.LINEAR,
    AlphaCurve.COSINE,
    AlphaCurve.SIGMOID,
    AlphaCurve.SIGMOID,
    AlphaCurve.SIGMOID,
)
ALPHA_CURVE_STEEPNESS = (12.0, 12.0, 6.0, 12.0, 24.0)
ALPHA_CURVE_NAMES = ("LINEAR", "COSINE", "SIGMOID_GENTLE", "SIGMOID", "SIGMOID_SHARP")

NUM_BUILTIN_BLUEPRINTS = 13
"""Size of the blueprint head without blueprints of users; index 0 (`noop`) is never selectable."""

_O = LifecycleOp


class HeadSpec(NamedTuple):
    """One row of the head table.

    Attributes:
        values: their names; none for `slot` and `blueprint`, whose values depend on the run.
        used_by: operations that read the head.
        canonical: stored value when the operation does not read the head.
        bonus: multiplier of the entropy bonus.
        floor, floor_weight: entropy floor and the coefficient of its penalty.
    """

    name: str
    values: tuple[str, ...]
    used_by: frozenset[LifecycleOp]
    canonical: int
    bonus: float
    floor: float
    floor_weight: float

    @property
    def size(self) -> int:
        """Number of values; 0 where it depends on the run (`head_sizes`)."""
        return len(self.values)


_ALL = frozenset(LifecycleOp)
_GERMINATE = frozenset({_O.GERMINATE})
_RETARGET = frozenset({_O.GERMINATE, _O.SET_ALPHA_TARGET})
_RAMP = frozenset({_O.SET_ALPHA_TARGET, _O.PRUNE})
HEADS: tuple[HeadSpec, ...] = (
    HeadSpec("slot", (), _ALL - {_O.WAIT}, 0, 1.0, 0.15, 0.1),
    HeadSpec("blueprint", (), _GERMINATE, 0, 1.3, 0.20, 0.3),
    HeadSpec("style", tuple(style.name for style in Style), _RETARGET, int(Style.SIGMOID_ADD), 1.2, 0.15, 0.1),
    HeadSpec("tempo", TEMPO_NAMES, _GERMINATE, 1, 1.3, 0.20, 0.3),
    HeadSpec("alpha_target", ALPHA_TARGET_NAMES, _RETARGET, 2, 1.2, 0.10, 0.1),
    HeadSpec("alpha_speed", ALPHA_SPEED_NAMES, _RAMP, 0, 1.2, 0.10, 0.1),
    HeadSpec("alpha_curve", ALPHA_CURVE_NAMES, _RAMP, 0, 1.2, 0.10, 0.1),
    HeadSpec("op", OP_NAMES, _ALL, 0, 1.0, 0.30, 0.3),
)
"""The head table, in storage order."""

HEAD_NAMES = tuple(head.name for head in HEADS)
CANONICAL_ACTION = tuple(head.canonical for head in HEADS)

RELEVANCE: tuple[tuple[bool, ...], ...] = tuple(tuple(op in head.used_by for head in HEADS) for op in LifecycleOp)
"""`RELEVANCE[op][head]`: whether the operation reads the head."""


def canonical_action(op: LifecycleOp, **heads: int) -> tuple[int, ...]:
    """Eight head values with `heads` by name, e.g. slot=1, and the canonical value in all others."""
    action = list(CANONICAL_ACTION)
    for name, value in heads.items():
        action[Head[name.upper()]] = value
    action[Head.OP] = int(op)
    return tuple(action)


def head_sizes(num_slots: int, num_blueprints: int = NUM_BUILTIN_BLUEPRINTS) -> tuple[int, ...]:
    """Number of values of each head in a run with `num_slots` enabled slots."""
    sizes = [head.size for head in HEADS]
    sizes[Head.SLOT], sizes[Head.BLUEPRINT] = num_slots, num_blueprints
    return tuple(sizes)
