"""Every blueprint in every slot under masks (experimental)."""
