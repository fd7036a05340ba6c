"""The rollout buffer: columns and rows, rollbacks, neutral rows."""

import pytest
import torch

from dry_run import CountedReads
from esper.leyline.errors import CheckpointError
from esper.leyline.tensor_dataclass import named_tensors
from esper.simic.agent.rollout_buffer import TamiyoRolloutBuffer, Transition

N, T, D, S, H = 3, 5, 4, 2, 6


def new_buffer(**changes) -> TamiyoRolloutBuffer:
    return TamiyoRolloutBuffer(
        **{"num_envs": N, "max_steps": T, "feature_dim": D, "num_slots": S, "hidden_dim": H} | changes
    )


def column(t: int, **changes) -> dict[str, torch.Tensor]:
    """Distinct, reproducible numbers for one step of all hosts."""
    g = torch.Generator().manual_seed(t)

    def flag(*shape):
        return torch.rand(N, *shape, generator=g) < 0.5

    fields = {
        "state": torch.randn(N, D, generator=g),
        "raw_state": torch.randn(N, D, generator=g),
        "blueprint_index": torch.randint(-1, 13, (N, S), generator=g),
        "actions": torch.randint(0, 2, (N, 8), generator=g),
        "effective_op": torch.randint(0, 6, (N,), generator=g),
        "log_prob": -torch.rand(N, 8, generator=g),
        "value": torch.randn(N, generator=g),
        "reward": torch.randn(N, generator=g),
        "bootstrap_value": torch.zeros(N),
        "terminal": torch.zeros(N, dtype=torch.bool),
        "truncated": torch.zeros(N, dtype=torch.bool),
        "valid": torch.ones(N, dtype=torch.bool),
        "reset": torch.zeros(N, dtype=torch.bool),
        "forced": flag(),
        "legal": flag(6, S),
        "has_gate": flag(S),
    }
    return fields | changes


def only(host: int) -> torch.Tensor:
    return torch.arange(N) == host


def same(a: TamiyoRolloutBuffer, b: TamiyoRolloutBuffer) -> bool:
    return all(torch.equal(x, y) for (_, x), (_, y) in zip(named_tensors(a.slabs), named_tensors(b.slabs), strict=True))


def put(buffer: TamiyoRolloutBuffer, t: int, **changes) -> None:
    """Write a step of all hosts as a client does."""
    buffer.put(t, Transition(**column(t, **changes)))
    buffer.neutralize()


def roll_back(buffer: TamiyoRolloutBuffer, rows: list[tuple[int, int]], *, ends: bool = True) -> None:
    """Give these rows (host, step) the penalty of their host."""
    mask = torch.zeros(N, buffer.max_steps, dtype=torch.bool)
    for host, t in rows:
        mask[host, t] = True
    buffer.roll_back(mask, PENALTY[:, None].expand(mask.shape), ends=ends)


PENALTY = torch.tensor([-10.0, -20.0, -30.0])


def test_a_field_may_be_given_by_the_name_of_its_slab():
    own, of_slab = new_buffer(), new_buffer()
    fields = {name: values[0] for name, values in column(0).items()}
    plural = {name if name in vars(own.slabs) else f"{name}s": entry for name, entry in fields.items()}
    assert {"states", "raw_states", "log_probs", "values", "rewards"} <= plural.keys()
    own.add(0, **fields)
    of_slab.add(0, **plural)
    assert same(own, of_slab)
    with pytest.raises(TypeError, match="given twice"):
        own.add(0, **fields, rewards=1.0)


SCALARS = {
    "log_prob": -0.5, "value": 0.25, "reward": -1.5, "bootstrap_value": 0.75, "effective_op": 3, "terminal": False,
    "truncated": True, "valid": True, "reset": True, "forced": True,
}  # fmt: skip


@pytest.mark.parametrize("valid", [True, False])
@pytest.mark.parametrize("given", [lambda x: x, torch.tensor], ids=["numbers of Python", "tensors without axes"])
def test_a_row_of_scalars_is_added_without_a_single_read(given, valid):
    buffer, fields = new_buffer(), {name: values[0] for name, values in column(0).items()}
    scalars = {name: given(value) for name, value in (SCALARS | {"valid": valid}).items()}
    with CountedReads() as reads:
        buffer.add(1, **fields | scalars)
    assert reads.number == 0
    slabs, kept = buffer.slabs, int(valid)
    assert slabs.log_probs[1, 0].tolist() == [-0.5 * kept] * 8
    assert (slabs.values[1, 0], slabs.rewards[1, 0], slabs.bootstrap_values[1, 0]) == (
        0.25 * kept, -1.5 * kept, 0.75 * kept,
    )  # fmt: skip
    assert slabs.effective_op[1, 0] == 3 * kept
    flags = ("terminal", "truncated", "valid", "reset", "forced")
    assert [bool(getattr(slabs, name)[1, 0]) for name in flags] == [False, valid, valid, True, valid]


