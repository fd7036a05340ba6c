"""The kernel: parity with the scalar reference on arbitrary rows, and the promises of its interface."""

import dataclasses
import itertools
import math
import os
import subprocess
import sys

import pytest
import torch
from reward_toys import random_rows, replace_rows

from esper.runs.assembly.clients import compiled_reward
from esper.simic.compilation import graphs_compiled
from esper.simic.rewards import REWARD_TERMS, RewardConfig, compute_reward_batched
from esper.simic.rewards.modes import KERNEL_MODES
from esper.simic.rewards.reward import packed_weights
from reference.rewards.golden import kernel_arguments, outputs_of
from reference.rewards.modes import reward_of_row

CPU = torch.device("cpu")
OTHER_NUMBERS = RewardConfig(
    attribution="minimum", contribution_weight=0.7, escrow_delta_clip=0.0, pbrs_weight=0.2, epoch_progress_bonus=0.5,
    rent_host_params_floor=1000.0, alpha_shock_coef=0.4, prune_good_seed_penalty=-0.5, free_slots=2,
    hacking_ratio_threshold=2.0, attribution_sigmoid_steepness=1.5, germination_warmup_epochs=0, deferred_fraction=0.0,
    fossilize_quality_ceiling=2.0, max_rent=0.3, param_budget=1000.0, sparse_reward_scale=2.0, min_prune_bonus_age=8,
)  # fmt: skip
SWITCHED_OFF = RewardConfig(
    disable_pbrs=True, disable_terminal_reward=True, disable_anti_gaming=True, disable_timing_discount=True
)


def assert_parity(rows, config, tolerance):
    """Every column of the kernel against the scalar reference."""
    out, want = outputs_of(rows, config), [reward_of_row(row, config) for row in rows]
    terms = [[output.terms.get(name, 0.0) for name in REWARD_TERMS] for output in want]
    rest = [[output.total, output.escrow_next, output.deferred_opened] for output in want]
    near = {"rtol": 0, "atol": tolerance, "equal_nan": True}
    torch.testing.assert_close(out.breakdown, torch.tensor(terms, dtype=torch.float64), **near)
    got = torch.stack((out.total, out.escrow_next, out.deferred_opened), dim=-1)
    torch.testing.assert_close(got, torch.tensor(rest, dtype=torch.float64), **near)
    assert out.flags.tolist() == [list(output.flags) for output in want]


@pytest.mark.slow
@pytest.mark.parametrize("mode", KERNEL_MODES)
def test_kernel_and_scalar_reference_agree_on_ten_thousand_arbitrary_rows(mode):
    assert_parity(random_rows(10_000, 1), RewardConfig(mode=mode), 1e-9)


@pytest.mark.parametrize("mode", KERNEL_MODES)
@pytest.mark.parametrize("numbers", [OTHER_NUMBERS, SWITCHED_OFF], ids=["other numbers", "switched off"])
def test_kernel_and_scalar_reference_agree_for_other_configurations(mode, numbers):
    assert_parity(random_rows(300, 2), numbers.with_mode(mode), 1e-9)


@pytest.mark.parametrize("mode", KERNEL_MODES)
def test_float32_inputs_are_paid_as_the_same_numbers_in_float64_are(mode):
    rows, config = list(random_rows(1000, 3)), RewardConfig(mode=mode)
    single = outputs_of(rows, config, torch.float32)
    assert single.total.dtype == single.breakdown.dtype == torch.float32
    given = kernel_arguments(rows, torch.float32)
    given = {name: x.double() if x.is_floating_point() else x for name, x in given.items()}
    double = compute_reward_batched(**given, config_weights=packed_weights(config, CPU), mode=mode)
    assert torch.equal(single.total, double.total.float())


@pytest.mark.parametrize("mode", KERNEL_MODES)
def test_the_total_is_the_sum_of_finite_terms_for_every_pattern_of_missing_values(mode):
    optional = ("seed_contribution", "total_improvement", "counterfactual_improvement", "stage_improvement",
                "interaction_sum", "stable_val_acc", "escrow_credit", "effective_seed_params", "alpha_delta_sq_sum",
                "committed_acc", "val_loss", "loss_delta", "acc_delta", "val_acc", "total_params")  # fmt: skip
    rows = list(random_rows(300, 4))
    for missing in itertools.chain(itertools.combinations(optional, 2), [(), optional]):
        rows += replace_rows(rows[:2], **dict.fromkeys(missing, math.nan))
    out = outputs_of(rows, RewardConfig(mode=mode))
    torch.testing.assert_close(out.breakdown.sum(-1), out.total, rtol=0, atol=1e-12)
    for name in ("total", "breakdown", "escrow_next", "deferred_opened"):
        assert torch.isfinite(getattr(out, name)).all(), name


