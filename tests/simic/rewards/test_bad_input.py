"""What a user can get wrong about rewards: each mistake is refused with the name of the field and what it must be."""

import pytest
import torch

from esper.leyline.errors import ConfigError, RegistryError
from esper.runs.assembly.presets import resolve
from esper.simic.rewards import (
    LossRewardConfig,
    RewardConfig,
    compute_reward_batched,
    make_reward,
    register_reward,
    reward_traits,
)

NAN, INF = float("nan"), float("inf")


def zeros(*shape, dtype=torch.float32):
    return torch.zeros(shape, dtype=dtype)


def kernel(mode="shaped", attribution="harmonic", **changes):
    two, x = zeros(2, dtype=torch.int64), torch.full((2,), 50.0)
    given = {"actions": two, "seed_contributions": x, "val_accs": x, "acc_deltas": x, "stages": two + 3,
             "has_seed_mask": torch.ones(2, dtype=torch.bool), "total_improvements": x, "epochs_in_stage": two,
             "seed_ages": two, "previous_stages": two, "previous_epochs": two, "epoch": 3, "max_epochs": 9,
             "config_weights": RewardConfig(mode="shaped").pack()}  # fmt: skip
    compute_reward_batched(**(given | changes), mode=mode, attribution=attribution)


def settings(**reward):
    resolve({"task": "null", "reward": reward})


REFUSED = [
    (lambda: RewardConfig(mode="shapd"), ConfigError, 'reward.mode is "shapd"', "'shaped', 'escrow'"),
    (lambda: settings(mode="shapd"), ConfigError, "unknown reward 'shapd'", "did you mean 'shaped'?"),
    (lambda: make_reward("shapd"), RegistryError, "no reward is named 'shapd'", "did you mean 'shaped'?"),
    (lambda: reward_traits("nothing like it"), RegistryError, "no reward is named", "known names"),
    (lambda: make_reward("sparse", RewardConfig()), ConfigError, "reward 'sparse' was given", "with_mode('sparse')"),
    (lambda: register_reward("sparse"), RegistryError, "'sparse' is registered already", "choose another name"),
    (lambda: RewardConfig(attribution="mean"), ConfigError, 'reward.attribution is "mean"', "or 'minimum'"),
    (lambda: settings(max_rents=1.0), ConfigError, "unknown key reward.max_rents", "did you mean 'max_rent'"),
    (lambda: settings(loss={"target": 1.0}), ConfigError, "unknown key reward.loss.target", "target_loss"),
    (lambda: settings(gamma=0.99), ConfigError, "unknown key reward.gamma", ""),
    (lambda: RewardConfig(max_rent=NAN), ConfigError, "reward.max_rent is nan", "a finite number."),
    (lambda: RewardConfig(max_rent=-INF), ConfigError, "reward.max_rent is -inf", "a finite number."),
    (lambda: RewardConfig(max_rent=10**400), ConfigError, "reward.max_rent is 1000", "a number."),
    (lambda: RewardConfig(max_rent="1"), ConfigError, 'reward.max_rent is "1"', "a number."),
    (lambda: RewardConfig(max_rent=True), ConfigError, "reward.max_rent is true", "a number."),
    (lambda: RewardConfig(max_rent=None), ConfigError, "reward.max_rent is null", "a number."),
    (lambda: RewardConfig(free_slots=1.5), ConfigError, "reward.free_slots is 1.5", "a whole number."),
    (lambda: RewardConfig(disable_pbrs=1), ConfigError, "reward.disable_pbrs is 1", "true or false."),
    (lambda: LossRewardConfig(typical_loss_delta_std=0.0), ConfigError, "typical_loss_delta_std is 0.0", "above 0"),
    (lambda: LossRewardConfig(target_loss=INF), ConfigError, "reward.loss.target_loss is inf", "a finite number."),
    (lambda: settings(max_rent=NAN), ConfigError, "reward.max_rent is nan", "a finite number."),
    (lambda: settings(rent_host_params_floor=0), ConfigError, "reward.rent_host_params_floor is 0", "at least 1"),
    (lambda: kernel(val_accs=zeros(3)), ValueError, "val_accs has shape (3,)", "it must be (2,)"),
    (lambda: kernel(val_accs=zeros(2, 1)), ValueError, "val_accs has shape (2, 1)", "it must be (2,)"),
    (lambda: kernel(deferred_scales=zeros(3, 2)), ValueError, "deferred_scales has shape (3, 2)", "must be (2, S)"),
    (lambda: kernel(deferred_scales=zeros(2, 3), deferred_contributions=zeros(2, 2)), ValueError,
     "deferred_contributions has shape (2, 2) but deferred_scales (2, 3)", "both must be (N, S)"),
    (lambda: kernel(epoch=torch.tensor([1, 2, 3])), ValueError, "epoch has shape (3,)", "or one per host: (2,)"),
    (lambda: kernel(epoch=torch.tensor([1.0, 2.0])), TypeError, "epoch is torch.float32", "it must be torch.int64"),
    (lambda: kernel(stages=zeros(2, dtype=torch.int32)), TypeError, "stages is torch.int32", "be torch.int64"),
    (lambda: kernel(has_seed_mask=zeros(2)), TypeError, "has_seed_mask is torch.float32", "it must be torch.bool"),
    (lambda: kernel(val_losses=zeros(2, dtype=torch.int64)), TypeError, "val_losses is torch.int64", "a floating type"),
    (lambda: kernel(attribution="mean"), ConfigError, "attribution 'mean' is unknown", "'harmonic' or 'minimum'"),
    (lambda: kernel(config_weights=LossRewardConfig().pack()), ValueError, "config_weights is", "takes floats"),
    (lambda: kernel(mode="shapd"), ConfigError, "reward mode 'shapd' has no formula", "did you mean 'shaped'?"),
]  # fmt: skip


@pytest.mark.parametrize(("mistake", "error", "found", "expected"), REFUSED, ids=[case[2] for case in REFUSED])
def test_a_mistake_is_refused_with_the_name_of_the_field_and_what_it_must_be(mistake, error, found, expected):
    with pytest.raises(error) as raised:
        mistake()
    assert type(raised.value) is error
    assert found in str(raised.value)
    assert expected in str(raised.value)


def test_what_is_sound_is_not_refused():
    RewardConfig(loss=LossRewardConfig(target_loss=1), max_rent=2, deferred_fraction=1, mode="basic_plus")
    settings(rent_host_params_floor=1)
    settings(mode="loss", loss={"target_loss": 1})
    make_reward("escrow", RewardConfig(mode="escrow", rollback_penalty=None))
    kernel()
    kernel(epoch=torch.tensor(3), max_epochs=torch.tensor([9]))
    kernel(epoch=torch.tensor([3, 4]), max_epochs=torch.tensor([9, 9]))
    kernel(deferred_scales=zeros(2, 3), deferred_contributions=zeros(2, 3))
