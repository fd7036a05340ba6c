"""Tasks: what is trained. A data set, a host and defaults, by name."""
