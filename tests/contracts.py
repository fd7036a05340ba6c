"""What everybody who satisfies a protocol must do: one function per protocol, for real parts and toys alike.

    check_policy(make_client)     check_reward(reward)     check_executor(make_executor, N)

Each function raises AssertionError where the contract is broken. Write your own part, call the function in a test.
"""

import dataclasses
from collections.abc import Callable, Mapping
from functools import cache
from typing import Any

import torch
from torch import Tensor

from esper.kasmina.rules.conditions import LifecycleConfig
from esper.kasmina.rules.slot_fields import empty_slots
from esper.leyline.errors import CheckpointError
from esper.leyline.lifecycle import NUM_HEADS, Head, HostFamily, LifecycleOp
from esper.leyline.messages import (
    EngineSpec,
    EpisodeReward,
    Observation,
    PolicyProtocol,
    RewardInputs,
    RewardProtocol,
    StoredStep,
)
from esper.leyline.tensor_dataclass import is_tensor_dataclass, named_tensors, tree_map
from esper.tolaria.coalitions import enumerate_coalitions
from esper.tolaria.engine import VectorizedEngine
from esper.tolaria.engine_config import EngineConfig
from esper.tolaria.executors.protocol import Executor, empty_structure
from tiny import CPU, bit_equal, same_tree
from toys import ToyClient, ToyExecutor, action, script

N, S, E = 4, 3, 12
SLOTS = ("r0c0", "r0c1", "r1c0")
Op = LifecycleOp


def contract_spec(num_envs: int = N) -> EngineSpec:
    """The engine that policies and rewards are shown here."""
    return EngineSpec(
        run_seed=3, num_envs=num_envs, slot_ids=SLOTS, episode_length=E, family=HostFamily.CNN,
        selectable=(1, 2, 3, 4, 5, 6, 7), min_training_epochs=1,
    )  # fmt: skip


@cache
def lively_episode() -> ToyClient:
    """Real observations and reward inputs: seeds in many stages, host 3 rolled back in step 5, nothing in host 0."""
    config = EngineConfig(
        num_envs=N, episode_length=E, slots=SLOTS,
        lifecycle=LifecycleConfig(min_training_epochs=1, min_prune_age=1, max_seeds=0),
    )  # fmt: skip
    spec = contract_spec()
    plan = {t: {n: action(Op.GERMINATE, slot=t % S, style=n, tempo=0) for n in (1, 2, 3)} for t in (1, 3, 5, 7)}
    plan[6] = {1: action(Op.PRUNE, slot=1), 2: action(Op.FOSSILIZE, slot=1)}
    plan[8] = {1: action(Op.PRUNE, slot=0, alpha_speed=2), 2: action(Op.FOSSILIZE, slot=0)}
    executor = ToyExecutor(N, S, losses={5: [1.0, 1.0, 1.0, float("nan")]})
    client = ToyClient(spec, script(N, E, plan))
    engine = VectorizedEngine(config, executor, spec)
    engine.reset(client, 0)
    engine.rollout(client)
    return client


# -- PolicyProtocol -------------------------------------------------------------------------------------------------


def _step(t: int, obs: Observation, policy: PolicyProtocol, valid: Tensor) -> StoredStep:
    """Everything works, everything pays 0.5."""
    act = policy.act(obs)
    last = torch.full((N,), t == E) & valid
    bootstrap = policy.bootstrap(obs) * last if t == E else torch.zeros(N)
    return StoredStep(
        t=t, obs=obs, act=act, effective_op=act.actions[:, Head.OP] * valid, reward=torch.full((N,), 0.5),
        terminal=torch.zeros(N, dtype=torch.bool), truncated=last, bootstrap_value=bootstrap, valid=valid,
    )  # fmt: skip


def _play(policy: PolicyProtocol, told: ToyClient, first: int = 1, last: int = E) -> list[Tensor]:
    """Actions of the steps first .. last on the observations of an episode."""
    actions = []
    for t in range(first, last + 1):
        seen = told.steps[t - 1]
        policy.rollback(~seen.valid, torch.full((N,), -10.0))
        step = _step(t, seen.obs, policy, seen.valid)
        actions.append(step.act.actions)
        _check_decision(step, policy)
        policy.store(step)
    return actions


