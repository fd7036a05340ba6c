import math
from dataclasses import dataclass, field

import pytest
import torch

from esper.leyline.errors import ConfigError
from esper.tolaria.governor import (
    GovernorConfig,
    GovernorState,
    PanicReason,
    after_rollback,
    check,
    initial,
    snapshots_due,
)

CPU = torch.device("cpu")
GUESS = math.log(10.0)
EPS = 1e-9


@dataclass
class ScalarGovernor:
    """One host, written as the rules read."""

    guess: float = GUESS
    losses: list[float] = field(default_factory=list)
    strikes: int = 0

    def check(self, loss: float) -> PanicReason:
        if not math.isfinite(loss):
            return PanicReason.NAN
        past = self.losses[-20:]
        mean = math.fsum(past) / len(past) if past else math.nan
        std = math.sqrt(math.fsum((x - mean) ** 2 for x in past) / len(past)) if past else math.nan
        enough, reason = len(self.losses) >= 10, PanicReason.NONE
        if enough and mean < 0.6 * self.guess and abs(loss - self.guess) < 0.065 * self.guess:
            reason = PanicReason.LOBOTOMY
        elif enough and loss > 5 * self.guess and loss > mean + 6 * std and loss > 3 * mean:
            reason = PanicReason.DIVERGENCE
        if reason:
            self.strikes += 1
            return reason if self.strikes >= 3 else PanicReason.NONE
        self.losses.append(loss)
        self.strikes = 0
        return PanicReason.NONE


def losses(*values: float) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.float64)


def after(values: list[float], config: GovernorConfig | None = None) -> GovernorState:
    """One host that has had these losses."""
    config = config or GovernorConfig()
    state = initial(1, CPU, config)
    for value in values:
        state, _ = check(state, losses(value), config)
    return state


def test_a_loss_that_is_not_finite_panics_at_once_and_is_not_remembered():
    state, verdict = check(initial(4, CPU), losses(math.nan, math.inf, -math.inf, 2.0))
    assert verdict.reason.tolist() == [1, 1, 1, 0]
    assert verdict.panic.tolist() == [True, True, True, False]
    assert verdict.healthy.tolist() == [False, False, False, True]
    assert state.count.tolist() == [0, 0, 0, 1]


@pytest.mark.parametrize("guess", [math.log(10), math.log(256), math.log(50257)])
@pytest.mark.parametrize(("share", "panics"), [(0.065 - EPS, True), (0.065 + EPS, False)])
@pytest.mark.parametrize("side", [1.0, -1.0])
def test_a_host_that_had_learned_and_stays_at_guessing_panics(guess, share, panics, side):
    config, at = GovernorConfig(guess=guess), guess * (1 + side * share)
    _, verdict = check(after([0.59 * guess] * 10 + [at, at], config), losses(at), config)
    assert verdict.reason.tolist() == [PanicReason.LOBOTOMY if panics else PanicReason.NONE]


def test_a_noisy_epoch_with_the_loss_of_guessing_is_not_remembered_and_forgotten_after_a_better_one():
    # losses of a stable host of digits: half of its predictions are right in the third epoch
    state = after([0.3] * 10 + [0.26, 2.16])
    assert (state.strikes.tolist(), state.count.tolist()) == ([1], [11])
    assert after([0.3] * 10 + [0.26, 2.16, 0.23, 2.2, 2.3]).strikes.tolist() == [2]
    assert after([0.3] * 10 + [2.16, 2.2, 0.5]).strikes.tolist() == [0]


@pytest.mark.parametrize(("mean", "panics"), [(0.6 - EPS, True), (0.6 + EPS, False)])
def test_a_host_that_had_not_learned_may_guess(mean, panics):
    state = after([mean * GUESS] * 10)
    for _ in range(3):
        state, verdict = check(state, losses(GUESS))
    assert verdict.panic.tolist() == [panics]


@pytest.mark.parametrize(("past", "strikes"), [(9, 0), (10, 1)])
def test_ten_losses_tell_that_a_host_had_learned(past, strikes):
    state, verdict = check(after([0.5] * past), losses(GUESS))
    assert (verdict.strikes.tolist(), state.count.tolist()) == ([strikes], [past + 1 - strikes])


@pytest.mark.parametrize(("excess", "strikes"), [(EPS, 1), (0.0, 0), (-EPS, 0)])
@pytest.mark.parametrize(
    ("past", "bound"),
    [
        # binding bound: five times guessing (10 classes)
        ([1.0] * 10, 5 * math.log(10.0)),
        # mean 3, std 2: mean + 6 std = 15
        ([1.0, 5.0] * 5, 15.0),
        # mean 5, std 0: three times the mean = 15
        ([5.0] * 10, 15.0),
    ],
)
def test_an_anomaly_lies_above_all_three_bounds(past, bound, excess, strikes):
    state, verdict = check(after(past), losses(bound + excess))
    assert state.strikes.tolist() == [strikes]
    assert verdict.healthy.tolist() == [strikes == 0]
    assert state.count.tolist() == [11 - strikes]


