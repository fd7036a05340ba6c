"""The columns once more as plain numbers, independent of the tables of the module: places, ranges, what moves them.

Place 0 to 24 are the host, 25 + 31 s + o is column o of slot s.
"""

import math

import hypothesis.strategies as st
import pytest
import torch
from hypothesis import given, settings
from states import everywhere, random_observation, with_hosts, with_slots

from esper.kasmina.rules.slot_fields import empty_slots, ingest, new_hosts
from esper.leyline.lifecycle import AlphaMode, SeedStage
from esper.leyline.messages import HostState, Measurements, Observation, SlotState
from esper.leyline.tensor_dataclass import replace
from esper.tamiyo.features import HOST_FEATURES, SLOT_FEATURES, observe

NAN, INF = math.nan, math.inf
HOST_FLAGS = range(16, 23)  # last_success, last_op
HOST_SIGNED = (*range(1, 13), 23, 24)  # losses and accuracies
SLOT_FLAGS = (*range(11), 25, 26)  # occupied, stage, vanishing, exploding
SLOT_SIGNED = (12, 13, 20, 22, 27, 29)  # contribution, two velocities, interactions, health before, freshness
MEASURED_SLOT_FLOATS = (
    "acc_at_germination", "acc_at_stage_start", "acc_at_blending_start", "contribution", "contribution_velocity",
    "interaction_sum", "boost_received", "grad_norm", "grad_health", "grad_health_prev", "grad_ratio_ema",
)  # fmt: skip
HOST_FLOATS = (
    "val_acc", "val_loss", "train_acc", "train_loss", "prev_val_acc", "prev_val_loss", "acc_hist", "loss_hist",
    "committed_acc", "cf_total", "best_acc",
)  # fmt: skip


def column(o: int, slot: int = 0) -> int:
    return 25 + 31 * slot + o


