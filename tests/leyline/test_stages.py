from esper.leyline.lifecycle import (
    BLENDED,
    COOLDOWN,
    GROWING,
    HAS_MODULE,
    NUM_STAGE_CLASSES,
    NUM_STAGE_VALUES,
    STAGE_CLASS,
    SeedStage,
    stages_mask,
)

UNUSED = 5


def test_one_hot_classes_are_contiguous_and_differ():
    classes = [STAGE_CLASS[stage] for stage in SeedStage]
    assert classes == list(range(NUM_STAGE_CLASSES))
    assert STAGE_CLASS[UNUSED] == STAGE_CLASS[SeedStage.UNKNOWN]


def test_a_stage_has_a_module_or_cools_down_or_is_empty():
    assert frozenset(SeedStage) == HAS_MODULE | COOLDOWN | {SeedStage.UNKNOWN, SeedStage.DORMANT}
    assert not HAS_MODULE & COOLDOWN
    assert frozenset({SeedStage.FOSSILIZED}) == HAS_MODULE - GROWING
    assert BLENDED < HAS_MODULE


def test_a_mask_marks_exactly_the_stages_of_the_set():
    mask = stages_mask(COOLDOWN)
    assert len(mask) == NUM_STAGE_VALUES
    assert [value for value, inside in enumerate(mask) if inside] == [8, 9, 10]
