"""A run: configuration, assembly, the loop with its records and checkpoints, evaluation."""
