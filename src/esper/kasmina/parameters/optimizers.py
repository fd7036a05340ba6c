"""Optimizers on flat parameters: one row [P] per host or seed, all rows in one step, in place and independent.

Shape legend: R = rows (hosts or seeds), P = padded parameters of a row.
"""

import math
from dataclasses import dataclass
from typing import Annotated, Literal

import torch
from jaxtyping import Bool, Float, Int
from pydantic import Field
from torch import Tensor

from esper.leyline.errors import ConfigError
from esper.leyline.settings import AtLeast0, Decay, NotNegative, Positive, check_fields
from esper.leyline.tensor_dataclass import lift, named_tensors, tensor_dataclass, tree_map

_CLIP_EPS = 1e-6  # as torch.nn.utils.clip_grad_norm_
ScheduleName = Literal["constant", "cosine", "linear"]


@dataclass(frozen=True, kw_only=True)
class OptimizerSpec:
    """How hosts and seeds are trained; one optimizer kind for both. Seeds are never decayed.

    Attributes:
        kind: "sgd" with momentum, "adam" (decay is added to the gradient) or "adamw" (decay is apart from it), each as
            in `torch.optim`.
        host_lr, seed_lr: learning rates.
        schedule: how both fall over an episode, that of a seed from its birth on (`schedule_factor`).
        warmup: control steps in which they rise first.
        sgd_weight_decay: decay of all parameters of a host with "sgd".
        adamw_weight_decay: decay of a host with "adam" or "adamw": of its matrices, and of its biases and scales with
            `decay_vectors`.
        grad_clip: each host's and each seed's own L2 gradient norm is clipped to this; infinite for no clipping.
    """

    kind: Literal["sgd", "adam", "adamw"] = "sgd"
    host_lr: Positive = 0.01
    seed_lr: Positive = 0.01
    schedule: ScheduleName = "constant"
    warmup: AtLeast0 = 0
    momentum: Decay = 0.9
    sgd_weight_decay: NotNegative = 5e-4
    betas: tuple[Decay, Decay] = (0.9, 0.95)
    eps: Positive = 1e-8
    adamw_weight_decay: NotNegative = 0.1
    decay_vectors: bool = False
    grad_clip: Annotated[float, Field(gt=0, allow_inf_nan=True)] = 1.0

    def __post_init__(self) -> None:
        check_fields(self, "optimizer")

    @property
    def is_scheduled(self) -> bool:
        """Whether the learning rates change in an episode."""
        return self.schedule != "constant" or self.warmup > 0

    def require_length(self, episode_length: int) -> None:
        """Raise ConfigError unless the warm-up ends within an episode of this many control steps."""
        if self.warmup >= episode_length:
            raise ConfigError(
                f"warmup is {self.warmup}, but an episode has {episode_length} control steps, so the learning rate "
                f"would never be reached; set warmup to at most {episode_length - 1}, or episode_length higher."
            )


def schedule_factor(spec: OptimizerSpec, t: int, episode_length: int, *, born: int = 0) -> float:
    """What multiplies the learning rates in control step `t`, from 1 to `episode_length`.

    The same numbers as in a loop that calls `scheduler.step()` after each epoch, with E epochs and w of warm-up:

        SequentialLR(optimizer, [LinearLR(optimizer, 1 / (w + 1), total_iters=w), falling], milestones=[w])
        cosine   falling = CosineAnnealingLR(optimizer, T_max=E - w)             Loshchilov & Hutter 2017, no restarts
        linear   falling = LinearLR(optimizer, 1.0, 0.0, total_iters=E - w)

    The last step still trains: 0 would be reached one step after it. The rates of a seed that germinated in step `born`
    begin to fall then, and end with those of the host.
    """
    done = t - 1
    if done < spec.warmup:
        return (done + 1) / (spec.warmup + 1)
    begin = min(max(spec.warmup, born), episode_length - 1)  # a seed of the last step is not trained any more
    share = (done - begin) / (episode_length - begin)
    match spec.schedule:
        case "constant":
            return 1.0
        case "cosine":
            return 0.5 * (1.0 + math.cos(math.pi * share))
        case "linear":
            return 1.0 - share


@tensor_dataclass
class SGDState:
    """Momentum of each row, zero at the start."""

    momentum: Float[Tensor, "*R P"]


@tensor_dataclass
class AdamWState:
    """Moment estimates of each row, with Adam or AdamW, and its number of steps."""

    exp_avg: Float[Tensor, "*R P"]
    exp_avg_sq: Float[Tensor, "*R P"]
    steps: Int[Tensor, "*R"]


OptimizerState = SGDState | AdamWState


