"""The rollout buffer: columns and rows, rollbacks, neutral rows."""

import pytest
import torch

from esper.leyline.errors import CheckpointError
from esper.leyline.lifecycle import CANONICAL_ACTION, LifecycleOp
from esper.leyline.tensor_dataclass import named_tensors
from esper.simic.rollout_buffer import TamiyoRolloutBuffer, Transition

N, T, D, S, H = 3, 5, 4, 2, 6


def new_buffer(**changes) -> TamiyoRolloutBuffer:
    return TamiyoRolloutBuffer(
        **{"num_envs": N, "max_steps": T, "feature_dim": D, "num_slots": S, "hidden_dim": H} | changes
    )


def column(t: int, n: int = N, **changes) -> dict[str, torch.Tensor]:
    """Distinct, reproducible numbers for one step of n hosts."""
    g = torch.Generator().manual_seed(t)

    def flag(*shape):
        return torch.rand(n, *shape, generator=g) < 0.5

    fields = {
        "states": torch.randn(n, D, generator=g),
        "raw_states": torch.randn(n, D, generator=g),
        "blueprint_index": torch.randint(-1, 13, (n, S), generator=g),
        "actions": torch.randint(0, 2, (n, 8), generator=g),
        "effective_op": torch.randint(0, 6, (n,), generator=g),
        "log_probs": -torch.rand(n, 8, generator=g),
        "values": torch.randn(n, generator=g),
        "rewards": torch.randn(n, generator=g),
        "bootstrap_values": torch.zeros(n),
        "terminal": torch.zeros(n, dtype=torch.bool),
        "truncated": torch.zeros(n, dtype=torch.bool),
        "valid": torch.ones(n, dtype=torch.bool),
        "reset": torch.zeros(n, dtype=torch.bool),
        "forced": flag(),
        "legal": flag(6, S),
        "has_gate": flag(S),
    }
    return fields | changes


def only(host: int) -> torch.Tensor:
    return torch.arange(N) == host


def same(a: TamiyoRolloutBuffer, b: TamiyoRolloutBuffer) -> bool:
    return all(
        torch.equal(x, y) for (_, x), (_, y) in zip(named_tensors(a.rollout), named_tensors(b.rollout), strict=True)
    )


def put(buffer: TamiyoRolloutBuffer, t: int, **changes) -> None:
    """Write a step of all hosts as a client does."""
    buffer.put(t, Transition(**column(t, buffer.num_envs, **changes)))
    buffer.neutralize()


def roll_back(buffer: TamiyoRolloutBuffer, rows: list[tuple[int, int]], *, ends: bool = True) -> None:
    """Give these rows (host, step) the penalty of their host."""
    mask = torch.zeros(N, buffer.max_steps, dtype=torch.bool)
    for host, t in rows:
        mask[host, t] = True
    buffer.roll_back(mask, PENALTY[:, None].expand(mask.shape), ends=ends)


PENALTY = torch.tensor([-10.0, -20.0, -30.0])


@pytest.mark.parametrize("given", [lambda x: x, torch.Tensor.item], ids=["tensors without axes", "numbers of Python"])
def test_columns_and_rows_of_the_same_steps_give_the_same_rollout(given):
    columns, rows = new_buffer(), new_buffer()
    steps = [column(t, valid=~only(t % N), reset=only(1)) for t in range(T)]
    for t, step in enumerate(steps):
        columns.put(t, Transition(**step))
        for host in range(N):
            row = {name: given(x[host]) if x[host].dim() == 0 else x[host] for name, x in step.items()}
            rows.add(host, **{name.removesuffix("s") if name in ("values", "rewards", "log_probs") else name: x
                              for name, x in row.items()})  # fmt: skip
    for buffer in (columns, rows):
        buffer.neutralize()
    assert same(columns, rows)
    assert columns.num_steps == rows.num_steps == T
    with pytest.raises(IndexError, match="host 0 has its 5 steps already"):
        rows.add(0, **{name: x[0] for name, x in steps[0].items()})


