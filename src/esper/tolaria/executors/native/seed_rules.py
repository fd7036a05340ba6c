"""Seeds and gates as instructions: which modules have a rule, and why others have none.

A seed of a module without a rule is run by PyTorch.
"""

from collections.abc import Callable, Container, Mapping

from torch import nn

from esper.kasmina.blueprints.cnn import ChannelAttention, NormShift
from esper.kasmina.blueprints.layers import GateNetwork, LayerScale, TanhScale
from esper.tolaria.executors.native.assembler import Activation, Assembler, Operation, expect
from esper.tolaria.executors.native.layer_rules import (
    Features,
    Layer,
    Rule,
    Weights,
    activate,
    activation,
    backward_of,
    chain,
    convolution,
    group_norm,
    layer_scale,
    like,
    linear,
    mean_space,
)


def sequential(a: Assembler, module: nn.Sequential, weights: Weights, x: Features) -> Layer:
    """Layer by layer; a normalization is fused with the ReLU and layer scale after it."""
    layers = [(layer, weights.of(name)) for name, layer in module._modules.items()]  # a layer may occur twice
    steps: list[Callable[[Features], Layer]] = []
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
    return chain(x, *steps)


def attention(a: Assembler, module: ChannelAttention, weights: Weights, x: Features) -> Layer:
    """One factor per channel, from the means of all channels; for an isolated seed, which needs no input gradient."""
    sizes = (x.channels, x.space)

    def modulate(factor: Features) -> Layer:
        expect("factors of a channel attention", factor.channels, x.channels)
        y = like(a, x)
        a.emit(Operation.MODULATE, x.rows, factor.rows, y.rows, sizes=sizes)
        return y, backward_of(
            a, factor,
            input_grad=lambda g, grad: a.emit(Operation.MODULATE_BACKWARD, x.rows, g, grad, sizes=sizes),
        )  # fmt: skip

    mlp = (weights, Activation.TANH, module.squeeze, module.excite, ["squeeze", "excite"])
    return chain(x, lambda h: _mlp(a, h, *mlp), modulate)


def norm_shift(a: Assembler, module: NormShift, weights: Weights, x: Features) -> Layer:
    """A step from the features towards their normalization; for an isolated seed, which needs no input gradient."""
    gain, sizes = weights.of("gain"), (x.rows.size,)
    strength = gain.value("strength")

    def shift(z: Features) -> Layer:
        y = like(a, x)
        a.emit(Operation.SHIFT, strength, z.rows, x.rows, y.rows, sizes=sizes)
        operands = (strength, z.rows, x.rows)
        return y, backward_of(
            a, z, lambda g: a.emit(Operation.SHIFT_BACKWARD, *operands, g, gain.grad("strength"), sizes=sizes)
        )  # fmt: skip

    return chain(x, lambda h: group_norm(a, module.norm, weights.of("norm"), h), shift)


def gate(a: Assembler, module: GateNetwork, weights: Weights, x: Features) -> Layer:
    """One number in (0, 1) per example."""
    return _mlp(a, x, weights, Activation.SIGMOID, module.hidden, module.out, ["hidden", "out"])


def _mlp(
    a: Assembler, x: Features, weights: Weights, last: Activation, first: nn.Linear, second: nn.Linear, names: list[str]
) -> Layer:
    """Mean over space, linear, SiLU, linear, `last`; `names` are those of the linear layers."""
    return chain(
        x,
        lambda h: mean_space(a, h),
        lambda h: linear(a, first, weights.of(names[0]), h),
        lambda h: activate(a, Activation.SILU, h),
        lambda h: linear(a, second, weights.of(names[1]), h),
        lambda h: activate(a, last, h),
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
"""The rules, by the type of a seed or of a layer in a sequence."""

_PARTS: Mapping[type[nn.Module], Mapping[str, type[nn.Module]]] = {
    ChannelAttention: {"squeeze": nn.Linear, "act": nn.SiLU, "excite": nn.Linear},
    NormShift: {"norm": nn.GroupNorm, "gain": TanhScale},
    GateNetwork: {"hidden": nn.Linear, "act": nn.SiLU, "out": nn.Linear},
}
"""The children of modules that have a rule as a whole."""
_HOOKS = ("_forward_pre_hooks", "_forward_hooks", "_backward_pre_hooks", "_backward_hooks")


def problem(module: nn.Module) -> str | None:
    """Why a seed has no rule; None if it has one."""
    return altered(module, {*RULES, nn.Linear, TanhScale}) or _unknown(module)


def altered(module: nn.Module, kinds: Container[type[nn.Module]]) -> str | None:
    """Why a module does something else than its layers' types say; None if it does not.

    All types must be in `kinds`, compared exactly: a subclass or a parametrized layer is refused.
    """
    for path, layer in module.named_modules(remove_duplicate=False):
        name = f"{path or 'it'} ({type(layer).__name__})"
        if type(layer) not in kinds:
            return f"there is no rule for {name}"
        if any(getattr(layer, hooks) for hooks in _HOOKS):
            return f"{name} has hooks"
        if "forward" in vars(layer):
            return f"{name} has a forward pass of its own"
    names = [name for name, _ in module.named_parameters(remove_duplicate=False)]
    tied = sorted({*names} - {name for name, _ in module.named_parameters()})
    return f"{tied[0]} is the same parameter as another" if tied else None


def _unknown(module: nn.Module) -> str | None:
    """Why a module of known layers has no rule; None if it has one."""
    kind = type(module)
    parts = {name: type(part) for name, part in module.named_children()}
    if isinstance(module, nn.Sequential):
        inside = [f"{type(m).__name__} as a part" if type(m) in _PARTS else _unknown(m) for m in module]
        return next(filter(None, inside), None) if inside else "it has no layers"
    if kind in _PARTS and parts != _PARTS[kind]:
        return f"{kind.__name__} is not made of {', '.join(_PARTS[kind])}"
    if isinstance(module, NormShift):
        return _unknown(module.norm)
    if isinstance(module, nn.Conv2d) and not _plain(module):
        return f"there is no rule for {module}"
    if isinstance(module, nn.GroupNorm) and module.weight is None:
        return "there is no rule for group norms without weights"
    return None if kind in RULES else f"there is no rule for {kind.__name__} as a seed or in a sequence"


def _plain(conv: nn.Conv2d) -> bool:
    """Whether a convolution keeps the image size and is dense, or depthwise without bias."""
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
