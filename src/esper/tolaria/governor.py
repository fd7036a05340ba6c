"""The governor: compares each host's validation loss with the losses of that host so far, and orders rollbacks.

    rule  condition                                                          outcome
    1     the loss is NaN or infinite                                        panic: nan
    2     fewer than `min_history` losses are remembered                     healthy, remember the loss
    3     a host that had learned is back at guessing                        a strike; three in a row: panic, lobotomy
    4     the loss is above three bounds (guessing, mean, mean + noise)      a strike; three in a row: panic, divergence
    5     otherwise                                                          healthy, remember the loss, clear strikes

The first rule that applies decides; strikes of both rules add up. One loss does not show a lobotomy: in a noisy epoch a
network that is right in half of the cases has the loss of guessing too, and recovers in the next. All arithmetic is
float64, masked over hosts, without a host read.
"""

import math
from dataclasses import dataclass
from enum import IntEnum
from typing import Annotated

import torch
from jaxtyping import Bool, Float, Float64, Int
from pydantic import Field
from torch import Tensor

from esper.leyline.errors import ConfigError
from esper.leyline.random import MAX_EPISODE_LENGTH
from esper.leyline.settings import AtLeast1, Positive, check_fields
from esper.leyline.tensor_dataclass import numbers, replace, tensor_dataclass


class PanicReason(IntEnum):
    """Why a host is rolled back; the value is what `GovernorVerdict.reason` holds."""

    NONE = 0
    NAN = 1
    LOBOTOMY = 2
    DIVERGENCE = 3


@dataclass(frozen=True, kw_only=True)
class GovernorConfig:
    """When a loss is an anomaly, and how often a healthy host is snapshotted.

    Attributes:
        guess: loss of blind guessing, ln(number of classes); ln(vocabulary) for language tasks.
        window: number of healthy losses remembered. min_history: how many of them a comparison needs.
        max_strikes: consecutive losses at guessing or above all bounds that cause a panic.
        guess_factor, std_factor, mean_factor: a loss is an anomaly if it is above all of `guess_factor * guess`,
            `mean + std_factor * std` and `mean_factor * mean`.
        learned_share: a host has learned if its mean loss is below this share of `guess`.
        guess_band: a loss within this share of `guess` is that of a guessing network.
        snapshot_every: steps between two snapshots of a healthy host.
    """

    guess: Positive = math.log(10.0)  # noqa: RUF009 -- a number
    window: Annotated[int, Field(ge=1, le=MAX_EPISODE_LENGTH)] = 20
    min_history: AtLeast1 = 10
    max_strikes: AtLeast1 = 3
    guess_factor: Positive = 5.0
    std_factor: Positive = 6.0
    mean_factor: Positive = 3.0
    learned_share: Positive = 0.6
    guess_band: Positive = 0.065
    snapshot_every: AtLeast1 = 5

    def __post_init__(self) -> None:
        check_fields(self, "governor")
        if self.window < self.min_history:
            raise ConfigError(
                f"governor.window is {self.window} but governor.min_history is {self.min_history}; "
                "the window must hold at least as many losses as a comparison needs."
            )


DEFAULT_CONFIG = GovernorConfig()


@tensor_dataclass
class GovernorState:
    """The healthy losses of each host, in a ring buffer, and its consecutive anomalies (`strikes`).

    `count` is the number of healthy losses so far, not capped: the next loss is written at `count % W`. Unused places
    are 0.
    """

    window: Float64[Tensor, "N W"]
    count: Int[Tensor, " N"]
    strikes: Int[Tensor, " N"]


@tensor_dataclass
class GovernorVerdict:
    """The verdict of one step.

    `healthy` hosts ended in rule 2 or 5. `thresholds` are the three bounds of rule 4 in the order of the configuration;
    the last two are NaN while nothing is remembered. `strikes` are counted before a rollback clears them.
    """

    panic: Bool[Tensor, " N"]
    reason: Int[Tensor, " N"]
    healthy: Bool[Tensor, " N"]
    loss: Float64[Tensor, " N"]
    thresholds: Float64[Tensor, "N 3"]
    strikes: Int[Tensor, " N"]


