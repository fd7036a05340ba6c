from esper.leyline.actions import (
    ALPHA_CURVE_NAMES,
    ALPHA_CURVE_STEEPNESS,
    ALPHA_CURVES,
    ALPHA_SPEED_NAMES,
    ALPHA_SPEED_TICKS,
    ALPHA_TARGET_NAMES,
    ALPHA_TARGETS,
    CANONICAL_ACTION,
    HEAD_NAMES,
    HEADS,
    NUM_HEADS,
    NUM_OPS,
    RELEVANCE,
    STYLE_ALGORITHM,
    STYLE_CURVE,
    TEMPO_NAMES,
    TEMPO_TICKS,
    Head,
    LifecycleOp,
    Style,
    head_sizes,
)
from esper.leyline.stages import Algorithm, AlphaCurve

READS = {
    LifecycleOp.WAIT: {"op"},
    LifecycleOp.GERMINATE: {"op", "slot", "blueprint", "style", "tempo", "alpha_target"},
    LifecycleOp.SET_ALPHA_TARGET: {"op", "slot", "style", "alpha_target", "alpha_speed", "alpha_curve"},
    LifecycleOp.PRUNE: {"op", "slot", "alpha_speed", "alpha_curve"},
    LifecycleOp.FOSSILIZE: {"op", "slot"},
    LifecycleOp.ADVANCE: {"op", "slot"},
}


def test_the_head_table_is_in_the_order_of_the_head_indices():
    assert tuple(head.name.lower() for head in Head) == HEAD_NAMES
    assert (NUM_HEADS, NUM_OPS) == (8, 6)


def test_each_operation_reads_the_heads_of_its_row():
    for op, names in READS.items():
        assert {name for name, read in zip(HEAD_NAMES, RELEVANCE[op], strict=True) if read} == names


def test_sizes_of_a_run_with_three_slots():
    assert head_sizes(3) == (3, 13, 4, 3, 3, 4, 5, 6)
    assert head_sizes(1, num_blueprints=20) == (1, 20, 4, 3, 3, 4, 5, 6)


def test_value_tables_have_one_row_per_value_of_their_head():
    sizes = dict(zip(HEAD_NAMES, head_sizes(3), strict=True))
    assert len(TEMPO_TICKS) == len(TEMPO_NAMES) == sizes["tempo"]
    assert len(ALPHA_TARGETS) == len(ALPHA_TARGET_NAMES) == sizes["alpha_target"]
    assert len(ALPHA_SPEED_TICKS) == len(ALPHA_SPEED_NAMES) == sizes["alpha_speed"]
    assert len(ALPHA_CURVES) == len(ALPHA_CURVE_STEEPNESS) == len(ALPHA_CURVE_NAMES) == sizes["alpha_curve"]
    assert len(STYLE_ALGORITHM) == len(STYLE_CURVE) == len(Style) == sizes["style"]


def test_the_canonical_action_is_wait_with_values_inside_their_heads():
    assert CANONICAL_ACTION == (0, 0, Style.SIGMOID_ADD, 1, 2, 0, 0, LifecycleOp.WAIT)
    assert all(value < size for value, size in zip(CANONICAL_ACTION, head_sizes(1), strict=True))
    assert (TEMPO_TICKS[1], ALPHA_TARGETS[2], ALPHA_SPEED_TICKS[0]) == (5, 1.0, 0)


def test_the_gated_style_ramps_linearly_and_uses_the_gate():
    assert STYLE_ALGORITHM[Style.GATED_GATE] is Algorithm.GATE
    assert STYLE_CURVE[Style.GATED_GATE] is AlphaCurve.LINEAR
    assert STYLE_CURVE[Style.SIGMOID_ADD] is AlphaCurve.SIGMOID


def test_entropy_constants_are_usable():
    for head in HEADS:
        assert head.bonus >= 1.0
        assert 0.0 < head.alarm < head.floor < 1.0
        assert head.floor_weight > 0.0
