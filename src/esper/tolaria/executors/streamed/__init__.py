"""Hosts one after another: the reference."""
