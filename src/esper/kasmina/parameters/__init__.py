"""Parameters of N hosts and their seeds: layout, initialization, optimizers, structural changes and snapshots."""
