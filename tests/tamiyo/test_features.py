"""Features: every column by hand, by a scalar reference, and within its range on hostile states.

Place 0 to 24 are the host, 25 + 31 s + o is column o of slot s.
"""

import math

import hypothesis.strategies as st
import pytest
import torch
from hypothesis import given, settings
from states import everywhere, random_observation, with_hosts, with_slots

from esper.leyline.lifecycle import COOLDOWN, STAGE_CLASS, AlphaMode, SeedStage
from esper.leyline.messages import Observation
from esper.leyline.tensor_dataclass import tree_map
from esper.tamiyo.features import HOST_FEATURES, SLOT_FEATURES, feature_dim, observe

SLOT = {feature.name: 25 + i for i, feature in enumerate(SLOT_FEATURES)}
"""Place of each column of slot 0."""


# The scalar reference: one number at a time. -----------------------------------------------------------


def c1(x: float) -> float:
    return max(-1.0, min(1.0, x))


def sl(x: float) -> float:
    return math.copysign(math.log1p(abs(x)) / 7, x)


def known(x: float, missing: float, encode) -> float:
    return missing if math.isnan(x) else encode(x)


def host_block(obs: Observation, n: int) -> list[float]:
    host = {name: getattr(obs.hosts, name)[n].tolist() for name in vars(obs.hosts)}
    stages = obs.slots.stage[n].tolist()
    share = [sum(stage in which for stage in stages) / len(stages) for which in ((3,), (4,), (6, 7))]
    return [
        min(obs.t / obs.episode_length, 1),
        known(host["val_loss"], -1, lambda x: c1(sl(x))),
        known(host["val_acc"], -1, lambda x: x / 100),
        *(known(loss, -1, lambda x: c1(sl(x))) for loss in host["loss_hist"]),
        *(known(acc, -1, lambda x: x / 100) for acc in host["acc_hist"]),
        *share,
        float(host["last_success"]),
        *(float(host["last_op"] == op) for op in range(6)),
        known(host["train_loss"], -1, lambda x: c1(sl(x))),
        known(host["train_acc"], -1, lambda x: x / 100),
    ]


def slot_block(obs: Observation, n: int, s: int) -> list[float]:
    x = {name: getattr(obs.slots, name)[n, s].item() for name in vars(obs.slots)}
    if x["stage"] == SeedStage.DORMANT:
        return [0.0] * 31
    steps = {k: min(x[k], obs.episode_length) / obs.episode_length for k in ("epochs_in_stage", "age")}
    total, done = x["alpha_total"], x["alpha_done"]
    moving = x["alpha_mode"] != AlphaMode.HOLD and total > 0
    graded = not math.isnan(x["grad_health"])
    fresh = -1.0 if x["contribution_step"] < 0 else 0.995 ** (obs.t - x["contribution_step"])
    return [
        1.0,
        *(float(STAGE_CLASS[x["stage"]] == k) for k in range(10)),
        x["alpha"],
        known(x["contribution"], 0, lambda v: c1(v / 10)),
        known(x["contribution_velocity"], 0, lambda v: c1(v / 10)),
        x["tempo"] / 12,
        x["alpha_target"],
        x["alpha_mode"] / 2,
        min(total, obs.episode_length) / obs.episode_length,
        min(done, obs.episode_length) / obs.episode_length,
        min(max(total - done, 0), obs.episode_length) / obs.episode_length,
        c1((x["alpha_target"] - x["alpha_start"]) / total) if moving else 0.0,
        (x["algorithm"] - 1) / 2,
        known(x["interaction_sum"], 0, lambda v: c1(v / 10)),
        min(sl(x["grad_norm"]), 1) if math.isfinite(x["grad_norm"]) else 0.0,
        x["grad_health"] if graded else 0.0,
        float(graded and x["grad_vanishing"]),
        float(graded and x["grad_exploding"]),
        known(x["grad_health_prev"], -1, lambda v: v),
        steps["epochs_in_stage"],
        fresh,
        steps["age"],
    ]


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("num_slots", [1, 3, 6])
def test_every_column_agrees_with_its_scalar_reference(seed, num_slots):
    obs = random_observation(seed, n=16, s=num_slots, t=10 + 20 * seed)
    found, index = observe(obs)
    want = [host_block(obs, n) + [v for s in range(num_slots) for v in slot_block(obs, n, s)] for n in range(16)]
    torch.testing.assert_close(found, torch.tensor(want), atol=1e-6, rtol=0)
    assert torch.equal(index, obs.slots.blueprint.masked_fill(obs.slots.stage == SeedStage.DORMANT, -1))


