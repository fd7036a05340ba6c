"""Rows of metrics of an update, on the device; names as in `METRICS`."""

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from esper.leyline.actions import HEAD_NAMES
from esper.leyline.messages import Hidden
from esper.simic.agent.advantages import NormalizedAdvantages
from esper.simic.agent.losses import Losses, LossInputs, LossWeights, RatioStatistics, head_entropies
from esper.simic.agent.normalizers import masked_moments
from esper.simic.agent.rollout_buffer import SequenceBatch
from esper.simic.telemetry.metrics import metric_row
from esper.tamiyo.heads import check_stored_actions

MIN_EXPLAINABLE_VARIANCE = 1e-8


def update_row(
    rollout: SequenceBatch,
    normalized: NormalizedAdvantages,
    return_scale: Float[Tensor, ""],
    weights: LossWeights,
    lr: float,
    inverse_temperature: Float[Tensor, ""],
    selectable: Bool[Tensor, " B"],
) -> Float[Tensor, " M"]:
    """Metrics known before the first minibatch; values and returns are scaled, advantages not normalized."""
    valid = rollout.valid
    values, returns = masked_moments(rollout.values, valid), masked_moments(rollout.returns, valid)
    unexplained = masked_moments(rollout.returns - rollout.values, valid).var
    explained = 1.0 - unexplained / returns.var
    explainable = returns.var >= MIN_EXPLAINABLE_VARIANCE
    return metric_row(
        {
            "lr": torch.full((), lr, dtype=torch.float64, device=valid.device),
            "ent_coef": weights.entropy,
            "vf_coef": weights.value,
            "floor_scale": weights.floor,
            "inverse_temperature": inverse_temperature,
            "forced_share": (rollout.forced & valid).sum() / valid.sum(),
            "explained_variance": torch.where(explainable, explained, torch.nan),
            "value_mean": values.mean,
            "value_std": values.var.sqrt(),
            "return_mean": returns.mean,
            "return_std": returns.var.sqrt(),
            "return_scale": return_scale,
            "advantage_mean": normalized.mean,
            "advantage_std": normalized.std,
            "advantage_std_floored": normalized.floored,
            "actions_outside_mask": ~check_stored_actions(rollout.actions, rollout.legal, rollout.has_gate, selectable),
        }
    )


def health_row(hidden: Hidden) -> Float[Tensor, " M"]:
    """Root mean square and largest magnitude of the recurrent state."""
    h, c = hidden.h.detach(), hidden.c.detach()
    return metric_row(
        {
            "hidden_rms": h.square().mean().sqrt(),
            "hidden_max": h.abs().amax(),
            "cell_rms": c.square().mean().sqrt(),
            "cell_max": c.abs().amax(),
        }
    )


def epoch_row(
    approx_kl: Float[Tensor, ""], epoch: Int[Tensor, ""], *, ran: Bool[Tensor, ""], exceeded: Bool[Tensor, ""]
) -> Float[Tensor, " M"]:
    """KL divergence of one epoch; NaN for an epoch after the early stop."""
    return metric_row(
        {
            "approx_kl": torch.where(ran, approx_kl, torch.nan),
            "epochs_done": torch.where(ran, epoch.to(approx_kl.dtype), torch.nan),
            "stopped_early": exceeded,
        }
    )


def minibatch_row(
    x: LossInputs,
    losses: Losses,
    ratios: RatioStatistics,
    grad_norm: Float[Tensor, ""],
    *,
    ran: Bool[Tensor, ""],
    finite_logits: Bool[Tensor, ""],
    finite: Bool[Tensor, ""],
    takes: Bool[Tensor, ""],
) -> Float[Tensor, " M"]:
    """Metrics of a minibatch; NaN except for the counts if it took no optimizer step."""
    entropies, steps = head_entropies(x)
    numbers = {
        "evaluated_steps": x.valid.sum(),
        "policy_loss": losses.policy,
        "value_loss": losses.value,
        "entropy_loss": losses.entropy,
        "floor_loss": losses.floor,
        "total_loss": losses.total,
        "grad_norm": grad_norm,
        "clip_fraction": ratios.clip_fraction,
        "ratio_max": ratios.ratio_max,
        "ratio_min": ratios.ratio_min,
        **{f"steps_{name}": count for name, count in zip(HEAD_NAMES, steps.unbind(0), strict=True)},
        **{f"entropy_{name}": mean for name, mean in zip(HEAD_NAMES, entropies.unbind(0), strict=True)},
    }
    counts = metric_row(
        {
            "finite_minibatches": ran & finite,
            "nonfinite_minibatches": ran & ~finite,
            "nonfinite_logits": ran & ~finite_logits,
            "optimizer_steps": takes,
        }
    )
    return torch.where(counts.isnan(), torch.where(takes, metric_row(numbers), torch.nan), counts)
