from esper.leyline.lifecycle import (
    ALPHA_CURVE_NAMES,
    ALPHA_CURVE_STEEPNESS,
    ALPHA_CURVES,
    ALPHA_SPEED_NAMES,
    ALPHA_SPEED_TICKS,
    ALPHA_TARGET_NAMES,
    ALPHA_TARGETS,
    CANONICAL_ACTION,
    FIRST_RAMP_STEEPNESS,
    HEAD_NAMES,
    NUM_BUILTIN_BLUEPRINTS,
    RELEVANCE,
    STYLE_ALGORITHM,
    STYLE_CURVE,
    TEMPO_NAMES,
    TEMPO_TICKS,
    Algorithm,
    AlphaCurve,
    Head,
    LifecycleOp,
    Style,
    head_sizes,
)

READS = {
    LifecycleOp.WAIT: {"op"},
    LifecycleOp.GERMINATE: {"op", "slot", "blueprint", "style", "tempo", "alpha_target"},
    LifecycleOp.SET_ALPHA_TARGET: {"op", "slot", "style", "alpha_target", "alpha_speed", "alpha_curve"},
    LifecycleOp.PRUNE: {"op", "slot", "alpha_speed", "alpha_curve"},
    LifecycleOp.FOSSILIZE: {"op", "slot"},
    LifecycleOp.ADVANCE: {"op", "slot"},
}


def test_each_operation_reads_the_heads_of_its_row():
    for op, names in READS.items():
        assert {name for name, read in zip(HEAD_NAMES, RELEVANCE[op], strict=True) if read} == names


def test_the_canonical_action_is_wait_with_values_inside_their_heads():
    assert CANONICAL_ACTION == (0, 0, Style.SIGMOID_ADD, 1, 2, 0, 0, LifecycleOp.WAIT)
    assert all(value < size for value, size in zip(CANONICAL_ACTION, head_sizes(1), strict=True))
    assert (TEMPO_TICKS[1], ALPHA_TARGETS[2], ALPHA_SPEED_TICKS[0]) == (5, 1.0, 0)


def test_every_stored_number_means_what_it_always_meant():
    # runs, checkpoints and recorded steps hold these numbers; the literals are written out on purpose
    assert [(head.name, int(head)) for head in Head] == [
        ("SLOT", 0), ("BLUEPRINT", 1), ("STYLE", 2), ("TEMPO", 3), ("ALPHA_TARGET", 4), ("ALPHA_SPEED", 5),
        ("ALPHA_CURVE", 6), ("OP", 7),
    ]  # fmt: skip
    assert [(op.name, int(op)) for op in LifecycleOp] == [
        ("WAIT", 0), ("GERMINATE", 1), ("SET_ALPHA_TARGET", 2), ("PRUNE", 3), ("FOSSILIZE", 4), ("ADVANCE", 5),
    ]  # fmt: skip
    assert [(style.name, int(style)) for style in Style] == [
        ("LINEAR_ADD", 0), ("LINEAR_MULTIPLY", 1), ("SIGMOID_ADD", 2), ("GATED_GATE", 3),
    ]  # fmt: skip
    assert list(zip(TEMPO_NAMES, TEMPO_TICKS, strict=True)) == [("FAST", 3), ("STANDARD", 5), ("SLOW", 8)]
    assert list(zip(ALPHA_TARGET_NAMES, ALPHA_TARGETS, strict=True)) == [("HALF", 0.5), ("SEVENTY", 0.7), ("FULL", 1.0)]
    assert list(zip(ALPHA_SPEED_NAMES, ALPHA_SPEED_TICKS, strict=True)) == [
        ("INSTANT", 0), ("FAST", 3), ("MEDIUM", 5), ("SLOW", 8),
    ]  # fmt: skip
    assert NUM_BUILTIN_BLUEPRINTS == 13


def test_every_style_is_a_curve_of_the_first_ramp_and_an_algorithm():
    assert list(zip(Style, STYLE_CURVE, STYLE_ALGORITHM, strict=True)) == [
        (Style.LINEAR_ADD, AlphaCurve.LINEAR, Algorithm.ADD),
        (Style.LINEAR_MULTIPLY, AlphaCurve.LINEAR, Algorithm.MULTIPLY),
        (Style.SIGMOID_ADD, AlphaCurve.SIGMOID, Algorithm.ADD),
        (Style.GATED_GATE, AlphaCurve.LINEAR, Algorithm.GATE),
    ]
    assert FIRST_RAMP_STEEPNESS == 12.0


def test_every_curve_has_its_shape_and_the_sigmoids_their_steepness():
    found = dict(zip(ALPHA_CURVE_NAMES, zip(ALPHA_CURVES, ALPHA_CURVE_STEEPNESS, strict=True), strict=True))
    assert list(found) == ["LINEAR", "COSINE", "SIGMOID_GENTLE", "SIGMOID", "SIGMOID_SHARP"]
    assert (found["LINEAR"][0], found["COSINE"][0]) == (AlphaCurve.LINEAR, AlphaCurve.COSINE)
    assert [found[name] for name in ("SIGMOID_GENTLE", "SIGMOID", "SIGMOID_SHARP")] == [
        (AlphaCurve.SIGMOID, 6.0), (AlphaCurve.SIGMOID, 12.0), (AlphaCurve.SIGMOID, 24.0),
    ]  # fmt: skip
