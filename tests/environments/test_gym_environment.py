"""Hosts as an environment of Gymnasium: what esper's own learner stores, episodes, errors, and Gymnasium's checks."""

import dataclasses

import gymnasium
import numpy as np
import pytest
from gymnasium.error import ClosedEnvironmentError, InvalidAction, ResetNeeded
from gymnasium.utils.env_checker import check_env
from gymnasium.vector import AutoresetMode
from gymnasium.wrappers.vector import DictInfoToList, RecordEpisodeStatistics

import esper.gym
from dry_run import CountedReads
from esper.leyline.errors import ConfigError
from esper.leyline.lifecycle import CANONICAL_ACTION, Head, LifecycleOp
from esper.runs.assembly.assemble import dataset_of, engine_of
from esper.runs.assembly.clients import learner_of
from esper.runs.assembly.presets import resolve
from esper.simic.rewards.reward_config import GAMMA
from esper.tasks.null import Fault, NullSpec
from esper.tasks.presets import NULL
from esper.tasks.registry import registered
from tiny import CPU
from toys import action

Op = LifecycleOp
E, N = 14, 4
FAST = {"lifecycle": {"min_training_epochs": 1, "min_blending_epochs": 1, "min_prune_age": 1, "sequential": False}}
WAIT = np.tile(CANONICAL_ACTION, (N, 1))
NAN = float("nan")


def task(*faults, sigma=2.0):
    """Scripted hosts with noise, so that no two are equal, and with losses that are not finite."""
    script = NullSpec(sigma=sigma, permuted=True, faults=tuple(Fault(*fault) for fault in faults))
    return dataclasses.replace(NULL, name="noisy_null_of_gym", script=script)


def make(of=None, **settings):
    return esper.gym.make_vec(of or task(), **{"num_envs": N, "episode_length": E, "device": "cpu", **FAST, **settings})


def drawn(env, info, rng, *, masked=True):
    """Actions drawn head by head, from the masks or from all values."""
    sizes = env.single_action_space.nvec
    if not masked:
        return rng.integers(sizes, size=(env.num_envs, 8))
    heads = np.split(info["action_mask"], np.cumsum(sizes)[:-1], axis=1)
    return np.stack([np.where(mask, rng.random(mask.shape), -1.0).argmax(1) for mask in heads], axis=1)


def only_waits(info, host):
    return info["legal"][host].any(axis=1).tolist() == [True] + 5 * [False]


# -- parity -----------------------------------------------------------------------------------------------------------


def learned_from(of, reward, episode=0, **settings):
    """Rows of esper's own learner with these hosts, after an episode: its buffer."""
    values = {"reward": {"mode": reward}, "num_envs": N, "episode_length": E, "device": "cpu", "seed": 3}
    with registered(of):
        config = resolve({"task": of.name, **values, **FAST, **settings})
        engine = engine_of(config, dataset_of(config, CPU), CPU)
    client = learner_of(config, engine.spec)
    engine.reset(client, episode)
    engine.rollout(client)
    return client.buffer.rollout


FAULTS = ((0, 1, NAN), (1, 5, NAN), (2, 6, NAN), (2, 7, NAN), (3, E, NAN), (3, 2, NAN))


@pytest.mark.parametrize("limit", ["truncate", "terminate"])
@pytest.mark.parametrize("reward", ["objective", "shaped", "sparse"])
@pytest.mark.parametrize("faults", [(), FAULTS], ids=["sound", "rolled back"])
def test_it_gives_to_the_bit_what_the_learner_of_esper_learns_from(reward, faults, limit):
    own = learned_from(task(*faults), reward, time_limit=limit)
    env = make(task(*faults), reward=reward, time_limit=limit)
    obs, info = env.reset(seed=3)
    for t in range(E):
        valid = own.valid[:, t].numpy()
        assert (obs[:, : own.raw_states.shape[-1]] == own.raw_states[:, t].numpy())[valid].all()
        assert (info["legal"] == own.legal[:, t].numpy())[valid].all()
        assert (info["rolled_back"] == ~valid).all()
        played = own.actions[:, t].numpy()
        obs, got, terminated, truncated, info = env.step(played)
        assert not info["illegal"].any()  # neutral rows wait
        late = ~own.valid[:, -1].numpy() & (t == E - 2) if reward == "objective" else np.zeros(N, dtype=bool)
        assert (got == own.rewards[:, t].numpy())[valid & ~late].all()
        if t < E - 1:
            assert (got == 0.0)[~valid].all()
            assert not truncated.any()
            if reward != "objective":
                assert (terminated == own.terminal[:, t].numpy())[valid].all()
    if limit == "truncate":
        assert truncated.all()
        assert not terminated.any()
    else:
        assert terminated.all()
        assert not truncated.any()


