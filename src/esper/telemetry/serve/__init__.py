"""Runs as a live page: runs.py finds and reads them, app.py answers requests and refuses those that it must not."""
