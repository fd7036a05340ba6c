"""A reward of the user's is looked at in each step: what is wrong is named with the reward and the step."""

import re
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from esper.leyline.errors import ConfigError
from esper.leyline.messages import RewardInputs, RewardOutput
from esper.simic.client import ScriptedClient
from esper.simic.rewards.reward import _blank_inputs, check_reward, checked_step
from toys import ToyClient

HOSTS = 3


class Own:
    """Pays two terms, changed by a function."""

    terms: Any = ("a", "b")

    def __init__(self, change: Callable[[dict[str, Any], RewardInputs], object] = lambda output, inputs: None) -> None:
        self._change = change

    def initial_state(self, n: int, slots: int, steps: int, device: torch.device) -> None: ...

    def step(self, inputs: RewardInputs, state: None) -> Any:
        paid = torch.tensor([[1.0, -0.5]]).repeat(HOSTS, 1)
        output = {"total": paid.sum(1), "breakdown": paid, "flags": torch.zeros(HOSTS, 2, dtype=torch.bool)}
        given = self._change(output, inputs)
        return (SimpleNamespace(**output), state) if given is None else given

    def rollback_reward(self, state: None) -> torch.Tensor:
        return torch.zeros(HOSTS)

    def reset_hosts(self, state: None, mask: torch.Tensor) -> None: ...


def put(**values: Any) -> Callable[[dict[str, Any], RewardInputs], object]:
    return lambda output, inputs: output.update(values)


def edit(output: dict[str, Any], inputs: RewardInputs) -> None:
    inputs.hosts.val_acc.zero_()


def inputs() -> RewardInputs:
    return _blank_inputs(HOSTS, 2, torch.device("cpu"))


def test_what_is_right_is_what_the_reward_gives():
    output, _ = checked_step(Own(), inputs(), None)
    assert output.total.tolist() == [0.5] * HOSTS
    assert ScriptedClient(ToyClient.__new__(ToyClient), Own()).step(inputs(), None)[0].total.tolist() == [0.5] * HOSTS


def test_a_total_may_be_rounded_as_its_terms_are():
    paid = torch.tensor([[1e4, -1e4 + 0.01]]).repeat(HOSTS, 1)
    checked_step(Own(put(total=paid.double().sum(1) + 1e-3, breakdown=paid)), inputs(), None)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (put(total=torch.tensor(0.5)), "gives total [] of torch.float32; it must be floats [3]"),
        (put(total=0.5), "gives total a float; it must be floats [3]"),
        (put(total=torch.ones(3, dtype=torch.int64)), "gives total [3] of torch.int64; it must be floats [3]"),
        (put(breakdown=torch.ones(3, 1)), "gives breakdown [3, 1] of torch.float32; it must be floats [3, 2]"),
        (put(flags=torch.zeros(3, 2)), "gives flags [3, 2] of torch.float32; it must be bools [3, 2]"),
        (put(flags=None), "gives flags a NoneType"),
        (put(total=torch.ones(3)), "gives a total that is not the sum of its breakdown"),
        (put(total=torch.full((3,), torch.nan)), "gives NaN or infinity; what is not measured is NaN in its inputs"),
        (put(breakdown=torch.full((3, 2), torch.inf)), "gives NaN or infinity"),
        (edit, "edits its inputs in place"),
        (lambda output, inputs: 1 / 0, "fails: ZeroDivisionError"),
        (lambda output, inputs: RewardOutput(**output), "fails: TypeError"),
    ],
)
def test_what_is_wrong_is_named_with_the_reward_and_the_step(change, said):
    with pytest.raises(ConfigError, match=re.escape(said)) as refused:
        checked_step(Own(change), inputs(), None)
    assert str(refused.value).startswith("the reward Own in step 1 ")


@pytest.mark.parametrize("terms", ["ab", ("a", "a"), (), (1,), None])
def test_terms_are_different_names(terms):
    reward = Own()
    reward.terms = terms
    with pytest.raises(ConfigError, match="give one or more different names"):
        check_reward(reward)


def test_a_member_that_is_missing_is_named_before_anything_is_trained():
    class Half:
        terms = ("a",)

    with pytest.raises(ConfigError, match="the reward Half has no 'initial_state'"):
        ScriptedClient(ToyClient.__new__(ToyClient), Half())