def test_states_of_the_reference_test_hold_every_stage():
    stages = torch.cat([random_observation(seed, n=16, s=3).slots.stage.flatten() for seed in range(4)])
    assert stages.unique().tolist() == [stage for stage in SeedStage if stage is not SeedStage.UNKNOWN]


@pytest.mark.parametrize(("num_slots", "width"), [(1, 56), (3, 118), (4, 149), (6, 211), (10, 335)])
def test_the_width_is_that_of_the_host_and_31_per_slot(num_slots, width):
    features, index = observe(random_observation(0, n=2, s=num_slots))
    assert feature_dim(num_slots) == width == features.shape[1]
    assert features.dtype == torch.float32
    assert index.dtype == torch.int64


def test_a_blending_seed_by_hand():
    obs = everywhere(
        random_observation(1, n=1, s=1, t=30, episode_length=60), SeedStage.BLENDING,
        alpha=0.4, contribution=-2.5, contribution_velocity=30.0, tempo=3, alpha_start=0.0, alpha_target=0.7,
        alpha_total=5, alpha_done=2, algorithm=3, interaction_sum=5.0, grad_norm=math.e - 1, grad_health=0.8,
        grad_vanishing=1, grad_exploding=0, grad_health_prev=0.9, epochs_in_stage=6, contribution_step=28, age=18,
        alpha_mode=AlphaMode.UP,
    )  # fmt: skip
    got = {feature.name: value for feature, value in zip(SLOT_FEATURES, observe(obs)[0][0, 25:].tolist(), strict=True)}
    want = {
        "occupied": 1, "stage_blending": 1, "alpha": 0.4, "contribution": -0.25, "contribution_velocity": 1,
        "tempo": 0.25, "alpha_target": 0.7, "alpha_mode": 0.5, "alpha_total": 5 / 60, "alpha_done": 2 / 60,
        "time_to_target": 3 / 60, "alpha_velocity": 0.14, "algorithm": 1, "interaction_sum": 0.5, "grad_norm": 1 / 7,
        "grad_health": 0.8, "grad_vanishing": 1, "grad_health_prev": 0.9, "epochs_in_stage": 0.1,
        "freshness": 0.990025, "age": 0.3,
    }  # fmt: skip
    assert got == pytest.approx({name: 0.0 for name in got} | want, abs=1e-6)


def test_the_host_block_by_hand():
    obs = random_observation(1, n=1, s=4, t=90, episode_length=60)
    obs = with_hosts(
        obs,
        val_loss=torch.tensor([math.e - 1]), val_acc=torch.tensor([62.5]),
        train_loss=torch.tensor([0.0]), train_acc=torch.tensor([75.0]),
        loss_hist=torch.tensor([[math.nan, math.inf, -math.inf, 0.0, math.e - 1]]),
        acc_hist=torch.tensor([[math.nan, math.nan, 50.0, 0.0, 62.5]]),
        last_success=torch.tensor([True]), last_op=torch.tensor([3]),
    )  # fmt: skip
    obs = with_slots(obs, stage=torch.tensor([[3, 6, 7, 1]]))
    want = [1, 1 / 7, 0.625, -1, 1, -1, 0, 1 / 7, -1, -1, 0.5, 0, 0.625, 0.25, 0, 0.5, 1, 0, 0, 0, 1, 0, 0, 0, 0.75]
    assert observe(obs)[0][0, :25].tolist() == pytest.approx(want, abs=1e-6)