def test_a_host_without_a_last_step_has_the_same_discounted_return_as_in_the_learner():
    faults = ((0, E, NAN), (1, E, NAN), (1, E - 1, NAN), (2, 4, NAN))
    own = learned_from(task(*faults), "objective")
    env = make(task(*faults))
    env.reset(seed=3)
    gammas = GAMMA ** np.arange(E)
    rewards = np.stack([env.step(own.actions[:, t].numpy())[1] for t in range(E)], axis=1)
    want = (own.rewards.numpy() * own.valid.numpy() * gammas).sum(axis=1)
    assert (rewards * gammas).sum(axis=1) == pytest.approx(want, abs=1e-6)


def test_a_host_that_cannot_pay_waits_and_is_rewarded_at_the_end():
    env = make(task(sigma=0.0), compute_budget=1.0, num_envs=2)  # a host alone just pays
    grow = np.array([action(Op.GERMINATE, slot=0, blueprint=7, tempo=0), CANONICAL_ACTION])
    _, info = env.reset()
    rewards, stopped = [], []
    for t in range(E):
        _, reward, terminated, _, info = env.step(grow if t == 0 else WAIT[:2])
        rewards.append(reward[0])
        stopped.append(only_waits(info, 0))
        assert not only_waits(info, 1) or t == E - 1
    first = stopped.index(True)
    assert 0 < first < E - 1
    assert all(stopped[first:])
    assert rewards[first + 1 : -1] == [0.0] * (E - first - 2)
    assert rewards[-1] != 0.0
    assert terminated.all()


# -- masks and illegal actions ----------------------------------------------------------------------------------------


def test_actions_within_the_masks_are_executed_or_said_to_be_illegal():
    env, rng = make(), np.random.default_rng(0)
    _, info = env.reset(seed=1)
    illegal = 0
    for t in range(E):
        actions = drawn(env, info, rng)
        fits = info["legal"][np.arange(N), actions[:, Head.OP], actions[:, Head.SLOT]]
        before = info
        _, _, _, _, info = env.step(actions)
        assert (info["illegal"] >= ~fits).all(), t
        gated = (actions[:, Head.OP] == Op.SET_ALPHA_TARGET) & (actions[:, Head.STYLE] == 3)
        assert (info["illegal"] == ~fits)[~gated].all()
        assert (before["action_mask"].sum(axis=1) >= 8).all()
        illegal += info["illegal"].sum()
    assert illegal > 0  # this is what a factored mask cannot say


def test_an_illegal_action_waits():
    both = [make(task(sigma=0.0)) for _ in range(2)]
    for env in both:
        env.reset(seed=0)
    prune = np.tile(action(Op.PRUNE, slot=1), (N, 1))  # nothing has grown
    (a, *_, told), (b, *_, silent) = (env.step(x) for env, x in zip(both, (prune, WAIT), strict=True))
    assert told["illegal"].all()
    assert not silent["illegal"].any()
    assert (a == b).all()


# -- episodes ---------------------------------------------------------------------------------------------------------


def episode(env, rng, obs_and_info):
    """All observations and rewards of one episode of drawn actions; the last info."""
    (obs, info), seen = obs_and_info, []
    done = np.zeros(N, dtype=bool)
    while not done.all():
        seen.append(obs)
        obs, reward, terminated, truncated, info = env.step(drawn(env, info, rng))
        done = terminated | truncated
        seen.append(reward)
    return [*seen, obs], info


