"""A reward step of all modes except `objective`: the kernel on each target slot, then terms that depend on the past.

    inputs  slots and hosts before the op, the op and its outcome   (leyline.RewardInputs)
    state   carried from step to step                               (RewardState)
    ------> reward of the step (leyline.RewardOutput) and the next state

Pure, without host reads. Shape legend: N = hosts, S = slots, E = steps of an episode, M = terms.
"""

from collections.abc import Callable, Sequence
from functools import lru_cache
from typing import TYPE_CHECKING, Any, NamedTuple, TypeAlias, cast, final

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from esper.leyline.errors import ConfigError, EsperError, RegistryError, in_words, nearest, registering
from esper.leyline.lifecycle import BLENDED, GROWING, HAS_MODULE, LifecycleOp, SeedStage, stages_mask
from esper.leyline.messages import HostState, RewardInputs, RewardOutput, RewardProtocol, SlotState
from esper.leyline.tensor_dataclass import blank, lift, named_tensors, replace, tensor_dataclass, tree_map
from esper.simic.rewards.modes import NEW_SEED_POTENTIAL, REWARD_TERMS, Kernel, compute_reward_batched
from esper.simic.rewards.objective import ObjectiveReward
from esper.simic.rewards.reward_config import GAMMA, MODES, ModeTraits, RewardConfig, RewardMode, TimeLimit

_STAGE_SETS = (HAS_MODULE, GROWING, frozenset({SeedStage.FOSSILIZED}), BLENDED)


@tensor_dataclass
class SlotSets:
    """Membership of slots in sets of stages, and counts per host."""

    live: Bool[Tensor, "N S"]
    growing: Bool[Tensor, "N S"]
    fossil: Bool[Tensor, "N S"]
    blended: Bool[Tensor, "N S"]
    num_growing: Int[Tensor, " N"]
    num_fossil: Int[Tensor, " N"]


@lru_cache
def _set_table(device: torch.device) -> Tensor:
    """Membership [set, stage]."""
    return torch.tensor([stages_mask(stages) for stages in _STAGE_SETS], device=device)


def slot_sets(stage: Int[Tensor, "N S"]) -> SlotSets:
    """Membership of every slot in the sets of stages."""
    table: Tensor = _set_table(stage.device)
    members_4NS = table.index_select(1, stage.reshape(-1)).view(len(_STAGE_SETS), *stage.shape)
    live, growing, fossil, blended = members_4NS.unbind()
    num_growing, num_fossil = members_4NS[1:3].sum(-1).unbind()
    return SlotSets(
        live=live, growing=growing, fossil=fossil, blended=blended, num_growing=num_growing, num_fossil=num_fossil
    )


def parameters(
    inputs: RewardInputs, sets: SlotSets, state: "RewardState", config: RewardConfig
) -> tuple[dict[str, Float[Tensor, " N"]], Float[Tensor, "N S"], Float[Tensor, "N S"]]:
    """Parameters, occupancy and alpha movement of each host by the kernel's names; alpha and parameters of each slot.

    occupancy = sum over blended slots of slot ratio * host + alpha * n;
    alpha movement = sum of (alpha - alpha')^2 * n' / max(host, floor), with (alpha', n') of the previous step.
    """
    zero_NS = torch.zeros_like(state.prev_params)
    host_N = inputs.hosts.host_params.to(torch.float64)
    alpha_NS = torch.where(sets.live, inputs.slots.alpha.to(torch.float64), zero_NS)
    params_NS = torch.where(sets.live, inputs.slots.params.to(torch.float64), zero_NS)
    occupied_NS = torch.addcmul((config.base_slot_rent_ratio * host_N)[:, None], alpha_NS, params_NS)
    moved_NS = (alpha_NS - state.prev_alpha).square() * state.prev_params
    fossil_NS = torch.where(sets.fossil, params_NS, zero_NS)
    sums_4N = torch.stack((params_NS, fossil_NS, torch.where(sets.blended, occupied_NS, zero_NS), moved_NS)).sum(-1)
    seeds_N, fossilized_N, occupancy_N, moved_N = sums_4N.unbind()
    moved_N = moved_N / host_N.clamp(min=config.rent_host_params_floor)
    found = {
        "total_params": host_N + seeds_N,
        "host_params": host_N,
        "effective_seed_params": occupancy_N,
        "alpha_delta_sq_sums": moved_N.masked_fill(host_N <= 0, 0.0),
        "fossilized_params": fossilized_N,
    }
    return found, alpha_NS, params_NS


