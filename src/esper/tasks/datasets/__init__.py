"""Data sets: checked, split, and resident on the device."""
