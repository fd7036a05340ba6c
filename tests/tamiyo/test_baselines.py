import hypothesis.strategies as st
import pytest
import torch
from hypothesis import given, settings
from scripted_observations import TRANSFORMER, engine_spec, legal_only, observation, step
from states import allowed
from torch.utils._python_dispatch import TorchDispatchMode

from esper.leyline.errors import CheckpointError, RegistryError
from esper.leyline.lifecycle import CANONICAL_ACTION, Head, LifecycleOp
from esper.tamiyo.baselines import BASELINES, make_baseline, pick

WAIT, GERMINATE, SET_TARGET, PRUNE, FOSSILIZE, ADVANCE = LifecycleOp
EVERYTHING = [(op, slot) for op in LifecycleOp for slot in range(3)]


class HostReads(TorchDispatchMode):
    """Counts the operations that make Python wait for the contents of a tensor."""

    READS = (torch.ops.aten._local_scalar_dense.default, torch.ops.aten.nonzero.default)

    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.count += func in self.READS
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("name", BASELINES)
def test_no_baseline_reads_the_device_in_a_step(name):
    policy = make_baseline(name, engine_spec(num_envs=4, auto_gates=(False, False, False)))
    obs = observation(6, legal_only(4, 3, *EVERYTHING), hosts={"stabilized": True, "plateau_count": 3})
    with HostReads() as reads:
        policy.store(step(obs, policy.act(obs)))
        policy.bootstrap(obs)
    assert reads.count == 0


def test_an_unknown_baseline_suggests_the_nearest_one():
    with pytest.raises(RegistryError, match="unknown baseline 'heuristics'; did you mean 'heuristic'"):
        make_baseline("heuristics", engine_spec())


@pytest.mark.parametrize("family", [{}, TRANSFORMER])
@pytest.mark.parametrize("name", BASELINES)
def test_every_baseline_answers_like_any_controller_and_learns_nothing(name, family):
    policy = make_baseline(name, engine_spec(num_envs=4, **family))
    policy.begin_rollout(1, torch.arange(4))
    obs = observation(1, legal_only(4, 3, (GERMINATE, 0), (GERMINATE, 2)))
    result = policy.act(obs)
    policy.store(step(obs, result))
    policy.rollback(torch.tensor([True, False, False, False]), torch.zeros(4))
    assert result.actions.shape == result.log_prob.shape == (4, 8)
    assert result.features.shape == result.raw_features.shape == (4, 0)
    assert policy.initial_hidden(4).h.shape == result.hidden.h.shape == (1, 4, 0)
    assert torch.equal(policy.bootstrap(obs), torch.zeros(4))
    assert policy.update() == {}


@pytest.mark.parametrize("name", BASELINES)
def test_the_number_of_hosts_may_change_with_a_rollout(name):
    policy = make_baseline(name, engine_spec(num_envs=2))
    policy.begin_rollout(1, torch.arange(5))
    assert policy.act(observation(1, legal_only(5, 3))).actions.shape == (5, 8)


@pytest.mark.parametrize("name", BASELINES)
def test_a_restored_controller_goes_on_as_the_original_would(name):
    spec = engine_spec(num_envs=3)
    original, copy = make_baseline(name, spec), make_baseline(name, spec)
    original.begin_rollout(4, torch.tensor([5, 6, 7]))
    hosts = {"stabilized": True, "plateau_count": 3}
    for t in range(5, 9):
        obs = observation(t, legal_only(3, 3, *EVERYTHING), hosts=hosts)
        original.store(step(obs, original.act(obs)))
    copy.load_state_dict(original.state_dict())
    obs = observation(9, legal_only(3, 3, *EVERYTHING), hosts=hosts)
    assert torch.equal(copy.act(obs).actions, original.act(obs).actions)


# the two that only wait remember nothing
@pytest.mark.parametrize("name", sorted(set(BASELINES) - {"wait_only", "static_final"}))
def test_the_state_of_another_number_of_hosts_is_refused(name):
    state = make_baseline(name, engine_spec(num_envs=2)).state_dict()
    with pytest.raises(CheckpointError, match="scripted controller"):
        make_baseline(name, engine_spec(num_envs=3)).load_state_dict(state)


def test_the_state_of_another_controller_is_refused():
    with pytest.raises(CheckpointError, match="rotation"):
        make_baseline("wait_only", engine_spec()).load_state_dict(
            make_baseline("heuristic", engine_spec()).state_dict()
        )