def stable_accuracy(hosts: HostState, window: int) -> Float[Tensor, " N"]:
    """Smallest of the last `window` known accuracies of a host, the current one included; NaN if that is missing."""
    known_NW = torch.where(torch.isnan(hosts.acc_hist), torch.inf, hosts.acc_hist)[:, -window:]
    return torch.minimum(known_NW.amin(-1), hosts.val_acc).to(torch.float64)


def change(now_N: Tensor, before_N: Tensor) -> Tensor:
    """Difference in float64; 0 where there is no previous value."""
    return torch.nan_to_num(now_N.to(torch.float64) - before_N, nan=0.0)


_COLUMN = {name: index for index, name in enumerate(REWARD_TERMS)}
CONTRIBUTION_MODES = ("shaped", "escrow")
"""Modes with refund, automatic-prune penalty and hindsight credit."""
HINDSIGHT_SCALE = 0.1


@tensor_dataclass
class RewardState:
    """Carried state; float64, zero at the start of an episode and after a rollback.

    Attributes:
        escrow: credit account of each slot.
        ledger: sum of a slot's positive interactions in each step so far; width 0 in modes without hindsight credit.
        deferred_scale: open pools, 0 = none.
        prev_alpha, prev_params: alpha and parameters of each slot in the previous step.
    """

    escrow: Float[Tensor, "N S"]
    ledger: Float[Tensor, "N S E"]
    deferred_scale: Float[Tensor, "N S"]
    prev_alpha: Float[Tensor, "N S"]
    prev_params: Float[Tensor, "N S"]


@lru_cache
def packed_weights(config: RewardConfig, device: torch.device) -> Float[Tensor, " W"]:
    """The numbers of the mode on `device`."""
    return (config.loss.pack() if config.mode == "loss" else config.pack()).to(device)


def reward_step(
    inputs: RewardInputs,
    state: RewardState,
    config: RewardConfig,
    kernel: Kernel = compute_reward_batched,
) -> tuple[RewardOutput, RewardState]:
    """Reward one step of all hosts; a refused operation counts as WAIT. `kernel` is eager or compiled.

    Returns:
        The reward in the dtype of `hosts.val_acc`, and the state for the next step.
    """
    sets, slots = slot_sets(inputs.slots.stage), inputs.slots
    old_NS = slots.contribution_step != inputs.epoch  # or never measured
    x = _Step(
        inputs=inputs,
        config=config,
        op=inputs.ops * inputs.success,
        place=inputs.target[:, None],
        is_target=inputs.target[:, None] == torch.arange(slots.stage.shape[1], device=inputs.target.device),
        sets=sets,
        measured=slots.contribution.to(torch.float64).masked_fill(old_NS, torch.nan),
    )
    params, alpha_NS, params_NS = parameters(inputs, sets, state, config)
    output = kernel(**_arguments(x, state), **params)
    total_N, extra = output.total, dict[str, Tensor]()
    after: dict[str, Tensor] = {"prev_alpha": alpha_NS, "prev_params": params_NS}
    if config.mode == "escrow":  # an account lives as long as its seed
        written_NS = torch.where(x.is_target, output.escrow_next[:, None], state.escrow)
        after["escrow"] = torch.where(sets.live, written_NS, 0.0)
    if config.mode in CONTRIBUTION_MODES:
        extra["auto_prune"] = config.auto_prune_penalty * inputs.auto_pruned.to(torch.float64)
        extra["hindsight"], after["ledger"] = _hindsight(x, state)
        if inputs.epoch == inputs.max_epochs:
            extra |= _at_the_end(x, after.get("escrow"))
    if config.mode == "basic_plus":  # a pool counts from the next step to the end of the episode
        opened_N = torch.where(output.deferred_opened > 0, output.deferred_opened, x.target(state.deferred_scale))
        after["deferred_scale"] = torch.where(x.is_target, opened_N[:, None], state.deferred_scale)
    for name, value_N in extra.items():
        output.breakdown[:, _COLUMN[name]] = value_N
        total_N = total_N + value_N
    dtype = inputs.hosts.val_acc.dtype
    reward = RewardOutput(total=total_N.to(dtype), breakdown=output.breakdown.to(dtype), flags=output.flags)
    return reward, replace(state, **after)