def test_bounds_of_a_host_without_a_past_are_missing():
    _, verdict = check(initial(1, CPU), losses(2.0))
    assert verdict.thresholds.isnan().tolist() == [[False, True, True]]


def test_a_rollback_clears_strikes_and_keeps_what_is_remembered():
    state, verdict = check(after([1.0] * 10 + [50.0, 50.0]), losses(50.0))
    cleared = after_rollback(state, verdict.panic)
    assert cleared.strikes.tolist() == [0]
    assert verdict.strikes.tolist() == [3]
    assert torch.equal(cleared.window, state.window)
    assert after_rollback(state, ~verdict.panic).strikes.tolist() == [3]


@pytest.mark.parametrize("seed", range(5))
def test_many_hosts_agree_with_one_host_at_a_time(seed):
    generator = torch.Generator().manual_seed(seed)
    num_hosts, steps = 16, 60
    kinds = torch.tensor([0.2, 1.0, 2.3, 40.0, math.nan])
    weights = torch.tensor([0.4, 0.1, 0.17, 0.3, 0.03])
    references = [ScalarGovernor() for _ in range(num_hosts)]
    state, seen = initial(num_hosts, CPU), set()
    for t in range(steps):
        # ten quiet steps first, because a past full of anomalies would make everything look normal
        kind = torch.multinomial(weights if t >= 10 else weights[:2], num_hosts, replacement=True, generator=generator)
        loss = kinds[kind] * (1 + 0.1 * torch.rand(num_hosts, generator=generator))
        state, verdict = check(state, loss)
        want = [reference.check(value) for reference, value in zip(references, loss.tolist(), strict=True)]
        assert verdict.reason.tolist() == want
        assert state.strikes.tolist() == [reference.strikes for reference in references]
        assert state.count.tolist() == [len(reference.losses) for reference in references]
        state = after_rollback(state, verdict.panic)
        for reference, reason in zip(references, want, strict=True):
            reference.strikes = 0 if reason else reference.strikes
        seen |= set(want)
    assert seen == set(PanicReason)


def due(state, verdict, t, *fossilized):
    return [hosts.tolist() for hosts in snapshots_due(state, ~verdict.panic, t, torch.tensor(fossilized))]


def test_a_healthy_host_is_snapshotted_every_fifth_step_and_when_a_seed_fossilizes():
    state, verdict = check(initial(2, CPU), losses(1.0, 1.0))
    assert due(state, verdict, 4, True, False) == [[True, False], [False, False]]
    assert due(state, verdict, 5, True, False) == [[True, True], [False, False]]


def test_of_a_host_with_strikes_only_a_new_fossil_is_snapshotted():
    state, verdict = check(after([1.0] * 10), losses(50.0))
    assert due(state, verdict, 5, True) == [[False], [True]]
    assert due(state, verdict, 5, False) == [[False], [False]]


def test_nothing_is_snapshotted_of_a_host_that_was_rolled_back_in_this_step():
    state, verdict = check(after([1.0] * 10 + [50.0]), losses(math.nan))
    for guards in (state, after_rollback(state, verdict.panic)):
        assert due(guards, verdict, 5, True) == [[False], [False]]


@pytest.mark.parametrize(
    "wrong", [{"guess": 0.0}, {"guess": math.nan}, {"max_strikes": 0}, {"window": 9}, {"snapshot_every": 0}]
)
def test_impossible_settings_are_refused(wrong):
    with pytest.raises(ConfigError, match=f"governor.{next(iter(wrong))}"):
        GovernorConfig(**wrong)


def test_a_full_window_counts_every_loss_that_it_holds():
    # four places: 1, 2, 3, 4, mean 10 / 4, variance 20 / 4 - 6.25; then 5 replaces 1
    config = GovernorConfig(window=4, min_history=4)
    for values, mean, variance in (([1.0, 2.0, 3.0, 4.0], 2.5, 1.25), ([1.0, 2.0, 3.0, 4.0, 5.0], 3.5, 1.25)):
        _, verdict = check(after(values, config), losses(1.0), config)
        _, noise, triple = verdict.thresholds[0].tolist()
        assert noise == pytest.approx(mean + 6.0 * math.sqrt(variance))
        assert triple == pytest.approx(3.0 * mean)
