"""Recorded rewards: cases with inputs and expected rewards, and the comparison of both implementations with them.

A file is `{mode, config, cases}`, or `{mode, presets, cases}` in mode `loss`; a case is `{inputs, reward, components}`.
`inputs.seed` is null where the target slot holds no live seed, and null stands for "not measured" elsewhere.
"""

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from inspect import signature
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from esper.leyline.errors import DataError
from esper.leyline.lifecycle import LifecycleOp
from esper.simic.rewards.modes import REWARD_TERMS, RewardOutput, compute_reward_batched
from esper.simic.rewards.reward_config import LossRewardConfig, RewardConfig
from reference.rewards.modes import reward_of_row
from reference.rewards.row import NAN, DeferredPool, HostRow, RowReward, as_kind

_RENAMED_CONFIG = {
    "reward_mode": "mode", "attribution_formula": "attribution", "drip_fraction": "deferred_fraction",
    "max_drip_per_epoch": "max_deferred_per_epoch", "min_drip_epochs": "min_deferred_epochs",
    "negative_drip_ratio": "negative_deferred_ratio",
}  # fmt: skip
_TERM_OF_COMPONENT = {
    "bounded_attribution": "attribution", "blending_warning": "blending_warning", "alpha_shock": "alpha_shock",
    "holding_warning": "holding_warning", "pbrs_bonus": "potential", "synergy_bonus": "synergy",
    "compute_rent": "rent", "terminal_bonus": "terminal", "action_shaping": "action", "fossilize_bonus": "action",
    "drip_this_epoch": "deferred_bonus",
}  # fmt: skip
_COST_OF_COMPONENT = {"occupancy_rent": "occupancy", "fossilized_rent": "fossil_upkeep"}
_SEED_FIELDS = {
    "stage": "stage", "epochs_in_stage": "epochs_in_stage", "previous_stage": "previous_stage",
    "previous_epochs_in_stage": "previous_epochs", "seed_age_epochs": "seed_age",
    "counterfactual_total_improvement": "counterfactual_improvement",
    "improvement_since_stage_start": "stage_improvement", "interaction_sum": "interaction_sum",
}  # fmt: skip
_HOST_FIELDS = {
    "seed_contribution": "seed_contribution", "val_acc": "val_acc", "acc_delta": "acc_delta", "epoch": "epoch",
    "max_epochs": "max_epochs", "total_params": "total_params", "host_params": "host_params",
    "effective_seed_params": "effective_seed_params", "alpha_delta_sq_sum": "alpha_delta_sq_sum",
    "n_active_seeds": "num_active", "num_fossilized_seeds": "num_fossilized",
    "num_contributing_fossilized": "num_contributing", "committed_val_acc": "committed_acc",
    "fossilized_seed_params": "fossilized_params", "stable_val_acc": "stable_val_acc",
    "escrow_credit_prev": "escrow_credit", "val_loss": "val_loss", "loss_delta": "loss_delta",
}  # fmt: skip
_NOT_OF_A_ROW = ("config_weights", "mode", "attribution", "deferred_scales", "deferred_contributions")


@dataclass(frozen=True, kw_only=True)
class GoldenCase:
    """One recorded row. `terms` hold the breakdown of the file, under our names."""

    row: HostRow
    config: RewardConfig
    reward: float
    terms: Mapping[str, float]
    deferred_opened: float


@dataclass(frozen=True, kw_only=True)
class GoldenReport:
    """Largest absolute errors over total and terms of a file."""

    mode: str
    cases: int
    scalar: float
    batched: float


def load_golden(path: Path) -> list[GoldenCase]:
    """All cases of a file; raises DataError where it is not one."""
    try:
        content = json.loads(path.read_text())
        mode, cases = content["mode"], content["cases"]
        configs = _configs(mode, content)
        return [_case(case, configs[case.get("preset", "")]) for case in cases]
    except (OSError, json.JSONDecodeError, KeyError, TypeError) as error:
        raise DataError(f"{path} is not a file of recorded rewards ({type(error).__name__}: {error}).") from error


def _configs(mode: str, content: Mapping[str, Any]) -> dict[str, RewardConfig]:
    if mode == "loss":
        presets = content["presets"]
        return {name: RewardConfig(mode="loss", loss=LossRewardConfig(**p)) for name, p in presets.items()}
    named = {_RENAMED_CONFIG.get(name, name): value for name, value in content["config"].items() if name != "gamma"}
    kinds = {f.name: f.type for f in fields(RewardConfig)}
    return {"": RewardConfig(**{name: as_kind(value, kinds[name]) for name, value in named.items()})}


def _case(case: Mapping[str, Any], config: RewardConfig) -> GoldenCase:
    components = case.get("components", {})
    terms = {ours: components[name] for name, ours in _TERM_OF_COMPONENT.items() if name in components}
    terms |= {ours: -components[name] for name, ours in _COST_OF_COMPONENT.items() if name in components}
    opened = case.get("new_drip", {}).get("drip_scale", 0.0)
    row = row_of_case(case["inputs"])
    return GoldenCase(row=row, config=config, reward=case["reward"], terms=terms, deferred_opened=opened)


