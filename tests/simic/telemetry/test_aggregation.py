"""Metrics are declared once, reduced on the device, and what is missing stays missing."""

import math

import pytest
import torch

from esper.simic.ppo import METRIC_NAMES, METRICS, aggregate_ppo_metrics, metric_row


def row(**values: float) -> torch.Tensor:
    return metric_row({name: torch.tensor(float(value)) for name, value in values.items()})


def test_a_weighted_mean_counts_each_row_by_its_steps():
    found = aggregate_ppo_metrics([row(policy_loss=1.0, evaluated_steps=30), row(policy_loss=5.0, evaluated_steps=10)])
    assert found["policy_loss"] == pytest.approx(2.0)
    assert found["evaluated_steps"] == 40


def test_a_mean_without_a_weight_counts_rows_alike():
    assert aggregate_ppo_metrics([row(grad_norm=1.0), row(grad_norm=2.0), row(lr=0.1)])["grad_norm"] == 1.5


def test_a_head_is_weighed_by_the_steps_that_used_it():
    rows = [row(entropy_tempo=0.9, steps_tempo=1, evaluated_steps=9), row(entropy_tempo=0.1, steps_tempo=3)]
    assert aggregate_ppo_metrics(rows)["entropy_tempo"] == pytest.approx(0.3)


def test_extremes_sums_last_and_any():
    rows = [
        row(epochs_done=3.0, nonfinite_minibatches=1, approx_kl=0.1, stopped_early=0),
        row(epochs_done=2.0, nonfinite_minibatches=1, approx_kl=0.2, stopped_early=1),
        row(epochs_done=1.0, stopped_early=0),
    ]
    found = aggregate_ppo_metrics(rows)
    assert (found["epochs_done"], found["nonfinite_minibatches"]) == (3.0, 2.0)
    assert found["approx_kl"] == pytest.approx(0.2)
    assert found["stopped_early"] == 1.0


def test_what_no_row_knows_is_missing_and_never_zero():
    found = aggregate_ppo_metrics([row(lr=0.5)])
    assert found.pop("lr") == 0.5
    assert set(found) == set(METRIC_NAMES) - {"lr"}
    assert all(math.isnan(value) for value in found.values())


def test_a_mean_whose_weights_are_all_zero_is_missing():
    assert math.isnan(aggregate_ppo_metrics([row(entropy_slot=0.0, steps_slot=0)])["entropy_slot"])


def test_a_known_zero_is_zero():
    found = aggregate_ppo_metrics([row(nonfinite_minibatches=0, stopped_early=0, advantage_std_floored=0)])
    assert (found["nonfinite_minibatches"], found["stopped_early"], found["advantage_std_floored"]) == (0.0, 0.0, 0.0)


def test_everything_is_read_at_once():
    vectors = []

    def read(x: torch.Tensor) -> list[float]:
        vectors.append(x)
        return x.tolist()

    aggregate_ppo_metrics([row(lr=0.5), row(grad_norm=1.0)], read)
    assert [v.shape for v in vectors] == [(len(METRICS),)]


def test_names_are_unique_and_weights_are_metrics():
    assert len(set(METRIC_NAMES)) == len(METRIC_NAMES)
    assert {metric.weight for metric in METRICS} - {""} <= set(METRIC_NAMES)


def test_an_undeclared_metric_is_refused():
    with pytest.raises(KeyError, match="not declared"):
        row(polcy_loss=1.0)
