"""Tolaria: the execution engine. N hosts, one step at a time, on one device."""
