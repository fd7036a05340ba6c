"""Executors: how N hosts are run."""
