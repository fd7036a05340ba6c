"""Metrics of learning."""
