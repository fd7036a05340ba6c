"""The rollout of N hosts: preallocated tensors, one row per host, one column per step.

    states [N,T,D]   host 0 | s0 s1 s2 s3 ..        valid   1 1 1 1
                     host 1 | s0 s1 -- s3 ..                1 1 0 1     host 1 was rolled back in step 2: row 2 is
                                                    term.   0 ? 0 0     neutral, row 3 starts from a zero recurrent
                                                    reset   0 0 0 1     state; the reward decides if row 1 is terminal

An unwritten or invalid row is neutral: it evaluates without error and enters no mean. Only WAIT on slot 0 is legal in
it, the actions are canonical, and everything else but `valid` and `reset` is 0.

Shape legend: N = hosts, T = steps, D = features, S = slots, L = recurrent layers, H = recurrent width, n = some hosts.
"""

from collections.abc import Mapping
from typing import final

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from esper.leyline.lifecycle import CANONICAL_ACTION, NUM_OPS, LifecycleOp
from esper.leyline.messages import Hidden
from esper.leyline.ranks import Ranks
from esper.leyline.tensor_dataclass import (
    below,
    blank,
    check_same_shapes,
    copy_into,
    lift,
    named_tensors,
    tensor_dataclass,
    tree_map,
    with_prefix,
)
from esper.simic.advantages import NormalizedAdvantages, compute_gae, normalize_advantages
from esper.simic.rewards.reward_config import GAMMA


@tensor_dataclass
class Transition:
    """One step of all hosts, *R = N, or steps of whole rows, *R = n T.

    `reset` marks those before which the recurrent state was zero.
    """

    states: Float[Tensor, "*R D"]
    raw_states: Float[Tensor, "*R D"]
    blueprint_index: Int[Tensor, "*R S"]
    actions: Int[Tensor, "*R 8"]
    effective_op: Int[Tensor, "*R"]
    log_probs: Float[Tensor, "*R 8"]
    values: Float[Tensor, "*R"]
    rewards: Float[Tensor, "*R"]
    bootstrap_values: Float[Tensor, "*R"]
    terminal: Bool[Tensor, "*R"]
    truncated: Bool[Tensor, "*R"]
    valid: Bool[Tensor, "*R"]
    reset: Bool[Tensor, "*R"]
    forced: Bool[Tensor, "*R"]
    legal: Bool[Tensor, "*R 6 S"]
    has_gate: Bool[Tensor, "*R S"]


@tensor_dataclass
class SequenceBatch(Transition):
    """Whole rows of some hosts, with the recurrent state before their first step."""

    advantages: Float[Tensor, "n T"]
    returns: Float[Tensor, "n T"]
    hidden0: Hidden


_FINITE = ("states", "raw_states")
"""Fields that are always finite (`features.observe`)."""
_UNMASKED = ("valid", "reset")
_DEFAULTS = ("bootstrap_values", "terminal", "truncated", "reset", "forced")
_IN_CHECKPOINTS = "slabs"
"""What checkpoints call the rollout."""


