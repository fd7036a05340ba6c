"""Parameters of N hosts and their seeds side by side: layout, initialization, optimizers, births and snapshots."""
