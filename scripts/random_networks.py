"""Random networks as a user might write them, from a seed: the grammar of `fuzz_native.py`.

    Plan      an input, and steps; a step is code that builds a module, and the values that the module is called with
    Network   the module of a plan; `str(plan)` is its code

Value 0 is the input, value k + 1 what step k gives. Steps are drawn one after another and tried at once on a batch, so
that shapes fit and numbers stay small.
"""

import random
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, Final

import torch
import torch.nn.functional as F
from torch import Tensor, nn

EXAMPLES: Final = 3
_LARGEST, _NUMBERS = 1e3, 1500
"""Of the values of a network: the largest, and how many an example has."""


class Fn(nn.Module):
    """A function as text, "x, y: x + y" or "x: y = x * 2; return y + x"; tensors by name are its parameters.

    Those whose name begins with b are buffers.
    """

    def __init__(self, source: str, **shapes: tuple[int, ...]) -> None:
        super().__init__()
        for name, shape in shapes.items():
            if name.startswith("b"):
                self.register_buffer(name, torch.randn(shape))
            else:
                self.register_parameter(name, nn.Parameter(torch.randn(shape)))
        arguments, body = source.split(":", 1)
        *lines, last = (line.strip() for line in body.split(";"))
        lines.append(last if last.startswith("return") else f"return {last}")
        scope: dict[str, Any] = {}
        exec(f"def run(self, {arguments}):\n" + "".join(f"    {line}\n" for line in lines), NAMES, scope)
        self._run = scope["run"]

    def forward(self, *values: Tensor) -> Tensor:
        """What the function gives."""
        found: Tensor = self._run(self, *values)
        return found


class Kept(nn.Module):
    """A layer that stays in evaluation mode."""

    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.layer = layer

    def train(self, mode: bool = True) -> "Kept":
        """The layer is left in evaluation mode."""
        super().train(mode)
        self.layer.eval()
        return self

    def forward(self, x: Tensor) -> Tensor:
        """That of the layer."""
        out: Tensor = self.layer(x)
        return out


class NoGrad(Kept):
    """A layer whose weights and inputs get no gradient."""

    def train(self, mode: bool = True) -> "NoGrad":
        """As any module."""
        nn.Module.train(self, mode)
        return self

    def forward(self, x: Tensor) -> Tensor:
        """That of the layer."""
        with torch.no_grad():
            return super().forward(x)


class SelfAttention(nn.Module):
    """`nn.MultiheadAttention` of a sequence to itself."""

    def __init__(self, width: int, heads: int, *, causal: bool, weights: bool, bias: bool) -> None:
        super().__init__()
        self.attention = nn.MultiheadAttention(width, heads, bias=bias, batch_first=True)
        self.causal, self.weights = causal, weights

    def forward(self, x: Tensor) -> Tensor:
        """[B, T, D]."""
        mask = torch.full((x.shape[1], x.shape[1]), -torch.inf).triu(1) if self.causal else None
        out: Tensor = self.attention(x, x, x, need_weights=self.weights, attn_mask=mask)[0]
        return out


def frozen(layer: nn.Module) -> nn.Module:
    """A layer whose weights are not trained."""
    return layer.requires_grad_(False)


def half_frozen(layer: nn.Module) -> nn.Module:
    """A layer of which some weights are not trained."""
    for parameter in list(layer.parameters())[::2]:
        parameter.requires_grad_(False)
    return layer


def tied(layer: nn.Module, to: nn.Module) -> nn.Module:
    """A layer that has the weight of another one."""
    assert layer.weight.shape == to.weight.shape
    layer.weight = to.weight
    return layer


class Squeeze(nn.Module):
    """Squeeze and excitation."""

    def __init__(self, channels: int, width: int) -> None:
        super().__init__()
        self.down, self.up = nn.Conv2d(channels, width, 1), nn.Conv2d(width, channels, 1)

    def forward(self, x: Tensor) -> Tensor:
        """[B, C, H, W]."""
        return x * self.up(F.silu(self.down(F.adaptive_avg_pool2d(x, 1)))).sigmoid()


NAMES: Final[dict[str, Any]] = {
    "nn": nn, "torch": torch, "F": F, "Fn": Fn, "Kept": Kept, "NoGrad": NoGrad, "SelfAttention": SelfAttention,
    "frozen": frozen, "half_frozen": half_frozen, "tied": tied, "Squeeze": Squeeze,
}  # fmt: skip
"""What the code of steps may name, besides `steps`, the modules before."""


@dataclass(frozen=True)
class Step:
    """Code that builds a module, and the values that it is called with."""

    code: str
    sources: tuple[int, ...]


@dataclass(frozen=True)
class Plan:
    """A network.

    Attributes:
        shape: of one input. vocabulary: inputs are tokens below it; 0 for floats. seed: of the weights.
    """

    shape: tuple[int, ...]
    vocabulary: int
    seed: int
    steps: tuple[Step, ...]

    def __str__(self) -> str:
        kind = f"tokens below {self.vocabulary}" if self.vocabulary else "floats"
        lines = [f"v0 = inputs [B, {', '.join(map(str, self.shape))}], {kind}; weights by seed {self.seed}"]
        for k, step in enumerate(self.steps):
            lines.append(f"v{k + 1} = {step.code}({', '.join(f'v{source}' for source in step.sources)})")
        return "\n".join(lines)

    def inputs(self, batch: int, seed: int, dtype: torch.dtype) -> Tensor:
        """A batch."""
        generator = torch.Generator().manual_seed(seed)
        if self.vocabulary:
            return torch.randint(self.vocabulary, (batch, *self.shape), generator=generator)
        return torch.randn(batch, *self.shape, generator=generator, dtype=torch.float64).to(dtype)


class Network(nn.Module):
    """The network of a plan."""

    def __init__(self, plan: Plan) -> None:
        super().__init__()
        self.plan = plan
        modules: list[nn.Module] = []
        with torch.random.fork_rng():
            torch.manual_seed(plan.seed)
            for step in plan.steps:
                modules.append(eval(step.code, {**NAMES, "steps": modules}))
        self.steps = nn.ModuleList(modules)

    def forward(self, x: Tensor) -> Tensor:
        """What the last step gives."""
        values = [x]
        for step, module in zip(self.plan.steps, self.steps, strict=True):
            values.append(module(*(values[source] for source in step.sources)))
        return values[-1]