@final
class TamiyoRolloutBuffer:
    """Owner and only writer of `rollout`, the rows of all N hosts.

    `put` copies one column of all hosts unmasked, and `add` the next row of one; call `neutralize` before the rollout
    is used. Only `load_state_dict` reads the device.
    """

    def __init__(
        self,
        num_envs: int,
        max_steps: int,
        feature_dim: int,
        num_slots: int,
        hidden_dim: int,
        num_layers: int = 1,
        device: torch.device | str = "cpu",
        gamma: float = GAMMA,
        gae_lambda: float = 0.95,
    ) -> None:
        self.num_envs, self.max_steps = num_envs, max_steps
        self.gamma, self.gae_lambda = gamma, gae_lambda
        row = vars(blank(Transition, {"*R": num_envs, "D": feature_dim, "S": num_slots}, torch.device(device)))
        fields = {name: x.new_empty((num_envs, max_steps, *x.shape[1:])) for name, x in row.items()}
        fields |= {name: fields["values"].new_empty((num_envs, max_steps)) for name in ("advantages", "returns")}
        zeros = torch.zeros(num_layers, num_envs, hidden_dim, device=device)
        self.rollout = SequenceBatch(hidden0=Hidden(h=zeros, c=zeros.clone()), **fields)
        self._neutral = {name: x.new_zeros(()) for name, x in row.items()}
        self._neutral["actions"] = torch.tensor(CANONICAL_ACTION, device=device)
        self._neutral["legal"] = torch.zeros(NUM_OPS, num_slots, dtype=torch.bool, device=device)
        self._neutral["legal"][LifecycleOp.WAIT, 0] = True
        self.reset()

    def reset(self) -> None:
        """Make every row neutral."""
        for name, nothing in self._neutral.items():
            getattr(self.rollout, name).copy_(nothing)
        self.rollout.advantages.zero_()
        self.rollout.returns.zero_()
        self._lengths = [0] * self.num_envs
        self._normalized = False

    def put(self, t: int, row: Transition) -> None:
        """Copy `row` to column `t` (from 0) of all hosts without neutralizing it; raises IndexError behind the last."""
        if not 0 <= t < self.max_steps:
            raise IndexError(f"column {t} of a buffer of {self.max_steps} steps; reset() it before the next rollout.")
        for name, values in vars(row).items():
            getattr(self.rollout, name).select(1, t).copy_(values)
        self._lengths = [t + 1] * self.num_envs

    @torch.no_grad()
    def add(self, env_id: int, **fields: int | float | Tensor) -> None:
        """Append a row to one host without a read, as `put` does; numbers may be Python's, and names singular (value).

        Raises:
            IndexError: the row of the host is full. TypeError: unknown or missing fields; `_DEFAULTS` may be left out.
        """
        t = self._lengths[env_id]
        if t == self.max_steps:
            raise IndexError(f"host {env_id} has its {t} steps already; reset() the buffer before the next rollout.")
        given = {name if name in self._neutral else f"{name}s": value for name, value in fields.items()}
        row = {**dict.fromkeys(_DEFAULTS, 0), "valid": 1, **given}
        if wrong := sorted(row.keys() ^ self._neutral.keys()):
            raise TypeError(f"{', '.join(wrong)} are missing or unknown; the fields are {', '.join(self._neutral)}.")
        for name, value in row.items():
            getattr(self.rollout, name)[env_id, t] = value
        self._lengths[env_id] = t + 1

    @property
    def num_steps(self) -> int:
        """Length of the longest row."""
        return max(self._lengths)

    @torch.no_grad()
    def neutralize(self) -> None:
        """Make invalid rows neutral. Features are wide: a product with 0 is much faster than `where`."""
        valid = self.rollout.valid
        weight = valid.to(torch.float32)[..., None]
        for name, nothing in self._neutral.items():
            field = getattr(self.rollout, name)
            if name in _FINITE:
                field.mul_(weight)
            elif name not in _UNMASKED:
                field.copy_(torch.where(lift(valid, field), field, nothing))

    def roll_back(self, mask_NT: Bool[Tensor, "N T"], reward_NT: Float[Tensor, "N T"], *, ends: bool) -> None:
        """Replace the reward of each masked row, the one before a rollback, if it is valid and not terminal.

        If `ends`, the row also becomes terminal; else its segment continues after the rollback.
        """
        rollout = self.rollout
        open_NT = mask_NT & rollout.valid & ~rollout.terminal
        rollout.rewards.copy_(torch.where(open_NT, reward_NT, rollout.rewards))
        if ends:
            rollout.terminal.logical_or_(open_NT)
            rollout.truncated.logical_and_(~open_NT)
            rollout.bootstrap_values.masked_fill_(open_NT, 0.0)

    def add_final_reward(
        self, final: Float[Tensor, " N"], rewarded: Float[Tensor, " N"], others: Float[Tensor, " N"]
    ) -> None:
        """Add the final reward of the episode to the last valid row of each host, and make it terminal.

        A row of the last step has `rewarded` of it already. A row k steps earlier gets gamma^k times the final reward
        and the `others` of the last step, so that the discounted return does not depend on k.
        """
        rollout, last = self.rollout, self.num_steps - 1
        step_NT = torch.where(rollout.valid, torch.arange(self.max_steps, device=rollout.valid.device), -1)
        place_N = step_NT.amax(dim=1)
        due = torch.where(place_N == last, final - rewarded, (final + others) * self.gamma ** (last - place_N))
        found_N1, place_N1 = (place_N >= 0)[:, None], place_N.clamp(min=0)[:, None]
        reward_N1, ended_N1, cut_N1 = (
            x.gather(1, place_N1) for x in (rollout.rewards, rollout.terminal, rollout.truncated)
        )
        rollout.rewards.scatter_(1, place_N1, torch.where(found_N1, reward_N1 + due[:, None], reward_N1))
        rollout.terminal.scatter_(1, place_N1, ended_N1 | (found_N1 & ~cut_N1))

    def compute_advantages_and_returns(
        self, rewards: Float[Tensor, "N T"] | None = None
    ) -> tuple[Float[Tensor, "N T"], Float[Tensor, "N T"]]:
        """Advantages and returns of the whole rollout; `rewards` replace the stored ones if given."""
        s = self.rollout
        rewards_NT = s.rewards if rewards is None else rewards
        advantages_NT = compute_gae(
            rewards_NT, s.values, s.bootstrap_values, s.terminal, s.truncated, s.valid, self.gamma, self.gae_lambda
        )
        s.advantages.copy_(advantages_NT)
        torch.add(s.advantages, s.values, out=s.returns)
        self._normalized = False
        return s.advantages, s.returns

    def normalize_advantages(self, std_floor: float = 0.1, ranks: Ranks | None = None) -> NormalizedAdvantages:
        """Normalize the stored advantages over all valid steps of all ranks; raises RuntimeError the second time."""
        if self._normalized:
            raise RuntimeError(
                "the advantages are normalized already; call compute_advantages_and_returns() to get fresh ones."
            )
        normalized = normalize_advantages(self.rollout.advantages, self.rollout.valid, std_floor, ranks)
        self.rollout.advantages.copy_(normalized.advantages)
        self._normalized = True
        return normalized

    def sequences(self, hosts: Int[Tensor, " n"]) -> SequenceBatch:
        """Copies of the whole rows of some hosts."""
        rows = {name: field.index_select(0, hosts) for name, field in named_tensors(self.rollout) if "." not in name}
        return SequenceBatch(hidden0=tree_map(lambda h: h.index_select(1, hosts), self.rollout.hidden0), **rows)

    def state_dict(self) -> dict[str, Tensor]:
        """Copies of the rollout, and how far it is."""
        fields = {name: field.clone() for name, field in named_tensors(self.rollout)}
        lengths = torch.tensor(self._lengths)
        return {
            **with_prefix(_IN_CHECKPOINTS, fields), "lengths": lengths, "normalized": torch.tensor(self._normalized),
        }  # fmt: skip

    def load_state_dict(self, state: Mapping[str, Tensor]) -> None:
        """Restore what `state_dict` gave; raises CheckpointError where names or shapes differ."""
        check_same_shapes(state, self.state_dict(), "rollout buffer")
        copy_into(dict(named_tensors(self.rollout)), below(_IN_CHECKPOINTS, state), "rollout buffer")
        self._lengths = state["lengths"].tolist()
        self._normalized = bool(state["normalized"])
