"""Objectives: what the loss of a token tells."""

import math

import pytest
import torch

from esper.tasks.objectives import Classification, NextToken, WithMetric, perplexity

TOKENS = NextToken(10)


@pytest.mark.parametrize("objective", [TOKENS, WithMetric(objective=TOKENS, metric=lambda x, y: x, unit="hits")])
def test_perplexity_is_the_exponential_of_the_loss_of_a_token(objective):
    assert perplexity(objective, math.log(7.0)) == pytest.approx(7.0)
    assert perplexity(objective, 1e4) == math.inf
    assert math.isnan(perplexity(objective, math.nan))


def test_other_losses_have_no_perplexity():
    assert perplexity(Classification(10), 1.0) is None


def test_padding_changes_no_loss_of_a_token():
    logits = torch.zeros(1, 3, 10)
    scores = TOKENS.scores(logits, torch.tensor([[4, -1, -1]]))
    assert perplexity(TOKENS, float(scores.loss / scores.weight)) == pytest.approx(10.0)  # all tokens equally likely
