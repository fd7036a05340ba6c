"""Leyline: dataclasses of tensors, tables, protocols and random streams that all parts share."""
