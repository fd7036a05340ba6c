"""The reward kernel: one control step of all hosts, one row per host, looking only at each host's target slot.

Pure tensor code without branches on data or host reads; compiles to one graph, because `mode` and `attribution` are
static and every number is in `config_weights`. Shape legend: N = hosts, S = slots,
M = len(REWARD_TERMS), I = len(REWARD_INFO), W = 65 numbers (11 in mode `loss`).
"""

from collections.abc import Callable, Mapping
from functools import lru_cache, reduce
from operator import add
from typing import NamedTuple, get_args

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from esper.leyline.errors import ConfigError, nearest
from esper.simic.rewards.credit import contribution_terms, credit_of, suspected_ratio
from esper.simic.rewards.reward_config import LOSS_FIELDS, MODES, WEIGHT_NAMES, Attribution
from esper.simic.rewards.row import Row, number, row_of
from esper.simic.rewards.terms import PLAIN_MODES, REWARD_INFO, REWARD_TERMS, drip_opened, objective_potential

FloatN = Float[Tensor, " N"]
IntN = Int[Tensor, " N"]

_INTEGERS = frozenset(
    {
        "actions", "stages", "epochs_in_stage", "seed_ages", "previous_stages", "previous_epochs",
        "num_active", "num_fossilized", "num_contributing",
    }
)  # fmt: skip
_POOLS = ("drip_scales", "drip_contributions")
CREDIT_MODES = ("shaped", "escrow")


class RewardOutput(NamedTuple):
    """Rewards of one step in the dtype of `val_accs`; `total` is the sum of `breakdown`."""

    total: Float[Tensor, " N"]
    breakdown: Float[Tensor, "N M"]
    info: Float[Tensor, "N I"]
    escrow_next: Float[Tensor, " N"]
    drip_opened: Float[Tensor, " N"]
    flags: Bool[Tensor, "N 2"]


Kernel = Callable[..., RewardOutput]
"""`compute_reward_batched`, or a compiled form of it."""


