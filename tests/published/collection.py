"""All published networks."""

import importlib
import pkgutil

import published
from published.entry import Published

_WITHOUT = {"checks", "collection", "data", "entry", "examples", "loading"}


def every() -> list[Published]:
    """Of all modules of networks, in the order of their names."""
    names = sorted(module.name for module in pkgutil.iter_modules(published.__path__))
    return [of for name in names if name not in _WITHOUT for of in _networks(name)]


def _networks(module: str) -> list[Published]:
    return list(importlib.import_module(f"published.{module}").NETWORKS)
