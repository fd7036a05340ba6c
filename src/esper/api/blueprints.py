"""What can grow in a slot."""

from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Literal

from torch import nn

from esper.kasmina import blueprints as _built_in  # registers those of this package
from esper.kasmina.blueprints import registry
from esper.leyline.errors import ConfigError, nearest
from esper.leyline.lifecycle import HostFamily

assert _built_in
Family = Literal["cnn", "transformer"]
"""Features [C, H, W] of a network of convolutions, or [T, D] and [D]."""
Build = Callable[[int], nn.Module]


def register_blueprint(
    *, family: Family = "cnn", init: Mapping[str, float] = MappingProxyType({})
) -> Callable[[Build], Build]:
    """Decorate a function that builds a network h -> change of h; its name is that of the blueprint.

    Args:
        family: features h [B, C, H, W] of a "cnn", or [B, T, D] of a "transformer".
        init: parameters that start at a constant, by name, so that the output of a new seed is zero.

    Returns:
        The decorator. The function gets the number of channels, C or D.

    Raises:
        RegistryError: the name is taken. ConfigError: an unknown family.
    """
    of_hosts = _family(family)

    def register(build: Build) -> Build:
        registry.register(registry.FunctionBlueprint(of_hosts, build, init))
        return build

    return register


def blueprint_names(family: Family = "cnn") -> tuple[str, ...]:
    """The blueprints that a controller can choose for networks of a family; raises ConfigError for an unknown one."""
    names = registry.names()
    return tuple(names[index] for index in registry.selectable(_family(family)))


def _family(name: str) -> HostFamily:
    families = {family.name.lower(): family for family in HostFamily}
    if name not in families:
        raise ConfigError(f"family is {name!r}; {nearest(name, families)}")
    return families[name]
