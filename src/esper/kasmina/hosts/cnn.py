"""The convolutional host.

x -> pixel unshuffle -> conv -> batch norm -> ReLU -> (r0c0) -> pool -> (r1c0) -> ... (r0c1) ... -> mean over space
                        block 0                                                   block 1              -> linear: head
"""

from collections.abc import Iterable
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, ClassVar, final

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.fx.experimental.proxy_tensor import get_proxy_mode

from esper.kasmina.hosts.host import Apply, Host, InjectionPoint, enabled_points
from esper.kasmina.parameters.layout import drop_batch_counters
from esper.leyline.errors import ConfigError
from esper.leyline.lifecycle import HostFamily
from esper.leyline.settings import AtLeast0, AtLeast1, AtLeast2, check_fields


def max_pool_2x2(h: Tensor) -> Tensor:
    """[..., H, W] -> [..., H // 2, W // 2]; an odd last row or column is left out."""
    if h.device.type != "cpu" or get_proxy_mode() is not None:  # a traced graph names the operation
        return F.max_pool2d(h, 2)
    pooled: Tensor = _MaxPool.apply(h)  # type: ignore[no-untyped-call]
    return pooled


@final
class _MaxPool(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, h: Tensor) -> Tensor:  # noqa: ANN401
        """The larger of two columns, then of two rows."""
        wide = torch.maximum(*_columns(h))
        ctx.save_for_backward(h, wide)
        return torch.maximum(*_rows(wide))

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:  # noqa: ANN401
        """The gradient at the largest of each window, zero elsewhere."""
        h, wide = ctx.saved_tensors
        covered = h.shape[-2] % 2 == 0 and h.shape[-1] % 2 == 0
        grad_wide, grad_h = torch.empty_like(wide), torch.empty_like(h) if covered else torch.zeros_like(h)
        _share(grad, _rows(wide), _rows(grad_wide))
        _share(grad_wide, _columns(h), _columns(grad_h))
        return grad_h


