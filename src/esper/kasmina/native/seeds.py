"""Seeds and gates as instructions: which kinds of modules there are rules for, and which of them can be written so.

seed --> RULES[type(seed)]      built of layers in a row, or one of the modules below
has_rule(module)                False: hosts in which it grows are run by PyTorch
"""

from collections.abc import Callable, Mapping

from torch import nn

from esper.kasmina.blueprints.cnn import ChannelAttention, NormShift
from esper.kasmina.blueprints.gate import GateNetwork
from esper.kasmina.blueprints.layers import LayerScale
from esper.kasmina.native.assembler import Activation, Assembler, Operation, Rows
from esper.kasmina.native.rules import (
    Back,
    Features,
    Rule,
    Weights,
    activation,
    chain,
    convolution,
    group_norm,
    layer_scale,
    linear,
    mean_space,
)


def sequential(a: Assembler, chain_of: nn.Sequential, weights: Weights, x: Features) -> tuple[Features, Back]:
    """Layer by layer; what follows a normalization is done together with it."""
    layers = [(layer, weights.of(name)) for name, layer in chain_of.named_children()]
    steps: list[Callable[[Features], tuple[Features, Back]]] = []
    while layers:
        layer, own = layers.pop(0)
        if isinstance(layer, nn.GroupNorm):
            relu = bool(layers) and isinstance(layers[0][0], nn.ReLU)
            if relu:
                layers.pop(0)
            scale = layers.pop(0)[1] if layers and isinstance(layers[0][0], LayerScale) else None
            steps.append(lambda h, n=layer, w=own, r=relu, s=scale: group_norm(a, n, w, h, relu=r, scale=s))  # type: ignore[misc]
        else:
            steps.append(lambda h, m=layer, w=own: RULES[type(m)](a, m, w, h))  # type: ignore[misc]
    return chain(a, x, *steps)


def attention(a: Assembler, module: ChannelAttention, weights: Weights, x: Features) -> tuple[Features, Back]:
    """A factor per channel from the means of all; nothing upstream learns from it."""
    factor, back_factor = chain(
        a,
        x,
        lambda h: mean_space(a, h),
        lambda h: linear(a, module.squeeze, weights.of("squeeze"), h),
        lambda h: activation(Activation.SILU)(a, module.act, weights, h),
        lambda h: linear(a, module.excite, weights.of("excite"), h),
        lambda h: activation(Activation.TANH)(a, module, weights, h),
    )
    y, sizes = x.like(a.rows(x.rows.size)), (x.channels, x.space)
    a.emit(Operation.MODULATE, x.rows, factor.rows, y.rows, sizes=sizes)
    if not a.learns:
        a.release(factor.rows)

    def back(g: Rows, wanted: bool) -> None:
        assert not wanted, "an isolated seed sends nothing upstream"
        into = a.rows(x.channels)
        a.emit(Operation.MODULATE_BACK, x.rows, g, into, sizes=sizes)
        a.release(g, y.rows)
        back_factor(into, False)

    return y, back


def norm_shift(a: Assembler, module: NormShift, weights: Weights, x: Features) -> tuple[Features, Back]:
    """A step from the features towards their normalized selves; nothing upstream learns from it."""
    z, back_norm = group_norm(a, module.norm, weights.of("norm"), x)
    y, sizes, strength = x.like(a.rows(x.rows.size)), (x.rows.size,), weights.of("gain")
    a.emit(Operation.SHIFT, strength.value("strength"), z.rows, x.rows, y.rows, sizes=sizes)
    if not a.learns:
        a.release(z.rows)

    def back(g: Rows, wanted: bool) -> None:
        assert not wanted, "an isolated seed sends nothing upstream"
        a.emit(
            Operation.SHIFT_BACK, strength.value("strength"), z.rows, x.rows, g, strength.slope("strength"), sizes=sizes
        )
        a.release(y.rows)
        back_norm(g, False)

    return y, back


def gate(a: Assembler, module: GateNetwork, weights: Weights, x: Features) -> tuple[Features, Back]:
    """One number in (0, 1) per example."""
    return chain(
        a,
        x,
        lambda h: mean_space(a, h),
        lambda h: linear(a, module.hidden, weights.of("hidden"), h),
        lambda h: activation(Activation.SILU)(a, module.act, weights, h),
        lambda h: linear(a, module.out, weights.of("out"), h),
        lambda h: activation(Activation.SIGMOID)(a, module, weights, h),
    )


RULES: Mapping[type[nn.Module], Rule] = {
    nn.Conv2d: convolution,
    nn.GroupNorm: group_norm,
    nn.ReLU: activation(Activation.RELU),
    nn.SiLU: activation(Activation.SILU),
    nn.Tanh: activation(Activation.TANH),
    nn.Sigmoid: activation(Activation.SIGMOID),
    LayerScale: layer_scale,
    nn.Sequential: sequential,
    ChannelAttention: attention,
    NormShift: norm_shift,
    GateNetwork: gate,
}
"""Every kind of seed, and of layer in a sequence, that there is a rule for."""

_WHOLE = (ChannelAttention, NormShift, GateNetwork)


def has_rule(module: nn.Module) -> bool:
    """Whether a seed can be written as instructions."""
    if type(module) is nn.Sequential:
        return len(module) > 0 and all(type(m) not in _WHOLE and has_rule(m) for m in module)
    if isinstance(module, nn.Conv2d) and not _plain(module):
        return False
    if isinstance(module, nn.GroupNorm) and module.weight is None:
        return False
    return type(module) in RULES


def _plain(conv: nn.Conv2d) -> bool:
    """A convolution that keeps the size of the image and has all or no channels in common."""
    kernel = conv.kernel_size[0]
    depthwise = conv.groups == conv.in_channels == conv.out_channels and conv.bias is None
    return (
        conv.kernel_size in ((1, 1), (3, 3))
        and conv.stride == (1, 1)
        and conv.dilation == (1, 1)
        and conv.padding == (kernel // 2, kernel // 2)
        and conv.padding_mode == "zeros"
        and (conv.groups == 1 or depthwise)
    )
