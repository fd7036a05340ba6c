"""Training: configuration, assembly and the loop of a run."""
