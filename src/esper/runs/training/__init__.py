"""Training: the loop of a run, its checkpoints, its best host."""
