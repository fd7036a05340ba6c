"""Configuration of a run, and its parts put together."""