class _Step(NamedTuple):
    """One step as its terms see it; `op` is WAIT where the operation was refused.

    `is_target` marks the slot of the operation. It serves in the place of `scatter`: compiled for a CPU, PyTorch
    2.13 moves a read of the scattered tensor before the scatter.
    """

    inputs: RewardInputs
    config: RewardConfig
    op: Int[Tensor, " N"]
    place: Int[Tensor, "N 1"]
    is_target: Bool[Tensor, "N S"]
    sets: SlotSets
    measured: Float[Tensor, "N S"]

    def target(self, values_NS: Tensor) -> Tensor:
        """[N]: the value of the target slot."""
        return values_NS.gather(1, self.place).squeeze(1)


def _arguments(x: _Step, state: RewardState) -> dict[str, Any]:
    """Arguments of the kernel; numbers are float64 and contiguous, steps are tensors, so that one graph serves all."""
    inputs, sets, config, target = x.inputs, x.sets, x.config, x.target
    hosts, slots, val_acc_N = inputs.hosts, inputs.slots, inputs.hosts.val_acc.to(torch.float64)
    escrow, deferred, loss = config.mode == "escrow", config.mode == "basic_plus", config.mode == "loss"
    return {
        "actions": x.op,
        "seed_contributions": target(x.measured),
        "val_accs": val_acc_N,
        "acc_deltas": change(val_acc_N, hosts.prev_val_acc),
        "has_seed_mask": target(sets.live),
        "stages": target(slots.stage),
        "total_improvements": val_acc_N - target(slots.acc_at_germination),
        "epochs_in_stage": target(slots.epochs_in_stage),
        "seed_ages": target(slots.age),
        "previous_stages": target(slots.prev_stage),
        "previous_epochs": target(slots.prev_epochs),
        "epoch": _as_tensor(inputs.epoch, x.op),
        "max_epochs": _as_tensor(inputs.max_epochs, x.op),
        "config_weights": packed_weights(config, x.op.device),
        "mode": config.mode,
        "attribution": config.attribution,
        "counterfactual_improvements": hosts.cf_total.to(torch.float64),
        "stage_improvements": val_acc_N - target(slots.acc_at_stage_start),
        "interaction_sums": target(slots.interaction_sum).to(torch.float64),
        "stable_val_accs": stable_accuracy(hosts, config.escrow_stable_window) if escrow else None,
        "escrow_credits": target(state.escrow) if escrow else None,
        "num_active": sets.num_growing,
        "num_fossilized": sets.num_fossil,
        "num_contributing": hosts.n_contributing.contiguous(),
        "committed_accs": hosts.committed_acc.to(torch.float64),
        "deferred_scales": state.deferred_scale if deferred else None,
        "deferred_contributions": x.measured if deferred else None,
        "val_losses": hosts.val_loss.to(torch.float64) if loss else None,
        "loss_deltas": change(hosts.val_loss, hosts.prev_val_loss) if loss else None,
    }


def _as_tensor(clock: int | Tensor, like: Tensor) -> Tensor:
    return clock if isinstance(clock, Tensor) else like.new_full((), clock)


def _hindsight(x: _Step, state: RewardState) -> tuple[Float[Tensor, " N"], Float[Tensor, "N S E"]]:
    """Hindsight credit for helping other seeds, and the next ledger.

    min(cap, sum over steps tau of weight * tanh(0.1 * ledger(tau) * c) * gamma^(epoch - tau)) when the seed is
    fossilized with a contribution c > 0; then the seed's row is cleared.
    """
    epoch, config, live_NS = x.inputs.epoch, x.config, x.sets.live
    assert isinstance(epoch, int), "the ledger has a column for each step"
    helped_NS = torch.clamp(torch.nan_to_num(x.inputs.interactions, nan=0.0), min=0.0).sum(-1, dtype=torch.float64)
    helped_NS = helped_NS * live_NS
    known_NSE = state.ledger[..., :epoch]
    row_NE = known_NSE.gather(1, x.place[..., None].expand(-1, -1, epoch)).squeeze(1)
    row_NE[:, -1] = x.target(helped_NS)
    gain_N = torch.nan_to_num(x.target(x.measured), nan=0.0)
    ages_E = torch.arange(epoch - 1, -1, -1, device=x.op.device, dtype=torch.float64)
    credit_NE = torch.tanh(row_NE * (HINDSIGHT_SCALE * gain_N)[:, None]) * torch.pow(GAMMA, ages_E)
    credit_N = torch.clamp(config.hindsight_weight * credit_NE.sum(-1), max=config.hindsight_cap)
    fossilized_N = (x.op == int(LifecycleOp.FOSSILIZE)) & x.target(live_NS)
    keep_NS = live_NS & ~(x.is_target & fossilized_N[:, None])
    ledger_NSE = state.ledger * keep_NS[..., None]
    ledger_NSE[..., epoch - 1] = helped_NS * keep_NS
    return credit_N * (fossilized_N & (gain_N > 0)), ledger_NSE


