"""Who earned what: the facts of the contribution modes `shaped` and `escrow`.

    measured contribution c --(ratio penalty, discount, timing)--> attribution     paid at once (shaped)
                                                              `--> escrow account  paid as the account changes

Contributions, gate signals and progress are percentage points.
"""

import torch
from torch import Tensor

from esper.leyline.record import record
from esper.leyline.stages import SeedStage
from esper.simic.rewards.config import MIN_CONTRIBUTION
from esper.simic.rewards.derived import derived
from esper.simic.rewards.facts import Facts
from esper.simic.rewards.masks import (
    Mask,
    above,
    at_least,
    below,
    both,
    choose,
    either,
    equal,
    is_known,
    no,
    only,
    without_nan,
)

UNKNOWN_PROGRESS_SHARE = 0.5
"""Share of a contribution that is credited while progress since germination is unknown."""
SUSPICIOUS_CONTRIBUTION = 1.0
"""Contribution above which it is compared with the gate signal."""
RATIO_PENALTY_STEP = 0.1
RATIO_PENALTY_CAP = 0.3
UNBOUNDED = 1e300
"""A bound on a change of an account that bounds nothing; finite, as choices want it."""
UNSUPPORTED_PENALTY = -0.03
"""Ratio penalty of an unsupported claim, per point, up to the cap at a contribution of 10."""