def compute_reward_batched(  # noqa: D417 -- arguments that belong together are described together
    actions: IntN,
    seed_contributions: FloatN,
    val_accs: FloatN,
    acc_deltas: FloatN,
    has_seed_mask: Bool[Tensor, " N"],
    stages: IntN,
    total_improvements: FloatN,
    epochs_in_stage: IntN,
    seed_ages: IntN,
    previous_stages: IntN,
    previous_epochs: IntN,
    epoch: int | Int[Tensor, "*#N"],
    max_epochs: int | Int[Tensor, "*#N"],
    config_weights: Float[Tensor, " W"],
    *,
    mode: str = "shaped",
    attribution: str = "harmonic",
    counterfactual_improvements: FloatN | None = None,
    stage_improvements: FloatN | None = None,
    interaction_sums: FloatN | None = None,
    stable_val_accs: FloatN | None = None,
    escrow_credits: FloatN | None = None,
    total_params: FloatN | None = None,
    host_params: FloatN | None = None,
    effective_seed_params: FloatN | None = None,
    alpha_delta_sq_sums: FloatN | None = None,
    num_active: IntN | None = None,
    num_fossilized: IntN | None = None,
    num_contributing: IntN | None = None,
    committed_accs: FloatN | None = None,
    fossilized_params: FloatN | None = None,
    drip_scales: Float[Tensor, "N S"] | None = None,
    drip_contributions: Float[Tensor, "N S"] | None = None,
    val_losses: FloatN | None = None,
    loss_deltas: FloatN | None = None,
    potentials_prev: FloatN | None = None,
) -> RewardOutput:
    """Reward one step of N hosts; formulas in `credit.py` and `terms.py`.

    Args:
        actions: effective operations (WAIT where the sampled one took no effect).
        seed_contributions: leave-one-out contribution of the target slot in points, NaN unless measured now.
        val_accs, acc_deltas: accuracy of the whole model and its change (0 at the first step), points.
        has_seed_mask: the target slot holds a live seed; without one the seed's fields are ignored.
        stages, epochs_in_stage, seed_ages, previous_stages, previous_epochs: clocks of the slot before the op.
        total_improvements, stage_improvements: accuracy gained since germination and since stage entry, or NaN.
        epoch, max_epochs: step from 1 and length of the episode.
        config_weights: `RewardConfig.pack()`, in mode `loss` `LossRewardConfig.pack()`; float32 is taken as float64.
        counterfactual_improvements: gate signal (all players off), NaN without players.
        interaction_sums, stable_val_accs, escrow_credits: of the target slot, NaN where missing.
        total_params, host_params, effective_seed_params, fossilized_params, alpha_delta_sq_sums: parameters and
            alpha movement of the host.
        num_active, num_fossilized, num_contributing: seeds of the host before the op.
        committed_accs: accuracy with every seed off that is not fossilized.
        drip_scales, drip_contributions: open pools (0 = none) and contributions of their fossils.
        val_losses, loss_deltas: mode `loss`; a positive change is a regression.
        potentials_prev: mode `objective`; potential of the previous step, 0 at the start of a segment.

    Returns:
        `RewardOutput` in the dtype of `val_accs`; an argument left out counts as missing in every row.

    Raises:
        ConfigError: unknown mode or attribution. ValueError, TypeError: wrong shape or dtype.
    """
    given: dict[str, Tensor | None] = {
        "actions": actions, "seed_contributions": seed_contributions, "val_accs": val_accs, "acc_deltas": acc_deltas,
        "has_seed_mask": has_seed_mask, "stages": stages, "total_improvements": total_improvements,
        "epochs_in_stage": epochs_in_stage, "seed_ages": seed_ages, "previous_stages": previous_stages,
        "previous_epochs": previous_epochs, "counterfactual_improvements": counterfactual_improvements,
        "stage_improvements": stage_improvements, "interaction_sums": interaction_sums,
        "stable_val_accs": stable_val_accs, "escrow_credits": escrow_credits, "total_params": total_params,
        "host_params": host_params, "effective_seed_params": effective_seed_params,
        "alpha_delta_sq_sums": alpha_delta_sq_sums, "num_active": num_active, "num_fossilized": num_fossilized,
        "num_contributing": num_contributing, "committed_accs": committed_accs,
        "fossilized_params": fossilized_params, "drip_scales": drip_scales,
        "drip_contributions": drip_contributions, "val_losses": val_losses, "loss_deltas": loss_deltas,
        "potentials_prev": potentials_prev,
    }  # fmt: skip
    check_static(mode, attribution, config_weights)
    check_arguments(given)
    for name, clock in (("epoch", epoch), ("max_epochs", max_epochs)):
        check_clock(name, clock, len(actions))
    weights = _by_name(config_weights.to(torch.float64), mode == "loss")
    x = row_of(given, weights, _clock(epoch, val_accs), _clock(max_epochs, val_accs), mode, attribution)
    return _in_dtype(_with_credit(x) if mode in CREDIT_MODES else _without_credit(x), val_accs.dtype)


@lru_cache(maxsize=16)  # every step of a run has the same vector, and 65 views cost as much as thirty operators
def _by_name(config_weights: Tensor, loss: bool) -> Mapping[str, Tensor]:
    """Each packed number as a view of the vector."""
    return dict(zip(LOSS_FIELDS if loss else WEIGHT_NAMES, config_weights.unbind(), strict=True))


def _with_credit(x: Row) -> RewardOutput:
    """Modes `shaped` and `escrow`."""
    credit = credit_of(x)
    following = credit.account + credit.change
    info = {
        "discount": credit.discount, "ratio_penalty": credit.ratio_penalty, "timing": credit.timing,
        "progress": credit.progress, "growth": x.growth, "escrow_prev": credit.account,
        "escrow_target": credit.target, "escrow_delta": credit.change, "escrow_next": following,
    }  # fmt: skip
    return _output(x, contribution_terms(x, credit), info, suspected_ratio(x, credit), escrow_next=following)


def _without_credit(x: Row) -> RewardOutput:
    """All other modes; info columns without meaning hold neutral values."""
    one, account = torch.ones_like(x.c), x.known("escrow_credits")
    info = {"discount": one, "timing": one, "progress": number(x.given, "total_improvements")}
    info |= {"escrow_prev": account, "escrow_next": account}
    if x.mode != "loss":
        info["growth"] = x.growth
    if x.mode == "objective":
        info["objective_potential"] = objective_potential(x)
    opened = drip_opened(x) if x.mode == "basic_plus" else None
    return _output(x, PLAIN_MODES[x.mode](x), info, x.zero, escrow_next=account, opened=opened)


