"""Attribution of accuracy to the seeds of a finished network."""