def initial(num_envs: int, device: torch.device, config: GovernorConfig = DEFAULT_CONFIG) -> GovernorState:
    """The state of N fresh hosts."""
    zeros = torch.zeros(num_envs, dtype=torch.int64, device=device)
    window = torch.zeros(num_envs, config.window, dtype=torch.float64, device=device)
    return GovernorState(window=window, count=zeros, strikes=zeros)


def check(
    state: GovernorState, val_loss: Float[Tensor, " N"], config: GovernorConfig = DEFAULT_CONFIG
) -> tuple[GovernorState, GovernorVerdict]:
    """Apply the rules to the validation loss [N] of this step.

    Returns:
        The state with healthy losses remembered and strikes counted (`after_rollback` clears them), and the verdict.
    """
    loss_N = val_loss.to(torch.float64)
    mean_N, std_N = _statistics(state)
    enough_N = state.count >= config.min_history
    guess_bound_N = torch.full_like(mean_N, config.guess_factor * config.guess)
    bounds = (guess_bound_N, mean_N + config.std_factor * std_N, config.mean_factor * mean_N)
    thresholds_N3 = torch.stack(bounds, dim=1)
    finite_N = loss_N.abs() < math.inf
    guessing_N = (loss_N - config.guess).abs() < config.guess_band * config.guess
    lobotomy_N = enough_N & (mean_N < config.learned_share * config.guess) & guessing_N
    diverging_N = enough_N & finite_N & ~lobotomy_N & (loss_N[:, None] > thresholds_N3).all(dim=1)
    struck_N = lobotomy_N | diverging_N
    healthy_N = finite_N & ~struck_N
    strikes_N = (state.strikes + struck_N).masked_fill(healthy_N, 0)
    struck_out_N = struck_N & (strikes_N >= config.max_strikes)
    reason_N = torch.where(lobotomy_N, int(PanicReason.LOBOTOMY), int(PanicReason.DIVERGENCE)) * struck_out_N
    reason_N = reason_N.masked_fill(~finite_N, int(PanicReason.NAN))
    verdict = GovernorVerdict(
        panic=reason_N != PanicReason.NONE,
        reason=reason_N,
        healthy=healthy_N,
        loss=loss_N,
        thresholds=thresholds_N3,
        strikes=strikes_N,
    )
    return replace(_remember(state, loss_N, healthy_N), strikes=strikes_N), verdict


def after_rollback(state: GovernorState, panic: Bool[Tensor, " N"]) -> GovernorState:
    """Clear the strikes of hosts that were rolled back; their remembered losses were healthy and stay."""
    return replace(state, strikes=state.strikes.masked_fill(panic, 0))


def snapshots_due(
    state: GovernorState,
    safe: Bool[Tensor, " N"],
    t: int | Int[Tensor, ""],
    fossilized: Bool[Tensor, " N"],
    config: GovernorConfig = DEFAULT_CONFIG,
) -> tuple[Bool[Tensor, " N"], Bool[Tensor, " N"]]:
    """Which hosts to snapshot in step `t`, and which to add only their new fossil to the older snapshot.

    A host that was not rolled back (`safe`) is snapshotted every few steps and when a seed fossilized. If it has
    strikes, its other weights are not trusted, and only the fossil is added.
    """
    snapshot_N = safe & (state.strikes == 0) & (fossilized | (t % config.snapshot_every == 0))
    return snapshot_N, safe & fossilized & ~snapshot_N


def _statistics(state: GovernorState) -> tuple[Tensor, Tensor]:
    """Mean and population standard deviation [N] of the remembered losses; NaN where there are none."""
    places_W = numbers(state.window.shape[1], state.window.device)
    known_N = state.count.clamp(max=places_W.shape[0])
    mean_N = state.window.sum(dim=1) / known_N
    deviation_NW = (state.window - mean_N[:, None]) * (places_W < known_N[:, None])
    return mean_N, (deviation_NW.square().sum(dim=1) / known_N).sqrt()


def _remember(state: GovernorState, loss_N: Tensor, healthy_N: Tensor) -> GovernorState:
    next_N1 = (state.count % state.window.shape[1])[:, None]
    written_N1 = torch.where(healthy_N[:, None], loss_N[:, None], state.window.gather(1, next_N1))
    return replace(state, window=state.window.scatter(1, next_N1, written_N1), count=state.count + healthy_N)