def ranges(num_slots: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Lowest and highest value of each column, and whether it is 0 or 1 and nothing between."""
    width = 25 + 31 * num_slots
    low, flag = torch.zeros(width), torch.zeros(width, dtype=torch.bool)
    signed = [*HOST_SIGNED, *(column(o, s) for s in range(num_slots) for o in SLOT_SIGNED)]
    flags = [*HOST_FLAGS, *(column(o, s) for s in range(num_slots) for o in SLOT_FLAGS)]
    low[signed], flag[flags] = -1.0, True
    return low, torch.ones(width), flag


def test_the_declared_ranges_are_these():
    declared = (*HOST_FEATURES, *SLOT_FEATURES, *SLOT_FEATURES)
    low, high, _ = ranges(2)
    assert [(feature.low, feature.high) for feature in declared] == list(zip(low.tolist(), high.tolist(), strict=True))


def assert_in_range(obs: Observation) -> None:
    features = observe(obs)[0]
    low, high, flag = ranges(obs.num_slots)
    assert features.isfinite().all()
    assert (features >= low).all(), (features < low).nonzero()[:, 1].unique()
    assert (features <= high).all(), (features > high).nonzero()[:, 1].unique()
    flags = features[:, flag]
    assert ((flags == 0) | (flags == 1)).all()
    dormant = (obs.slots.stage == SeedStage.DORMANT).repeat_interleave(31, dim=1)
    assert (features[:, 25:][dormant] == 0).all()
    assert (observe(obs)[1][obs.slots.stage == SeedStage.DORMANT] == -1).all()


@settings(max_examples=40, deadline=None)
@given(st.integers(0, 2**31), st.sampled_from([1, 3, 4]), st.integers(1, 300), st.integers(1, 60))
def test_every_column_of_a_valid_state_is_in_its_range(seed, num_slots, t, episode_length):
    assert_in_range(random_observation(seed, n=8, s=num_slots, t=t, episode_length=episode_length))


def with_every_float(obs: Observation, value: float) -> Observation:
    slots = {name: torch.full_like(getattr(obs.slots, name), value) for name in MEASURED_SLOT_FLOATS}
    hosts = {name: torch.full_like(getattr(obs.hosts, name), value) for name in HOST_FLOATS}
    return with_hosts(with_slots(obs, **slots), **hosts)


@settings(max_examples=60, deadline=None)
@given(st.integers(0, 2**31), st.sampled_from([INF, -INF, NAN, 3e38, -3e38, 1e-45, -0.0]))
def test_every_column_of_a_hostile_state_is_in_its_range(seed, value):
    # losses, accuracies and all that was measured of a seed at once, in every stage
    assert_in_range(with_every_float(random_observation(seed, n=8), value))


@pytest.mark.parametrize("stage", [stage for stage in SeedStage if stage is not SeedStage.UNKNOWN])
def test_a_state_of_which_nothing_was_measured_has_the_missing_value_everywhere(stage):
    obs = with_every_float(everywhere(random_observation(3, n=2, s=2), stage, contribution_step=-1), NAN)
    seen = observe(with_slots(obs, grad_vanishing=obs.has_gate | True, grad_exploding=obs.has_gate | True))[0]
    assert (seen[:, 1:13] == -1).all()
    for s in range(2):
        missing = 0.0 if stage is SeedStage.DORMANT else -1.0
        assert (seen[:, [column(o, s) for o in (12, 13, 22, 23, 24, 25, 26)]] == 0).all()
        assert (seen[:, [column(27, s), column(29, s)]] == missing).all()


# What each field of the state moves. ---------------------------------------------------------------------------------


def blending(num_slots: int = 3) -> Observation:
    """Every slot half blended and measured in the step before, with a value of its own in every field."""
    obs = everywhere(
        random_observation(5, n=1, s=num_slots, t=31), SeedStage.BLENDING,
        prev_stage=3, epochs_in_stage=2, prev_epochs=9, age=5, serial=1, blueprint=4, algorithm=1, has_gate=0, tempo=3,
        germ_curve=1, params=10, alpha=0.5, alpha_start=0.0, alpha_target=0.7, alpha_curve=1, alpha_steepness=12.0,
        alpha_total=5, alpha_done=2, acc_at_germination=50.0, acc_at_stage_start=50.0, acc_at_blending_start=50.0,
        contribution=1.0, contribution_step=30, contribution_velocity=1.0, interaction_sum=1.0, boost_received=1.0,
        grad_norm=1.0, grad_health=0.5, grad_vanishing=0, grad_exploding=0, grad_health_prev=0.5, grad_ratio_ema=0.5,
    )  # fmt: skip
    return with_slots(obs, alpha_mode=torch.full_like(obs.slots.alpha_mode, AlphaMode.UP))


NOTHING: set[int] = set()
MOVED_BY_A_SLOT = {
    # name: (columns of the slot, columns of the host, new values)
    "stage": ({5, 6}, {14, 15}, [6]),
    "prev_stage": (NOTHING, NOTHING, [2, 4]),
    "epochs_in_stage": ({28}, NOTHING, [7]),
    "prev_epochs": (NOTHING, NOTHING, [0, 40]),
    "age": ({30}, NOTHING, [9]),
    "serial": (NOTHING, NOTHING, [0, 4]),
    "blueprint": (NOTHING, NOTHING, [1, 12]),
    "algorithm": ({21}, NOTHING, [2, 3]),
    "has_gate": (NOTHING, NOTHING, [1]),
    "tempo": ({14}, NOTHING, [5, 8]),
    "germ_curve": (NOTHING, NOTHING, [2, 3]),
    "params": (NOTHING, NOTHING, [0, 10**6]),
    "alpha": ({11}, NOTHING, [0.0, 0.25]),
    "alpha_start": ({20}, NOTHING, [0.3]),
    "alpha_target": ({15, 20}, NOTHING, [0.5]),
    "alpha_mode": ({16, 20}, NOTHING, [0]),
    "alpha_curve": (NOTHING, NOTHING, [2, 3]),
    "alpha_steepness": (NOTHING, NOTHING, [6.0, 24.0]),
    "alpha_total": ({17, 19, 20}, NOTHING, [8]),
    "alpha_done": ({18, 19}, NOTHING, [3]),
    "acc_at_germination": (NOTHING, NOTHING, [0.0, NAN]),
    "acc_at_stage_start": (NOTHING, NOTHING, [0.0, NAN]),
    "acc_at_blending_start": (NOTHING, NOTHING, [0.0, NAN]),
    "contribution": ({12}, NOTHING, [3.0, NAN]),
    "contribution_step": ({29}, NOTHING, [11, -1]),
    "contribution_velocity": ({13}, NOTHING, [3.0, NAN]),
    "interaction_sum": ({22}, NOTHING, [3.0, NAN]),
    "boost_received": (NOTHING, NOTHING, [3.0, NAN]),
    "grad_norm": ({23}, NOTHING, [3.0, NAN]),
    "grad_health": ({24}, NOTHING, [0.25, NAN]),
    "grad_vanishing": ({25}, NOTHING, [1]),
    "grad_exploding": ({26}, NOTHING, [1]),
    "grad_health_prev": ({27}, NOTHING, [0.25, NAN]),
    "grad_ratio_ema": (NOTHING, NOTHING, [0.9, NAN]),
}
MOVED_BY_A_HOST = {
    "val_loss": ({1}, [2.0, NAN]),
    "val_acc": ({2}, [20.0, NAN]),
    "last_success": ({16}, [0]),
    "last_op": ({18, 20}, [3]),
    "train_loss": ({23}, [2.0, NAN]),
    "train_acc": ({24}, [20.0, NAN]),
    **dict.fromkeys(
        ("prev_val_acc", "prev_val_loss", "committed_acc", "cf_total", "best_acc"),
        (NOTHING, [7.0, NAN]),
    ),
    **dict.fromkeys(
        ("host_params", "n_germinated", "n_pruned", "n_fossilized", "n_contributing", "plateau_count", "stable_count"),
        (NOTHING, [0, 50]),
    ),
    "stabilized": (NOTHING, [0, 1]),
    "compute": (NOTHING, [0.0, 20.5]),
    "segment": (NOTHING, [3]),
}
HISTORIES = {"loss_hist": 3, "acc_hist": 8}
"""Place of the oldest of five."""


def moved(before: Observation, after: Observation) -> set[int]:
    return set((observe(before)[0] != observe(after)[0])[0].nonzero().flatten().tolist())


def test_the_tables_of_this_file_name_every_field():
    assert set(MOVED_BY_A_SLOT) == set(SlotState.__annotations__)
    assert set(MOVED_BY_A_HOST) | set(HISTORIES) == set(HostState.__annotations__)


@pytest.mark.parametrize("slot", [0, 2])
@pytest.mark.parametrize("field", MOVED_BY_A_SLOT)
def test_a_field_of_a_slot_moves_these_columns_and_no_other(field, slot):
    before = blending()
    own, of_the_host, values = MOVED_BY_A_SLOT[field]
    for value in values:
        changed = getattr(before.slots, field).clone()
        changed[:, slot] = value
        after = with_slots(before, **{field: changed})
        assert moved(before, after) == {column(o, slot) for o in own} | of_the_host, value
        indices = observe(after)[1]
        assert torch.equal(indices, after.slots.blueprint)


@pytest.mark.parametrize("field", MOVED_BY_A_HOST)
def test_a_field_of_a_host_moves_these_columns_and_no_other(field):
    before = blending()
    before = with_hosts(before, last_op=torch.tensor([1]), last_success=torch.tensor([True]))
    columns, values = MOVED_BY_A_HOST[field]
    for value in values:
        after = with_hosts(before, **{field: torch.full_like(getattr(before.hosts, field), value)})
        assert moved(before, after) == columns, value


@pytest.mark.parametrize("place", range(5))
@pytest.mark.parametrize(("field", "oldest"), HISTORIES.items())
def test_an_entry_of_a_history_moves_its_own_column(field, oldest, place):
    before = blending()
    for value in (0.125, NAN):
        history = torch.full_like(getattr(before.hosts, field), 3.0)
        before = with_hosts(before, **{field: history})
        changed = history.clone()
        changed[:, place] = value
        assert moved(before, with_hosts(before, **{field: changed})) == {oldest + place}


def test_the_clock_moves_the_step_and_the_freshness_of_what_was_measured():
    before = blending(2)
    before = with_slots(before, contribution_step=torch.tensor([[30, -1]]))
    assert moved(before, replace(before, t=32)) == {0, column(29)}


# From the measurements of a step to its features. -------------------------------------------------------------


def measurements(num_slots: int = 2, **changes: torch.Tensor) -> Measurements:
    row, slots = torch.ones(1), torch.ones(1, num_slots)
    fields = {
        "train_acc": 60.0 * row, "train_loss": row, "val_acc": 50.0 * row, "val_loss": row, "committed_acc": 50.0 * row,
        "cf_total": row, "contribution": slots, "interactions": torch.full((1, num_slots, num_slots), NAN),
        "grad_norm": slots, "grad_health": 0.5 * slots, "grad_vanishing": slots < 0, "grad_exploding": slots < 0,
        "grad_ratio": slots, "subset_acc": torch.zeros(1, 0),
    }  # fmt: skip
    return Measurements(**fields | changes)


def life(*steps: Measurements, num_slots: int = 2, stage: SeedStage = SeedStage.BLENDING) -> list[torch.Tensor]:
    """Features of one host [D] in steps 1, 2, ... whose slots stay in `stage`."""
    device = torch.device("cpu")
    slots, hosts = empty_slots(1, num_slots, device), new_hosts(1, 100, device)
    slots = replace(slots, stage=torch.full_like(slots.stage, stage), blueprint=torch.ones_like(slots.blueprint))
    legal, healthy = torch.ones(1, 6, num_slots, dtype=torch.bool), torch.ones(1, dtype=torch.bool)
    seen = []
    for t, measured in enumerate(steps, start=1):
        slots, hosts = ingest(slots, hosts, measured, t, healthy)
        obs = Observation(t=t, episode_length=60, slots=slots, hosts=hosts, legal=legal)
        seen.append(observe(obs)[0][0])
    return seen


MEASURED = {
    # name: (columns of its own step, columns of the next step), for a measurement of slot 1 where there are slots
    "val_loss": ({1, 7}, {6}),
    "val_acc": ({2, 12}, {11}),
    "train_acc": ({24}, NOTHING),
    "train_loss": ({23}, NOTHING),
    "committed_acc": (NOTHING, NOTHING),
    "cf_total": (NOTHING, NOTHING),
    "contribution": ({column(12, 1), column(13, 1)}, {column(13, 1)}),
    "interactions": ({column(22, 0), column(22, 1)}, NOTHING),
    "grad_norm": ({column(23, 1)}, NOTHING),
    "grad_health": ({column(24, 1)}, {column(27, 1)}),
    "grad_vanishing": ({column(25, 1)}, NOTHING),
    "grad_exploding": ({column(26, 1)}, NOTHING),
    "grad_ratio": (NOTHING, NOTHING),
    "subset_acc": (NOTHING, NOTHING),
}


def other(field: str) -> torch.Tensor:
    """Another measurement than that of `measurements`, of slot 1 where there are slots."""
    value = getattr(measurements(), field).clone()
    if field == "interactions":
        return torch.tensor([[[NAN, 4.0], [4.0, NAN]]])
    if field == "subset_acc":
        return torch.ones(1, 4)
    if value.dtype == torch.bool:
        value[:, -1] = True
    else:
        value[..., -1] *= 0.5
    return value


def test_every_measurement_is_named():
    assert set(MEASURED) == set(Measurements.__annotations__)


@pytest.mark.parametrize("field", MEASURED)
def test_a_measurement_moves_its_own_columns_in_its_step_and_in_the_next(field):
    same, changed = measurements(), measurements(**{field: other(field)})
    one, another = life(same, same, same), life(same, changed, same)
    now, later = MEASURED[field]
    for before, after, columns in zip(one, another, (NOTHING, now, later), strict=True):
        assert set((before != after).nonzero().flatten().tolist()) == columns


def contributions(*values: float) -> list[torch.Tensor]:
    """Features of a single slot with these contributions, one per step."""
    return life(*(measurements(1, contribution=torch.tensor([[value]])) for value in values), num_slots=1)


def test_the_velocity_shows_after_two_measurements_that_differ_and_not_before():
    # 0.3 (3 - 2) / 10; kept where nothing is measured; then (0.7 * 0.3 + 0.3 (1 - 3)) / 10
    seen = [row[column(13)].item() for row in contributions(NAN, 2.0, NAN, 3.0, NAN, 1.0)]
    assert seen == pytest.approx([0, 0, 0, 0.03, 0.03, -0.039], abs=1e-6)
    assert [row[column(13)].item() for row in contributions(2.0, 2.0, 2.0)] == [0, 0, 0]


@pytest.mark.parametrize("without", [1, 2, 61])
def test_freshness_is_missing_through_any_number_of_steps_until_the_first_measurement_and_decays_after_it(without):
    # a contribution of nothing is a measurement, and freshness is all that tells it from none
    seen = contributions(*[NAN] * without, 0.0, *[NAN] * 9)
    assert [row[column(29)].item() for row in seen[:without]] == [-1.0] * without
    assert all(row[[column(12), column(13)]].tolist() == [0.0, 0.0] for row in seen)
    want = [0.995**k for k in range(10)]
    assert [row[column(29)].item() for row in seen[without:]] == pytest.approx(want, abs=1e-6)
    assert seen[without][column(29)] == 1.0
