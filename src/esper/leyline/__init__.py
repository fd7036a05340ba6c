"""Leyline: the words everybody shares. Records, tables, protocols, random streams; no behaviour."""
