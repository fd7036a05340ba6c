"""Sizes of the policy network, checked at birth."""

from dataclasses import dataclass
from types import MappingProxyType

from esper.leyline.errors import ConfigError

WIDTH_MULTIPLE = 8
"""The value head narrows the recurrent width to an eighth."""


@dataclass(frozen=True, kw_only=True)
class PolicyConfig:
    """Size of the policy network.

    Attributes:
        feature_width: width of the feature net.
        hidden_width: width of the recurrent state and of what the heads read; a multiple of 8.
        num_layers: recurrent layers.

    Raises:
        ConfigError: a size that cannot be.
    """

    feature_width: int = 128
    hidden_width: int = 128
    num_layers: int = 1

    def __post_init__(self) -> None:
        for name in ("feature_width", "hidden_width", "num_layers"):
            if getattr(self, name) < 1:
                raise ConfigError(f"policy.{name} is {getattr(self, name)}, expected at least 1; raise policy.{name}.")
        if self.hidden_width % WIDTH_MULTIPLE:
            raise ConfigError(
                f"policy.hidden_width is {self.hidden_width}, expected a multiple of {WIDTH_MULTIPLE}, because the "
                f"value head narrows it to an eighth; {self._nearest_width()} is the nearest that fits."
            )

    def _nearest_width(self) -> int:
        return max(WIDTH_MULTIPLE, round(self.hidden_width / WIDTH_MULTIPLE) * WIDTH_MULTIPLE)


POLICY_PRESETS = MappingProxyType(
    {
        "small": PolicyConfig(feature_width=128, hidden_width=128, num_layers=1),
        "paper": PolicyConfig(feature_width=512, hidden_width=512, num_layers=1),
    }
)
"""Named sizes."""