def test_a_seed_gives_the_same_hosts_and_no_seed_the_next_ones():
    env = make()
    first, _ = episode(env, np.random.default_rng(0), env.reset(seed=7))
    second, _ = episode(env, np.random.default_rng(0), env.reset())
    again, _ = episode(env, np.random.default_rng(0), env.reset(seed=7))
    then, _ = episode(env, np.random.default_rng(0), env.reset())
    other, _ = episode(env, np.random.default_rng(0), env.reset(seed=np.int64(8)))
    for a, b in ((first, again), (second, then)):
        assert all((x == y).all() for x, y in zip(a, b, strict=True))
    for a, b in ((first, second), (first, other)):
        assert any((x != y).any() for x, y in zip(a, b, strict=True))
    of_the_call, _ = episode(made := make(seed=7), np.random.default_rng(0), made.reset())
    assert all((x == y).all() for x, y in zip(first, of_the_call, strict=True))


def test_the_step_after_the_last_begins_the_next_episode_whatever_its_actions():
    assert esper.gym.GrowingHosts.metadata["autoreset_mode"] is AutoresetMode.NEXT_STEP
    env, other = make(), make()
    _, info = episode(env, np.random.default_rng(0), env.reset(seed=2))
    assert all(only_waits(info, host) for host in range(N))
    obs, reward, terminated, truncated, info = env.step(np.tile(action(Op.GERMINATE), (N, 1)))
    assert reward.tolist() == [0.0] * N
    assert not (terminated | truncated | info["illegal"]).any()
    other.reset(seed=2)
    want, told = other.reset()
    assert (obs == want).all()
    assert all((info[name] == told[name]).all() for name in told)
    assert "kept_points" not in info


def test_the_last_observation_is_of_the_hosts_after_the_last_operation():
    env = make(time_limit="truncate")
    env.reset(seed=0)
    for _ in range(E - 1):
        obs, *_ = env.step(WAIT)
    assert not obs[:, 25:].any()  # all slots are empty
    obs, _, _, truncated, info = env.step(np.tile(action(Op.GERMINATE, slot=1, blueprint=4), (N, 1)))
    assert truncated.all()
    occupied = obs[:, [25, 25 + 31, 25 + 62]]
    assert occupied.tolist() == [[0.0, 1.0, 0.0]] * N
    assert (info["kept_params"] == 10_000).all()  # nothing is fossilized


def test_what_an_episode_leaves_is_told_with_its_last_step():
    env = make(task(sigma=0.0))
    _, info = env.reset(seed=0)
    waits = [env.step(WAIT) for _ in range(E)]
    info = waits[-1][-1]
    accuracy = 50.0 * (1.0 - np.exp(-E / 10.0))  # of a host alone
    assert info["kept_points"] == pytest.approx([accuracy] * N, abs=1e-3)
    assert info["final_reward"] == pytest.approx([accuracy / 100.0] * N, abs=1e-5)
    assert all("final_reward" not in each[-1] for each in waits[:-1])


# -- rollbacks --------------------------------------------------------------------------------------------------------


def test_a_rollback_ends_the_episode_of_its_host_where_the_reward_is_not_of_the_whole_one():
    env = make(task((1, 4, NAN)), reward="shaped")
    env.reset()
    rows = [env.step(WAIT) for _ in range(6)]
    assert [row[2].tolist() for row in rows] == [[False, t == 3, False, False] for t in range(1, 7)]
    assert rows[2][1][1] == -10.0  # the row before the rollback
    assert rows[2][-1]["rolled_back"].tolist() == [False, True, False, False]
    assert only_waits(rows[2][-1], 1)
    assert rows[3][1][1] == 0.0  # nothing was decided
    assert not only_waits(rows[3][-1], 1)


def test_a_rollback_is_a_step_within_the_episode_under_the_objective():
    env = make(task((1, 4, NAN)))
    env.reset()
    rows = [env.step(np.tile(action(Op.GERMINATE, slot=0), (N, 1))) for _ in range(6)]
    assert not any(row[2].any() for row in rows)
    assert rows[2][-1]["rolled_back"].tolist() == [False, True, False, False]
    assert rows[3][-1]["illegal"][1]  # only WAIT was
    assert rows[3][1][1] == 0.0


