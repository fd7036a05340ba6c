"""The row of a step: a valid one is stored, others are neutral."""

import torch

from esper.leyline.lifecycle import CANONICAL_ACTION, LifecycleOp
from esper.leyline.tensor_dataclass import named_tensors
from esper.simic.agent.rollout_buffer import TamiyoRolloutBuffer, Transition

D, S, T = 40, 3, 5
NAN = float("nan")


def taken(n: int, seed: int = 0) -> Transition:
    """Any step of n hosts; every third was rolled back, and its measurements are missing."""
    g = torch.Generator().manual_seed(seed)

    def flag(*shape: int) -> torch.Tensor:
        return torch.rand(n, *shape, generator=g) < 0.5

    def number(*shape: int) -> torch.Tensor:
        return torch.randn(n, *shape, generator=g)

    valid = torch.arange(n) % 3 != 2
    legal = flag(6, S)
    legal[:, LifecycleOp.WAIT] = True
    return Transition(
        states=number(D),
        raw_states=number(D),
        actions=torch.randint(0, 4, (n, 8), generator=g),
        log_probs=-number(8).abs(),
        values=number(),
        blueprint_index=torch.randint(-1, 13, (n, S), generator=g),
        legal=legal,
        has_gate=flag(S),
        effective_op=torch.randint(0, 6, (n,), generator=g),
        rewards=number().masked_fill(~valid, NAN),
        bootstrap_values=number().masked_fill(~valid, NAN),
        terminal=flag(),
        truncated=flag(),
        valid=valid,
        reset=flag(),
        forced=flag(),
    )


def test_a_row_that_was_put_is_neutral_only_where_it_is_not_valid():
    step, held = taken(9), TamiyoRolloutBuffer(num_envs=9, max_steps=T, feature_dim=D, num_slots=S, hidden_dim=4)
    held.put(3, step)
    held.neutralize()
    row = Transition(**{name: getattr(held.rollout, name)[:, 3] for name in Transition.__annotations__})
    valid, lost = step.valid, ~step.valid
    for name in Transition.__annotations__:
        assert torch.equal(getattr(row, name)[valid], getattr(step, name)[valid]), name
    assert row.actions[lost].tolist() == [list(CANONICAL_ACTION)] * 3
    assert row.legal[lost].nonzero()[:, 1:].tolist() == [[LifecycleOp.WAIT, 0]] * 3
    assert torch.equal(row.reset, step.reset)
    for name in set(Transition.__annotations__) - {"actions", "legal", "reset"}:
        assert not getattr(row, name)[lost].any(), name


def add(buffer: TamiyoRolloutBuffer, host: int, t: int, row: Transition) -> None:
    """Store the row of one host; of an invalid one only that it is, and whether the recurrent state was zero."""
    for name, values in vars(row).items():
        if row.valid[host] or name in ("valid", "reset"):
            getattr(buffer.rollout, name)[host, t] = values[host]


def test_a_column_that_was_put_is_a_row_added_to_each_host_and_nothing_beside_it():
    added, put = (
        TamiyoRolloutBuffer(num_envs=5, max_steps=T, feature_dim=D, num_slots=S, hidden_dim=4) for _ in range(2)
    )
    for t in range(3):
        step = taken(5, seed=t)
        for n in range(5):
            add(added, n, t, step)
        put.put(t, step)
    put.neutralize()
    for (name, field), (_, other) in zip(named_tensors(added.rollout), named_tensors(put.rollout), strict=True):
        assert torch.equal(field, other), name