def test_fields_of_a_row_are_checked_and_those_with_a_default_may_be_left_out():
    buffer, row = new_buffer(), {name: x[0] for name, x in column(0).items()}
    buffer.add(1, **row)
    buffer.add(1, **{name: row[name] for name in row if name not in ("terminal", "valid", "forced")})
    assert buffer.num_steps == 2
    assert buffer.rollout.valid.tolist() == [[False] * T, [True, True, False, False, False], [False] * T]
    with pytest.raises(TypeError, match="rewrads are missing or unknown"):
        buffer.add(0, **row, rewrad=0.0)
    del row["actions"]
    with pytest.raises(TypeError, match="actions are missing or unknown"):
        buffer.add(0, **row)


def test_an_invalid_row_is_neutral_whatever_was_put():
    missing = torch.full((N,), float("nan"))
    buffer, step = new_buffer(), column(3, valid=~only(1), reset=only(1), rewards=missing, bootstrap_values=missing)
    buffer.put(3, Transition(**step))
    buffer.neutralize()
    row = {name: getattr(buffer.rollout, name)[1, 3] for name in step}
    assert row.pop("actions").tolist() == list(CANONICAL_ACTION)
    assert row.pop("legal").nonzero().tolist() == [[LifecycleOp.WAIT, 0]]
    assert row.pop("reset")
    assert not any(value.any() for value in row.values())
    for name, values in step.items():
        assert torch.equal(getattr(buffer.rollout, name)[[0, 2], 3].nan_to_num(7), values[[0, 2]].nan_to_num(7)), name


def test_a_rollout_its_rollbacks_and_its_advantages_cost_no_read():
    buffer = new_buffer(device="meta")  # where there is nothing to be read
    for t in range(T):
        buffer.put(t, Transition(**column(t, valid=~only(1), reset=only(2))))
    buffer.neutralize()
    marked = torch.zeros(N, T, dtype=torch.bool, device="meta")
    buffer.roll_back(marked, marked.float(), ends=True)
    buffer.add_final_reward(*[PENALTY.to("meta")] * 3)
    buffer.compute_advantages_and_returns()
    buffer.normalize_advantages()
    buffer.sequences(torch.zeros(2, dtype=torch.int64, device="meta"))
    buffer.reset()
    buffer.add(1, **{name: x[0] for name, x in column(0).items()})


def rolled_back_one_by_one(buffer: TamiyoRolloutBuffer, mask: torch.Tensor, reward: torch.Tensor) -> None:
    """`roll_back` with `ends`, one row after another."""
    stored = buffer.rollout
    for host, t in mask.nonzero().tolist():
        if stored.valid[host, t] and not stored.terminal[host, t]:
            stored.rewards[host, t] = reward[host, t]
            stored.terminal[host, t], stored.truncated[host, t], stored.bootstrap_values[host, t] = True, False, 0.0


def test_rollbacks_that_are_marked_together_are_those_that_are_marked_one_by_one():
    g, num_marked = torch.Generator().manual_seed(7), 0
    for _ in range(20):
        mask, penalty = torch.rand(N, T, generator=g) < 0.4, torch.randn(N, T, generator=g)
        one_by_one, together = new_buffer(), new_buffer()
        for t in range(T):
            valid, ends = torch.rand(N, generator=g) < 0.7, torch.rand(N, generator=g) < 0.3
            for buffer in (one_by_one, together):
                put(buffer, t, valid=valid, terminal=ends, truncated=~ends, bootstrap_values=torch.ones(N))
        rolled_back_one_by_one(one_by_one, mask, penalty)
        together.roll_back(mask, penalty, ends=True)
        assert same(one_by_one, together)
        num_marked += int((together.rollout.rewards == penalty).sum())
    assert num_marked > 20


