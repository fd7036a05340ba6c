"""Slots that are not named: places in a network where seeds may grow, and patterns of paths.

    features       proposed, in the order of the forward pass
    [B, C, H, W]   the end of each resolution; of one or two resolutions, several blocks of each, four in all
    [B, T, D]      up to four blocks, or else as for vectors; so for [B, C, T] of nn.Conv1d
    [B, D]         up to four blocks, or six hidden layers, each with what follows it (norm, activation, dropout)

The kind of features is that of most layers. A place is the output of a module that is called once, in front of the
output layer; of nested modules with the same output, the outermost. Nothing is proposed inside of a module that is a
place itself, unless it is an `nn.Sequential` or half of the network, nor inside of a seed of a grown network. Places
that everything passes through come before those in a branch: with the features of other examples there, the network
gives the outputs of those.
"""

import re
from collections.abc import Collection, Iterable, Sequence
from fnmatch import fnmatchcase
from functools import partial
from typing import NamedTuple, final

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from esper.kasmina.hosts.host import ONE_TENSOR, Interface
from esper.kasmina.hosts.module_host import (
    ModuleHostSpec,
    check_slot,
    disturb,
    is_transposed,
    new_network,
    probe_inputs,
    replaced_outputs,
    run_once,
)
from esper.kasmina.hosts.weights import Model
from esper.kasmina.parameters.initialization import deterministic_build
from esper.leyline.errors import ConfigError, nearest
from esper.leyline.structure import flatten

_MOST, _BLOCKS, _GUESSED = 6, 4, 3
"""Places in a network; blocks of one kind; layers where nothing is passed by everything."""


def host_of(
    model: Model, slots: Sequence[str] | None, example: Tensor, *, interface: Interface = ONE_TENSOR
) -> ModuleHostSpec:
    """The host of a network with slots that are named, matched by patterns, or proposed (`slots` None).

    Patterns are such as "layer?.*": parts between dots are matched one by one, and what matches but cannot hold a seed
    is left out. Other arguments are as for `ModuleHostSpec.of`, and so is the ConfigError; it is raised, too, if no
    place was found, or if a pattern matches nothing that can hold a seed.
    """
    if slots is not None and not any(_is_pattern(slot) for slot in slots):
        return ModuleHostSpec.of(model, slots, example, interface=interface)
    inputs = probe_inputs(example, interface)
    new = deterministic_build(lambda: new_network(model))
    if not any(is_lazy(tensor) for tensor in (*new.parameters(), *new.buffers())):
        run_once(interface.attach(new).eval(), inputs[0])  # says what is wrong with the inputs
    network = deterministic_build(lambda: new_network(model, interface.arguments(inputs[0][:1])))
    if slots is None:
        named, places = set[str](), _Trace(network, inputs, interface).places
    else:
        named, places = {slot for slot in slots if not _is_pattern(slot)}, partial(_matched, network, slots)
    refused = set[str]()
    while True:
        found = places(refused)
        try:
            return ModuleHostSpec.of(model, found, example, interface=interface)
        except ConfigError as error:
            culprits = {path for path in found if repr(path) in str(error)} - named
            if not culprits:
                raise
            refused |= culprits


# -- patterns ---------------------------------------------------------------------------------------------------------


def _is_pattern(slot: str) -> bool:
    return any(sign in slot for sign in "*?[")


def _matched(network: nn.Module, slots: Sequence[str], refused: Collection[str]) -> list[str]:
    """The paths that slots stand for, in the user's order, without the refused ones; raises ConfigError for none."""
    found, offered = list[str](), [path for path, _ in network.named_modules() if path]
    for slot in slots:
        paths = [path for path in offered if _matches(path, slot)] if _is_pattern(slot) else [slot]
        left = [path for path in paths if path not in refused]
        if not left:
            what = "matches no submodule" if not paths else "matches no submodule that can hold a seed"
            known = [path for path in offered if path not in refused]
            raise ConfigError(f"slot {slot!r} {what} of {type(network).__name__}, where '*' stands for one part "
                              f"between dots; {nearest(slot, known)}")  # fmt: skip
        found += [path for path in left if path not in found]
    return found


