"""Attribution: what each seed of a finished network is worth."""
