"""The rollout of N hosts: preallocated slabs, one row per host, one column per step.

    states [N,T,D]   host 0 | s0 s1 s2 s3 ..        valid   1 1 1 1
                     host 1 | s0 s1 -- s3 ..                1 1 0 1     host 1 was rolled back in step 2: row 2 is
                                                    term.   0 ? 0 0     neutral, row 3 starts from a zero recurrent
                                                    reset   0 0 0 1     state; the reward decides if row 1 is terminal

An unwritten or invalid row is neutral: it evaluates without error and enters no mean. Only WAIT on slot 0 is legal in
it, the actions are canonical, and everything else but `valid` and `reset` is 0.

Shape legend: N = hosts, T = steps, D = features, S = slots, L = recurrent layers, H = recurrent width, n = some hosts.
"""

from collections.abc import Mapping
from functools import lru_cache
from typing import final

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from esper.leyline.errors import nearest
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
    tensors_by_name,
    tree_map,
    with_prefix,
)
from esper.simic.agent.advantages import NormalizedAdvantages, compute_gae, normalize_advantages
from esper.simic.rewards.reward_config import GAMMA


@tensor_dataclass
class Transition:
    """One step of all hosts. `reset` marks those whose recurrent state was zero before it."""

    state: Float[Tensor, "N D"]
    raw_state: Float[Tensor, "N D"]
    blueprint_index: Int[Tensor, "N S"]
    actions: Int[Tensor, "N 8"]
    effective_op: Int[Tensor, " N"]
    log_prob: Float[Tensor, "N 8"]
    value: Float[Tensor, " N"]
    reward: Float[Tensor, " N"]
    bootstrap_value: Float[Tensor, " N"]
    terminal: Bool[Tensor, " N"]
    truncated: Bool[Tensor, " N"]
    valid: Bool[Tensor, " N"]
    reset: Bool[Tensor, " N"]
    forced: Bool[Tensor, " N"]
    legal: Bool[Tensor, "N 6 S"]
    has_gate: Bool[Tensor, "N S"]


_FINITE = ("state", "raw_state")
"""Fields that are always finite (`features.observe`)."""
_UNMASKED = ("valid", "reset")