class RefusedError(Exception):
    """PyTorch does not run the network, or its numbers grow too large."""


class Draw:
    """What a rule of the grammar sees: a generator, and the values so far; `shape` is that of the current one."""

    def __init__(self, r: random.Random, values: list[Tensor], modules: list[nn.Module], codes: list[str]) -> None:
        self.r, self.values, self.modules, self.codes = r, values, modules, codes
        self.shape = tuple(values[-1].shape[1:])

    @property
    def last(self) -> int:
        """The number of the current value."""
        return len(self.values) - 1

    def options(self, **choices: list[Any]) -> str:
        """Keyword arguments; the first of the choices is the default and is left out."""
        chosen = ((name, self.r.choice(some)) for name, some in choices.items())
        return "".join(f", {name}={value!r}" for name, value in chosen if value != choices[name][0])

    def earlier(self, fits: Callable[[tuple[int, ...]], bool]) -> int | None:
        """A value that fits; None if there is none."""
        found = [k for k, x in enumerate(self.values[:-1]) if x.is_floating_point() and fits(tuple(x.shape[1:]))]
        return self.r.choice(found) if found else None


Rule = Callable[[Draw], Step | str | None]
_RULES: dict[int, list[tuple[int, Rule]]] = {1: [], 2: [], 3: []}
"""By the number of axes of an example: vectors, sequences, images; each with its weight."""


def rule(*axes: int, weight: int = 2) -> Callable[[Rule], Rule]:
    """A rule for values with so many axes; it returns a step, code for the current value, or None."""

    def register(found: Rule) -> Rule:
        for number in axes:
            _RULES[number].append((weight, found))
        return found

    return register


def divisor(r: random.Random, *numbers: int) -> int:
    """One that divides all numbers."""
    return r.choice([k for k in range(1, min(numbers) + 1) if all(number % k == 0 for number in numbers)])


# -- layers of images --------------------------------------------------------------------------------------------------

SIZES: Final = [1, 1, 2, 3, 3, 3, 4, 5, (1, 3), (3, 2), (2, 5)]


