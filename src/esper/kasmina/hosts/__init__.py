"""Hosts: the networks that seeds grow in, with slots at named points."""