@pytest.mark.parametrize("mode", KERNEL_MODES)
def test_a_row_is_paid_the_same_bit_for_bit_in_any_company(mode):
    rows, config = list(random_rows(301, 5)), RewardConfig(mode=mode)
    whole = outputs_of(rows, config)
    order = torch.randperm(len(rows), generator=torch.Generator().manual_seed(0))
    shuffled = outputs_of([rows[i] for i in order.tolist()], config)
    parts = [outputs_of(rows[a:b], config) for a, b in itertools.pairwise((0, 1, 2, 9, 77, 301))]
    for index, value in enumerate(whole):
        torch.testing.assert_close(shuffled[index], value[order], rtol=0, atol=0, equal_nan=True)
        torch.testing.assert_close(torch.cat([part[index] for part in parts]), value, rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize("mode", KERNEL_MODES)
def test_seed_fields_of_rows_without_a_seed_are_never_read(mode):
    config = RewardConfig(mode=mode)
    blank = replace_rows(random_rows(300, 6), has_seed=False, stage=1)
    noise = [
        dataclasses.replace(
            row, stage=other.stage, epochs_in_stage=other.epochs_in_stage, seed_age=other.seed_age,
            previous_stage=other.previous_stage, previous_epochs=other.previous_epochs,
            counterfactual_improvement=math.nan, stage_improvement=other.stage_improvement,
            interaction_sum=other.interaction_sum,
        )
        for row, other in zip(blank, random_rows(300, 7), strict=True)
    ]  # fmt: skip
    for left, right in zip(outputs_of(blank, config), outputs_of(noise, config), strict=True):
        torch.testing.assert_close(left, right, rtol=0, atol=0, equal_nan=True)


def fourteen_arguments(rows):
    names = ("actions", "seed_contributions", "val_accs", "acc_deltas", "has_seed_mask", "stages",
             "total_improvements", "epochs_in_stage", "seed_ages", "previous_stages", "previous_epochs")  # fmt: skip
    given = kernel_arguments(rows)
    return [given[name] for name in names]


def test_missing_arguments_mean_missing_in_every_row():
    rows = replace_rows(
        random_rows(200, 8), counterfactual_improvement=math.nan, stage_improvement=math.nan,
        interaction_sum=math.nan, stable_val_acc=math.nan, escrow_credit=math.nan, total_params=0.0, host_params=0.0,
        effective_seed_params=math.nan, alpha_delta_sq_sum=math.nan, num_active=0, num_fossilized=0,
        num_contributing=0, committed_acc=math.nan, fossilized_params=0.0, epoch=4,
    )  # fmt: skip
    for mode in KERNEL_MODES:
        if mode == "loss":
            continue
        weights = RewardConfig(mode=mode).pack()
        short = compute_reward_batched(*fourteen_arguments(rows), 4, 30, weights, mode=mode)
        full = kernel_arguments(rows) | {"deferred_scales": None, "deferred_contributions": None}
        long = compute_reward_batched(**full, config_weights=weights, mode=mode)
        torch.testing.assert_close(short.breakdown, long.breakdown, rtol=0, atol=0)


TRACED = """
import torch
from esper.simic.rewards import compute_reward_batched
from esper.simic.rewards.modes import KERNEL_MODES
from esper.simic.rewards.reward import packed_weights
from esper.simic.rewards.reward_config import RewardConfig
from reference.rewards.golden import kernel_arguments
from reward_toys import random_rows

given = kernel_arguments(list(random_rows(16, 12)))
for mode in KERNEL_MODES:
    config = RewardConfig(mode=mode)
    weights = packed_weights(config, torch.device("cpu"))
    torch._dynamo.reset()  # no graph of another mode counts as a recompilation
    whole = torch.compile(compute_reward_batched, fullgraph=True, backend="eager")
    eager = compute_reward_batched(**given, config_weights=weights, mode=mode)
    for got, want in zip(whole(**given, config_weights=weights, mode=mode), eager, strict=True):
        torch.testing.assert_close(got, want, rtol=1e-9, atol=1e-9, equal_nan=True)
print(len(KERNEL_MODES), "modes")
"""


@pytest.mark.slow
def test_torch_compile_traces_the_kernel_as_one_graph():
    # in a process of its own, where no shape is checked: the checks cannot be traced
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", TRACED], capture_output=True, text=True, check=False,
        env=os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)},
    )  # fmt: skip
    assert done.stdout == f"{len(KERNEL_MODES)} modes\n", done.stderr


@pytest.mark.compiled
@pytest.mark.filterwarnings("ignore:.*deprecated:DeprecationWarning")  # raised by the compiler's own imports
@pytest.mark.parametrize("mode", KERNEL_MODES)
def test_the_kernel_compiles_to_one_graph_with_the_same_answer(mode):
    config = RewardConfig(mode=mode)
    weights = packed_weights(config, CPU)
    given = kernel_arguments(list(random_rows(64, 11)))
    whole, before = compiled_reward(compute_reward_batched), graphs_compiled()
    eager = compute_reward_batched(**given, config_weights=weights, mode=mode)
    for got, want in zip(whole(**given, config_weights=weights, mode=mode), eager, strict=True):
        torch.testing.assert_close(got, want, rtol=1e-9, atol=1e-9, equal_nan=True)
    assert graphs_compiled() == before + 1