def test_a_rollout_its_rollbacks_and_its_advantages_cost_no_read():
    buffer, rows = new_buffer(), [Transition(**column(t, valid=~only(1), reset=only(2))) for t in range(T)]
    marked, rewards = torch.rand(N, T) < 0.5, torch.zeros(N, T)
    with CountedReads() as reads:
        for t, row in enumerate(rows):
            buffer.put(t, row)
        buffer.neutralize()
        buffer.roll_back(marked, rewards, ends=True)
        buffer.add_final_reward(PENALTY, PENALTY, PENALTY)
        buffer.compute_advantages_and_returns()
        buffer.normalize_advantages()
        buffer.sequences(torch.tensor([0, 2]))
        buffer.reset()
    assert reads.number == 0


def test_a_rollback_ends_the_last_row_with_the_penalty():
    buffer = new_buffer()
    for t in range(3):
        put(buffer, t, truncated=~only(-1), bootstrap_value=torch.ones(N))
    kept = buffer.slabs.rewards.clone()
    roll_back(buffer, [(1, 2)])
    assert buffer.slabs.terminal.nonzero().tolist() == [[1, 2]]
    assert not buffer.slabs.truncated[1, 2]
    assert buffer.slabs.bootstrap_values[1, 2] == 0
    assert buffer.slabs.rewards[1, 2] == -20
    kept[1, 2] = -20
    assert torch.equal(buffer.slabs.rewards, kept)
    assert buffer.slabs.truncated[0, 2]


def rolled_back_one_by_one(buffer: TamiyoRolloutBuffer, mask: torch.Tensor, reward: torch.Tensor) -> None:
    """`roll_back` with `ends`, one row after another."""
    slabs = buffer.slabs
    for host, t in mask.nonzero().tolist():
        if slabs.valid[host, t] and not slabs.terminal[host, t]:
            slabs.rewards[host, t] = reward[host, t]
            slabs.terminal[host, t], slabs.truncated[host, t], slabs.bootstrap_values[host, t] = True, False, 0.0


def test_rollbacks_that_are_marked_together_are_those_that_are_marked_one_by_one():
    g, num_marked = torch.Generator().manual_seed(7), 0
    for _ in range(20):
        mask, penalty = torch.rand(N, T, generator=g) < 0.4, torch.randn(N, T, generator=g)
        one_by_one, together = new_buffer(), new_buffer()
        for t in range(T):
            valid, ends = torch.rand(N, generator=g) < 0.7, torch.rand(N, generator=g) < 0.3
            for buffer in (one_by_one, together):
                put(buffer, t, valid=valid, terminal=ends, truncated=~ends, bootstrap_value=torch.ones(N))
        rolled_back_one_by_one(one_by_one, mask, penalty)
        together.roll_back(mask, penalty, ends=True)
        assert same(one_by_one, together)
        num_marked += int((together.slabs.rewards == penalty).sum())
    assert num_marked > 20


def test_advantages_and_returns_of_stored_or_of_other_rewards():
    buffer = new_buffer(num_envs=1, max_steps=4, gae_lambda=0.98)
    row = {name: x[0] for name, x in column(0).items()}
    for r, v, end in zip([1, 0, -1, 2], [0.5, 0.4, 0.3, 0.2], [False, False, False, True], strict=True):
        buffer.add(0, **row | {"reward": r, "value": v, "truncated": end, "bootstrap_value": 0.6 * end})
    want = torch.tensor([[1.974540, 1.104030, 1.236315, 2.397000]])
    advantages, returns = buffer.compute_advantages_and_returns()
    torch.testing.assert_close(advantages, want, atol=1e-6, rtol=0)
    torch.testing.assert_close(returns, want + buffer.slabs.values)
    advantages, _ = buffer.compute_advantages_and_returns(torch.zeros(1, 4))
    assert float(advantages[0, 3]) == pytest.approx(0.995 * 0.6 - 0.2)


def test_advantages_are_normalized_once():
    buffer = new_buffer()
    put(buffer, 0)
    buffer.compute_advantages_and_returns()
    buffer.normalize_advantages()
    with pytest.raises(RuntimeError, match="already"):
        buffer.normalize_advantages()
    buffer.compute_advantages_and_returns()
    buffer.normalize_advantages()