@rule(3, weight=10)
def convolution(d: Draw) -> str:
    """Of any size."""
    channels, groups = d.shape[0], d.r.choice([1, 1, divisor(d.r, d.shape[0])])
    outputs, kernel = groups * d.r.randint(1, max(1, 8 // groups)), d.r.choice(SIZES)
    sizes = d.options(
        stride=[1, 1, 1, 2, 3, (2, 1), (1, 3)], padding=[0, 1, 1, 2, "same", "valid", (0, 1), (2, 0), 3],
        dilation=[1, 1, 1, 2, (1, 2), 3], groups=[1, groups], bias=[True, True, False],
        padding_mode=["zeros", "zeros", "zeros", "zeros", "reflect", "replicate", "circular"],
    )  # fmt: skip
    return f"nn.Conv2d({channels}, {outputs}, {kernel}{sizes})"


@rule(3, weight=2)
def transposed_convolution(d: Draw) -> str:
    """Of any size."""
    channels, groups = d.shape[0], divisor(d.r, d.shape[0])
    sizes = d.options(
        stride=[1, 2, 2, 3, (2, 1)], padding=[0, 0, 1, (1, 0), 2], output_padding=[0, 0, 1, (0, 1)],
        dilation=[1, 1, 2, (1, 2)], groups=[1, groups], bias=[True, False],
    )  # fmt: skip
    return f"nn.ConvTranspose2d({channels}, {groups * d.r.randint(1, 3)}, {d.r.choice(SIZES)}{sizes})"


@rule(3, weight=6)
def normalization(d: Draw) -> str:
    """Of batches, groups, examples, or rows."""
    c = d.shape[0]
    options = {"affine": [True, True, False], "eps": [1e-5, 1e-5, 1e-3]}
    running = {"momentum": [0.1, 0.3, 1.0], "track_running_stats": [True, True, False]}
    return d.r.choice([
        f"nn.BatchNorm2d({c}{d.options(**options, **running)})",
        f"nn.BatchNorm2d({c})",
        f"nn.GroupNorm({divisor(d.r, c)}, {c}{d.options(**options)})",
        f"nn.InstanceNorm2d({c}{d.options(affine=[False, True], eps=options['eps'])})",
        f"nn.InstanceNorm2d({c}{d.options(affine=[False, True], track_running_stats=[False, True])})",
        f"nn.LayerNorm({list(d.shape)!r})",
        f"nn.LayerNorm({d.shape[-1]}{d.options(elementwise_affine=[True, False], bias=[True, False])})",
        f"nn.LocalResponseNorm({d.r.randint(1, 3)})",
    ])  # fmt: skip


@rule(3, weight=5)
def pooling(d: Draw) -> str:
    """Of any size."""
    kernel = d.r.choice([2, 2, 3, 3, 4, (2, 1), (1, 3), (3, 2)])
    sizes = {"stride": [None, None, 1, 2, 3, (2, 1)], "padding": [0, 0, 1, (1, 0)], "ceil_mode": [False, False, True]}
    target = d.r.choice([1, 2, 3, (2, 1), (1, None), (3, 2), 4])
    return d.r.choice([
        f"nn.MaxPool2d({kernel}{d.options(**sizes, dilation=[1, 1, 2, (1, 2)])})",
        "nn.MaxPool2d(2)",
        f"nn.AvgPool2d({kernel}{d.options(**sizes, count_include_pad=[True, False], divisor_override=[None, None, 3])})",
        f"nn.AdaptiveAvgPool2d({target})",
        f"nn.AdaptiveMaxPool2d({target})",
        f"nn.LPPool2d(2, {kernel}{d.options(ceil_mode=[False, True])})",
        "Fn('x: F.max_pool2d(x, 2, 1) - F.avg_pool2d(x, 2, 1)')",
    ])  # fmt: skip


@rule(3, weight=4)
def of_images(d: Draw) -> str:
    """What else takes images."""
    c, h, w = d.shape
    return d.r.choice([
        f"Squeeze({c}, {d.r.randint(1, 4)})", f"nn.PixelShuffle({d.r.choice([2, 3])})",
        f"nn.PixelUnshuffle({d.r.choice([2, 3])})", f"nn.ChannelShuffle({divisor(d.r, c)})",
        "nn.Upsample(scale_factor=2)", f"nn.Upsample(size={(h + 1, 2 * w)})",
        f"nn.Upsample(scale_factor={d.r.choice([2, (1, 2), (2, 3)])}, mode='nearest')",
        f"nn.Upsample(scale_factor=2, mode='bilinear'{d.options(align_corners=[None, True, False])})",
        "nn.Upsample(scale_factor=2, mode='bicubic')", "nn.UpsamplingBilinear2d(scale_factor=2)",
        f"Fn('x: F.interpolate(x, size={(2, 3)})')", "Fn('x: F.interpolate(x, scale_factor=0.5)')",
        f"Fn('x: F.interpolate(x, size={(h + 2, w)}, mode=\"bilinear\", antialias=False)')",
        f"Fn('x: F.pad(x, {(d.r.randint(-1, 2), d.r.randint(0, 2), d.r.randint(0, 2), d.r.randint(-1, 1))})')",
        "Fn('x: F.pad(x, (1, 2), value=0.5)')", "nn.ZeroPad2d((1, 0, 0, 2))", "nn.ReflectionPad2d(1)",
        "nn.ReplicationPad2d((0, 1, 2, 0))", "nn.CircularPad2d(1)", "nn.ConstantPad2d(1, 0.5)", "nn.Softmax2d()",
        f"nn.Dropout2d({d.r.choice([0.0, 0.25])})", "nn.GLU(1)", f"nn.PReLU({c})",
        "Fn('x: x * x.mean((2, 3), keepdim=True)')", "Fn('x: x - x.amax((2, 3), keepdim=True)')",
        "Fn('x: x.permute(0, 2, 3, 1).contiguous()')", "Fn('x: x.permute(0, 3, 1, 2)')", "Fn('x: x.transpose(2, 3)')",
        f"Fn('x: x.view(x.size(0), {divisor(d.r, c)}, -1, *x.shape[2:]).transpose(1, 2).flatten(1, 2)')",
        f"Fn('x: F.conv2d(x, self.p.softmax(1), padding=1)', p={(2, c, 3, 3)})",
        f"Fn('x: F.conv2d(x, self.p, self.q)', p={(2, c, 1, 2)}, q=(2,))",
        f"Fn('x: x * self.p + self.q', p={(c, 1, 1)}, q={(1, 1, w)})",
        f"Fn('x: x + self.p', p={(1, c, h, w)})", f"Fn('x: x * self.b', b={(c, 1, 1)})",
        f"Fn('x: F.batch_norm(x, self.bm, self.bv.abs() + 1, training=False)', bm={(c,)}, bv={(c,)})",
        f"Fn('x: F.batch_norm(x, None, None, self.p, training=True)', p={(c,)})",
        "Fn('x: F.unfold(x, 2).view(len(x), -1, x.shape[2] - 1, x.shape[3] - 1)')",
        f"nn.Sequential(nn.Conv2d({c}, {c}, 1), nn.BatchNorm2d({c}), nn.ReLU(inplace=True))",
        f"nn.utils.parametrizations.weight_norm(nn.Conv2d({c}, 3, 1))",
    ])  # fmt: skip


@rule(3, weight=3)
def leave_images(d: Draw) -> str:
    """Vectors and sequences of images."""
    return d.r.choice([
        "nn.Flatten()", "Fn('x: x.mean((2, 3))')", "Fn('x: x.mean(dim=[-1, -2])')", "Fn('x: x.amax((2, 3))')",
        "Fn('x: x.flatten(2).transpose(1, 2)')", "Fn('x: x.flatten(2)')", "Fn('x: x.mean(3)')", "Fn('x: x.sum(1)')",
        "Fn('x: x.view(x.size(0), -1)')", "Fn('x: F.adaptive_avg_pool2d(x, 1).squeeze(-1).squeeze(-1)')",
        "Fn('x: x.reshape(x.shape[0], x.shape[1], -1).permute(0, 2, 1)')", "Fn('x: x[:, :, 0, 0]')",
        "Fn('x: x.permute(0, 2, 1, 3).flatten(2)')", "Fn('x: x.flatten(1, 2)')", "Fn('x: x.unbind(1)[0]')",
        "Fn('x: x.std((2, 3))')", "Fn('x: x.select(2, -1)')", "Fn('x: x.logsumexp((2, 3))')",
        "Fn('x: x.max(dim=1).values')",
    ])  # fmt: skip


# -- layers of sequences -----------------------------------------------------------------------------------------------


def heads_of(d: Draw) -> int:
    """A number of heads."""
    return divisor(d.r, d.shape[-1])


@rule(2, weight=8)
def of_sequences(d: Draw) -> str:
    """Attention, normalizations, layers of each token, convolutions."""
    t, w = d.shape
    h = heads_of(d)
    causal, scale = d.r.random() < 0.5, d.options(scale=[None, None, 0.25])
    split = f"x.unflatten(-1, ({h}, -1)).transpose(1, 2)"
    affine = d.options(elementwise_affine=[True, True, False], eps=[1e-5, 1e-3], bias=[True, True, False])
    return d.r.choice([
        f"SelfAttention({w}, {h}, causal={causal}, weights={d.r.random() < 0.5}, bias={d.r.random() < 0.7})",
        f"SelfAttention({w}, {h}, causal={causal}, weights=False, bias=True)",
        f"nn.TransformerEncoderLayer({w}, {h}, {d.r.randint(2, 8)}, dropout={d.r.choice([0.0, 0.0, 0.25])}, batch_first=True"
        f"{d.options(norm_first=[False, True], activation=['relu', 'gelu'], bias=[True, True, False])})",
        f"Fn('x: q = {split}; y = F.scaled_dot_product_attention(q, q, q, is_causal={causal}{scale}); "
        "return y.transpose(1, 2).flatten(2)')",
        f"Fn('x: q, k, v = F.linear(x, self.p).chunk(3, -1); "
        f"y = F.scaled_dot_product_attention(q, k, v, is_causal={causal}{scale}); return y', p={(3 * w, w)})",
        f"Fn('x: q = {split}; a = (q @ q.transpose(-2, -1) * 0.5).softmax(-1); "
        "return (a @ q).transpose(1, 2).reshape(x.shape)')",
        "Fn('x: a = x @ x.transpose(1, 2); "
        "a = a.masked_fill(torch.ones(x.shape[1], x.shape[1]).triu(1).bool(), -torch.inf); return a.softmax(-1) @ x')",
        "Fn('x: mask = torch.ones(x.shape[1], x.shape[1]).tril().bool(); "
        "return F.scaled_dot_product_attention(x, x, x, attn_mask=mask)')",
        f"Fn('x: F.scaled_dot_product_attention(x, x, x, attn_mask=self.p)', p={(t, t)})",
        f"nn.LayerNorm({w}{affine})", f"nn.LayerNorm({w})", f"nn.LayerNorm({[t, w]})",
        f"nn.RMSNorm({w}{d.options(elementwise_affine=[True, False], eps=[None, 1e-3])})",
        f"Fn('x: x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-3) * self.p', p={(w,)})",
        f"nn.Linear({w}, {d.r.choice([2, 3, 4, 6, 8])}{d.options(bias=[True, False])})",
        f"nn.Sequential(nn.Linear({w}, {2 * w}), nn.GELU(), nn.Linear({2 * w}, {w}))",
        f"nn.Conv1d({t}, {d.r.choice([2, 3, 4])}, {d.r.choice([1, 2, 3])}"
        f"{d.options(padding=[0, 1, 'same'], stride=[1, 2], dilation=[1, 2], bias=[True, False])})",
        "Fn('x: F.pad(x, (0, 0, 1, 0))[:, :-1]')", f"Fn('x: x + self.p[: x.shape[1]]', p={(t + 2, w)})",
        f"Fn('x: torch.cat([self.p.expand(x.shape[0], -1, -1), x], 1)', p={(1, 1, w)})",
        f"nn.BatchNorm1d({t}{d.options(affine=[True, False], track_running_stats=[True, False])})",
        f"nn.InstanceNorm1d({t})", f"nn.GroupNorm({divisor(d.r, t)}, {t})",
        "nn.GLU()", "nn.MaxPool1d(2)", f"nn.AvgPool1d(2{d.options(stride=[None, 1], padding=[0, 1])})",
        "nn.AdaptiveAvgPool1d(2)", "nn.Upsample(scale_factor=2)", f"nn.ConvTranspose1d({t}, 2, 2, stride=2)",
        "nn.Softmax(-1)", "nn.LogSoftmax(-1)", "Fn('x: x.transpose(1, 2)')", "Fn('x: x.mT @ x')",
        "Fn('x: x @ x.mT')", f"Fn('x: x @ self.p', p={(w, 3)})", f"Fn('x: torch.einsum(\"btd,de->bte\", x, self.p)', p={(w, 2)})",
        "Fn('x: torch.einsum(\"btd,bsd->bts\", x, x)')", "Fn('x: torch.bmm(x, x.transpose(1, 2))')",
        "Fn('x: x.cumsum(1) / torch.arange(1, x.shape[1] + 1)[:, None]')",
        f"Fn('x: F.linear(x, self.p * 0.5, self.q)', p={(3, w)}, q=(3,))",
        "Fn('x: outs = []; h = x[:, 0]; "
        "[outs.append(torch.tanh(h + x[:, k])) for k in range(x.shape[1])]; return torch.stack(outs, 1)')",
        f"Fn('x: a, g = F.linear(x, self.p).chunk(2, dim=-1); return a * F.gelu(g)', p={(2 * w, w)})",
        "Fn('x: a, b = x[..., ::2], x[..., 1::2]; return torch.stack([-b, a], -1).flatten(-2)')",
        f"nn.GRU({w}, 3, batch_first=True)" if d.r.random() < 0.1 else f"nn.Linear({w}, {w})",
        f"nn.Dropout({d.r.choice([0.0, 0.25, 0.5])})", f"nn.PReLU({t})", f"nn.Unflatten(1, (1, {t}))",
        f"nn.Unflatten(2, (1, {w}))",
    ])  # fmt: skip


@rule(2, weight=1)
def leave_sequences(d: Draw) -> str:
    """Vectors and images of sequences."""
    return d.r.choice([
        "Fn('x: x.mean(1)')", "Fn('x: x[:, -1]')", "Fn('x: x[:, 0]')", "nn.Flatten()", "Fn('x: x.amax(1)')",
        "Fn('x: x.sum(-1)')", "Fn('x: (x * x.softmax(1)).sum(1)')", "Fn('x: x.max(1)[0]')", "Fn('x: x.var(1)')",
        "Fn('x: x.unsqueeze(1)')", "Fn('x: x[:, None]')", "Fn('x: x[..., None]')", "Fn('x: torch.norm(x, dim=1)')",
    ])  # fmt: skip


# -- layers of vectors -------------------------------------------------------------------------------------------------


@rule(1, weight=8)
def of_vectors(d: Draw) -> str:
    """What takes vectors."""
    (w,) = d.shape
    return d.r.choice([
        f"nn.Linear({w}, {d.r.choice([1, 2, 4, 5, 8, 12])}{d.options(bias=[True, True, False])})",
        f"nn.Linear({w}, {w})", f"nn.BatchNorm1d({w}{d.options(affine=[True, True, False], momentum=[0.1, 0.3])})",
        f"nn.BatchNorm1d({w})", f"nn.LayerNorm({w})", f"nn.GroupNorm({divisor(d.r, w)}, {w})", f"nn.RMSNorm({w})",
        f"nn.Sequential(nn.Linear({w}, 6), nn.BatchNorm1d(6), nn.ReLU(), nn.Dropout(0.5), nn.Linear(6, {w}))",
        f"nn.Bilinear({w}, {w}, 2)" if d.r.random() < 0.2 else f"nn.Linear({w}, 3)",
        "nn.Softmax(1)", "nn.LogSoftmax(-1)", "Fn('x: F.normalize(x, dim=1)')", "Fn('x: x[:, :, None] * x[:, None]')",
        f"Fn('x: x @ self.p', p={(w, 3)})", f"Fn('x: F.linear(x, self.p.t(), self.q)', p={(w, 3)}, q=(3,))",
        f"Fn('x: torch.addmm(self.q, x, self.p)', p={(w, 3)}, q=(3,))", f"Fn('x: torch.mv(x, self.p)[:, None]', p={(w,)})",
        f"Fn('x: (x[:, None] - self.p).square().sum(-1)', p={(3, w)})", f"Fn('x: torch.cdist(x, self.p)', p={(3, w)})",
        f"Fn('x: F.cosine_similarity(x[:, None], self.p, dim=-1)', p={(2, w)})",
        f"Fn('x: F.linear(F.normalize(x), F.normalize(self.p))', p={(2, w)})",
        f"nn.Unflatten(1, ({divisor(d.r, w)}, -1))", "Fn('x: x[:, :, None, None]')", "Fn('x: x.unsqueeze(1)')",
        f"nn.PReLU({w})", "nn.GLU()", f"nn.utils.parametrizations.weight_norm(nn.Linear({w}, 3))",
        f"Fn('x: x.view(-1, 1, {w})')", "Fn('x: torch.outer(self.p, self.q).mean() * x', p=(2,), q=(3,))",
        "Fn('x: x * self.p.exp()', p=())", f"Fn('x: x.unflatten(1, ({divisor(d.r, w)}, -1)).sum(1)')",
    ])  # fmt: skip


# -- anything ----------------------------------------------------------------------------------------------------------

ACTIVATIONS: Final = [
    "nn.ReLU()", "nn.ReLU()", "nn.ReLU(inplace=True)", "nn.GELU()", "nn.GELU('tanh')", "nn.SiLU()", "nn.Mish()",
    "nn.SiLU(inplace=True)", "nn.ELU()", "nn.ELU(0.5, inplace=True)", "nn.SELU()", "nn.CELU(0.7)", "nn.LeakyReLU(0.1)",
    "nn.LeakyReLU(0.2, inplace=True)", "nn.Hardswish()", "nn.Hardsigmoid()", "nn.Hardtanh(-0.5, 0.7)", "nn.ReLU6()",
    "nn.Sigmoid()", "nn.Tanh()", "nn.Softplus()", "nn.Softplus(2.0, 3.0)", "nn.Softsign()", "nn.PReLU()",
    "nn.LogSigmoid()", "nn.Tanhshrink()", "nn.Softshrink(0.3)", "nn.Hardshrink(0.3)", "nn.Threshold(0.1, 0.5)",
    "nn.Hardswish(inplace=True)", "nn.Mish(inplace=True)", "nn.ReLU6(inplace=True)", "nn.Identity()",
    "Fn('x: F.relu_(x)')", "Fn('x: torch.tanh_(x)')", "Fn('x: x.sigmoid_()')", "Fn('x: F.silu(x) * 2')",
    "Fn('x: x * torch.sigmoid(1.702 * x)')", "Fn('x: 0.5 * x * (1 + torch.erf(x / 2**0.5))')",
    "Fn('x: F.relu(x) ** 2')", "Fn('x: F.softmin(x, dim=1)')",
]  # fmt: skip
ELEMENTWISE: Final = [
    "x * 2 + 1", "1 - x", "x / 3", "x ** 2 * 0.5", "x * x", "x / (1 + x.abs())", "1 / (1 + x * x)", "torch.exp(-x * x)",
    "x.clamp(-1, 1)", "x.clamp(min=0)", "x.clamp_max(0.5)", "torch.where(x > 0, x, 0.25 * x)",
    "x.masked_fill(x > 1, 0.5)", "torch.maximum(x, 0.5 * x)", "(x * x + 1).sqrt()", "(x * x + 1).rsqrt() * x",
    "(1 + x.abs()).log()", "torch.log(1 + x * x)", "torch.tanh(x) + x.sigmoid()", "x.sin() + x.cos()", "torch.erf(x)",
    "x.abs()", "x.sign() * x", "torch.atan(x)", "x.square().neg()", "x - 0.5 * x.detach()", "x.detach() * x",
    "torch.lerp(x, x * x, 0.25)", "x.pow(3) * 0.25", "(x.abs() + 0.5) ** 0.5", "2.0 ** (x * 0.5)", "x.clone()",
    "x.contiguous()", "F.dropout(x, 0.0, self.training)", "x.softmax(-1)", "x - x.mean(-1, keepdim=True)",
    "x / (x.std(1, keepdim=True) + 1)", "x.var(dim=1, keepdim=True, unbiased=False) + x",
    "x.logsumexp(1, keepdim=True) + x", "x.amax(1, keepdim=True) - x", "x.cumsum(1) * 0.5",
    "x.norm(dim=1, keepdim=True) + x", "x.sum(-1, keepdim=True) * 0.25 + x", "(x.exp() - 1).tanh()", "x.exp().log1p()",
    "torch.zeros_like(x) + x", "x + torch.ones(x.shape[-1])", "x * torch.arange(x.shape[-1])",
    "x + torch.linspace(0, 1, x.shape[-1])", "torch.ones_like(x) - x", "torch.full_like(x, 0.5) * x",
    "x * (x > 0)", "x * (x > 0).to(x.dtype)", "torch.min(x, x.new_tensor(0.5))", "x.reciprocal().clamp(-1, 1)",
    "x.logit(eps=0.25)", "torch.addcmul(x, x, x, value=0.5)", "x.relu() - (-x).relu()", "x.mul(2).sub(1).div(4)",
    "x.add(x, alpha=0.5)", "torch.rsub(x, 2)", "x - x.median(-1, keepdim=True).values", "x.floor() + x",
    "x.flatten(1).view(x.shape)", "x.reshape(x.shape)", "x.view_as(x)", "x.sinh() * 0.25", "x.hypot(x * 0.5)",
    "x.nan_to_num()", "torch.xlogy(x, x.abs() + 1)", "x.prod(1, keepdim=True) + x", "x.min(-1, keepdim=True)[0] * x",
    "torch.logaddexp(x, -x)", "x.trunc() * 0.5 + x", "x.frac() * x", "x.type_as(x)", "x * x.shape[1]", "F.normalize(x, dim=-1)",
]  # fmt: skip
SHAPES: Final = [
    "x.flip(1)", "x.roll(1, 1)", "x.roll((1, -1), (1, -1))", "torch.cat([x[:, 1:], x[:, :1]], 1)", "torch.cat([x, -x], 1)",
    "torch.stack([x, x * 2], 1).flatten(1, 2)", "x[:, 1:]", "x[:, ::2]", "x[..., :-1]", "x[..., 1::2]",
    "x[..., None].expand(*x.shape, 2).flatten(-2)", "x.repeat_interleave(2, -1)", "x.transpose(1, -1)", "x.flip(-1)",
    "x.narrow(1, 0, 1)", "x.split(1, 1)[0]", "x.chunk(2, 1)[-1]", "x.index_select(1, torch.tensor([0, 0]))",
    "x[:, [0, -1]]", "x[:, torch.tensor([0])]", "x.diff(dim=-1)", "x.unbind(1)[0].unsqueeze(1) + x", "sum(x.chunk(2, 1))",
    "torch.cat([x, torch.zeros(x.shape[0], 1, *x.shape[2:])], 1)", "torch.cat([x, x.new_zeros(len(x), 1, *x.shape[2:])], 1)",
    "torch.cat([x, torch.ones_like(x[:, :1])], 1)", "x.repeat(1, 2, *([1] * (x.dim() - 2)))", "x.movedim(1, -1)",
    "x.unsqueeze(1).squeeze(1)", "x.swapaxes(1, -1)", "x.tile((2,))", "x.gather(-1, torch.zeros_like(x[..., :1], dtype=torch.long))",
    "x.sort(-1).values", "x.topk(1, -1).values", "torch.tensor_split(x, 2, 1)[0]", "x.unfold(-1, 2, 1).sum(-1)",
    "x.expand(*x.shape)", "x[:, :1].expand_as(x)", "x[:, :1].expand(-1, *x.shape[1:]) * x", "x.flatten(1).unflatten(1, x.shape[1:])",
    "x.tril()", "x.triu(1)", "x.as_strided(x.shape, x.stride())", "x.squeeze()", "x.masked_fill(torch.eye(x.shape[-1]).bool()[0], 0.)",
]  # fmt: skip
EDITS: Final = [
    "y = x * 1; y += x; return y", "y = x.clone(); y[:, 0] += 1; return y", "y = x.clone(); y[:, :1] *= 2; return y",
    "y = x + 0; y[..., 0] = 0; return y", "y = x * 2; z = y.view(y.shape[0], -1); z.mul_(2); return y",
    "y = x * 2; z = y[:, :1]; y.add_(1); return y + z", "y = x * 2; z = y.flatten(1); y.relu_(); return y + z.view_as(y)",
    "y = torch.zeros_like(x); y[:, 0] = x[:, 0]; return y + x", "y = x * 2; z = y; y.relu_(); return y + z",
    "y = x + 1; w = y * 3; y.tanh_(); return y + w", "y = x.clone(); y.clamp_(-1, 1); return y",
    "y = x.clone(); y.masked_fill_(y > 0.5, 0.0); return y", "x.add_(1); return x", "x.mul_(0.5); return x", "x *= 2; return x",
    "x -= 1; x /= 2; return x", "y = x.detach().clone(); y += 1; return x + y", "y = x * 2; y.detach().mul_(2); return y",
    "y = x * 2; y.data.mul_(2); return y", "y = x * 2; y.copy_(x); return y", "y = x * 2; y.fill_(1); return y + x",
    "y = x * 2; y[:, 0].zero_(); return y", "y = x.clone(); y.transpose(1, -1).add_(1); return y",
    "y = x.clone(); a, b = y[:, :1], y[:, -1:]; a += 1; return y * b", "y = x * 1; y[:, 1:] += y[:, :-1].clone(); return y",
    "with torch.no_grad(): s = x.abs().mean(1, keepdim=True); return x * s",
    "y = x * 2; with torch.no_grad(): y.mul_(2); return y", "with torch.no_grad(): y = x * 2; return y + x",
    "with torch.no_grad(): x.mul_(2); return x * x", "y = x.detach(); y += 1; return x * 2 + y",
    "y = x; x = x * 2; y += 1; return x + y", "y = x.view(x.shape); y += 1; return x * 2", "y = x[:, :1]; x = x + 1; y *= 2; return x",
    "y = x[:, :1]; y *= 2; return x + 0", "x[:, 0] = 0; return x * 1", "x[:, :1] = x[:, -1:].clone(); return x",
    "y = x.transpose(1, -1); y += 1; return x * y.transpose(1, -1)", "for k in range(3): x = x + 0.5 * torch.tanh(x); return x",
    "for row in [0, -1]: x = x * x[:, row : row + 1 or None]; return x", "y = torch.empty_like(x); y.copy_(x); return y",
    "y = x.clone(); y[:, 0] = y[:, -1]; return y", "y = x * 2; y.sub_(x).mul_(x); return y", "y = x.exp(); y.log_(); return y",
    "y = x + 1; y.pow_(2); return y", "y = x * 1; y.neg_(); return y", "y = x * 1; y.zero_(); return x + y",
    "y = x.repeat(1, 2, *([1] * (x.dim() - 2))); y[:, : x.shape[1]] += x; return y", "y = x * 1; y[x > 0] = 0.5; return y",
    "y = x * 2; z = y.unsqueeze(1); z += 1; w = y + z.squeeze(1); return w", "y = x.clone(); y.squeeze().add_(1); return y",
    "y = x * 1; u, v = y[:, :1], y[:, 1:]; u.mul_(2); return torch.cat([u, v], 1)", "y = x * 1; F.relu(y, inplace=True); return y",
    "y = x * 1; F.elu_(y); return y + x", "y = F.dropout(x, 0.0, True, True); return y", "y = x.reshape(len(x), -1); y += 1; return x * 2",
    "y = x.contiguous(); y += 1; return x * 2", "y = x.to(x.dtype); y += 1; return x * 2", "y = x.flatten(1); y *= 2; return x + 0",
    "y = x.permute(*range(x.dim())); y *= 2; return x * 1", "y = x.expand(*x.shape); y += 1; return x * 1",
    "y = F.dropout(x, 0.5, False); y += 1; return x * 2", "with torch.no_grad(): y = x * 2; a, b = y[:, :1], y[:, -1:]; a += 1; return y + x",
    "with torch.no_grad(): y = x * 2; a = y.chunk(2, 1)[0]; a.add_(1); return y + x", "with torch.no_grad(): y = x * 2; y += x; return y * x",
    "with torch.no_grad(): y = x * 2; y.unbind(1)[0].mul_(2); return y + x", "with torch.no_grad(): y = x * 2; y[:, 0] = 1; return y + x",
    "y = x * 2; z = y[:, :1]; y.add_(1); z.mul_(2); return y", "y = x * 2; y.add_(1); z = y[:, :1]; z.mul_(2); return z", "z = x[:, :1]; z.mul_(2); return z",
    "y = x * 1; z = y.detach(); y += 1; return y * z", "y = x * 1; y[0] += 1; return y", "y = x.new_zeros(x.shape[1:]); y += 1; return x * y",
    "y = torch.zeros(x.shape[-1]); y[0] = 1; return x + y", "y = torch.zeros(x.shape[-1]); y += 0.5; return x + y", "y = x.real if x.is_complex() else x; y = y.float() if False else y; y *= 0.5; return y",
]  # fmt: skip
PAIRS: Final = [
    "x + y", "x + y", "x - 2 * y", "x * y", "torch.maximum(x, y)", "torch.minimum(x, y)", "x.add(y, alpha=0.5)",
    "x += y; return x", "torch.where(y > 0, x, y)", "torch.addcmul(x, x, y, value=0.5)", "x * y.sigmoid()",
    "torch.stack([x, y], 1).sum(1)", "torch.lerp(x, y, 0.25)", "x / (1 + y.abs())", "torch.cat([x, y], 1)", "y.mul_(2); return x + y",
    "x * y.mean(-1, keepdim=True)", "torch.cat([y, x, y], -1)", "F.relu(x + y, inplace=True)", "x.copy_(y); return x", "x.sub_(y)",
    "torch.lerp(x, y, x.sigmoid())", "x.addcdiv(y, y.abs() + 1)", "(x > y).to(x.dtype) * x", "x - y.amax(1, keepdim=True)", "y.detach() + x",
    "x[:, :1] += y[:, :1]; return x", "torch.stack([x, y]).mean(0)", "torch.stack([x, y], -1).amax(-1)",
]  # fmt: skip


@rule(1, 2, 3, weight=8)
def activation(d: Draw) -> str:
    """An activation function."""
    return d.r.choice(ACTIVATIONS)


@rule(1, 2, 3, weight=4)
def elementwise(d: Draw) -> str:
    """A function as text, of each number or of rows."""
    return f"Fn({'x: ' + d.r.choice(ELEMENTWISE)!r})"


@rule(1, 2, 3, weight=3)
def shape(d: Draw) -> str:
    """A function as text that moves numbers."""
    return f"Fn({'x: ' + d.r.choice(SHAPES)!r})"


@rule(1, 2, 3, weight=3)
def edit(d: Draw) -> str:
    """A function as text that edits in place."""
    return f"Fn({'x: ' + d.r.choice(EDITS)!r})"


@rule(1, 2, 3, weight=7)
def pair(d: Draw) -> Step | None:
    """Two values of one shape."""
    other = d.earlier(lambda shape: shape == d.shape)
    if other is None:
        return None
    sources = (d.last, other) if d.r.random() < 0.7 else (other, d.last)
    return Step(f"Fn({'x, y: ' + d.r.choice(PAIRS)!r})", sources)


@rule(1, 2, 3, weight=2)
def joined(d: Draw) -> Step | None:
    """Two values, one after another."""
    other = d.earlier(lambda shape: len(shape) == len(d.shape) and shape[1:] == d.shape[1:])
    return None if other is None else Step("Fn('x, y: torch.cat([x, y], 1)')", (d.last, other))


@rule(1, 2, 3, weight=2)
def scaled_by_another(d: Draw) -> Step | None:
    """A value times another one for each channel."""
    other = d.earlier(lambda shape: 1 <= len(shape) < len(d.shape) and shape[0] == d.shape[0])
    if other is None:
        return None
    more = len(d.shape) - len(d.values[other].shape) + 1
    return Step(f"Fn('x, y: x * y[(...,) + (None,) * {more}]')", (d.last, other))


@rule(1, 2, 3, weight=3)
def again(d: Draw) -> str | None:
    """A module that was run before."""
    return f"steps[{d.r.randrange(len(d.modules))}]" if d.modules else None


@rule(1, 2, 3, weight=2)
def with_tied_weight(d: Draw) -> str | None:
    """A layer with the weight of another one."""
    fits = [k for k, module in enumerate(d.modules) if type(module) in (nn.Conv2d, nn.Linear)
            and not d.codes[k].startswith(("steps", "tied"))]  # fmt: skip
    if not fits:
        return None
    k = d.r.choice(fits)
    return f"tied({d.codes[k]}, steps[{k}])"


@rule(1, 2, 3, weight=2)
def with_tables(d: Draw) -> str:
    """Parameters and buffers beside the value."""
    wide = (d.shape[0], *(1,) * (len(d.shape) - 1))
    return d.r.choice([
        f"Fn('x: x * self.p', p={wide})", f"Fn('x: x + self.p', p={d.shape})", f"Fn('x: x * self.b + self.p', p=(), b={wide})",
        f"Fn('x: x * (1 + self.p.tanh())', p={wide})", f"Fn('x: x / (1 + self.p * self.p)', p={(d.shape[-1],)})",
        f"Fn('x: self.p - x', p={(1, *d.shape)})", f"Fn('x: x + self.b.mul_(0.5)', b={wide})",
        f"Fn('x: y = x + self.b; self.b.add_(1); return y', b={wide})",
        f"Fn('x: y = x * self.b; self.b += 0.5; return y + self.b', b={wide})",
        f"Fn('x: x + (self.b.mul_(0.5) if self.training else self.b)', b={d.shape})",
        f"Fn('x: x * self.p.detach() + self.p', p={wide})", "Fn('x: x * self.p[self.p > 0].sum()', p=(4,))",
        "Fn('x: w = self.p.softmax(0); return x * w[0] + x.tanh() * w[1]', p=(2,))",
        f"Fn('x: torch.where(self.p > 0, x, x * 0.5)', p={wide})", f"Fn('x: torch.cat([x, self.p.expand(len(x), *self.p.shape)], 1)', p={d.shape})",
        f"Fn('x: y = x + self.p; y += self.p; return y', p={d.shape})",
        f"Fn('x: with torch.no_grad(): self.p.mul_(0.5); return x * self.p', p={wide})",
        f"Fn('x: self.b.copy_(self.b * 0.5 + 0.25); return x * self.b', b={wide})",
    ])  # fmt: skip


def _wrapped(r: random.Random, code: str) -> str:
    """Sometimes a layer that is not trained, or stays in evaluation mode."""
    if not code.startswith("nn.") or "weight_norm" in code or r.random() > 0.12:
        return code
    return f"{r.choice(['frozen', 'half_frozen', 'Kept', 'NoGrad', 'frozen'])}({code})"


def draw(seed: int, k: int) -> Plan:
    """The k-th network of a seed, which PyTorch trains and runs."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # those of PyTorch about odd layers
        for attempt in range(100):
            try:
                plan = _draw(random.Random(f"{seed} {k} {attempt}"))
                check(plan)
            except RefusedError:
                continue
            return plan
    raise AssertionError("no network was found")


def _draw(r: random.Random) -> Plan:
    kind, vocabulary, first = r.choice(["image"] * 5 + ["sequence"] * 2 + ["vector"] * 1 + ["tokens"] * 2), 0, None
    if kind == "image":
        size: tuple[int, ...] = (r.randint(1, 4), r.randint(3, 8), r.randint(3, 8))
    elif kind == "sequence":
        size = (r.randint(2, 6), r.choice([2, 4, 6, 8]))
    elif kind == "vector":
        size = (r.randint(2, 12),)
    else:
        vocabulary, size = r.randint(3, 9), (r.randint(1, 6),)
        options = r.choice(["", "", ", padding_idx=0", ", scale_grad_by_freq=False"])
        first = Step(f"nn.Embedding({vocabulary}, {r.choice([2, 4, 6])}{options})", (0,))
    plan = Plan(size, vocabulary, r.randrange(2**31), () if first is None else (first,))
    values, modules, steps = [plan.inputs(EXAMPLES, plan.seed, torch.float64)], list[nn.Module](), list(plan.steps)
    torch.manual_seed(plan.seed)
    if first is not None:
        modules.append(eval(first.code, NAMES).double())
        values.append(modules[0](values[0]).detach())
    count = r.randint(2, 12)
    for _ in range(8 * count):
        if len(steps) == count:
            break
        draw_from = Draw(r, values, modules, [step.code for step in steps])
        rules = _RULES[len(draw_from.shape)]
        found = r.choices([rule for _, rule in rules], [weight for weight, _ in rules])[0](draw_from)
        if found is None:
            continue
        step = found if isinstance(found, Step) else Step(_wrapped(r, found), (draw_from.last,))
        try:
            module = eval(step.code, {**NAMES, "steps": modules})
            module.double()
            with torch.no_grad():
                out = module(*(values[source].clone() for source in step.sources))
            _check_value(out)
        except Exception:
            continue
        steps.append(step)
        modules.append(module)
        values.append(out)
    return Plan(plan.shape, vocabulary, plan.seed, tuple(steps))


def _check_value(x: object) -> None:
    if not isinstance(x, Tensor) or not x.is_floating_point() or x.dim() not in (2, 3, 4) or len(x) != EXAMPLES:
        raise RefusedError
    if not 1 <= x[0].numel() <= _NUMBERS or not bool(x.isfinite().all()) or float(x.abs().max()) > _LARGEST:
        raise RefusedError


def check(plan: Plan) -> None:
    """Raise RefusedError unless PyTorch trains the network, its numbers are sane, and rounding does not grow."""
    try:
        found = [list(_run(plan, dtype)) for dtype in (torch.float64, torch.float32)]
    except Exception as error:  # any error of PyTorch
        raise RefusedError(str(error)) from error
    for exact, rounded in zip(*found, strict=True):
        if exact.shape != rounded.shape or not bool(exact.isfinite().all()):
            raise RefusedError("not finite")
        if not exact.numel():
            continue
        scale = max(1.0, float(exact.abs().amax()))
        if scale > 1e5 or float((exact - rounded.double()).abs().amax()) > 1e-3 * scale:
            raise RefusedError("rounding grows")


def _run(plan: Plan, dtype: torch.dtype) -> Iterator[Tensor]:
    """Outputs in evaluation and training, and the gradients of weights and inputs."""
    network = Network(plan).to(dtype)
    for layer in network.modules():
        if isinstance(layer, nn.Dropout | nn.Dropout2d):
            layer.p = 0.0
    x = plan.inputs(7, plan.seed, torch.float64)
    x = x if plan.vocabulary else x.to(dtype)
    network.eval()
    with torch.no_grad():
        yield network(x.clone())
    network.train()
    x = x if plan.vocabulary else x.requires_grad_()
    out = network(x.clone())
    if out.dim() < 2 or len(out) != 7:
        raise RefusedError("not a batch")
    yield out.detach()
    wanted = [p for p in network.parameters() if p.requires_grad] + ([] if plan.vocabulary else [x])
    yield from torch.autograd.grad(out.sum(), wanted, allow_unused=True, materialize_grads=True)
