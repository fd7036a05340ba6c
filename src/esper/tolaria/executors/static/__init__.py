"""Every blueprint in every slot, selected by masks (experimental)."""
