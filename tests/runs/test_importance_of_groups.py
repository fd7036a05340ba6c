"""Importance of groups of inputs, for policies whose dependence is known."""

import math

import pytest
import torch

from esper.runs.evaluation.importance import MEASURES, Situations, feature_groups, importance
from esper.tamiyo.features import CLOCK, HOST_FEATURES, SLOT_FEATURES, feature_dim
from esper.tamiyo.network import TamiyoNetwork, initialize
from toys import menu

SLOTS = ("r0c0", "r0c1")
GROUPS = feature_groups(SLOTS)
NAMES = [group.name for group in GROUPS]
VAL_ACC = [feature.name for feature in HOST_FEATURES].index("val_acc")


def situations(hosts: int, steps: int, *, seed: int = 0) -> Situations:
    """Random features; WAIT and GERMINATE are legal."""
    generator = torch.Generator().manual_seed(seed)
    legal = torch.zeros(hosts, steps, 6, dtype=torch.bool)
    legal[..., :2] = True
    return Situations(
        features=torch.rand(hosts, steps, feature_dim(len(SLOTS)), generator=generator),
        blueprint_index=torch.randint(0, 3, (hosts, steps, len(SLOTS)), generator=generator),
        legal=legal,
        valid=torch.ones(hosts, steps, dtype=torch.bool),
    )


def two_operations(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Logit x for GERMINATE, 0 for all others; value x."""
    logits = torch.zeros(*x.shape, 6)
    logits[..., 1] = x
    return logits, x


def by_name(found: torch.Tensor) -> dict[str, torch.Tensor]:
    return dict(zip(NAMES, found, strict=True))


def test_every_column_and_blueprint_is_in_one_group_and_in_one_place():
    assert [group.name for group in GROUPS if group.kind == "where"] == ["host block", "slot r0c0", "slot r0c1"]
    for chosen in ([group for group in GROUPS if group.kind == kind] for kind in ("all", "what", "where")):
        assert sorted(i for group in chosen for i in group.columns) == list(range(feature_dim(2)))
        assert sorted(s for group in chosen for s in group.blueprints) == [0, 1]
    stage = next(group for group in GROUPS if group.name == "stage of the seeds")
    assert stage.columns[:5] == (13, 14, 15, 25, 26)  # counts in the host block, then the first slot
    assert stage.names[:4] == ("slots_in_training", "slots_in_blending", "slots_in_holding_or_fossilized", "occupied")


def test_the_measures_of_two_hosts_that_see_each_other_s_accuracy():
    seen = situations(2, 1)
    seen.features[:, 0, VAL_ACC] = torch.tensor([0.0, math.log(3.0)])  # probabilities 1/2 1/2, and 1/4 3/4
    found = by_name(importance(lambda x, _: two_operations(x[..., VAL_ACC]), seen, GROUPS))
    kl = torch.tensor(
        [0.5 * math.log(2.0) + 0.5 * math.log(2 / 3), 0.25 * math.log(0.5) + 0.75 * math.log(1.5)], dtype=torch.float64
    )
    for name in ("everything", "validation results", "host block"):
        torch.testing.assert_close(found[name][:, MEASURES.index("kl")], kl, rtol=1e-5, atol=0.0)
        assert found[name][:, MEASURES.index("changed")].tolist() == [1.0, 1.0]  # WAIT comes first in a tie
        torch.testing.assert_close(
            found[name][:, MEASURES.index("value")],
            torch.full((2,), math.log(3.0), dtype=torch.float64),
            rtol=1e-5,
            atol=0.0,
        )
    assert found[CLOCK].isnan().all()  # there is one step
    for name in set(NAMES) - {"everything", "validation results", "host block", CLOCK}:
        assert found[name].abs().max() == 0.0, name


def test_the_step_comes_from_another_step_because_all_hosts_share_it():
    seen = situations(2, 3)
    seen.features[..., 0] = torch.tensor([0.0, 1.0, 2.0])
    found = by_name(importance(lambda x, _: two_operations(x[..., 0]), seen, GROUPS))
    # against the steps 2 0 1 and 1 2 0: 2 + 1 + 1 and 1 + 1 + 2, over six pairs
    torch.testing.assert_close(
        found[CLOCK][:, MEASURES.index("value")], torch.full((2,), 8.0 / 6.0, dtype=torch.float64), rtol=1e-5, atol=0.0
    )
    assert found["everything"].abs().max() == 0.0


def test_a_group_comes_from_the_same_host_in_all_steps():
    seen = situations(2, 5)
    found = by_name(importance(lambda x, _: two_operations(x[..., VAL_ACC].cumsum(dim=1)), seen, GROUPS))
    remembered = seen.features[..., VAL_ACC].cumsum(dim=1)
    apart = (remembered[0] - remembered[1]).abs().mean().expand(2)
    torch.testing.assert_close(
        found["validation results"][:, MEASURES.index("value")], apart.double(), rtol=1e-5, atol=0.0
    )


def test_steps_without_a_choice_and_rolled_back_ones_are_not_counted():
    seen = situations(3, 3)
    seen.features[..., VAL_ACC] = torch.tensor([[1.0, 5.0, 9.0], [3.0, 5.0, 9.0], [4.0, 5.0, 9.0]])
    seen.legal[:, 2, 1] = False
    seen.legal[2, :, 1] = False
    seen.valid[1, 0] = False
    found = by_name(importance(lambda x, _: two_operations(x[..., VAL_ACC]), seen, GROUPS))
    value = found["validation results"][:, MEASURES.index("value")]
    # host 0: step 1 against host 2 alone, step 2 against both, 3 + 0 + 0; host 1: step 2; host 2 never chooses
    assert value[:2].tolist() == [1.0, 0.0]
    assert value[2].isnan()


def test_inputs_that_the_network_ignores_have_no_importance_and_others_have():
    network = TamiyoNetwork(menu(2, num_blueprints=3), feature_width=16, hidden_width=16)
    initialize(network, 0)
    contribution = next(group for group in GROUPS if group.name == "contribution of the seeds")
    with torch.no_grad():
        of_slot = sorted({(column - len(HOST_FEATURES)) % len(SLOT_FEATURES) for column in contribution.columns})
        network.slot_net.weight[:, of_slot] = 0.0
    seen = situations(3, 4)
    hidden, reset = network.initial_hidden(3, torch.device("cpu")), torch.zeros(3, 4, dtype=torch.bool)

    def policy(features, blueprints):
        logits, value = network.unroll(features, blueprints, hidden, reset)
        return logits[-1], value

    found = by_name(importance(policy, seen, GROUPS))
    assert found["contribution of the seeds"].abs().max() == 0.0
    for name in set(NAMES) - {"contribution of the seeds"}:
        assert (found[name][:, MEASURES.index("kl")] > 0.0).all(), name


def test_one_host_is_refused():
    with pytest.raises(ValueError, match="at least two"):
        importance(lambda x, _: two_operations(x[..., 0]), situations(1, 2), GROUPS)
