"""Hosts shared by processes of one machine."""