def neutral_unless(valid: Bool[Tensor, "*N"], entries: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Entries by field of `Transition`, in the dtypes of the buffer; neutral where not `valid`.

    Features are wide, so they are multiplied by 0, which is much faster than `where`.
    """
    neutral = neutral_row(entries["has_gate"].shape[-1], valid.device)
    weight = valid.to(torch.float32)[..., None]
    values = {}
    for name, nothing in neutral.items():
        entry = entries[name].to(nothing.dtype)
        if name in _FINITE:
            values[name] = entry * weight
        elif name in _UNMASKED:
            values[name] = entry
        else:
            values[name] = torch.where(lift(valid, entry), entry, nothing)
    return values


@lru_cache
def neutral_row(num_slots: int, device: torch.device) -> dict[str, Tensor]:
    """A neutral row, by field of `Transition`; broadcasts against one step of one host."""
    dtypes = {"blueprint_index": torch.int64, "effective_op": torch.int64}
    flags = ("terminal", "truncated", "valid", "reset", "forced", "has_gate")
    dtypes.update(dict.fromkeys(flags, torch.bool))
    neutral = {
        name: torch.zeros((), dtype=dtypes.get(name, torch.float32), device=device)
        for name in Transition.__annotations__
    }
    neutral["actions"] = torch.tensor(CANONICAL_ACTION, device=device)
    neutral["legal"] = torch.zeros(NUM_OPS, num_slots, dtype=torch.bool, device=device)
    neutral["legal"][LifecycleOp.WAIT, 0] = True
    return neutral


@tensor_dataclass
class SequenceBatch:
    """Whole rows of some hosts, with the recurrent state before their first step."""

    states: Float[Tensor, "n T D"]
    raw_states: Float[Tensor, "n T D"]
    blueprint_index: Int[Tensor, "n T S"]
    actions: Int[Tensor, "n T 8"]
    effective_op: Int[Tensor, "n T"]
    log_probs: Float[Tensor, "n T 8"]
    values: Float[Tensor, "n T"]
    rewards: Float[Tensor, "n T"]
    bootstrap_values: Float[Tensor, "n T"]
    terminal: Bool[Tensor, "n T"]
    truncated: Bool[Tensor, "n T"]
    valid: Bool[Tensor, "n T"]
    reset: Bool[Tensor, "n T"]
    forced: Bool[Tensor, "n T"]
    legal: Bool[Tensor, "n T 6 S"]
    has_gate: Bool[Tensor, "n T S"]
    advantages: Float[Tensor, "n T"]
    returns: Float[Tensor, "n T"]
    hidden0: Hidden


_NAMES = {name: name if name in SequenceBatch.__annotations__ else f"{name}s" for name in Transition.__annotations__}
"""Field of `Transition` -> its slab, e.g. value -> values."""
_FIELDS = {slab: name for name, slab in _NAMES.items()}
_DEFAULTS = {"bootstrap_value": 0, "terminal": 0, "truncated": 0, "valid": 1, "reset": 0, "forced": 0}

Entry = int | float | bool | Tensor
"""A scalar of `add`: a Python number or a 0-dim tensor, which is not read."""


@final
class TamiyoRolloutBuffer:
    """Owner and only writer of `slabs`, a SequenceBatch of all N hosts.

    `put` copies one column of all hosts unmasked; call `neutralize` before the rollout is used. `add` writes the next
    row of one host. Only `load_state_dict` reads the device.
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
        self.slabs = _allocate(num_envs, max_steps, feature_dim, num_slots, (num_layers, hidden_dim), device)
        self._neutral = neutral_row(num_slots, self.slabs.valid.device)
        self._defaults = {
            name: torch.full((), value, dtype=getattr(self.slabs, _NAMES[name]).dtype, device=device)
            for name, value in _DEFAULTS.items()
        }
        self._columns: dict[int, Transition] = {}
        self._lengths = [0] * num_envs
        self._normalized = False
        self.reset()

    @property
    def num_steps(self) -> int:
        """Length of the longest row."""
        return max(self._lengths)

    def reset(self) -> None:
        """Make every row neutral and every length 0."""
        for name, slab in _NAMES.items():
            getattr(self.slabs, slab).copy_(self._neutral[name])
        self.slabs.advantages.zero_()
        self.slabs.returns.zero_()
        self._lengths = [0] * self.num_envs
        self._normalized = False

    def put(self, t: int, row: Transition) -> None:
        """Copy `row` to column `t` of all hosts without neutralizing it. Raises IndexError outside the slab."""
        for name, place in vars(self.column(t)).items():
            place.copy_(getattr(row, name))
        self._lengths = [t + 1] * self.num_envs

    @torch.no_grad()
    def neutralize(self) -> None:
        """Make invalid rows neutral."""
        entries = {name: getattr(self.slabs, slab) for name, slab in _NAMES.items()}
        for name, value in neutral_unless(self.slabs.valid, entries).items():
            entries[name].copy_(value)

    def column(self, t: int) -> Transition:
        """Views of column `t` (from 0). Raises IndexError outside the slab."""
        if not 0 <= t < self.max_steps:
            raise IndexError(f"column {t} of a buffer of {self.max_steps} steps; reset() it before the next rollout.")
        if t not in self._columns:
            self._columns[t] = Transition(**{name: getattr(self.slabs, slab)[:, t] for name, slab in _NAMES.items()})
        return self._columns[t]

    @torch.no_grad()
    def add(self, env_id: int, **fields: Entry) -> None:
        """Append one row to host `env_id`; nothing is read.

        Fields are those of `Transition`, by their own name or the buffer's (`value` or `values`), with defaults for
        `bootstrap_value` (0), `terminal`, `truncated`, `reset`, `forced` (False) and `valid` (True).

        Raises:
            IndexError: the row of the host is full.
            TypeError: unknown, missing or doubled fields.
        """
        t = self._lengths[env_id]
        if t == self.max_steps:
            raise IndexError(f"host {env_id} has its {t} steps already; reset() the buffer before the next rollout.")
        fields, given = {_FIELDS.get(name, name): entry for name, entry in fields.items()}, fields
        if len(fields) < len(given):
            raise TypeError(f"a field is given twice, by its own name and that of its slab: {sorted(given)}.")
        unknown, missing = fields.keys() - _NAMES.keys(), _NAMES.keys() - fields.keys() - _DEFAULTS.keys()
        if unknown or missing:
            hint = nearest(min(unknown), _NAMES) if unknown else "Only flags and the bootstrap value have defaults."
            raise TypeError(f"unknown fields {sorted(unknown)}, missing fields {sorted(missing)}. {hint}")
        places = {name: getattr(self.slabs, slab)[env_id, t] for name, slab in _NAMES.items()}
        entries = {
            name: torch.as_tensor(entry, device=self.slabs.valid.device).expand_as(places[name])
            for name, entry in {**self._defaults, **fields}.items()
        }
        for name, value in neutral_unless(entries["valid"].to(torch.bool), entries).items():
            places[name].copy_(value)
        self._lengths[env_id] = t + 1

    def roll_back(self, mask_NT: Bool[Tensor, "N T"], reward_NT: Float[Tensor, "N T"], *, ends: bool) -> None:
        """Replace the reward of each masked row, the one before a rollback, if it is valid and not terminal.

        If `ends`, the row also becomes terminal; else its segment continues after the rollback.
        """
        slabs = self.slabs
        open_NT = mask_NT & slabs.valid & ~slabs.terminal
        slabs.rewards.copy_(torch.where(open_NT, reward_NT, slabs.rewards))
        if ends:
            slabs.terminal.logical_or_(open_NT)
            slabs.truncated.logical_and_(~open_NT)
            slabs.bootstrap_values.masked_fill_(open_NT, 0.0)

    def add_final_reward(
        self, final: Float[Tensor, " N"], rewarded: Float[Tensor, " N"], others: Float[Tensor, " N"]
    ) -> None:
        """Add the final reward of the episode to the last valid row of each host, and make it terminal.

        A row of the last step has `rewarded` of it already. A row k steps earlier gets gamma^k times the final reward
        and the `others` of the last step, so that the discounted return does not depend on k.
        """
        slabs, last = self.slabs, self.num_steps - 1
        step_NT = torch.where(slabs.valid, torch.arange(self.max_steps, device=slabs.valid.device), -1)
        place_N = step_NT.amax(dim=1)
        due = torch.where(place_N == last, final - rewarded, (final + others) * self.gamma ** (last - place_N))
        found_N1, place_N1 = (place_N >= 0)[:, None], place_N.clamp(min=0)[:, None]
        reward_N1, ended_N1, cut_N1 = (x.gather(1, place_N1) for x in (slabs.rewards, slabs.terminal, slabs.truncated))
        slabs.rewards.scatter_(1, place_N1, torch.where(found_N1, reward_N1 + due[:, None], reward_N1))
        slabs.terminal.scatter_(1, place_N1, ended_N1 | (found_N1 & ~cut_N1))

    def compute_advantages_and_returns(
        self, rewards: Float[Tensor, "N T"] | None = None
    ) -> tuple[Float[Tensor, "N T"], Float[Tensor, "N T"]]:
        """Advantages and returns of the whole rollout; `rewards` replace the stored ones if given."""
        s = self.slabs
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
        normalized = normalize_advantages(self.slabs.advantages, self.slabs.valid, std_floor, ranks)
        self.slabs.advantages.copy_(normalized.advantages)
        self._normalized = True
        return normalized

    def sequences(self, hosts: Int[Tensor, " n"]) -> SequenceBatch:
        """Copies of the whole rows of some hosts."""
        rows = {name: slab.index_select(0, hosts) for name, slab in named_tensors(self.slabs) if "." not in name}
        return SequenceBatch(hidden0=tree_map(lambda h: h.index_select(1, hosts), self.slabs.hidden0), **rows)

    def state_dict(self) -> dict[str, Tensor]:
        """Copies of all slabs, of the row lengths, and of whether the advantages are normalized."""
        slabs = {name: slab.clone() for name, slab in named_tensors(self.slabs)}
        counters = {"lengths": torch.tensor(self._lengths), "normalized": torch.tensor(self._normalized)}
        return {**with_prefix("slabs", slabs), **counters}

    def load_state_dict(self, state: Mapping[str, Tensor]) -> None:
        """Restore what `state_dict` gave; raises CheckpointError where names or shapes differ."""
        check_same_shapes(state, self.state_dict(), "rollout buffer")
        copy_into(tensors_by_name(self.slabs), below("slabs", state), "rollout buffer")
        self._lengths = state["lengths"].tolist()
        self._normalized = bool(state["normalized"])


def _allocate(n: int, t: int, d: int, s: int, hidden: tuple[int, int], device: torch.device | str) -> SequenceBatch:
    """Uninitialized slabs of `n` hosts; the recurrent state before the first step is zero."""
    row = blank(Transition, {"N": n, "D": d, "S": s}, torch.device(device))
    slabs = {_NAMES[name]: x.new_empty((n, t, *x.shape[1:])) for name, x in vars(row).items()}
    slabs |= {name: torch.empty_like(slabs["values"]) for name in ("advantages", "returns")}
    zeros = torch.zeros(hidden[0], n, hidden[1], device=device)
    return SequenceBatch(hidden0=Hidden(h=zeros, c=zeros.clone()), **slabs)