def test_wait_only_waits_whatever_is_legal():
    policy = make_baseline("wait_only", engine_spec(num_envs=2))
    assert policy.act(observation(1, legal_only(2, 3, *EVERYTHING))).actions.tolist() == [list(CANONICAL_ACTION)] * 2


def random_legal(n: int, seed: int) -> tuple[torch.Tensor, torch.Tensor]:
    gen = torch.Generator().manual_seed(seed)
    legal = torch.rand(n, 6, 3, generator=gen) < 0.3
    legal[:, WAIT] = True
    return legal, torch.rand(n, 3, generator=gen) < 0.5


@pytest.mark.parametrize("family", [{}, TRANSFORMER])
def test_random_actions_are_legal_in_every_head(family):
    spec = engine_spec(num_envs=400, **family)
    policy = make_baseline("random", spec)
    for seed in range(3):
        legal, has_gate = random_legal(400, seed)
        actions = policy.act(observation(seed + 1, legal, has_gate=has_gate)).actions
        for n, action in enumerate(actions.tolist()):
            op, slot = action[Head.OP], action[Head.SLOT]
            assert legal[n, op, slot]
            choices = allowed(op, slot, legal[n].tolist(), has_gate[n].tolist(), spec.selectable)
            assert all(value in choice for value, choice in zip(action, choices, strict=True))


def test_random_draws_every_head_uniformly():
    # 6 ops, 12,000 hosts: 2,000 each with a standard deviation of 41; GERMINATE's heads see about 2,000 draws
    n = 12_000
    policy = make_baseline("random", engine_spec(num_envs=n))
    obs = observation(1, legal_only(n, 3, *EVERYTHING), has_gate=torch.ones(n, 3, dtype=torch.bool))
    actions = policy.act(obs).actions
    assert (actions[:, Head.OP].bincount(minlength=6) - 2_000).abs().max() < 170
    grown = actions[actions[:, Head.OP] == GERMINATE]
    for head, size in ((Head.SLOT, 3), (Head.STYLE, 4), (Head.TEMPO, 3), (Head.ALPHA_TARGET, 3)):
        assert (grown[:, head].bincount(minlength=size) / len(grown) - 1 / size).abs().max() < 0.05
    retargeted = actions[actions[:, Head.OP] == SET_TARGET]
    for head, size in ((Head.STYLE, 4), (Head.ALPHA_SPEED, 4), (Head.ALPHA_CURVE, 5)):
        assert (retargeted[:, head].bincount(minlength=size) / len(retargeted) - 1 / size).abs().max() < 0.05
    assert (grown[:, Head.BLUEPRINT].bincount(minlength=8)[1:] / len(grown) - 1 / 7).abs().max() < 0.04


def test_random_actions_of_a_host_depend_on_run_episode_and_step_but_not_on_other_hosts():
    def draw(hosts: list[int], episode: int = 0, t: int = 1, run_seed: int = 3) -> list[list[int]]:
        n = len(hosts)
        policy = make_baseline("random", engine_spec(num_envs=n, run_seed=run_seed))
        policy.begin_rollout(episode, torch.tensor(hosts))
        return policy.act(observation(t, legal_only(n, 3, *EVERYTHING))).actions.tolist()

    hosts = list(range(40))
    together = draw(hosts)
    assert draw([17]) == [together[17]]
    assert draw(hosts[::-1]) == together[::-1]
    for other in (draw(hosts, episode=1), draw(hosts, t=2), draw(hosts, run_seed=4)):
        assert other != together


def test_random_without_a_choice_waits():
    policy = make_baseline("random", engine_spec(num_envs=50))
    assert policy.act(observation(1, legal_only(50, 3))).actions.unique(dim=0).tolist() == [list(CANONICAL_ACTION)]


@given(st.lists(st.booleans(), min_size=1, max_size=9).filter(any), st.integers(0, 2**24 - 1))
@settings(max_examples=100, deadline=None)
def test_pick_is_the_inverse_of_the_cumulative_distribution(mask, word):
    u = word * 2.0**-24
    valid = [i for i, ok in enumerate(mask) if ok]
    want = next(i for rank, i in enumerate(valid) if (rank + 1) / len(valid) > u)
    assert pick(torch.tensor([mask]), torch.tensor([u], dtype=torch.float64)).tolist() == [want]