def _output(
    x: Row,
    terms: Mapping[str, Tensor],
    info: Mapping[str, Tensor],
    suspected: Tensor,
    *,
    escrow_next: Tensor,
    opened: Tensor | None = None,
) -> RewardOutput:
    """The output in float64; a missing column is 0."""
    return RewardOutput(
        total=reduce(add, terms.values()),
        breakdown=torch.stack([terms.get(name, x.zero) for name in REWARD_TERMS]).T,
        info=torch.stack([info.get(name, x.zero) for name in REWARD_INFO]).T,
        escrow_next=escrow_next,
        drip_opened=x.zero if opened is None else opened,
        flags=torch.stack((suspected, x.ransoming)).to(torch.float32).to(torch.bool).T,  # compiled: by vectors
    )


def _in_dtype(out: RewardOutput, dtype: torch.dtype) -> RewardOutput:
    return RewardOutput._make(x.to(dtype) if x.is_floating_point() else x for x in out)


def _clock(value: int | Tensor, like: Tensor) -> Tensor:
    """A step number as float64 on the device; `full` does not wait as a copy would."""
    if isinstance(value, Tensor):
        return value.to(torch.float64)
    return torch.full((), value, dtype=torch.float64, device=like.device)


def check_static(mode: str, attribution: str, config_weights: Tensor) -> None:
    """Reject an unknown mode or attribution (ConfigError) and a wrong vector of weights (ValueError)."""
    if mode not in MODES:
        raise ConfigError(f"reward mode {mode!r} has no formula; {nearest(mode, MODES)}")
    if attribution not in get_args(Attribution):
        raise ConfigError(f"attribution {attribution!r} is unknown; it must be 'harmonic' or 'minimum'.")
    expected = len(LOSS_FIELDS if mode == "loss" else WEIGHT_NAMES)
    if config_weights.shape != (expected,) or config_weights.dtype not in (torch.float64, torch.float32):
        raise ValueError(
            f"config_weights is {config_weights.dtype} {tuple(config_weights.shape)}; mode {mode!r} takes floats "
            f"({expected},), as RewardConfig.pack() (LossRewardConfig.pack() in mode 'loss') gives it."
        )


def check_arguments(given: Mapping[str, Tensor | None]) -> None:
    """Reject wrong shapes (ValueError) and dtypes (TypeError) by name; no value is read."""
    actions = given["actions"]
    assert actions is not None
    for name, value in given.items():
        if value is None:
            continue
        expected_dim = 2 if name in _POOLS else 1
        if value.dim() != expected_dim or value.shape[0] != actions.shape[0]:
            shape = f"({actions.shape[0]}, S)" if name in _POOLS else f"({actions.shape[0]},)"
            raise ValueError(f"{name} has shape {tuple(value.shape)}; it must be {shape}, one row per host.")
        if name in _INTEGERS or name == "has_seed_mask":
            expected = torch.int64 if name in _INTEGERS else torch.bool
            if value.dtype != expected:
                raise TypeError(f"{name} is {value.dtype}; it must be {expected}.")
        elif not value.dtype.is_floating_point:
            raise TypeError(f"{name} is {value.dtype}; it must be a floating type, with NaN where not measured.")
    scales, contributions = (given.get(name) for name in _POOLS)
    if scales is not None and contributions is not None and scales.shape != contributions.shape:
        raise ValueError(
            f"drip_contributions has shape {tuple(contributions.shape)} but drip_scales {tuple(scales.shape)}; both "
            "must be (N, S), one column per slot."
        )


def check_clock(name: str, value: int | Tensor, num_hosts: int) -> None:
    """Reject a step number that is neither one for all hosts nor one for each."""
    if not isinstance(value, Tensor):
        return
    if value.shape not in ((), (1,), (num_hosts,)):
        raise ValueError(
            f"{name} has shape {tuple(value.shape)}; it must be one number for all hosts, or one per host: "
            f"({num_hosts},)."
        )
    if value.dtype != torch.int64:
        raise TypeError(f"{name} is {value.dtype}; it must be torch.int64.")