@record
class CreditFacts(Facts):
    """Facts of one call with the attribution of the target slot; all [N]."""

    @property
    def escrow(self) -> bool:
        """Contribution is credited to accounts."""
        return self.mode == "escrow"

    @derived
    def measured_seed(self) -> Mask:
        """A live seed with both a contribution and a gate signal."""
        return both(self.seed, self.has_contribution, self.has_gate_signal)

    @derived
    def discount(self) -> Tensor:
        """Discount d = sigmoid(steepness * g) where a live seed is harmful in spite of a contribution; 1 elsewhere."""
        if self.escrow:
            return self.one
        share = torch.sigmoid(self.gate_signal * self.weights["attribution_sigmoid_steepness"])
        return choose(both(self.harmful, self.has_contribution), share, self.one)

    @derived
    def trusted(self) -> Mask:
        """The discount is so small that the seed does not count as harmful."""
        return at_least(self.discount, 0.5)

    @derived
    def ratio_penalty(self) -> Tensor:
        """Penalty rho <= 0: a contribution that the gate signal does not support (others lean on the seed)."""
        w, c, limit = self.weights, self.contribution, self.weights["hacking_ratio_threshold"]
        supported = above(self.gate_signal, w["improvement_safe_threshold"])
        excess = torch.relu(self.gate_ratio - limit)
        of_ratio = torch.clamp((-RATIO_PENALTY_STEP / limit) * excess, min=-RATIO_PENALTY_CAP)
        unsupported = torch.clamp(UNSUPPORTED_PENALTY * c, min=-RATIO_PENALTY_CAP)
        penalty = choose(supported, of_ratio, unsupported)
        return only(penalty, self.anti_gaming_on, self.measured_seed, above(c, SUSPICIOUS_CONTRIBUTION), self.trusted)

    @derived
    def gate_ratio(self) -> Tensor:
        """Contribution relative to a positive gate signal; where there is none, the contribution itself."""
        return self.contribution / choose(self.positive_gate_signal, self.gate_signal, self.one)

    @derived
    def progress(self) -> Tensor:
        """Gain since germination; in escrow without the part that is not stable yet. NaN where unknown."""
        gain = self.number("total_improvements", torch.nan)
        return gain - (self.val_acc - self.number("stable_val_accs", torch.nan)) if self.escrow else gain

    @derived
    def raw_attribution(self) -> Tensor:
        """Contribution moderated by progress (host drift can make progress, but no contribution); read where c >= 0.

        A mean of c and p is at most c where p <= c and at least c elsewhere, where c itself is meant; 0 where p <= 0.
        """
        c, p = self.contribution, self.progress
        moderated = torch.minimum(c, self.combine(torch.relu(without_nan(p)), c))
        return choose(is_known(p), moderated, UNKNOWN_PROGRESS_SHARE * c)

    def timing(self, epochs: Tensor) -> Tensor:
        """Factor of what starts at `epochs`: early germinations learn from a host that has learned nothing yet."""
        floor, slope = self.timing_line
        return torch.clamp(floor + slope * epochs, max=1.0)

    @derived
    def timing_line(self) -> tuple[Tensor, Tensor]:
        """Timing factor of step 0, and what a step of warm-up adds to it; 1 and 0 where it is switched off. Scalars."""
        warmup, floor = self.weights["germination_warmup_epochs"], self.weights["germination_discount_floor"]
        on = both(above(warmup, 0), equal(self.weights["disable_timing_discount"], 0))
        floor = choose(on, floor, 1.0)
        return floor, (1 - floor) / torch.clamp(warmup, min=1.0)

    @derived
    def impermanent(self) -> Mask:
        """Rows whose target is not permanent yet."""
        return no(self.fossil)

    @derived
    def credited(self) -> Mask:
        """Rows in which a non-negative contribution of something not yet permanent is paid."""
        return both(at_least(self.raw_contribution, 0), self.impermanent)

    @derived
    def attribution_timing(self) -> Tensor:
        """Timing factor of the target seed's birth; 1 where no contribution is paid, and in escrow."""
        if self.escrow:
            return self.one
        return choose(both(self.credited, self.seed), self.timing(self.epoch - self.age), self.one)

    @derived
    def harmful_fossilize(self) -> Mask:
        """A harmful seed is made permanent."""
        return both(self.fossilize, self.harmful)

    @derived
    def attribution(self) -> Tensor:
        """What the target slot earns in this step, before shaping and costs."""
        return self.escrow_attribution if self.escrow else self.dense_attribution

    @derived
    def dense_attribution(self) -> Tensor:
        """Mode shaped: the moderated contribution itself; its negative when the seed is pruned."""
        w, c = self.weights, self.contribution
        improvement = self.known("stage_improvements")
        blended = self.seed, at_least(self.stage, int(SeedStage.BLENDING))
        proxy = only(w["proxy_confidence_factor"] * torch.relu(improvement), *blended)
        helpful = self.raw_attribution * self.discount * self.attribution_timing
        earned = choose(self.negative_contribution, c, choose(self.has_contribution, helpful, proxy))
        earned = only(earned * w["contribution_weight"], no(self.harmful_fossilize))
        earned = choose(self.prune, -earned, earned)
        return only(earned + self.ratio_penalty, self.impermanent)

    @derived
    def earning(self) -> Mask:
        """The target slot earns something."""
        return above(self.attribution, 0)

    @derived
    def account(self) -> Tensor:
        """Escrow account of the target slot before the step, K; 0 where missing."""
        return self.known("escrow_credits")

    @derived
    def escrow_target(self) -> Tensor:
        """Balance the account moves to, T; 0 outside escrow."""
        if not self.escrow:
            return self.zero
        deserved = self.weights["contribution_weight"] * self.raw_attribution + self.ratio_penalty
        target = only(torch.relu(deserved), self.credited)
        return only(choose(self.fossil, self.account, target), no(self.prune))

    @derived
    def escrow_delta(self) -> Tensor:
        """Change of the account, D: bounded where it is earned, complete where it is lost; 0 outside escrow."""
        if not self.escrow:
            return self.zero
        gap = self.escrow_target - self.account
        clip = self.weights["escrow_delta_clip"]
        bound = choose(above(clip, 0), clip, UNBOUNDED)
        bounded = torch.minimum(torch.maximum(gap, -bound), bound)
        change = choose(self.credited, bounded, only(gap, self.has_contribution))
        return choose(self.prune, -self.account, only(change, self.impermanent))

    @derived
    def escrow_next(self) -> Tensor:
        """Escrow account of the target slot after the step."""
        return self.account + self.escrow_delta if self.escrow else self.account

    @derived
    def escrow_attribution(self) -> Tensor:
        """Mode escrow: the change of the account, and the harm of a harmful seed."""
        harm = only(torch.clamp(self.contribution, max=0.0), no(either(self.prune, self.fossil)))
        earned = self.escrow_delta + self.weights["contribution_weight"] * harm
        return only(earned, no(self.harmful_fossilize))

    def as_flags(self, *masks: Mask) -> Tensor:
        """Masks side by side, in the type in which `has_seed_mask` was given: bool, or compiled for the CPU bytes."""
        dtype = self.exact("has_seed_mask").dtype
        if dtype == torch.bool:
            return torch.stack(masks).to(dtype).T
        return torch.cat([mask.to(torch.float32)[None] for mask in masks]).to(dtype).T  # from float32 by vectors

    @derived
    def flags(self) -> Tensor:
        """Suspicions for telemetry, [N,2]: `FLAGS`. They never change the reward."""
        ransom = both(self.seed, self.ransoming)
        if self.mode not in ("shaped", "escrow"):  # only these two impose the penalty
            return self.as_flags(torch.zeros_like(ransom), ransom)
        positive = self.positive_gate_signal, above(self.contribution, 0)
        suspected = below(self.ratio_penalty, 0), at_least(self.gate_ratio, self.weights["hacking_ratio_threshold"])
        ratio = both(self.measured_seed, *positive, *suspected)
        return self.as_flags(ratio, ransom)


FLAGS = ("attribution_ratio", "ransomware")
"""Columns of `flags`. Ransomware is critical where the contribution is at least `CRITICAL_CONTRIBUTION`."""
CRITICAL_CONTRIBUTION = MIN_CONTRIBUTION