# -- errors -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("actions", "words"),
    [
        (WAIT[:2], r"shape \(2, 8\).*integers of the shape \(4, 8\).*slot, blueprint, style"),
        (WAIT.astype(np.float32), "type float32; they must be integers"),
        (WAIT[0], r"shape \(8,\)"),
        (WAIT + np.eye(1, 8, Head.OP, dtype=int) * 6, r"host 0 has op = 6; it must be in 0 to 5.*action_mask"),
        (WAIT - np.eye(1, 8, dtype=int), "host 0 has slot = -1; it must be in 0 to 2"),
    ],
)
def test_actions_outside_of_the_space_are_refused(actions, words):
    env = make()
    env.reset(seed=0)
    with pytest.raises(InvalidAction, match=words):
        env.step(actions)
    after, *_ = env.step(WAIT)  # and nothing has happened
    env.reset(seed=0)
    assert (env.step(WAIT)[0] == after).all()


def test_a_step_needs_an_episode_and_an_open_environment():
    env = make()
    with pytest.raises(ResetNeeded, match="call reset"):
        env.step(WAIT)
    env.reset()
    env.close()
    env.close()
    for call in (lambda: env.step(WAIT), env.reset):
        with pytest.raises(ClosedEnvironmentError, match="is closed; make another one"):
            call()


def test_a_reset_takes_a_seed_and_no_options():
    env = make()
    with pytest.raises(ConfigError, match=r"options are \['difficulty'\]"):
        env.reset(options={"difficulty": 1})
    for seed in (-1, [1, 2], True):
        with pytest.raises(ConfigError, match=r"^seed is"):
            env.reset(seed=seed)
    env.reset(seed=1)


# -- Gymnasium --------------------------------------------------------------------------------------------------------


class One(gymnasium.Env):
    """One host as an environment of its own, for Gymnasium's checker."""

    def __init__(self):
        self.hosts = make(num_envs=1)
        self.observation_space = self.hosts.single_observation_space
        self.action_space = self.hosts.single_action_space
        self.metadata, self.render_mode = {"render_modes": []}, None

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        obs, info = self.hosts.reset(seed=seed, options=options)
        return obs[0], {name: value[0] for name, value in info.items()}

    def step(self, chosen):
        obs, reward, terminated, truncated, info = self.hosts.step(chosen[None])
        rows = {name: value[0] for name, value in info.items()}
        return obs[0], float(reward[0]), bool(terminated[0]), bool(truncated[0]), rows


@pytest.mark.filterwarnings("ignore:.*(spec|infinity|symmetric and normalized|float32).*")
def test_the_checker_of_gymnasium_finds_nothing():
    check_env(One(), skip_render_check=True)


def test_wrappers_of_gymnasium_read_its_infos():
    env = DictInfoToList(RecordEpisodeStatistics(make()))
    assert env.reset(seed=0)[1][0].keys() == {"action_mask", "legal", "illegal", "rolled_back"}
    total = np.zeros(N)
    for _ in range(E):
        obs, reward, *_, infos = env.step(WAIT)
        total += reward
        assert env.observation_space.contains(obs)
    assert [info["episode"]["r"] for info in infos] == pytest.approx(total, abs=1e-5)
    assert [info["episode"]["l"] for info in infos] == [E] * N
    assert {"kept_points", "kept_params", "final_reward"} <= infos[0].keys()


def test_arrays_of_a_step_stay_as_they_are():
    env = make()
    rows = [*env.reset()]
    kept = rows[0].copy(), rows[1]["action_mask"].copy()
    for _ in range(3):
        env.step(drawn(env, rows[1], np.random.default_rng(0), masked=False))
    assert (rows[0] == kept[0]).all()
    assert (rows[1]["action_mask"] == kept[1]).all()


def test_a_step_reads_the_device_twice_however_many_hosts_there_are():
    for num_envs in (2, 64):
        env = make(num_envs=num_envs)
        env.reset()
        with CountedReads() as reads:
            env.step(np.tile(CANONICAL_ACTION, (num_envs, 1)))
        assert reads.number == 2
