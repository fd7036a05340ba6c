"""A network in the style of the published ones, with data to grow it on.

Modules of networks import this file alone, so that they can be imported where there is no esper.
"""

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from torch import nn

if TYPE_CHECKING:
    import esper


@dataclass(frozen=True, kw_only=True)
class Published:
    """One network as people write it, without a thought of esper.

    Attributes:
        name: of the row in the table, e.g. "nanoGPT". style: whose style it is in, e.g. "nanoGPT", "torchvision".
        model: gives a new network. slots: where seeds may grow.
        data: gives (x, y) of about 96 examples, tiny and learnable; x, y may be tuples or dictionaries.
        options: further arguments of `esper.Task`, such as `outputs`, `loss`, `metric`.
        random: whether the forward pass draws random numbers in training.
        shows: what is peculiar about it, e.g. "in-place ReLU behind a slot".
        refused: a part of the sentence with which it is refused, where it is.
    """

    name: str
    style: str
    model: Callable[[], nn.Module]
    slots: Sequence[str]
    data: Callable[[], tuple[Any, Any]]
    options: Mapping[str, Any] = field(default_factory=dict)
    random: bool = False
    shows: str = ""
    refused: str | None = None

    def task(self, **changes: Any) -> "esper.Task":
        """The task with batches of 16 and episodes of 12 steps."""
        import esper

        x, y = self.data()
        given = {
            "batch": 16,
            "episode_length": 12,
            "name": re.sub(r"\W+", "-", self.name.lower()),
            **self.options,
            **changes,
        }
        return esper.Task(self.model, train=(x, y), **{"slots": list(self.slots), **given})
