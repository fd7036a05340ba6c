"""Esper grows neural networks while they train, and learns how."""