def _number(value: float | int | None) -> float | int:
    return NAN if value is None else value


def row_of_case(inputs: Mapping[str, Any]) -> HostRow:
    """A recorded input as a row."""
    values: dict[str, Any] = {"action": int(LifecycleOp[inputs["action"]]), "val_acc": 0.0}
    values |= {ours: _number(inputs[name]) for name, ours in _HOST_FIELDS.items() if name in inputs}
    seed = inputs["seed"]
    if seed is not None:
        values |= {"has_seed": True} | {ours: _number(seed[name]) for name, ours in _SEED_FIELDS.items()}
    born_at = inputs.get("acc_at_germination")
    values["total_improvement"] = NAN if born_at is None else values["val_acc"] - born_at
    pools = inputs.get("drip", ())
    values["deferred_pools"] = tuple(
        DeferredPool(scale=pool["drip_scale"], contribution=_number(pool["contribution"])) for pool in pools
    )
    kinds = {f.name: f.type for f in fields(HostRow)}
    return HostRow(**{name: as_kind(value, kinds[name]) for name, value in values.items()})


def kernel_arguments(rows: Sequence[HostRow], dtype: torch.dtype = torch.float64) -> dict[str, Tensor]:
    """Rows side by side as the arguments of `compute_reward_batched`, without weights and mode."""
    arguments: dict[str, Tensor] = {}
    names = [name for name in signature(compute_reward_batched).parameters if name not in _NOT_OF_A_ROW]
    columns = [field for field in fields(HostRow) if field.name not in ("compute", "deferred_pools", "potential_prev")]
    for name, field in zip(names, columns, strict=True):
        values = [getattr(row, field.name) for row in rows]
        kind = {"int": torch.int64, "bool": torch.bool}.get(getattr(field.type, "__name__", ""), dtype)
        arguments[name] = torch.tensor(values, dtype=kind)
    width = max((len(row.deferred_pools) for row in rows), default=0)
    padded = [(*row.deferred_pools, *[DeferredPool(scale=0.0)] * (width - len(row.deferred_pools))) for row in rows]
    shape = (len(rows), width)
    scales, contributions = (
        [[getattr(p, name) for p in pools] for pools in padded] for name in ("scale", "contribution")
    )
    arguments["deferred_scales"] = torch.tensor(scales, dtype=dtype).reshape(shape)
    arguments["deferred_contributions"] = torch.tensor(contributions, dtype=dtype).reshape(shape)
    return arguments


def outputs_of(rows: Sequence[HostRow], config: RewardConfig, dtype: torch.dtype = torch.float64) -> RewardOutput:
    """The kernel on rows."""
    weights = config.loss.pack() if config.mode == "loss" else config.pack()
    return compute_reward_batched(
        **kernel_arguments(rows, dtype), config_weights=weights, mode=config.mode, attribution=config.attribution
    )


def batched_rewards(cases: Sequence[GoldenCase], dtype: torch.dtype = torch.float64) -> list[RowReward]:
    """The kernel's output of each case, in the form of the scalar reference."""
    outputs: dict[int, RowReward] = {}
    for config in {case.config for case in cases}:
        chosen = [index for index, case in enumerate(cases) if case.config == config]
        rows = [cases[index].row for index in chosen]
        out = outputs_of(rows, config, dtype)
        for place, index in enumerate(chosen):
            outputs[index] = RowReward(
                terms=dict(zip(REWARD_TERMS, out.breakdown[place].tolist(), strict=True)),
                deferred_opened=out.deferred_opened[place].item(),
            )
    return [outputs[index] for index in range(len(cases))]


def error_of(case: GoldenCase, got: RowReward) -> float:
    """Largest absolute difference between a recorded case and what an implementation returns; inf where NaN differs."""
    pairs = [(case.reward, got.total), (case.deferred_opened, got.deferred_opened)]
    pairs += [(want, got.terms.get(name, 0.0)) for name, want in case.terms.items()]
    return max(_difference(want, have) for want, have in pairs)


def _difference(want: float, have: float) -> float:
    if math.isnan(want) or math.isnan(have):
        return 0.0 if math.isnan(want) and math.isnan(have) else math.inf
    return abs(want - have)


def check_golden(path: Path) -> GoldenReport:
    """Compare the scalar reference and the kernel with a file, in float64."""
    cases = load_golden(path)
    scalar = max(error_of(case, reward_of_row(case.row, case.config)) for case in cases)
    batched = max(error_of(case, got) for case, got in zip(cases, batched_rewards(cases), strict=True))
    return GoldenReport(mode=cases[0].config.mode, cases=len(cases), scalar=scalar, batched=batched)