def _check_decision(step: StoredStep, policy: PolicyProtocol) -> None:
    act, obs, spec = step.act, step.obs, contract_spec()
    assert act.actions.shape == act.log_prob.shape == (N, NUM_HEADS)
    assert act.actions.dtype == torch.int64
    for head, size in zip(Head, spec.head_sizes, strict=True):
        assert bool(((act.actions[:, head] >= 0) & (act.actions[:, head] < size)).all()), (step.t, head.name)
    ops, slots = act.actions[:, Head.OP], act.actions[:, Head.SLOT]
    assert bool(obs.legal[torch.arange(N), ops, slots].all()), f"illegal in step {step.t}: ops {ops}, slots {slots}"
    assert act.value.shape == (N,)
    assert bool(act.value.isfinite().all() & act.log_prob.isfinite().all())
    assert bool((act.log_prob <= 1e-6).all())
    fresh = policy.initial_hidden(N)
    assert act.hidden.h.shape == fresh.h.shape
    assert act.hidden.c.shape == fresh.c.shape


def check_policy(make: Callable[[EngineSpec], PolicyProtocol]) -> None:
    """A controller decides for all hosts at once, the same again from the same state, and restores to the bit."""
    spec, told = contract_spec(), lively_episode()
    policy, reference = make(spec), make(spec)
    assert isinstance(policy, PolicyProtocol)
    hidden = policy.initial_hidden(5)
    assert hidden.h.shape[1] == hidden.c.shape[1] == 5
    assert not hidden.h.any()
    assert not hidden.c.any()
    for one in (policy, reference):
        one.begin_rollout(2, spec.host_ids())
    first, again = _play(policy, told, last=6), _play(reference, told, last=6)
    assert all(torch.equal(a, b) for a, b in zip(first, again, strict=True)), "the same episode was decided otherwise"
    _check_restore(policy, make(spec), told)
    metrics = policy.update()
    assert isinstance(metrics, Mapping)
    assert all(isinstance(name, str) and isinstance(value, float) for name, value in metrics.items())
    policy.begin_rollout(2, spec.host_ids())
    assert policy.act(told.steps[0].obs).actions.shape == (N, NUM_HEADS)


def _check_restore(policy: PolicyProtocol, fresh: PolicyProtocol, told: ToyClient) -> None:
    """In the middle of an episode: a copy goes on as the original does; bootstrapping changes nothing."""
    spec = contract_spec()
    state = {name: x.clone() for name, x in policy.state_dict().items()}
    fresh.begin_rollout(2, spec.host_ids())
    fresh.load_state_dict(state)
    assert same_tree(fresh.state_dict(), state)
    seen = told.steps[6].obs
    value = policy.bootstrap(seen)
    assert value.shape == (N,)
    assert bool(value.isfinite().all())
    assert torch.equal(policy.bootstrap(seen), value), "bootstrap moved the recurrent state"
    ours, theirs = _play(policy, told, first=7), _play(fresh, told, first=7)
    assert all(torch.equal(a, b) for a, b in zip(ours, theirs, strict=True)), "a restored controller decides otherwise"
    if state:
        broken = {f"{name}.more": x for name, x in state.items()}
        try:
            fresh.load_state_dict(broken)
        except CheckpointError:
            return
        raise AssertionError("a state with other names was accepted")


# -- RewardProtocol -------------------------------------------------------------------------------------------------


def check_reward(reward: RewardProtocol[Any]) -> None:
    """A reward is pure, adds up, treats hosts apart, and starts anew where it is told to."""
    told = lively_episode()
    assert isinstance(reward, RewardProtocol)
    assert len(set(reward.terms)) == len(reward.terms) > 0
    carried = reward.initial_state(N, S, E, CPU)
    start = carried
    for t, inputs in enumerate(told.inputs, start=1):
        before = _tensors(carried)
        paid, after = reward.step(inputs, carried)
        again, after_again = reward.step(inputs, carried)
        assert same_tree(_tensors(carried), before), f"step {t} wrote into its state"
        assert torch.equal(paid.total, again.total)
        assert same_tree(_tensors(after), _tensors(after_again)), f"step {t} is not a function of its arguments"
        healthy = told.steps[t - 1].valid
        assert paid.total.shape == (N,)
        assert paid.flags.shape == (N, 2)
        assert paid.breakdown.shape == (N, len(reward.terms))
        assert bool(paid.total[healthy].isfinite().all()), f"step {t} pays {paid.total}"
        torch.testing.assert_close(paid.breakdown.sum(dim=1)[healthy], paid.total[healthy], rtol=1e-5, atol=1e-5)
        if t % 4 == 1:  # 1, 5 (the rollback), 9
            _check_apart(reward, inputs, carried, paid.total)
        penalty = reward.rollback_reward(after)
        assert penalty.shape == (N,)
        assert bool(penalty[healthy].isfinite().all())
        carried = reward.reset_hosts(after, ~healthy)
    _check_reset(reward, carried, start)