def _columns(h: Tensor) -> tuple[Tensor, Tensor]:
    """Left and right column of each window."""
    even = h[..., : h.shape[-2] // 2 * 2, : h.shape[-1] // 2 * 2]
    return even[..., ::2], even[..., 1::2]


def _rows(wide: Tensor) -> tuple[Tensor, Tensor]:
    """Upper and lower row of each window."""
    return wide[..., ::2, :], wide[..., 1::2, :]


def _share(grad: Tensor, values: tuple[Tensor, Tensor], into: tuple[Tensor, Tensor]) -> None:
    """Pass `grad` to the larger of two values, to the first if they are equal."""
    # a product with a mask of floats is vectorized, `torch.where` is not
    second_wins = (values[1] > values[0]).to(grad.dtype)
    torch.mul(grad, second_wins, out=into[1])
    torch.sub(grad, into[1], out=into[0])


@dataclass(frozen=True, kw_only=True)
class CNNHostSpec:
    """Architecture of a convolutional host.

    Attributes:
        in_channels: channels of the input image. base: channels of the first block, doubled in each later one.
        blocks: number of blocks (at least 2). kernel: 1 or 3. pools: the first `pools` blocks end with a 2x2 pooling.
        classes: number of logits. unshuffle: each f x f pixels of the image become channels of one position
            (`torch.nn.PixelUnshuffle`), so that block 0 gets f^2 in_channels; 1 leaves the image as it is.
    """

    in_channels: AtLeast1
    base: AtLeast1
    blocks: AtLeast2
    kernel: AtLeast1
    pools: AtLeast0
    classes: AtLeast2
    unshuffle: AtLeast1 = 1
    family: ClassVar[HostFamily] = HostFamily.CNN

    def __post_init__(self) -> None:
        check_fields(self, "host")
        if self.kernel not in (1, 3):
            raise ConfigError(f"host.kernel is {self.kernel}; it must be 1 or 3.")
        if self.pools > self.blocks:
            raise ConfigError(f"host.pools is {self.pools} but there are {self.blocks} blocks; pool at most once in "
                              "each.")  # fmt: skip

    def channels(self) -> tuple[int, ...]:
        """Output channels of each block."""
        return tuple(self.base * 2**i for i in range(self.blocks))

    def input_channels(self) -> int:
        """Channels that block 0 gets."""
        return self.in_channels * self.unshuffle**2

    def points(self) -> tuple[InjectionPoint, ...]:
        """All points in action order."""
        channels, n = self.channels(), self.blocks
        pre = [InjectionPoint(slot_id=f"r0c{i}", channels=channels[i], order=i,
                              position=(2 * i + 1) / (2 * n)) for i in range(n)]  # fmt: skip
        post = [InjectionPoint(slot_id=f"r1c{i}", channels=channels[i], order=n + i,
                               position=(2 * i + 2) / (2 * n)) for i in range(self.pools)]  # fmt: skip
        return (*pre, *post)

    def largest_activation(self, height: int, width: int) -> int:
        """Floats of the largest features of one image, of its logits, or of its copy that is unshuffled."""
        copied = self.in_channels * height * width if self.unshuffle > 1 else 0
        height, width = height // self.unshuffle, width // self.unshuffle
        halvings = (min(i, self.pools) for i in range(self.blocks))
        features = (c * (height >> k) * (width >> k) for c, k in zip(self.channels(), halvings, strict=True))
        return max(self.classes, copied, *features)

    def num_params(self) -> int:
        """sum_i (c_{i-1} c_i k^2 + 2 c_i) + c_{n-1} classes + classes, where c_{-1} are the channels of the input."""
        channels = (self.input_channels(), *self.channels())
        convs = sum(a * b * self.kernel**2 + 2 * b for a, b in pairwise(channels))
        return convs + channels[-1] * self.classes + self.classes

    def build(self, slot_ids: Iterable[str], example: Tensor) -> "CNNHost":
        """A host with these slots enabled, for images like `example` [1, C, H, W]."""
        height, width = example.shape[-2:]
        return CNNHost(self, slot_ids, image_size=(height, width))

    def check_image(self, height: int, width: int, points: Iterable[InjectionPoint]) -> None:
        """Raise ConfigError if the size of images is not a multiple of `unshuffle`, or too small.

        That is where a pooling has no input, or C*H*W = 1 at one of the `points`.
        """
        factor = self.unshuffle
        if height % factor or width % factor:
            fitting = [f for f in range(1, factor) if not (height % f or width % f)]
            raise ConfigError(
                f"host.unshuffle is {factor}, but images of {height}x{width} do not split into squares of "
                f"{factor}x{factor} pixels; set it to {' or '.join(map(str, fitting))}, or crop or pad the images."
            )
        if min(height, width) // factor >> self.pools < 1:
            unshuffled = f" after host.unshuffle {factor}" if factor > 1 else ""
            raise ConfigError(
                f"images of {height}x{width} vanish in {self.pools} poolings{unshuffled}; use larger ones or a smaller "
                "host.pools."
            )
        for point in points:
            if self.features(point, (height, width)) == (1, 1, 1):
                raise ConfigError(
                    f"the features at slot {point.slot_id} of a {height}x{width} image are a single value, which no "
                    "seed can normalize; disable the slot, or use larger images or a larger host.base."
                )

    def features(self, point: InjectionPoint, image_size: tuple[int, int]) -> tuple[int, int, int]:
        """Channels, height and width of the features at a point."""
        block = int(point.slot_id.partition("c")[2])
        halvings = min(block + (point.order >= self.blocks), self.pools)
        height, width = image_size
        return point.channels, height // self.unshuffle >> halvings, width // self.unshuffle >> halvings


@final
class Block(nn.Module):
    """Convolution, batch norm, ReLU."""

    def __init__(self, inputs: int, outputs: int, kernel: int) -> None:
        super().__init__()
        self.conv = nn.Conv2d(inputs, outputs, kernel, padding=kernel // 2, bias=False)
        self.norm = nn.BatchNorm2d(outputs)

    def forward(self, x: Tensor) -> Tensor:
        """[B, C, H, W] -> [B, C', H, W]."""
        return F.relu(self.norm(self.conv(x)))


@final
class CNNHost(Host):
    """Blocks of doubling width and a linear head, without seeds."""

    family = HostFamily.CNN

    def __init__(self, spec: CNNHostSpec, slot_ids: Iterable[str], *, image_size: tuple[int, int]) -> None:
        """A host with these slots enabled, for images of `image_size` (height, width).

        Raises ConfigError for a slot that does not exist, or an image that does not fit (`CNNHostSpec.check_image`).
        """
        super().__init__()
        self.spec = spec
        self.enabled = enabled_points(spec.points(), slot_ids)
        self._slots = frozenset(point.slot_id for point in self.enabled)
        spec.check_image(*image_size, self.enabled)
        self.image_size = image_size
        self.largest_activation = spec.largest_activation(*image_size)
        channels = (spec.input_channels(), *spec.channels())
        self.blocks = nn.ModuleList(Block(a, b, spec.kernel) for a, b in pairwise(channels))
        self.head = nn.Linear(channels[-1], spec.classes)
        drop_batch_counters(self)

    def features(self, point: InjectionPoint) -> tuple[int, int, int]:
        """Channels, height and width of the features at a point."""
        return self.spec.features(point, self.image_size)

    def rebuild(self) -> "CNNHost":
        """A new host with newly initialized weights."""
        return CNNHost(self.spec, [point.slot_id for point in self.enabled], image_size=self.image_size)

    def forward(self, x: Tensor, apply: Apply) -> Tensor:
        """Logits [B, classes] of images [B, C, H, W]; `apply` runs once per enabled slot, in execution order."""
        if self.spec.unshuffle > 1:
            x = F.pixel_unshuffle(x, self.spec.unshuffle)
        for i, block in enumerate(self.blocks):
            x = block(x)
            if f"r0c{i}" in self._slots:
                x = apply(f"r0c{i}", x)
            if i < self.spec.pools:
                x = max_pool_2x2(x)
                if f"r1c{i}" in self._slots:
                    x = apply(f"r1c{i}", x)
        logits: Tensor = self.head(x.mean(dim=(2, 3)))
        return logits
