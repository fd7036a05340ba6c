"""Precision of host training: autocast, and dynamic loss scaling on the device (Micikevicius et al. 2018).

Only fp16 needs scaling. Each host has its own scale: a gradient that is not finite skips the step of that host and
halves its scale; 2,000 finite steps in a row double it.
"""

from contextlib import AbstractContextManager, nullcontext
from typing import Literal, final

import torch
from jaxtyping import Bool, Float
from torch import Tensor

_GROWTH_INTERVAL = 2000
_START, _MAX = 2.0**14, 2.0**16

AmpMode = Literal["off", "auto", "bf16", "fp16"]


def chosen_amp(mode: AmpMode, device: torch.device) -> AmpMode:
    """Resolve "auto": "bf16" on a GPU that supports it, else "off"."""
    if mode != "auto":
        return mode
    return "bf16" if device.type == "cuda" and torch.cuda.is_bf16_supported() else "off"


def amp_dtype(mode: AmpMode, device: torch.device) -> torch.dtype | None:
    """The autocast dtype of `mode` on this device; None for float32."""
    return {"off": None, "bf16": torch.bfloat16, "fp16": torch.float16}[chosen_amp(mode, device)]


@final
class LossScaler:
    """One loss scale per host, float32 [N]; idle unless the dtype is fp16."""

    def __init__(self, dtype: torch.dtype | None, num_envs: int, device: torch.device) -> None:
        self.dtype, self.device_type = dtype, device.type
        self.enabled = dtype is torch.float16
        self.scale = torch.empty(num_envs, device=device)
        self.good_steps = torch.empty(num_envs, dtype=torch.int64, device=device)
        self.reset()

    def reset(self) -> None:
        """The scales of fresh hosts."""
        self.scale.fill_(_START if self.enabled else 1.0)
        self.good_steps.zero_()

    def autocast(self) -> AbstractContextManager[object]:
        """The context of host and seed forward passes."""
        if self.dtype is None:
            return nullcontext()
        return torch.autocast(self.device_type, dtype=self.dtype)

    def update(self, finite: Bool[Tensor, " N"]) -> None:
        """Adapt the scales after a step; `finite` marks hosts with finite gradients."""
        good = torch.where(finite, self.good_steps + 1, 0)
        grown = good >= _GROWTH_INTERVAL
        factor: Float[Tensor, " N"] = torch.where(finite, torch.where(grown, 2.0, 1.0), 0.5)
        self.scale.mul_(factor).clamp_(min=1.0, max=_MAX)
        self.good_steps.copy_(torch.where(grown, 0, good))
