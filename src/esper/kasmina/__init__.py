"""Kasmina: hosts, slots, seeds, and the rulebook that says what may happen to them."""