def test_advantages_and_returns_of_stored_or_of_other_rewards():
    buffer = new_buffer(num_envs=1, max_steps=4, gae_lambda=0.98)
    for t, (r, v, end) in enumerate([(1.0, 0.5, False), (0.0, 0.4, False), (-1.0, 0.3, False), (2.0, 0.2, True)]):
        scalars = {"rewards": r, "values": v, "truncated": end, "bootstrap_values": 0.6 * end}
        put(buffer, t, **{name: torch.tensor([x]) for name, x in scalars.items()})
    want = torch.tensor([[1.974540, 1.104030, 1.236315, 2.397000]])
    advantages, returns = buffer.compute_advantages_and_returns()
    torch.testing.assert_close(advantages, want, atol=1e-6, rtol=0)
    torch.testing.assert_close(returns, want + buffer.rollout.values)
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
    put(buffer, 0, rewards=rewards, values=torch.ones(N), terminal=ends)
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
    assert torch.equal(batch.states, buffer.rollout.states[[2, 0]])
    assert torch.equal(batch.legal, buffer.rollout.legal[[2, 0]])
    assert batch.hidden0.h.shape == batch.hidden0.c.shape == (2, 2, H)


def test_overflow_is_an_index_error():
    buffer = new_buffer()
    with pytest.raises(IndexError, match="column 5"):
        buffer.put(T, Transition(**column(0)))


def test_reset_makes_every_row_neutral_again():
    buffer = new_buffer()
    for t in range(T):
        put(buffer, t)
    buffer.compute_advantages_and_returns()
    buffer.reset()
    assert same(buffer, new_buffer())
    assert buffer.num_steps == 0
    roll_back(buffer, [(n, t) for n in range(N) for t in range(T)])
    assert not buffer.rollout.terminal.any()


def test_a_rollback_that_ends_nothing_exchanges_the_reward_of_the_row_before_it():
    buffer = new_buffer()
    for t in range(3):
        put(buffer, t, valid=~only(1) if t == 1 else ~only(-1))
    kept = buffer.rollout.rewards.clone()
    marked = torch.zeros(N, T, dtype=torch.bool)
    marked[1, :2] = True  # row 1 is not valid: a second rollback in a row finds nothing
    buffer.roll_back(marked, torch.full((N, T), -0.25), ends=False)
    assert not buffer.rollout.terminal.any()
    kept[1, 0] = -0.25
    assert torch.equal(buffer.rollout.rewards, kept)


def test_the_end_of_an_episode_is_paid_to_the_last_valid_row_discounted_by_the_steps_between():
    buffer, last_valid = new_buffer(num_envs=4, gamma=0.5), [4, 3, 1, None]
    for t in range(T):
        valid = torch.tensor([last is not None and t <= last for last in last_valid])
        put(buffer, t, rewards=torch.ones(4), valid=valid)
    buffer.add_final_reward(torch.full((4,), 8.0), torch.full((4,), 5.0), torch.full((4,), -16.0))
    # in time: 8 in the place of 5; one step before the end 1/2 * (8 - 16), three before 1/8 * (8 - 16)
    ends, rewards = [1 + 3, 1 - 4, 1 - 1], buffer.rollout.rewards
    assert rewards[[0, 1, 2], last_valid[:3]].tolist() == ends
    assert rewards.sum() == sum(ends) + 4 + 3 + 1
    assert buffer.rollout.terminal.nonzero().tolist() == [[0, 4], [1, 3], [2, 1]]


def test_a_half_filled_buffer_survives_a_restart():
    buffer, other = new_buffer(), new_buffer()
    for t in range(3):
        put(buffer, t)
    other.load_state_dict(buffer.state_dict())
    for b in (buffer, other):
        roll_back(b, [(0, 2)])
        put(b, 3)
        put(b, 4)
    assert same(buffer, other)
    assert other.num_steps == 5


def test_the_state_of_another_shape_is_refused():
    with pytest.raises(CheckpointError, match="states"):
        new_buffer().load_state_dict(new_buffer(feature_dim=D + 1).state_dict())
