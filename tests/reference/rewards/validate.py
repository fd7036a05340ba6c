"""Checks of the data that enter the kernel. They read values back, so tests and debug runs call them, the loop never.

Each check marks rows; the first that marks any raises with the number of the row.
"""

from collections.abc import Iterator

import torch
from torch import Tensor

from esper.leyline.actions import NUM_OPS
from esper.leyline.errors import DataError
from esper.leyline.stages import NUM_STAGE_VALUES
from esper.simic.rewards.modes import check_arguments
from esper.simic.rewards.reward_config import RewardConfig

_UNUSED_STAGE = 5


def validate_reward_inputs(
    config: RewardConfig,
    *,
    actions: Tensor,
    stages: Tensor,
    previous_stages: Tensor,
    val_accs: Tensor,
    has_seed_mask: Tensor,
    seed_contributions: Tensor,
    last_step: Tensor,
    counterfactual_improvements: Tensor | None = None,
    stable_val_accs: Tensor | None = None,
    committed_accs: Tensor | None = None,
    drip_scales: Tensor | None = None,
    drip_contributions: Tensor | None = None,
) -> None:
    """Raise DataError where a row has no valid reward; arguments as in the kernel, `last_step` bool [N].

    The numbers of `config` were checked when it was made. The kernel never raises on data: it treats missing
    numbers of such rows as neutral.

    Raises:
        DataError: the first kind of row without a valid reward. ValueError, TypeError: an argument whose shape or dtype
            does not fit the others, by its name.
    """
    check_arguments(
        {
            "actions": actions, "stages": stages, "previous_stages": previous_stages, "val_accs": val_accs,
            "has_seed_mask": has_seed_mask, "seed_contributions": seed_contributions,
            "counterfactual_improvements": counterfactual_improvements, "stable_val_accs": stable_val_accs,
            "committed_accs": committed_accs, "drip_scales": drip_scales, "drip_contributions": drip_contributions,
        }
    )  # fmt: skip
    _require_like("last_step", last_step, actions)
    missing = torch.full_like(val_accs, torch.nan)
    given = {
        "gate_signal": counterfactual_improvements,
        "stable": stable_val_accs,
        "committed": committed_accs,
    }
    known = {name: ~torch.isnan(missing if value is None else value) for name, value in given.items()}
    for marked_N, problem in _problems(
        config, actions, stages, previous_stages, val_accs, has_seed_mask, seed_contributions, last_step, known
    ):
        _raise_at(marked_N, problem)
    if drip_scales is not None:
        measured = torch.zeros_like(drip_scales, dtype=torch.bool)
        measured = measured if drip_contributions is None else ~torch.isnan(drip_contributions)
        _raise_at(
            ((drip_scales != 0) & ~measured).any(-1), "has an open pool whose fossil has no measured contribution"
        )


def _problems(
    config: RewardConfig,
    actions: Tensor,
    stages: Tensor,
    previous_stages: Tensor,
    val_accs: Tensor,
    has_seed_mask: Tensor,
    seed_contributions: Tensor,
    last_step: Tensor,
    known: dict[str, Tensor],
) -> Iterator[tuple[Tensor, str]]:
    for name, values in (("stage", stages), ("previous stage", previous_stages)):
        outside = (values < 0) | (values >= NUM_STAGE_VALUES) | (values == _UNUSED_STAGE)
        yield outside, f"has a {name} that does not exist; stages are 0 to 10 without 5"
    yield (actions < 0) | (actions >= NUM_OPS), f"has an operation outside 0 to {NUM_OPS - 1}"
    yield torch.isnan(val_accs), "has no accuracy; every step measures one"
    if config.mode in ("shaped", "escrow"):
        unsupported = has_seed_mask & ~torch.isnan(seed_contributions) & ~known["gate_signal"]
        yield unsupported, "has a contribution without the gate signal measured in the same pass"
    if config.mode == "escrow":
        yield ~known["stable"], "has no stable accuracy, which mode 'escrow' needs"
    if config.mode in ("sparse", "minimal", "objective"):
        yield last_step & ~known["committed"], f"ends without a committed accuracy, which mode {config.mode!r} rewards"


def _require_like(name: str, value: Tensor, like: Tensor) -> None:
    if value.shape != like.shape:
        raise ValueError(f"{name} has shape {tuple(value.shape)}; it must be {tuple(like.shape)}, one row per host.")


def _raise_at(marked_N: Tensor, problem: str) -> None:
    rows = marked_N.nonzero().flatten()
    if rows.numel():
        raise DataError(f"row {int(rows[0])} {problem} ({rows.numel()} of {marked_N.numel()} rows).")
