"""Runs as a live page: sources.py finds and reads them, app.py answers requests, guard.py refuses those it must not."""