def test_minibatches_are_made_of_normalized_advantages_and_of_returns_that_are_not():
    # deltas 1, 3 and 8 of single steps: mean 4, deviation sqrt(26 / 3)
    buffer = new_buffer()
    rewards, ends = torch.tensor([2.0, 4.0, 9.0]), torch.ones(N, dtype=torch.bool)
    put(buffer, 0, reward=rewards, value=torch.ones(N), terminal=ends)
    buffer.compute_advantages_and_returns()
    normalized = buffer.normalize_advantages()
    batch = buffer.sequences(torch.arange(N))
    want = torch.tensor([-3.0, -1.0, 4.0]) / (26 / 3) ** 0.5
    torch.testing.assert_close(batch.advantages[:, 0], want)
    assert torch.equal(batch.advantages, normalized.advantages)
    assert not batch.advantages[:, 1:].any()
    assert batch.returns[:, 0].tolist() == rewards.tolist()


def test_sequences_are_whole_rows_of_the_chosen_hosts():
    buffer = new_buffer(num_layers=2)
    for t in range(T):
        put(buffer, t)
    batch = buffer.sequences(torch.tensor([2, 0]))
    assert torch.equal(batch.states, buffer.slabs.states[[2, 0]])
    assert torch.equal(batch.legal, buffer.slabs.legal[[2, 0]])
    assert batch.hidden0.h.shape == batch.hidden0.c.shape == (2, 2, H)


def test_overflow_is_an_index_error():
    buffer = new_buffer()
    with pytest.raises(IndexError, match="column 5"):
        buffer.put(T, Transition(**column(0)))
    row = {name: values[0] for name, values in column(0).items()}
    for _ in range(T):
        buffer.add(0, **row)
    with pytest.raises(IndexError, match="host 0"):
        buffer.add(0, **row)


def test_a_misspelled_field_is_named():
    with pytest.raises(TypeError, match=r"rewrad.*did you mean 'reward'"):
        new_buffer().add(0, **{name: values[0] for name, values in column(0).items()}, rewrad=0.0)


def test_reset_makes_every_row_neutral_again():
    buffer = new_buffer()
    for t in range(T):
        put(buffer, t)
    buffer.compute_advantages_and_returns()
    buffer.reset()
    assert same(buffer, new_buffer())
    assert buffer.num_steps == 0
    roll_back(buffer, [(n, t) for n in range(N) for t in range(T)])
    assert not buffer.slabs.terminal.any()


def test_a_rollback_that_ends_nothing_exchanges_the_reward_of_the_row_before_it():
    buffer = new_buffer()
    for t in range(3):
        put(buffer, t, valid=~only(1) if t == 1 else ~only(-1))
    kept = buffer.slabs.rewards.clone()
    marked = torch.zeros(N, T, dtype=torch.bool)
    marked[1, :2] = True  # row 1 is not valid: a second rollback in a row finds nothing
    buffer.roll_back(marked, torch.full((N, T), -0.25), ends=False)
    assert not buffer.slabs.terminal.any()
    kept[1, 0] = -0.25
    assert torch.equal(buffer.slabs.rewards, kept)


def test_the_end_of_an_episode_is_paid_to_the_last_valid_row_discounted_by_the_steps_between():
    buffer, rewards = new_buffer(num_envs=4, gamma=0.5), torch.ones(N, T)
    last_valid = [4, 3, 1, None]
    for t in range(T):
        row = {name: value[0] for name, value in column(t).items()} | {"truncated": False, "terminal": False}
        for n, last in enumerate(last_valid):
            buffer.add(n, **row | {"reward": rewards[0, 0], "valid": last is not None and t <= last})
    buffer.add_final_reward(torch.full((4,), 8.0), torch.full((4,), 5.0), torch.full((4,), -16.0))
    # in time: 8 in the place of 5; one step before the end 1/2 * (8 - 16), three before 1/8 * (8 - 16)
    ends = [row[last] for row, last in zip(buffer.slabs.rewards.tolist(), last_valid, strict=True) if last is not None]
    assert ends == [1 + 3, 1 - 4, 1 - 1]
    assert buffer.slabs.rewards.sum() == sum(ends) + 4 + 3 + 1
    assert buffer.slabs.terminal.nonzero().tolist() == [[0, 4], [1, 3], [2, 1]]


def test_a_half_filled_buffer_survives_a_restart():
    buffer, other = new_buffer(), new_buffer()
    for t in range(3):
        put(buffer, t)
    other.load_state_dict(buffer.state_dict())
    for b in (buffer, other):
        roll_back(b, [(0, 2)])
        put(b, 3)
        b.add(1, **{name: values[1] for name, values in column(4).items()})
    assert same(buffer, other)
    assert other.num_steps == 5


def test_the_state_of_another_shape_is_refused():
    with pytest.raises(CheckpointError, match="states"):
        new_buffer().load_state_dict(new_buffer(feature_dim=D + 1).state_dict())
