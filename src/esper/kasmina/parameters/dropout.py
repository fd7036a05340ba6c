"""Dropout whose masks depend on nobody but the host that draws them.

    key       stream DROPOUT of (run seed, host, episode, step, slot)
    counter   (four elements, number of the mask in this train pass)

`nn.Dropout` draws from the global generator, so that a mask would depend on who drew before. Layers of it in a seed are
exchanged for `Dropout` when the seed is built. The masks of a host are the same whoever runs it, alone or with others.

Shape legend: B = examples per host, G = hosts of a call; the host is the fastest index of the rows, as in `lowering`.
"""

from dataclasses import dataclass
from typing import final

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn

from esper.leyline.random import Stream, philox, to_uniform, words


@dataclass
class Moment:
    """When a train pass takes place; whoever begins a pass moves it."""

    run_seed: int
    episode: int = 0
    t: int = 0


@final
class Draws:
    """The masks that the seeds in one slot of some hosts draw in one train pass, one after the other."""

    def __init__(self, moment: Moment, hosts: Int[Tensor, " G"], slot: int) -> None:
        """`hosts` are global numbers."""
        self._moment, self.hosts, self._slot = moment, hosts, slot
        self.count = 0

    def of(self, hosts: Int[Tensor, " G"]) -> "Draws":
        """The same masks for other hosts."""
        draws = Draws(self._moment, hosts, self._slot)
        draws.count = self.count
        return draws

    def uniform(self, shape: tuple[int, ...]) -> Float[Tensor, "..."]:
        """Numbers in [0, 1) of a shape [B * G, ...] for the next mask."""
        now, num_hosts = self._moment, self.hosts.shape[0]
        own = words(now.run_seed, Stream.DROPOUT, self.hosts, episode=now.episode, t=now.t, slot=self._slot)
        one = (shape[0] // num_hosts, *shape[1:])
        size = torch.Size(one).numel()
        block = torch.arange((size + 3) // 4, device=self.hosts.device)
        zero = torch.zeros_like(block)
        counter = torch.stack((block, zero + self.count, zero, zero), dim=-1)
        drawn = philox(counter, (own[:, :1], own[:, 1:2])).flatten(1)[:, :size]
        self.count += 1
        return to_uniform(drawn).view(num_hosts, *one).transpose(0, 1).flatten(0, 1)


@final
class Dropout(nn.Module):
    """Zero with probability `p` in training, scaled so that means stay; whole channels [B * G, C] where `channels`."""

    def __init__(self, p: float, *, channels: bool) -> None:
        super().__init__()
        self.p, self.channels = p, channels
        self.draws: Draws | None = None

    def forward(self, x: Tensor) -> Tensor:
        """[B * G, ...] -> the same."""
        if not self.training or self.p == 0.0:
            return x
        assert self.draws is not None, "who draws is said before a train pass"
        shape = (*x.shape[:2], *(1,) * (x.dim() - 2)) if self.channels else tuple(x.shape)
        kept = self.draws.uniform(shape) >= self.p
        return x * (kept / max(1.0 - self.p, torch.finfo(torch.float32).tiny)).to(x.dtype)


_WHOLE_CHANNELS: dict[type[nn.Module], bool] = {
    nn.Dropout: False,
    nn.Dropout1d: True,
    nn.Dropout2d: True,
    nn.Dropout3d: True,
}
"""Layers that are exchanged, and whether they drop whole channels."""


def with_keyed_dropout(module: nn.Module) -> nn.Module:
    """`module`, in which every layer of dropout draws keyed masks."""
    holder = nn.ModuleList([module])
    for parent in list(holder.modules()):
        for name, child in parent._modules.items():
            if child is not None and type(child) in _WHOLE_CHANNELS:
                parent._modules[name] = Dropout(child.p, channels=_WHOLE_CHANNELS[type(child)])  # type: ignore[arg-type]
    return holder[0]


def dropout_layers(module: nn.Module) -> tuple[Dropout, ...]:
    """The layers of a module that draw masks."""
    return tuple(layer for layer in module.modules() if isinstance(layer, Dropout))


def draw_for(layers: tuple[Dropout, ...], draws: Draws | None) -> None:
    """Let these layers draw the masks of `draws` from now on."""
    for layer in layers:
        layer.draws = draws
