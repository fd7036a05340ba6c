"""Tamiyo: the policy. Observation in, action out."""
