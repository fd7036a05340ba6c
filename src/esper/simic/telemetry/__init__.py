"""Metrics of learning: which there are and how minibatches are combined."""
