"""Objectives: the loss of a token, R² of a split, and outputs that are not finite."""

import math

import pytest
import torch

from esper.tasks.losses import (
    Classification,
    Custom,
    MeanSquaredError,
    NextToken,
    WithMetric,
    of_split,
    perplexity,
    points_of_guessing,
)

TOKENS = NextToken(10)


@pytest.mark.parametrize("objective", [TOKENS, WithMetric(objective=TOKENS, metric=lambda x, y: x, unit="hits")])
def test_perplexity_is_the_exponential_of_the_loss_of_a_token(objective):
    assert perplexity(objective, math.log(7.0)) == pytest.approx(7.0)
    assert perplexity(objective, 1e4) == math.inf
    assert math.isnan(perplexity(objective, math.nan))


def test_other_losses_have_no_perplexity():
    assert perplexity(Classification(10), 1.0) is None


def test_guessing_gives_the_points_of_the_best_constant_answer():
    padded = torch.tensor([[1, 1, -1], [2, 1, -1]])
    assert points_of_guessing(Classification(3), torch.tensor([0, 2, 2, 1])) == 50.0
    assert points_of_guessing(NextToken(3), padded) == 75.0
    assert points_of_guessing(MeanSquaredError(variance=1.0), torch.randn(4)) == 0.0
    assert points_of_guessing(Custom(loss=lambda o, y: o, blind_loss=1.0), torch.randn(4)) == 0.0
    assert points_of_guessing(Custom(loss=lambda o, y: o, blind_loss=1.0, metric=lambda o, y: o), padded) is None


def test_padding_changes_no_loss_of_a_token():
    logits = torch.zeros(1, 3, 10)
    scores = TOKENS.scores(logits, torch.tensor([[4, -1, -1]]))
    assert perplexity(TOKENS, float(scores.loss / scores.weight)) == pytest.approx(10.0)  # all tokens equally likely


def test_an_example_of_the_padding_class_does_not_count():
    scores = Classification(3).scores(torch.eye(3), torch.tensor([0, -1, 2]))
    assert scores.weight.tolist() == [1.0, 0.0, 1.0]
    assert scores.loss[1] == scores.score[1] == 0.0


# -- R² ---------------------------------------------------------------------------------------------------------------


def r2(outputs: torch.Tensor, targets: torch.Tensor, batch: int = 7) -> float:
    """R² in percent, from scores that are summed batch by batch."""
    objective = of_split(MeanSquaredError(variance=123.0), targets)  # the variance of other targets has no part in it
    parts = [objective.scores(*part) for part in zip(outputs.split(batch), targets.split(batch), strict=True)]
    score, weight = (sum(getattr(part, name).double().sum() for part in parts) for name in ("score", "weight"))
    return float(objective.points(score, weight))


@pytest.mark.parametrize("shape", [(1,), (3,), (2, 4)])
def test_r2_is_that_of_scikit_learn_weighted_by_the_variance_of_each_output(shape):
    from sklearn.metrics import r2_score

    generator = torch.Generator().manual_seed(1)
    # outputs of very different scales, of which the largest decides as it does in the loss
    targets = torch.randn(20, *shape, generator=generator) * torch.tensor(10.0) ** torch.arange(shape[-1]) + 5.0
    outputs = targets + torch.randn(20, *shape, generator=generator)
    expected = r2_score(targets.flatten(1).numpy(), outputs.flatten(1).numpy(), multioutput="variance_weighted")
    assert r2(outputs, targets) == pytest.approx(100.0 * expected, rel=1e-5)


def test_r2_of_outputs_that_are_all_equal_counts_their_errors_and_if_nothing_varies_what_is_met():
    # squared errors 0.5 of the first output and 0.0375 of the third, variances 1.25, 0 and 0: 1 - 0.5375 / 1.25
    targets = torch.tensor([[0.0, 2.0, 3.0], [1.0, 2.0, 3.0], [2.0, 2.0, 3.0], [3.0, 2.0, 3.0]])
    outputs = targets + torch.tensor([[1.0, 0.0, 0.1], [0.0, 0.0, 0.2], [0.0, 0.0, -0.1], [1.0, 0.0, 0.3]])
    assert r2(outputs, targets) == pytest.approx(57.0)
    same = torch.full((4, 3), 2.0)  # nothing varies: the share of examples that are met
    assert r2(same + torch.tensor([[0.0], [0.1], [0.0], [0.0]]), same) == pytest.approx(75.0)


def test_the_network_with_the_lower_loss_has_the_higher_r2_though_an_output_hardly_varies():
    targets = torch.tensor([[0.0, 1e-3], [4.0, 0.0], [8.0, 0.0]])
    close, far = targets + torch.tensor([0.1, 0.1]), targets + torch.tensor([0.5, 0.0])
    assert MeanSquaredError(variance=1.0).scores(close, targets).loss.mean() < 0.1
    assert r2(close, targets) > r2(far, targets)


# -- outputs that are not finite --------------------------------------------------------------------------------------

NOT_FINITE = pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])


@NOT_FINITE
def test_an_example_whose_logits_are_not_finite_is_wrong_though_the_first_class_is_right(value):
    logits = torch.tensor([[value, value], [1.0, 0.0]])
    scores = Classification(2).scores(logits, torch.tensor([0, 0]))
    assert scores.score.tolist() == [0.0, 1.0]
    assert not scores.loss[0].isfinite()


def test_one_nan_among_the_logits_is_enough_and_a_class_that_is_ruled_out_is_not():
    logits = torch.tensor([[5.0, math.nan, 0.0], [5.0, math.inf, 0.0], [5.0, -math.inf, 0.0]])
    assert Classification(3).score(logits, torch.tensor([0, 0, 0])).tolist() == [0.0, 0.0, 1.0]


@NOT_FINITE
def test_a_token_whose_logits_are_not_finite_is_wrong_and_the_others_of_its_row_count(value):
    logits = torch.zeros(1, 3, 10)
    logits[0, 1] = value
    assert TOKENS.score(logits, torch.zeros(1, 3, dtype=torch.int64)).tolist() == [2.0]


@NOT_FINITE
def test_no_function_of_the_users_hides_outputs_that_are_not_finite(value):
    outputs, targets = torch.tensor([[value, value], [1.0, 0.0]]), torch.tensor([0, 0])

    def hits(outputs, targets):
        return 100.0 * (outputs.argmax(dim=1) == targets)

    def loss(outputs, targets):
        return outputs.nan_to_num(0.0, 0.0, 0.0).square().sum(dim=1)

    own = Custom(loss=loss, metric=hits, blind_loss=1.0).scores(outputs, targets)
    metric = WithMetric(objective=Classification(2), metric=hits, unit="hits").scores(outputs, targets)
    for values in (own.loss, own.score, metric.score):
        assert values.isfinite().tolist() == [False, True]
