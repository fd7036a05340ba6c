"""The vocabulary of the lifecycle."""

from esper.leyline.lifecycle import (
    ALPHA_CURVE_NAMES,
    ALPHA_CURVE_STEEPNESS,
    ALPHA_CURVES,
    ALPHA_SPEED_NAMES,
    ALPHA_SPEED_TICKS,
    ALPHA_TARGET_NAMES,
    ALPHA_TARGETS,
    BLENDED,
    CANONICAL_ACTION,
    COOLDOWN,
    FIRST_RAMP_STEEPNESS,
    GROWING,
    HAS_MODULE,
    HEAD_NAMES,
    NUM_BUILTIN_BLUEPRINTS,
    NUM_STAGE_CLASSES,
    RELEVANCE,
    STAGE_CLASS,
    STYLE_ALGORITHM,
    STYLE_CURVE,
    TEMPO_NAMES,
    TEMPO_TICKS,
    Algorithm,
    AlphaCurve,
    Head,
    LifecycleOp,
    SeedStage,
    Style,
    head_sizes,
    stages_mask,
)

UNUSED = 5
READS = {
    LifecycleOp.WAIT: {"op"},
    LifecycleOp.GERMINATE: {"op", "slot", "blueprint", "style", "tempo", "alpha_target"},
    LifecycleOp.SET_ALPHA_TARGET: {"op", "slot", "style", "alpha_target", "alpha_speed", "alpha_curve"},
    LifecycleOp.PRUNE: {"op", "slot", "alpha_speed", "alpha_curve"},
    LifecycleOp.FOSSILIZE: {"op", "slot"},
    LifecycleOp.ADVANCE: {"op", "slot"},
}


def test_one_hot_classes_of_stages_are_contiguous_and_differ():
    assert [STAGE_CLASS[stage] for stage in SeedStage] == list(range(NUM_STAGE_CLASSES))
    assert STAGE_CLASS[UNUSED] == STAGE_CLASS[SeedStage.UNKNOWN]


def test_a_stage_has_a_module_or_cools_down_or_is_empty():
    assert frozenset(SeedStage) == HAS_MODULE | COOLDOWN | {SeedStage.UNKNOWN, SeedStage.DORMANT}
    assert not HAS_MODULE & COOLDOWN
    assert frozenset({SeedStage.FOSSILIZED}) == HAS_MODULE - GROWING
    assert BLENDED < HAS_MODULE
    assert stages_mask(COOLDOWN) == (*[False] * 8, True, True, True)


def test_each_operation_reads_the_heads_of_its_row():
    for op, names in READS.items():
        assert {name for name, read in zip(HEAD_NAMES, RELEVANCE[op], strict=True) if read} == names


def test_the_canonical_action_is_wait_with_values_inside_their_heads():
    assert CANONICAL_ACTION == (0, 0, Style.SIGMOID_ADD, 1, 2, 0, 0, LifecycleOp.WAIT)
    assert all(value < size for value, size in zip(CANONICAL_ACTION, head_sizes(1), strict=True))


def test_every_stored_number_means_what_it_always_meant():
    # runs, checkpoints and recorded steps hold these numbers; the literals are written out on purpose
    assert {head.name: int(head) for head in Head} == {
        "SLOT": 0, "BLUEPRINT": 1, "STYLE": 2, "TEMPO": 3,
        "ALPHA_TARGET": 4, "ALPHA_SPEED": 5, "ALPHA_CURVE": 6, "OP": 7,
    }  # fmt: skip
    assert {op.name: int(op) for op in LifecycleOp} == {
        "WAIT": 0, "GERMINATE": 1, "SET_ALPHA_TARGET": 2, "PRUNE": 3, "FOSSILIZE": 4, "ADVANCE": 5
    }  # fmt: skip
    assert list(zip([(style.name, int(style)) for style in Style], STYLE_CURVE, STYLE_ALGORITHM, strict=True)) == [
        (("LINEAR_ADD", 0), AlphaCurve.LINEAR, Algorithm.ADD),
        (("LINEAR_MULTIPLY", 1), AlphaCurve.LINEAR, Algorithm.MULTIPLY),
        (("SIGMOID_ADD", 2), AlphaCurve.SIGMOID, Algorithm.ADD),
        (("GATED_GATE", 3), AlphaCurve.LINEAR, Algorithm.GATE),
    ]
    assert list(zip(TEMPO_NAMES, TEMPO_TICKS, strict=True)) == [("FAST", 3), ("STANDARD", 5), ("SLOW", 8)]
    assert list(zip(ALPHA_TARGET_NAMES, ALPHA_TARGETS, strict=True)) == [("HALF", 0.5), ("SEVENTY", 0.7), ("FULL", 1.0)]
    assert list(zip(ALPHA_SPEED_NAMES, ALPHA_SPEED_TICKS, strict=True)) == [
        ("INSTANT", 0), ("FAST", 3), ("MEDIUM", 5), ("SLOW", 8),
    ]  # fmt: skip
    found = dict(zip(ALPHA_CURVE_NAMES, zip(ALPHA_CURVES, ALPHA_CURVE_STEEPNESS, strict=True), strict=True))
    assert list(found) == ["LINEAR", "COSINE", "SIGMOID_GENTLE", "SIGMOID", "SIGMOID_SHARP"]
    assert (found["LINEAR"][0], found["COSINE"][0]) == (AlphaCurve.LINEAR, AlphaCurve.COSINE)
    assert [found[name] for name in ("SIGMOID_GENTLE", "SIGMOID", "SIGMOID_SHARP")] == [
        (AlphaCurve.SIGMOID, 6.0), (AlphaCurve.SIGMOID, 12.0), (AlphaCurve.SIGMOID, 24.0),
    ]  # fmt: skip
    assert (NUM_BUILTIN_BLUEPRINTS, FIRST_RAMP_STEEPNESS) == (13, 12.0)
