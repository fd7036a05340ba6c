"""Rewards: what a step is worth, scalar and batched."""