def _at_the_end(x: _Step, escrow_NS: Tensor | None) -> dict[str, Tensor]:
    """Terms of the last step: forfeited accounts of growing seeds, potential of seeds that never blended."""
    extra: dict[str, Tensor] = {}
    if escrow_NS is not None:
        extra["escrow_forfeit"] = -torch.where(x.sets.growing, escrow_NS, 0.0).sum(-1)
    if not x.config.disable_pbrs:
        stage_NS, age_NS = x.inputs.slots.stage, x.inputs.slots.age.to(torch.float64)
        young_NS = (stage_NS == int(SeedStage.GERMINATED)) | (stage_NS == int(SeedStage.TRAINING))
        pruned_NS = x.is_target & (x.op == int(LifecycleOp.PRUNE))[:, None]
        due_NS = x.config.pbrs_weight * NEW_SEED_POTENTIAL * torch.pow(GAMMA, 1.0 - age_NS)
        extra["germination_refund"] = -torch.where(young_NS & ~pruned_NS, due_NS, 0.0).sum(-1)
    return extra


if TYPE_CHECKING:
    AnyReward: TypeAlias = RewardProtocol[Any]
else:  # a structural type cannot be checked while tests run
    AnyReward = object

RewardFactory = Callable[[RewardConfig], AnyReward]


@final
class ContributionReward:
    """All built-in modes except `objective`, chosen by the configuration."""

    terms: Sequence[str] = REWARD_TERMS

    def __init__(self, config: RewardConfig) -> None:
        self.config = config
        self._kernel: Kernel = compute_reward_batched

    def warm_up(self, form: Callable[[Kernel], Kernel], n: int, slots: int, device: torch.device) -> None:
        """Compile the kernel for `n` hosts with `form`; raises ConfigError where that is impossible."""
        blank, start = _blank_inputs(n, slots, device), self.initial_state(n, slots, 1, device)
        self._kernel = form(compute_reward_batched)
        reward_step(blank, start, self.config, self._kernel)

    def initial_state(self, n: int, slots: int, steps: int, device: torch.device) -> RewardState:
        """Carried state at the start of an episode of `steps` steps."""
        sizes = {"N": n, "S": slots, "E": steps if self.config.mode in CONTRIBUTION_MODES else 0}
        return tree_map(Tensor.double, blank(RewardState, sizes, device))

    def step(self, inputs: RewardInputs, state: RewardState) -> tuple[RewardOutput, RewardState]:
        """Reward one step."""
        return reward_step(inputs, state, self.config, self._kernel)

    def rollback_reward(self, state: RewardState) -> Float[Tensor, " N"]:
        """Reward that replaces that of the last row of each host if it is rolled back now."""
        penalty, hosts = self.config.resolved("rollback_penalty"), len(state.escrow)
        return torch.full((hosts,), penalty, dtype=torch.float32, device=state.escrow.device)

    def reset_hosts(self, state: RewardState, mask: Bool[Tensor, " N"]) -> RewardState:
        """The state with the masked hosts as at the start of an episode; for hosts rolled back in this step.

        Zero `prev_params` means no alpha movement in the next step, as in the restored slots: only fossils survive a
        rollback, and their alpha stays 1.
        """
        zero = state.escrow.new_zeros(())
        return tree_map(lambda x: torch.where(lift(mask, x), zero, x), state)


def _blank_inputs(n: int, slots: int, device: torch.device) -> RewardInputs:
    """Inputs of a step without operation or measurement, to compile with."""
    sizes = {"N": n, "S": slots}
    whole = torch.zeros(n, dtype=torch.int64, device=device)
    return RewardInputs(
        epoch=1,
        max_epochs=1,
        slots=blank(SlotState, sizes, device),
        hosts=blank(HostState, sizes, device),
        interactions=torch.zeros(n, slots, slots, device=device),
        ops=whole,
        target=whole,
        success=whole.bool(),
        auto_pruned=whole,
    )


