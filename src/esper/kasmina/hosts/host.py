"""What every host network offers: its slots, and a forward pass that calls a function at each of them."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable
from typing import Any, Protocol, runtime_checkable

from torch import Tensor, nn

from esper.kasmina.hosts.interface import Arguments
from esper.kasmina.hosts.slots import InjectionPoint
from esper.leyline.stages import HostFamily

Apply = Callable[[str, Tensor], Tensor]
"""(slot id, features) -> features of the same shape, except that the first axis may grow where prefixes are shared."""


class Host(nn.Module, ABC):
    """A host network without seeds.

    Attributes:
        family: decides which blueprints fit.
        enabled: the slots of the run, in action order.
        largest_activation: floats of the largest activation of one example, outputs included; bounds the memory.
        shares_prefixes: whether `apply` may return more rows than it gets (states of the network side by side), with
            the rest of the forward pass working on all of them. False where the input of a slot is used again later.
        global_rng: whether its forward pass draws from the global generators of PyTorch, Python or numpy, which are
            then seeded for each host and step. Such hosts run one by one.
        causal: of sequences: whether outputs at a position depend on no later one. Gates then see the past alone.
        frozen: paths of frozen parameters that each host has a copy of, registered as buffers; all hosts share others.
    """

    family: HostFamily
    enabled: tuple[InjectionPoint, ...]
    largest_activation: int
    shares_prefixes: bool = True
    global_rng: bool = False
    causal: bool = True
    frozen: tuple[str, ...] = ()

    @abstractmethod
    def execution_order(self) -> tuple[str, ...]:
        """The enabled slot ids in the order of `forward`."""

    @abstractmethod
    def features(self, point: InjectionPoint) -> tuple[int, ...]:
        """Shape of the features of one example at a point: (C, H, W) or (T, D)."""

    @abstractmethod
    def rebuild(self) -> nn.Module:
        """A new network of the same architecture with newly initialized weights, drawn from the global generator."""

    @abstractmethod
    def forward(self, x: Tensor, apply: Apply) -> Tensor:
        """Outputs [B, ...] of inputs [B, ...]; `apply` runs once per enabled slot, in execution order."""

    def arguments(self, x: Tensor) -> Arguments:
        """What the network itself is called with for a batch [B, ...]."""
        return (x,), {}

    def collected(self, result: Any) -> Tensor:  # noqa: ANN401
        """What `forward` gives where the network returns `result`: outputs [B, ...] as an objective takes them."""
        outputs: Tensor = result
        return outputs


@runtime_checkable
class HostSpec(Protocol):
    """The architecture of a host as plain data, which can be pickled and compared."""

    @property
    def family(self) -> HostFamily:
        """Family of all hosts of this architecture."""

    def points(self) -> tuple[InjectionPoint, ...]:
        """All slots in action order."""

    def num_params(self) -> int:
        """Number of parameters of the host."""

    def build(self, slot_ids: Iterable[str], example: Tensor) -> Host:
        """A host with these slots enabled, for inputs like `example` [1, ...] (what a batch becomes on the device).

        Raises:
            ConfigError: a slot that does not exist, or inputs that the host cannot process.
        """
