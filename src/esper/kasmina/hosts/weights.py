"""Trained weights, with which every host starts: of a file, of a state dict, or of a network that is there.

    weights     a file of torch.save or safetensors, or the state dict itself
    names       those of network.state_dict(); all of them, and no others
    around it   a dictionary with a single state dict in it ("state_dict", "model", ...) stands for that; a prefix of
                all names is left out (`module.` of DataParallel, `_orig_mod.` of torch.compile, `net.` of a trainer)

Nothing in a file is executed. Weights are copied when they are given, so that they can be trained on elsewhere.
"""

import copy
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeAlias, final

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from esper.kasmina.parameters.layout import refuse_gradient_hooks
from esper.leyline.errors import ConfigError, in_words
from esper.leyline.files import expanded
from esper.leyline.tensor_dataclass import state_digest

Model: TypeAlias = Callable[[], nn.Module]
"""Gives a new network in every call."""
Weights: TypeAlias = Path | str | Mapping[str, Any]
"""A file, or names and tensors as of `nn.Module.state_dict`."""
_ADDED = ("module.", "_orig_mod.")
"""Prefixes of `nn.parallel` and `torch.compile`."""
_SHOWN = 3


@final
class Copies:
    """Gives a copy of a network in every call.

    It is copied here, to the CPU and without gradients, and not looked at again. Raises ConfigError if it cannot be.
    """

    def __init__(self, network: nn.Module) -> None:
        refuse_gradient_hooks(network)  # a copy has none
        # weights that are computed from others, as nn.utils.weight_norm does, have a history, which prevents copies
        held = [value for layer in network.modules() for value in vars(layer).values() if isinstance(value, Tensor)]
        known = {id(value): value.detach().clone() for value in held if value.grad_fn is not None}
        try:
            self._network = copy.deepcopy(network, known).cpu()
        except Exception as error:  # whatever a part of the user's raises when it is copied
            raise ConfigError(
                f"the network {type(network).__name__} cannot be copied ({in_words(error)}), but every "
                "host starts as a copy; give its class or a function as model=, and weights=network.state_dict()."
            ) from error
        self._network.zero_grad(set_to_none=True)

    def __call__(self) -> nn.Module:
        """A new network with the weights and buffers of the first."""
        return copy.deepcopy(self._network)


@final
@dataclass(frozen=True, eq=False)
class Loaded:
    """Gives a new network of `model` with these weights and buffers in every call."""

    model: Model
    weights: Mapping[str, Any] = field(repr=False)

    def __call__(self) -> nn.Module:
        """The network; raises ConfigError if the weights do not fit it."""
        network = self.model()
        _load(network, self.weights)
        return network


def started(model: Model | nn.Module, weights: Weights | None) -> tuple[Model, str | None]:
    """What gives the network of a host, and SHA-256 of the weights; None if the model draws its own.

    Raises ConfigError for a network that cannot be copied; a file that is missing, damaged or holds more than weights;
    and weights that are not a state dict. Whether they fit is found when a network is built.
    """
    if isinstance(model, nn.Module):
        model = Copies(model)
        if weights is None:
            network = model()
            return model, _digest(dict((*network.named_parameters(), *network.named_buffers())))
    if weights is None:
        return model, None
    found = _read(expanded(weights)) if isinstance(weights, Path | str) else weights
    state = _state_dict(found, str(weights) if isinstance(weights, Path | str) else "weights")
    return Loaded(model, state), _digest(state)


def _digest(state: Mapping[str, Any]) -> str:
    """Of the tensors that have a shape already."""
    return state_digest({name: x for name, x in state.items() if isinstance(x, Tensor) and not is_lazy(x)})


def _read(path: Path) -> object:
    """What a file holds; nothing in it is executed."""
    again = "write the file again with torch.save(network.state_dict(), path)"
    try:
        if not path.is_file():
            found = "is not a regular file" if path.exists() else "does not exist"
            raise ConfigError(f"the file of weights {path} {found}; name a file of torch.save or safetensors.")
        return load_file(path) if path.suffix == ".safetensors" else torch.load(path, "cpu", weights_only=True)
    except ConfigError:
        raise
    except (OSError, SafetensorError) as error:
        raise ConfigError(f"the weights {path} cannot be read: {error}; {again}.") from error
    except Exception as error:  # a damaged pickle raises anything
        message = str(error)
        if objects := re.search(r"GLOBAL ([\w.]+)", message) or ("TorchScript" in message):
            what = f"an object of {objects[1]}" if isinstance(objects, re.Match) else "a compiled program"
            raise ConfigError(
                f"the weights {path} hold {what}, and to load it would execute its code; {again}, or load it yourself "
                "and give weights=network.state_dict()."
            ) from error
        first = message.strip().split("\n")[0].split(". ")[0].rstrip(".") or type(error).__name__
        raise ConfigError(f"the weights {path} are damaged, or no file of torch.save ({first}); {again}.") from error


