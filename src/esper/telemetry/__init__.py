"""Telemetry: the record of a run and where it goes."""
