"""Blueprints: what may grow in a slot, one small class each."""