@pytest.mark.parametrize("norm", [math.inf, -math.inf, math.nan])
def test_a_gradient_norm_that_overflowed_counts_as_not_taken(norm):
    obs = everywhere(random_observation(0), SeedStage.TRAINING, grad_norm=norm)
    assert (observe(obs)[0][:, SLOT["grad_norm"]] == 0).all()


# The ranges once more as plain numbers, independent of the tables of the module. --------------------------------------

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


def with_every_float(obs: Observation, value: float) -> Observation:
    slots = {name: torch.full_like(getattr(obs.slots, name), value) for name in MEASURED_SLOT_FLOATS}
    hosts = {name: torch.full_like(getattr(obs.hosts, name), value) for name in HOST_FLOATS}
    return with_hosts(with_slots(obs, **slots), **hosts)


@settings(max_examples=80, deadline=None)
@given(
    st.integers(0, 2**31), st.sampled_from([1, 3, 4]), st.integers(1, 300), st.integers(1, 60),
    st.none() | st.sampled_from([INF, -INF, NAN, 3e38, -3e38, 1e-45, -0.0]),
)  # fmt: skip
def test_every_column_of_a_valid_or_hostile_state_is_in_its_range(seed, num_slots, t, episode_length, value):
    # a hostile state has this value as losses, accuracies and all that was measured of a seed, in every stage
    obs = random_observation(seed, n=8, s=num_slots, t=t, episode_length=episode_length)
    obs = obs if value is None else with_every_float(obs, value)
    features, index = observe(obs)
    low, high, flag = ranges(num_slots)
    assert features.isfinite().all()
    assert (features >= low).all(), (features < low).nonzero()[:, 1].unique()
    assert (features <= high).all(), (features > high).nonzero()[:, 1].unique()
    flags = features[:, flag]
    assert ((flags == 0) | (flags == 1)).all()
    dormant = obs.slots.stage == SeedStage.DORMANT
    assert (features[:, 25:].unflatten(1, (num_slots, 31))[dormant] == 0).all()
    assert (index[dormant] == -1).all()


@pytest.mark.parametrize("stage", [stage for stage in SeedStage if stage is not SeedStage.UNKNOWN])
def test_a_state_of_which_nothing_was_measured_has_the_missing_value_everywhere(stage):
    obs = with_every_float(everywhere(random_observation(3, n=2, s=2), stage, contribution_step=-1), NAN)
    seen = observe(with_slots(obs, grad_vanishing=obs.has_gate | True, grad_exploding=obs.has_gate | True))[0]
    assert (seen[:, 1:13] == -1).all()
    for s in range(2):
        missing = 0.0 if stage is SeedStage.DORMANT else -1.0
        assert (seen[:, [column(o, s) for o in (12, 13, 22, 23, 24, 25, 26)]] == 0).all()
        assert (seen[:, [column(27, s), column(29, s)]] == missing).all()


def test_a_slot_in_cooldown_keeps_its_blueprint_and_shows_only_what_it_was():
    kept = {"occupied", "tempo", "algorithm", "epochs_in_stage", "age"}
    shown = {i for i, f in enumerate(SLOT_FEATURES) if f.name in kept or f.name.startswith("stage")}
    obs = random_observation(0, n=64)
    features, index = observe(obs)
    cooling = torch.isin(obs.slots.stage, torch.tensor(sorted(COOLDOWN)))
    assert cooling.any()
    blocks = features[:, 25:].unflatten(1, (3, 31))[cooling]
    assert torch.equal(index[cooling], obs.slots.blueprint[cooling])
    for i in set(range(31)) - shown:
        want = -1.0 if SLOT_FEATURES[i].name in ("grad_health_prev", "freshness") else 0.0
        assert (blocks[:, i] == want).all(), SLOT_FEATURES[i].name


def test_a_host_is_seen_the_same_alone_and_among_others():
    obs = random_observation(7, n=9)
    together, index = observe(obs)
    for n in range(9):
        alone, alone_index = observe(tree_map(lambda x, row=slice(n, n + 1): x[row], obs))
        assert torch.equal(alone[0], together[n])
        assert torch.equal(alone_index[0], index[n])
