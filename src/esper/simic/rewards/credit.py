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
from esper.simic.rewards.facts import Facts, derived

UNKNOWN_PROGRESS_SHARE = 0.5
"""Share of a contribution that is credited while progress since germination is unknown."""
SUSPICIOUS_CONTRIBUTION = 1.0
"""Contribution above which it is compared with the gate signal."""
RATIO_PENALTY_STEP = 0.1
RATIO_PENALTY_CAP = 0.3
UNSUPPORTED_CONTRIBUTION_SCALE = 10.0
"""Contribution at which an unsupported claim costs the full ratio penalty."""


@record
class CreditFacts(Facts):
    """Facts of one call with the attribution of the target slot; all [N]."""

    @property
    def escrow(self) -> bool:
        """Contribution is credited to accounts."""
        return self.mode == "escrow"

    @derived
    def measured_seed(self) -> Tensor:
        """A live seed with both a contribution and a gate signal."""
        return self.seed & self.has_contribution & self.has_gate_signal

    @derived
    def discount(self) -> Tensor:
        """Discount d = sigmoid(steepness * g) where a live seed is harmful in spite of a contribution; 1 elsewhere."""
        if self.escrow:
            return self.one
        odds = torch.exp(torch.clamp(self.gate_signal, max=0.0) * self.weights["attribution_sigmoid_steepness"])
        return torch.where(self.harmful & self.has_contribution, odds / (1 + odds), self.one)

    @derived
    def ratio_penalty(self) -> Tensor:
        """Penalty rho <= 0: a contribution that the gate signal does not support (others lean on the seed)."""
        w, c, g = self.weights, self.contribution, self.gate_signal
        suspicious = self.measured_seed & (c > SUSPICIOUS_CONTRIBUTION) & (self.discount >= 0.5)
        suspicious = suspicious & self.anti_gaming_on
        supported = g > w["improvement_safe_threshold"]
        ratio = c / torch.where(supported, g, self.one)
        excess = torch.clamp(ratio / w["hacking_ratio_threshold"] - 1, min=0.0)
        of_ratio = torch.clamp(RATIO_PENALTY_STEP * excess, max=RATIO_PENALTY_CAP)
        unsupported = RATIO_PENALTY_CAP * torch.clamp(c / UNSUPPORTED_CONTRIBUTION_SCALE, max=1.0)
        return -torch.where(suspicious, torch.where(supported, of_ratio, unsupported), self.zero)

    @derived
    def progress(self) -> Tensor:
        """Gain since germination; in escrow without the part that is not stable yet. NaN where unknown."""
        gain = self.number("total_improvements", torch.nan)
        return gain - (self.val_acc - self.number("stable_val_accs", torch.nan)) if self.escrow else gain

    @derived
    def raw_attribution(self) -> Tensor:
        """Contribution moderated by progress (host drift can make progress, but no contribution)."""
        c = self.contribution
        p = torch.nan_to_num(self.progress, nan=0.0)
        moderated = torch.where(c >= p, self.combine(p, c), c)
        moderated = torch.where(p > 0, moderated, self.zero)
        return torch.where(self.progress == self.progress, moderated, UNKNOWN_PROGRESS_SHARE * c)

    def timing(self, epochs: Tensor) -> Tensor:
        """Factor of what starts at `epochs`: early germinations learn from a host that has learned nothing yet."""
        floor = self.weights["germination_discount_floor"]
        return torch.where(epochs >= self.warmup, self.one, floor + self.timing_slope * epochs)

    @derived
    def warmup(self) -> Tensor:
        """Steps of the discount of early germinations; minus infinity where it is switched off. A scalar."""
        warmup = self.weights["germination_warmup_epochs"]
        off = (warmup <= 0) | (self.weights["disable_timing_discount"] != 0)
        return torch.where(off, -torch.inf, warmup)

    @derived
    def timing_slope(self) -> Tensor:
        """What a step of warm-up adds to the timing factor. A scalar."""
        return (1 - self.weights["germination_discount_floor"]) / torch.clamp(self.warmup, min=1.0)

    @derived
    def credited(self) -> Tensor:
        """Rows in which a non-negative contribution of something not yet permanent is paid."""
        return self.has_contribution & (self.contribution >= 0) & ~self.fossil

    @derived
    def attribution_timing(self) -> Tensor:
        """Timing factor of the target seed's birth; 1 where no contribution is paid, and in escrow."""
        if self.escrow:
            return self.one
        return torch.where(self.credited & self.seed, self.timing(self.epoch - self.age), self.one)

    @derived
    def harmful_fossilize(self) -> Tensor:
        """A harmful seed is made permanent."""
        return self.fossilize & self.harmful

    @derived
    def attribution(self) -> Tensor:
        """What the target slot earns in this step, before shaping and costs."""
        return self.escrow_attribution if self.escrow else self.dense_attribution

    @derived
    def dense_attribution(self) -> Tensor:
        """Mode shaped: the moderated contribution itself; its negative when the seed is pruned."""
        w, c = self.weights, self.contribution
        improvement = self.known("stage_improvements")
        blended = self.seed & (self.stage >= int(SeedStage.BLENDING)) & (improvement > 0)
        proxy = torch.where(blended, w["proxy_confidence_factor"] * improvement, self.zero)
        helpful = self.raw_attribution * self.discount * self.attribution_timing
        earned = torch.where(c < 0, c, torch.where(self.has_contribution, helpful, proxy))
        earned = torch.where(self.fossil | self.harmful_fossilize, self.zero, earned * w["contribution_weight"])
        earned = torch.where(self.prune, -earned, earned)
        return earned + torch.where(self.fossil, self.zero, self.ratio_penalty)

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
        target = torch.where(self.credited, torch.clamp(deserved, min=0.0), self.zero)
        return torch.where(self.prune, self.zero, torch.where(self.fossil, self.account, target))

    @derived
    def escrow_delta(self) -> Tensor:
        """Change of the account, D: bounded where it is earned, complete where it is lost; 0 outside escrow."""
        if not self.escrow:
            return self.zero
        gap = self.escrow_target - self.account
        clip = self.weights["escrow_delta_clip"]
        bound = torch.where(clip > 0, clip, torch.inf)
        bounded = torch.minimum(torch.maximum(gap, -bound), bound)
        change = torch.where(self.credited, bounded, torch.where(self.has_contribution, gap, self.zero))
        return torch.where(self.prune, -self.account, torch.where(self.fossil, self.zero, change))

    @derived
    def escrow_attribution(self) -> Tensor:
        """Mode escrow: the change of the account, and the harm of a harmful seed."""
        harm = torch.where(self.prune | self.fossil, self.zero, torch.clamp(self.contribution, max=0.0))
        earned = self.escrow_delta + self.weights["contribution_weight"] * harm
        return torch.where(self.harmful_fossilize, self.zero, earned)

    @derived
    def flags(self) -> Tensor:
        """Suspicions for telemetry, bool [N,2]: `FLAGS`. They never change the reward."""
        c, g = self.contribution, self.gate_signal
        ransom = self.seed & self.ransoming
        if self.mode not in ("shaped", "escrow"):  # only these two impose the penalty
            return torch.stack((torch.zeros_like(ransom), ransom), dim=-1)
        positive = self.measured_seed & (g > 0) & (c > 0)
        ratio = c / torch.where(positive, g, self.one)
        extreme = positive & (self.ratio_penalty != 0) & (ratio >= self.weights["hacking_ratio_threshold"])
        return torch.stack((extreme, ransom), dim=-1)


FLAGS = ("attribution_ratio", "ransomware")
"""Columns of `flags`. Ransomware is critical where the contribution is at least `CRITICAL_CONTRIBUTION`."""
CRITICAL_CONTRIBUTION = MIN_CONTRIBUTION