def _matches(path: str, pattern: str) -> bool:
    parts, patterns = path.split("."), pattern.split(".")
    return len(parts) == len(patterns) and all(map(fnmatchcase, parts, patterns))


# -- proposals --------------------------------------------------------------------------------------------------------


class _Place(NamedTuple):
    """The output `h` of a submodule. `end` is its number among all that ended, `layer` that of its last layer."""

    path: str
    module: nn.Module
    h: Tensor
    end: int
    layer: int

    @property
    def depth(self) -> int:
        """Parts of the path that are not numbers."""
        return sum(not part.isdigit() for part in self.path.split("."))

    @property
    def kind(self) -> tuple[int, str, type]:
        """What blocks of one kind have in common: depth, path without numbers, class."""
        return self.depth, re.sub(r"\d+", "*", self.path), type(self.module)


@final
class _Trace:
    """A forward pass in evaluation, and the places in it."""

    def __init__(self, network: nn.Module, inputs: tuple[Tensor, Tensor], interface: Interface) -> None:
        counted: list[object] = []
        network.register_forward_hook(lambda layer, args, result: counted.append(interface.selected(layer, result)))
        self._network, (self._x, self._others) = interface.attach(network), inputs
        self._decides = dict[str, bool]()
        disturb(network.eval())
        with torch.no_grad():
            self._run = run_once(network, self._x)
        seeds = [f"{path}." for path, module in network.named_modules() if getattr(module, "is_grown", False)]
        outputs = {id(self._run.output), *map(id, flatten(counted[0])[0])}
        modules = [network.get_submodule(call.path) for call in self._run.calls]
        layers = [end for end, module in enumerate(modules) if _is_layer(module)]
        found = [
            _Place(path, module, h, end, sum(layer <= end for layer in layers))
            for end, ((path, h, _, _), module) in enumerate(zip(self._run.calls, modules, strict=True))
            if path and id(h) not in outputs and not f"{path}.".startswith(tuple(seeds))
            if self._can_hold_a_seed(path)
        ]
        found = [place for place in found if place.layer]
        found = [place for place in found if place.layer < len(layers)] or found  # not the output layer
        shown = [(modules[end], self._run.calls[end].output) for end in layers[:-1]]
        axes = [h.dim() for of, h in shown if isinstance(h, Tensor) and not isinstance(of, nn.Embedding)]
        common = max({place.h.dim() for place in found}, key=lambda dim: (axes.count(dim), dim), default=0)
        found = [place for place in found if place.h.dim() == common and self._has_known_axes(place, modules)]
        whole = [place for place in found if type(place.module) is not nn.Sequential]
        whole = [place for place in whole if 2 * sum(map(_is_layer, place.module.modules())) < len(layers)]
        self._found = [place for place in found if not any(place.path.startswith(f"{of.path}.") for of in whole)]

    def places(self, refused: Collection[str]) -> list[str]:
        """Proposed paths but for the refused ones; raises ConfigError if there are none."""
        found = [place for place in self._found if place.path not in refused]
        if not found and not [*self._network.children()]:
            name = type(self._network).__name__
            raise ConfigError(f"{name} is a single layer, and a seed grows in front of the output layer; add a layer.")
        if not found:
            raise ConfigError(f"no place where a seed may grow was found in {type(self._network).__name__}; name the "
                              "submodules at whose outputs seeds may grow with slots=. They are called once, in front "
                              "of the output layer, and give [B, C, H, W], [B, T, D], [B, C, T] or "
                              "[B, D].")  # fmt: skip
        if found[0].h.dim() < 4:
            chosen = self._several(found, _MOST)
        else:
            sizes = dict[tuple[int, ...], list[_Place]]()
            for place in found:
                sizes.setdefault(tuple(place.h.shape[2:]), []).append(place)
            if len(sizes) > 1:
                sizes.pop((1, 1), None)  # of squeezed features
            each = max(1, _BLOCKS // len(sizes)) if len(sizes) < 3 else 1
            chosen = [one for group in sizes.values() for one in self._several(group, each)]
            chosen = _spread(sorted(chosen, key=lambda place: place.end), _MOST)
        return list({id(place.h): place.path for place in chosen}.values())

    def _several(self, found: Sequence[_Place], most: int) -> list[_Place]:
        """Ends of blocks or, where there are none, of layers, in order and not more than `most`; at least one."""
        ends = list({place.layer: place for place in found}.values())
        if most == 1:
            return [next((place for place in reversed(ends) if self._is_passed_by_all(place)), ends[-1])]
        passed = [place for place in ends if self._is_passed_by_all(place)]
        for group in (_spread(group, min(most, _BLOCKS)) for group in _blocks(found)):
            # something else, e.g. a mask, may pass by all of them but the last one
            if (not passed or self._is_passed_by_all(group[-1])) and self._is_chain(group):
                return group
        return _spread(passed, most) if passed else _spread(ends, min(most, _GUESSED))

    @torch.no_grad()
    def _is_passed_by_all(self, place: _Place) -> bool:
        """Whether the network gives the same for other inputs if the features here are the same."""
        if place.path not in self._decides:
            kept = dict[str, Tensor]()
            with replaced_outputs(self._network, lambda path, h: kept.setdefault(path, h).clone(), [place.path]):
                run_once(self._network, self._x)  # layers behind the place may edit the copy
            with replaced_outputs(self._network, lambda path, h: kept[path], [place.path]):
                found = run_once(self._network, self._others).output
            self._decides[place.path] = torch.equal(found, self._run.output)  # a deep network rounds differences away
        return self._decides[place.path]

    @torch.no_grad()
    def _is_chain(self, places: Sequence[_Place]) -> bool:
        """Whether the features of the last place depend on those of the first."""
        first, last = places[0], places[-1]
        with replaced_outputs(self._network, lambda _, h: h.roll(1, dims=0), [first.path]):
            run = run_once(self._network, self._x)
        return all(not torch.equal(call.output, last.h) for call in run.of(last.path))

    def _has_known_axes(self, place: _Place, modules: Iterable[nn.Module]) -> bool:
        """Whether the layers show which axis has the channels."""
        h = place.h
        convs = [of for of in modules if isinstance(of, nn.Conv2d if h.dim() == 4 else nn.Conv1d)]
        if h.dim() == 4:
            return h.shape[1] in {size for of in convs for size in (of.in_channels, of.out_channels)}
        linear = {size for of in modules if isinstance(of, nn.Linear) for size in (of.in_features, of.out_features)}
        return not convs or h.shape[-1] in linear or is_transposed(self._network, place.path, self._run)

    def _can_hold_a_seed(self, path: str) -> bool:
        try:
            check_slot(path, self._run, len(self._x))
        except ConfigError:
            return False
        return True


def _is_layer(module: nn.Module) -> bool:
    """Whether a module has a matrix of weights itself."""
    return hasattr(module, "parametrizations") or any(p.dim() > 1 for p in module.parameters(recurse=False))


def _blocks(found: Iterable[_Place]) -> list[list[_Place]]:
    """Two or more modules with layers in them, of one kind each; the least nested kind first, then the largest."""
    kinds = dict[tuple[int, str, type], list[_Place]]()
    for place in found:
        if any(True for _ in place.module.children()) and any(map(_is_layer, place.module.modules())):
            kinds.setdefault(place.kind, []).append(place)
    several = [group for group in kinds.values() if len(group) > 1]
    return sorted(several, key=lambda of: (of[0].depth, -sum(p.numel() for one in of for p in one.module.parameters())))


def _spread(places: Sequence[_Place], most: int) -> list[_Place]:
    """At most so many of them, at equal distances, with the last one."""
    count = min(most, len(places))
    return [places[(i + 1) * len(places) // count - 1] for i in range(count)]