def init_state(spec: OptimizerSpec, like: Float[Tensor, "*R P"]) -> OptimizerState:
    """The state before the first step; `like` gives shape and device."""
    if spec.kind == "sgd":
        return SGDState(momentum=torch.zeros_like(like))
    steps = torch.zeros(like.shape[:-1], dtype=torch.int64, device=like.device)
    return AdamWState(exp_avg=torch.zeros_like(like), exp_avg_sq=torch.zeros_like(like), steps=steps)


def host_decay_mask(spec: OptimizerSpec, matrix_mask: Bool[Tensor, " P"]) -> Bool[Tensor, " P"]:
    """The elements of a host that are decayed: all, or only matrices with Adam and AdamW without `decay_vectors`."""
    return torch.ones_like(matrix_mask) if spec.kind == "sgd" or spec.decay_vectors else matrix_mask


def clip_factor(norm: Float[Tensor, " R"], max_norm: float) -> Float[Tensor, " R"]:
    """The factor that clips gradients of these L2 norms to `max_norm`."""
    return (max_norm / (norm + _CLIP_EPS)).clamp_(max=1.0)


@torch.no_grad()
def step_rows(
    spec: OptimizerSpec,
    params: Float[Tensor, "R P"],
    grad: Float[Tensor, "R P"],
    state: OptimizerState,
    lr: float | Float[Tensor, "R 1"],
    decay_mask: Bool[Tensor, " P"] | None = None,
    active: Bool[Tensor, " R"] | None = None,
) -> None:
    """One optimizer step of every active row: `params` and `state` change in place, `grad` is overwritten.

    `grad` is clipped already. `lr` is that of all rows, or of each. `decay_mask` marks the elements that are decayed;
    None for none (seeds). Rows that are not `active` (None: all are) do not change, whatever their gradient is.
    """
    if active is not None:
        params_before, state_before = params.clone(), tree_map(torch.clone, state)
    if isinstance(state, SGDState):
        _sgd(spec, params, grad, state, lr, decay_mask)
    else:
        _adamw(spec, params, grad, state, lr, decay_mask)
    if active is None:
        return
    torch.where(lift(active, params), params, params_before, out=params)
    for (_, now), (_, before) in zip(named_tensors(state), named_tensors(state_before), strict=True):
        torch.where(lift(active, now), now, before, out=now)


def _sgd(
    spec: OptimizerSpec, params: Tensor, grad: Tensor, state: SGDState, lr: float | Tensor, decay_mask: Tensor | None
) -> None:
    """Momentum without dampening: g := g + wd * w;  m := mu * m + g;  w := w - lr * m."""
    if decay_mask is not None:
        grad.addcmul_(params, decay_mask * spec.sgd_weight_decay)
    state.momentum.mul_(spec.momentum).add_(grad)
    _descend(params, state.momentum, lr)


def _descend(params: Tensor, direction: Tensor, lr: float | Tensor) -> None:
    if isinstance(lr, Tensor):
        params.addcmul_(direction, lr, value=-1.0)
    else:
        params.add_(direction, alpha=-lr)


def _adamw(
    spec: OptimizerSpec, params: Tensor, grad: Tensor, state: AdamWState, lr: float | Tensor, decay_mask: Tensor | None
) -> None:
    """AdamW (Loshchilov & Hutter 2019): w := w - lr * wd * w - lr * (m / c1) / (sqrt(v / c2) + eps).

    Adam (Kingma & Ba 2015) has g := g + wd * w first instead of the decay of w. The denominator is multiplied by c1, so
    that the two corrections of a row become one factor and one term.
    """
    beta1, beta2 = spec.betas
    if decay_mask is not None and spec.kind == "adam":
        grad.addcmul_(params, decay_mask * spec.adamw_weight_decay)
    elif decay_mask is not None:
        params.mul_(1.0 - decay_mask * (lr * spec.adamw_weight_decay))
    state.exp_avg.lerp_(grad, 1.0 - beta1)
    state.exp_avg_sq.mul_(beta2).addcmul_(grad, grad, value=1.0 - beta2)
    state.steps.add_(1)
    steps_R1 = state.steps.unsqueeze(-1).to(torch.float64)
    c1_R1, c2_R1 = 1.0 - beta1**steps_R1, 1.0 - beta2**steps_R1
    factor_R1 = (c1_R1 / c2_R1.sqrt()).to(params.dtype)
    denominator = state.exp_avg_sq.sqrt().mul_(factor_R1).add_((spec.eps * c1_R1).to(params.dtype))
    if isinstance(lr, Tensor):
        _descend(params, state.exp_avg / denominator, lr)
    else:
        params.addcdiv_(state.exp_avg, denominator, value=-lr)
