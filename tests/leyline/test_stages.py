from esper.leyline.lifecycle import (
    BLENDED,
    COOLDOWN,
    GROWING,
    HAS_MODULE,
    NUM_STAGE_CLASSES,
    NUM_STAGE_VALUES,
    STAGE_CLASS,
    STAGE_POTENTIAL,
    SeedStage,
    stages_mask,
)

UNUSED = 5


def test_value_5_belongs_to_no_stage():
    assert UNUSED not in {int(stage) for stage in SeedStage}
    assert max(SeedStage) == NUM_STAGE_VALUES - 1


def test_one_hot_classes_are_contiguous_and_differ():
    classes = [STAGE_CLASS[stage] for stage in SeedStage]
    assert classes == list(range(NUM_STAGE_CLASSES))
    assert STAGE_CLASS[UNUSED] == STAGE_CLASS[SeedStage.UNKNOWN]


def test_a_stage_has_a_module_or_cools_down_or_is_empty():
    assert frozenset(SeedStage) == HAS_MODULE | COOLDOWN | {SeedStage.UNKNOWN, SeedStage.DORMANT}
    assert not HAS_MODULE & COOLDOWN
    assert frozenset({SeedStage.FOSSILIZED}) == HAS_MODULE - GROWING
    assert BLENDED < HAS_MODULE


def test_potentials_rise_with_growth_and_are_zero_without_a_seed():
    growth = [SeedStage.DORMANT, SeedStage.GERMINATED, SeedStage.TRAINING, SeedStage.BLENDING, SeedStage.HOLDING]
    values = [STAGE_POTENTIAL[stage] for stage in [*growth, SeedStage.FOSSILIZED]]
    assert values == sorted(set(values))
    assert all(STAGE_POTENTIAL[stage] == 0.0 for stage in COOLDOWN)
    assert len(STAGE_POTENTIAL) == len(STAGE_CLASS) == NUM_STAGE_VALUES


def test_a_mask_marks_exactly_the_stages_of_the_set():
    mask = stages_mask(COOLDOWN)
    assert len(mask) == NUM_STAGE_VALUES
    assert [value for value, inside in enumerate(mask) if inside] == [8, 9, 10]
