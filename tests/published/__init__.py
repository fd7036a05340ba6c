"""Networks in the style of published ones, and what is checked of each."""

import importlib
import pkgutil
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from published.entry import Published

_WITHOUT = {"checks", "data", "entry", "loading"}


def every() -> "list[Published]":
    """Of all modules of networks, in the order of their names."""
    names = sorted(module.name for module in pkgutil.iter_modules(__path__))
    return [
        of for name in names if name not in _WITHOUT for of in importlib.import_module(f"{__name__}.{name}").NETWORKS
    ]