def check_reward(reward: RewardProtocol[Any]) -> None:
    """Raise ConfigError unless a reward of the user's has all members of `RewardProtocol`, and terms."""
    name = type(reward).__name__
    members = ("terms", "initial_state", "step", "rollback_reward", "reset_hosts")
    if missing := [member for member in members if not hasattr(reward, member)]:
        raise ConfigError(f"the reward {name} has no {missing[0]!r}; it needs {', '.join(members)}.")
    terms = reward.terms
    texts = isinstance(terms, Sequence) and not isinstance(terms, str) and all(isinstance(term, str) for term in terms)
    if not texts or not terms or len(set(terms)) < len(terms):
        raise ConfigError(f"the reward {name} has the terms {terms!r}; give one or more different names.")


def checked_step(reward: RewardProtocol[Any], inputs: RewardInputs, state: Any) -> tuple[Any, Any]:  # noqa: ANN401
    """The step of a reward of the user's; raises ConfigError where its output is not a `RewardOutput` of N hosts.

    Values are looked at on a CPU alone, where that is no read of a device.
    """
    at = f"the reward {type(reward).__name__} in step {int(inputs.epoch)}"
    tensors = [tensor for _, tensor in named_tensors(inputs)]
    versions = [tensor._version for tensor in tensors]
    try:
        output, after = reward.step(inputs, state)
    except EsperError:
        raise
    except Exception as error:  # any error of the user's code
        raise ConfigError(f"{at} fails: {in_words(error)}") from error
    if [tensor._version for tensor in tensors] != versions:
        raise ConfigError(f"{at} edits its inputs in place, which belong to the engine; let it work on copies.")
    n, m = len(inputs.target), len(reward.terms)
    for name, shape, kind in (("total", (n,), None), ("breakdown", (n, m), None), ("flags", (n, 2), torch.bool)):
        value: Any = getattr(output, name, None)
        is_tensor = isinstance(value, Tensor) and value.shape == shape
        if not is_tensor or not (value.is_floating_point() if kind is None else value.dtype is kind):
            found = (
                f"{list(value.shape)} of {value.dtype}" if isinstance(value, Tensor) else f"a {type(value).__name__}"
            )
            wanted = "floats" if kind is None else "bools"
            raise ConfigError(f"{at} gives {name} {found}; it must be {wanted} {list(shape)} in a RewardOutput.")
    if output.total.device.type == "cpu":
        if not (output.total.isfinite().all() and output.breakdown.isfinite().all()):
            raise ConfigError(f"{at} gives NaN or infinity; what is not measured is NaN in its inputs (nan_to_num).")
        parts = output.breakdown.double()
        off = (output.total.double() - parts.sum(dim=1)).abs()
        if (off > 1e-5 + 1e-4 * parts.abs().sum(dim=1)).any():  # terms that cancel leave rounding errors of their size
            raise ConfigError(f"{at} gives a total that is not the sum of its breakdown; let total be that sum.")
    return output, after


_REGISTRY: dict[str, tuple[RewardFactory, ModeTraits]] = {
    mode: (ObjectiveReward if mode == "objective" else ContributionReward, traits) for mode, traits in MODES.items()
}


def register_reward(
    name: str, *, summary: str = "", time_limit: TimeLimit = "truncate", fossils_as_players: bool = False
) -> Callable[[RewardFactory], RewardFactory]:
    """Register a function `RewardConfig -> RewardProtocol` as `name`; raises RegistryError if it is taken."""
    traits = ModeTraits(summary=summary, time_limit=time_limit, fossils_as_players=fossils_as_players)
    return registering("reward", name, _REGISTRY, lambda build: (build, traits))


def reward_names() -> tuple[str, ...]:
    """All names that `make_reward` takes."""
    return tuple(_REGISTRY)


def reward_traits(name: str) -> ModeTraits:
    """Time limit and measurements that the reward `name` needs; raises RegistryError."""
    return _entry(name)[1]


def make_reward(name: str, config: RewardConfig | None = None) -> AnyReward:
    """The reward `name`, with default numbers unless `config` is given.

    Raises:
        RegistryError: unknown name. ConfigError: `config` is for another built-in mode.
    """
    build, _ = _entry(name)
    if config is None:
        config = RewardConfig(mode=cast(RewardMode, name)) if name in MODES else RewardConfig()
    elif name in MODES and config.mode != name:
        raise ConfigError(
            f"reward {name!r} was given a configuration of mode {config.mode!r}; use config.with_mode({name!r})."
        )
    return build(config)


def _entry(name: str) -> tuple[RewardFactory, ModeTraits]:
    if name not in _REGISTRY:
        raise RegistryError(f"no reward is named {name!r}; {nearest(name, _REGISTRY)}")
    return _REGISTRY[name]
