"""Functions of the user's on examples of several tensors, applied to batches that hold them packed."""

from dataclasses import dataclass
from typing import Any, final

from jaxtyping import Int
from torch import Tensor

from esper.leyline.structure import Structure
from esper.tasks.datasets import Augmentation


@final
@dataclass(frozen=True)
class StructuredInputs:
    """`Inputs` around the user's `function`.

    `stored`, `given`: structures of an example as it is stored and as the network takes it, None for one tensor.
    """

    function: Any
    stored: Structure | None
    given: Structure | None

    def __call__(self, x: Tensor) -> Tensor:
        """See `Inputs`."""
        found = self.function(x if self.stored is None else self.stored.unpack(x))
        packed: Tensor = found if self.given is None else self.given.pack(found)
        return packed


@final
@dataclass(frozen=True)
class StructuredAugmentation:
    """`Augmentation` around the user's `function`, which takes and gives the structure of a stored example."""

    function: Augmentation
    stored: Structure

    def draw(self, run_seed: int, hosts: Int[Tensor, " N"], episode: int, t: int, count: int) -> Int[Tensor, "N n K"]:
        """See `Augmentation`."""
        return self.function.draw(run_seed, hosts, episode, t, count)

    def __call__(self, x: Tensor, drawn: Int[Tensor, "N B K"]) -> Tensor:
        """See `Augmentation`."""
        return self.stored.pack(self.function(self.stored.unpack(x), drawn))