def _row(rec: Any, n: int) -> Any:
    """One host, as a batch of one."""
    return tree_map(lambda x: x[n : n + 1], rec)


def _check_apart(reward: RewardProtocol[Any], inputs: RewardInputs, carried: Any, total: Tensor) -> None:
    """One host alone is paid as it is among the others."""
    for n in range(N):
        state = _row(carried, n) if is_tensor_dataclass(carried) else carried[n : n + 1]
        alone, _ = reward.step(_row(inputs, n), state)
        torch.testing.assert_close(alone.total, total[n : n + 1], equal_nan=True)


def _check_reset(reward: RewardProtocol[Any], carried: Any, start: Any) -> None:
    mask = torch.tensor([False, True, False, True])
    mixed = _tensors(reward.reset_hosts(carried, mask))
    for name, x in mixed.items():
        if not isinstance(reward, EpisodeReward):  # those go on after a rollback
            assert bit_equal(x[mask], _tensors(start)[name][mask]), f"{name} is not as at the start"
        assert bit_equal(x[~mask], _tensors(carried)[name][~mask]), f"{name} of another host was changed"


def _tensors(state: Any) -> dict[str, Tensor]:
    return {"": state.clone()} if isinstance(state, Tensor) else {n: x.clone() for n, x in named_tensors(state)}


# -- Executor -------------------------------------------------------------------------------------------------------


def check_executor(make: Callable[[], Executor], num_envs: int) -> None:
    """An executor trains all hosts, measures without a trace, starts anew by episode, and restores to the bit."""
    executor, reference = make(), make()
    assert isinstance(executor, Executor)
    num_slots = executor.costs.seed_params.shape[0]
    slots = empty_slots(num_envs, num_slots, CPU)
    coalitions = enumerate_coalitions(slots.stage, slots.alpha > 0.0)
    executor.reset(1)
    reference.reset(1)
    for t in (1, 2, 3):
        trained, trained_twin = executor.train_epoch(t, slots), reference.train_epoch(t, slots)
        assert same_tree(vars(trained), vars(trained_twin)), "the same episode went otherwise"
        assert trained.acc.shape == trained.loss.shape == (num_envs,)
        assert bool(((trained.acc >= 0.0) & (trained.acc <= 100.0)).all())
        assert trained.grad_norm.shape == (num_envs, num_slots)
        assert bool(trained.grad_norm.isnan().all()), "a gradient of a seed that is not there"
        before = {name: x.clone() for name, x in executor.state_dict().items()}
        measured = executor.evaluate(t, slots, coalitions)
        assert measured.accuracy.shape == coalitions.valid.shape
        main = measured.accuracy[:, 0]
        assert bool(((main >= 0.0) & (main <= 100.0)).all())
        assert bool(measured.loss.isfinite().all())
        assert same_tree(executor.state_dict(), before), "measuring left a trace"
        reference.evaluate(t, slots, coalitions)
        for one in (executor, reference):
            one.apply_structure(dataclasses.replace(empty_structure(num_envs, num_slots), t=t))
    other = make()
    other.reset(1)
    other.load_state_dict({name: x.clone() for name, x in executor.state_dict().items()})
    assert same_tree(other.state_dict(), executor.state_dict())
    assert same_tree(vars(other.train_epoch(4, slots)), vars(executor.train_epoch(4, slots)))
    test = executor.committed("test", slots).accuracy[:, 0]
    assert test.shape == (num_envs,)
    assert bool(((test >= 0.0) & (test <= 100.0)).all())
    executor.reset(1)
    fresh = make()
    fresh.reset(1)
    assert same_tree(executor.state_dict(), fresh.state_dict()), "the last episode was not forgotten"
