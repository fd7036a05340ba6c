"""The convolutional host."""

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class CNNHostSpec:
    """Shape of a convolutional host.

    Attributes:
        in_channels: channels of the input image. base: channels of the first block, doubled in each later one.
        blocks: number of blocks (at least 2). kernel: 1 or 3. pools: the first `pools` blocks end with a 2x2 pooling.
        classes: number of logits.
    """

    in_channels: int
    base: int
    blocks: int
    kernel: int
    pools: int
    classes: int
