"""Telemetry: run directory, listeners and progress display."""