def _state_dict(found: object, name: str) -> dict[str, Any]:
    """Copies of the tensors of a state dict, or of the single one in a dictionary."""
    if isinstance(found, nn.Module):
        raise ConfigError(f"the weights {name} are a {type(found).__name__}; give its state_dict().")
    inner = {key: part for key, part in found.items() if _is_state(part)} if isinstance(found, Mapping) else {}
    if len(inner) > 1:
        first = next(iter(inner))
        raise ConfigError(
            f"{name} holds the weights of several networks, {', '.join(map(repr, inner))}; give one of them, e.g. "
            f"weights=torch.load(path, weights_only=True)[{first!r}]."
        )
    state = next(iter(inner.values()), found)
    if not isinstance(state, Mapping) or not any(isinstance(value, Tensor) for value in state.values()):
        keys = f" with {', '.join(map(repr, list(state)[:_SHOWN]))}" if isinstance(state, Mapping) and state else ""
        raise ConfigError(
            f"{name} is of type {type(state).__name__}{keys}, expected names and tensors as of network.state_dict()."
        )
    copies = {
        str(key): value.detach().to("cpu", copy=True) if isinstance(value, Tensor) else value
        for key, value in state.items()
    }
    for key, value in copies.items():
        if isinstance(value, Tensor) and value.is_floating_point() and not value.isfinite().all():
            raise ConfigError(f"{key!r} of {name} is NaN or infinite; give weights of a training that did not diverge.")
    return copies


def _is_state(part: object) -> bool:
    return isinstance(part, Mapping) and bool(part) and all(
        isinstance(key, str) and isinstance(value, Tensor) for key, value in part.items()
    )  # fmt: skip


def _load(network: nn.Module, weights: Mapping[str, Any]) -> None:
    """Copy weights into a network; raises ConfigError that names what does not fit."""
    own = network.state_dict()
    outer = f"{next(iter(weights), '').partition('.')[0]}."  # of a trainer, whose attribute the network is
    if {key.removeprefix(outer) for key in weights} == own.keys() and all(key.startswith(outer) for key in weights):
        weights = {key.removeprefix(outer): value for key, value in weights.items()}
    for prefix in (*_ADDED, *_ADDED):  # in either order
        if all(key.startswith(prefix) for key in weights) and not any(key.startswith(prefix) for key in own):
            weights = {key.removeprefix(prefix): value for key, value in weights.items()}
    wrong = [
        f"{key!r} is {list(weights[key].shape)} instead of {list(value.shape)}"
        for key, value in own.items()
        if isinstance(weights.get(key), Tensor) and not is_lazy(value) and weights[key].shape != value.shape
    ]
    missing, unexpected = list[str](), list[str]()
    if not wrong:
        try:
            missing, unexpected = network.load_state_dict(dict(weights), strict=False)
        except (RuntimeError, AttributeError, TypeError, ValueError) as error:  # a layer that loads in its own way
            wrong = [in_words(error)]
    named = (("missing ", [*map(repr, missing)]), ("unexpected ", [*map(repr, unexpected)]), ("", wrong))
    if problems := "; ".join(what + _some(keys) for what, keys in named if keys):
        raise ConfigError(
            f"the weights do not fit {type(network).__name__}: {problems}. All {len(own)} names and shapes of its "
            "state_dict() are expected, and no others; give weights of this architecture, or load those that fit with "
            "network.load_state_dict({k: v for k, v in weights.items() if k in own and v.shape == own[k].shape}, "
            "strict=False), where own = network.state_dict(), and give model=network."
        )


def _some(found: list[str]) -> str:
    more = f" and {len(found) - _SHOWN} more" * (len(found) > _SHOWN)
    return ", ".join(found[:_SHOWN]) + more
