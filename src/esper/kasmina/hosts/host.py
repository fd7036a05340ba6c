"""What every host network offers: slots (named places in its forward pass), and a pass that calls a function at each.

host            id of a slot                      action order        execution order
built in        r<row>c<column>, e.g. "r0c1"      row, column         place in the forward pass
user's module   path of a submodule, "layer2.1"   as the user lists   place in the forward pass

An `Interface` says how a network of the user's is called, and what is taken of its result.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, final, runtime_checkable

import torch
from torch import Tensor, nn

from esper.leyline.errors import ConfigError, in_words, nearest
from esper.leyline.lifecycle import HostFamily
from esper.leyline.structure import Structure, described, flatten, selection, unflatten


@dataclass(frozen=True, kw_only=True)
class InjectionPoint:
    """A place where a seed can grow.

    Attributes:
        slot_id: e.g. "r0c1". channels: C of features [C, H, W], D of [T, D].
        order: index among all points in action order. position: place in the forward pass, in [0, 1].
        transposed: the network has the features [B, T, D] as [B, D, T], as `nn.Conv1d` does.
    """

    slot_id: str
    channels: int
    order: int
    position: float
    transposed: bool = False


def enabled_points(points: Sequence[InjectionPoint], slot_ids: Iterable[str]) -> tuple[InjectionPoint, ...]:
    """The points of a run in action order, for `slot_ids` in any order.

    Raises ConfigError if `slot_ids` is empty, names a slot twice, or names one that the host does not offer.
    """
    wanted = list(slot_ids)
    offered = {point.slot_id: point for point in points}
    if not wanted:
        raise ConfigError(f"no slots are enabled; choose at least one of {', '.join(offered)}.")
    for slot_id in wanted:
        if slot_id not in offered:
            raise ConfigError(f"the host has no slot {slot_id!r}; {nearest(slot_id, offered)}")
    if len(set(wanted)) < len(wanted):
        raise ConfigError(f"slots {', '.join(wanted)}: each slot can be enabled only once; remove the repetition.")
    return tuple(sorted((offered[slot_id] for slot_id in wanted), key=lambda point: point.order))


Arguments = tuple[tuple[Any, ...], dict[str, Any]]
"""Positional and named arguments of a call."""


@final
@dataclass(frozen=True)
class Interface:
    """What a batch becomes for a network, and what its result becomes for an objective.

    Attributes:
        inputs: the structure of an example, whose batches come packed; None for one tensor.
        outputs: the function of the user's that takes from a result what counts; None for all of it.
        packs: whether what counts may be several tensors of floats [B, ...], because a loss of the user's takes them.
    """

    inputs: Structure | None = None
    outputs: Callable[[Any], Any] | None = None
    packs: bool = False

    def arguments(self, x: Tensor) -> Arguments:
        """Those of the network for a batch: a dictionary is given by name, a tuple in order."""
        if self.inputs is None:
            return (x,), {}
        tree = self.inputs.unpack(x)
        return ((), tree) if isinstance(tree, dict) else (tuple(tree), {})

    def selected(self, network: nn.Module, result: Any) -> Any:  # noqa: ANN401 -- whatever the user returns
        """What counts of a result; raises ConfigError if the user's function fails on it."""
        if self.outputs is None:
            return result
        try:
            return self.outputs(result)
        except (TypeError, AttributeError, LookupError, ValueError, RuntimeError) as error:
            raise ConfigError(
                f"outputs fails on {described(result)}, which {type(network).__name__} returns"
                f"{' in training' * network.training}: {in_words(error)}"
            ) from error

    def collected(self, network: nn.Module, result: Any) -> Tensor:  # noqa: ANN401
        """What an objective gets of a result, [B, ...]; raises ConfigError if nothing says which tensor that is."""
        found = self.selected(network, result)
        if isinstance(found, Tensor):
            return found
        name = "outputs" if self.outputs is not None else type(network).__name__
        what = f"{name} gives {described(found)}{' in training' * network.training}"
        if not self.packs:
            place = selection(found)
            choice = f"out if isinstance(out, torch.Tensor) else {place}" if network.training else place
            raise ConfigError(
                f"{what}, but an objective takes one tensor: say which with outputs=lambda out: {choice}, or give a "
                "loss(outputs, targets) of your own that takes all of it."
            )
        try:
            tree = as_floats(found)
            return Structure.of(tree).pack(tree)
        except (TypeError, ConfigError) as error:
            raise ConfigError(
                f"{what}, but your loss can take tensors of floats [B, ...] alone; choose them with outputs=, e.g. "
                f"outputs=lambda out: {selection(found)}."
            ) from error

    def attach(self, network: nn.Module) -> nn.Module:
        """Make a network take batches and give outputs as an objective takes them, wherever it is called."""
        network.register_forward_pre_hook(self._given, with_kwargs=True)
        network.register_forward_hook(self._collect)
        return network

    def _given(self, network: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Arguments:
        return self.arguments(args[0])

    def _collect(self, network: nn.Module, args: tuple[Any, ...], result: Any) -> Tensor:  # noqa: ANN401
        return self.collected(network, result)


def inputs_in_words(network: nn.Module, x: Tensor) -> str:
    """What a network is called with for a batch, where an interface may be attached to it."""
    for hook in network._forward_pre_hooks.values():
        interface = getattr(hook, "__self__", None)
        if isinstance(interface, Interface) and interface.inputs is not None:
            return str(interface.inputs)
    return f"{list(x.shape)} of {x.dtype}"


ONE_TENSOR = Interface()
"""network(x) gives outputs."""


def as_floats(tree: object) -> object:
    """A tree of tensors of floats, all as float32; raises TypeError or ConfigError if it holds something else."""
    tensors, form = flatten(tree)
    if not all(x.is_floating_point() for x in tensors):
        raise ConfigError(f"{described(tree)} holds something else than floats.")
    return unflatten(form, [x.float() for x in tensors])


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
        any_layout: whether images may lie channels-last, in which convolutions of a CPU are faster.
        causal: of sequences: whether outputs at a position depend on no later one. Gates then see the past alone.
        frozen: paths of frozen parameters that each host has a copy of, registered as buffers; all hosts share others.
    """

    family: HostFamily
    enabled: tuple[InjectionPoint, ...]
    largest_activation: int
    shares_prefixes: bool = True
    global_rng: bool = False
    any_layout: bool = False
    causal: bool = True
    frozen: tuple[str, ...] = ()

    def execution_order(self) -> tuple[str, ...]:
        """The enabled slot ids in the order of `forward`."""
        return tuple(point.slot_id for point in sorted(self.enabled, key=lambda point: point.position))

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

        Raises ConfigError for a slot that does not exist, or inputs that the host cannot process.
        """


def near(got: Tensor, want: Tensor) -> bool:
    """Equal shapes, and values up to the rounding of the largest one; NaN equals NaN."""
    if got.shape != want.shape or not want.numel():
        return got.shape == want.shape
    largest = max(1.0, float(want.detach().abs().nan_to_num(0.0, 0.0, 0.0).max()))
    return torch.allclose(got, want, rtol=0.0, atol=1e-4 * largest, equal_nan=True)
