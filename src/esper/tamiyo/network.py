"""The recurrent policy network: features to the logits of eight heads and a value.

    features, blueprint embeddings --> Linear, LayerNorm, ReLU (--> Linear if the widths differ)
                                            |
                        per layer:  x + LayerNorm(LSTM(x))          the only recurrent part
                                            |
    trunk: one Linear holding the first layer of all nine outputs
         |- slot, style, tempo, alpha_target, alpha_speed, alpha_curve, op    ReLU, Linear
         |- blueprint                                                         ReLU, Linear, ReLU, Linear
         `- value V(s)                                                        (LayerNorm, ReLU, Linear) ...

`step` computes one step of N hosts, `unroll` sequences [N, T] with gradient; in `unroll` everything but the recurrence
runs over all N * T rows at once.

Shape legend: N = hosts, T = steps, R = any leading axes, D = features, S = slots, F = feature width, H = recurrent
width, L = recurrent layers, G = 4H (gates i, f, g, o).
"""

import math
from collections.abc import Callable, Sequence
from typing import Any, final

import torch
import torch.nn.functional as F
from jaxtyping import Bool, Float, Int
from torch import Tensor, nn

from esper.leyline.errors import ConfigError
from esper.leyline.lifecycle import Head, LifecycleOp
from esper.leyline.messages import Hidden
from esper.leyline.random import Stream, local_generator
from esper.leyline.tensor_dataclass import tensor_dataclass
from esper.tamiyo.features import feature_dim


def lstm_cell(
    gates_x: Float[Tensor, "N G"],
    h: Float[Tensor, "N H"],
    c: Float[Tensor, "N H"],
    recurrent_weight: Float[Tensor, "G H"],
) -> tuple[Float[Tensor, "N H"], Float[Tensor, "N H"]]:
    """One step of an LSTM (Hochreiter and Schmidhuber, 1997, with the forget gate of Gers et al., 2000); (h', c')."""
    i, f, g, o = torch.addmm(gates_x, h, recurrent_weight.t()).chunk(4, dim=-1)
    c = torch.addcmul(f.sigmoid() * c, i.sigmoid(), g.tanh())
    return o.sigmoid() * c.tanh(), c


def lstm_sequence(
    gates_x: Float[Tensor, "N T G"],
    h0: Float[Tensor, "N H"],
    c0: Float[Tensor, "N H"],
    reset: Bool[Tensor, "N T"],
    recurrent_weight: Float[Tensor, "G H"],
) -> Float[Tensor, "N T H"]:
    """H' of every step from the state (h0, c0), which `reset[:, 0]` may zero; differentiable once."""
    outputs: Tensor = _Sequence.apply(gates_x, h0, c0, reset, recurrent_weight)  # type: ignore[no-untyped-call]
    return outputs


_BLOCK = 2**17
"""Elements of one factor computed at once, so that they stay in the cache."""


@final
class _Sequence(torch.autograd.Function):
    """The equations above; time is the first axis."""

    @staticmethod
    def forward(ctx: Any, gates_x: Tensor, h: Tensor, c: Tensor, reset: Tensor, weight: Tensor) -> Tensor:  # noqa: ANN401
        """All steps, written into the tensors that the backward pass needs."""
        hosts, steps, _ = gates_x.shape
        fresh, inputs = reset.t()[..., None], gates_x.transpose(0, 1)
        gates = gates_x.new_empty(steps, hosts, gates_x.shape[-1])
        h_before, c_before, tanh_c_all, outputs = gates.new_empty(4, steps, hosts, h.shape[-1]).unbind()
        every = (fresh, inputs, h_before, c_before, tanh_c_all, outputs, gates, *gates.chunk(4, dim=-1))
        transposed, zero = weight.t(), gates.new_zeros(())
        for new, x_in, h_in, c_in, tanh_c, out, a, a_i, a_f, a_g, a_o in zip(
            *(x.unbind(0) for x in every), strict=True
        ):
            torch.where(new, zero, h, out=h_in)  # a product would keep NaN across a reset
            torch.where(new, zero, c, out=c_in)
            torch.addmm(x_in, h_in, transposed, out=a)
            a_i.sigmoid_()
            a_f.sigmoid_()
            a_g.tanh_()
            a_o.sigmoid_()
            c = torch.mul(a_f, c_in).addcmul_(a_i, a_g)
            torch.tanh(c, out=tanh_c)
            h = torch.mul(a_o, tanh_c, out=out)
        ctx.save_for_backward(gates, (~fresh).to(gates.dtype), h_before, c_before, tanh_c_all, weight)
        return outputs.transpose(0, 1)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:  # noqa: ANN401
        """Gradients of the gate inputs, the initial state and the recurrent weight."""
        gates, keep, h_before, c_before, tanh_c_all, weight = ctx.saved_tensors
        steps, hosts, width = tanh_c_all.shape
        grads = torch.empty_like(gates)
        inner, outer = grads[..., : 3 * width].unflatten(-1, (3, width)), grads[..., 3 * width :]
        given = (grad.transpose(0, 1), grads, inner, outer, keep)
        dh_before, dc = gates.new_zeros(2, hosts, width).unbind()
        grad_weight, keep_after = torch.zeros_like(weight), keep[0]  # multiplies zeros in the last step
        block = max(1, _BLOCK // (hosts * width))
        for end in range(steps, 0, -block):
            here = slice(max(0, end - block), end)
            factors = _factors(gates[here], c_before[here], tanh_c_all[here], keep[here])
            for grad_h, da, da_inner, da_outer, keep_here, of_cell, of_gates, of_output, carried in zip(
                *(reversed(x.unbind(0)) for x in (*(x[here] for x in given), *factors)), strict=True
            ):
                dh = torch.addcmul(grad_h, dh_before, keep_after)
                dc = torch.addcmul(dc, dh, of_cell)
                torch.mul(dh, of_output, out=da_outer)
                torch.mul(dc[:, None], of_gates, out=da_inner)
                dc, dh_before, keep_after = dc * carried, da @ weight, keep_here
            grad_weight.addmm_(grads[here].flatten(0, 1).t(), h_before[here].flatten(0, 1))
        return grads.transpose(0, 1), dh_before * keep_after, dc, None, grad_weight


def _factors(gates: Tensor, c_before: Tensor, tanh_c_all: Tensor, keep: Tensor) -> tuple[Tensor, ...]:
    """Factors: dh to dc, dc to (da_i, da_f, da_g), dh to da_o, dc to dc of the step before."""
    i, f, g, o = gates.chunk(4, dim=-1)
    of_gates = torch.stack((g * i * (1.0 - i), c_before * f * (1.0 - f), i * (1.0 - g * g)), dim=-2)
    return o * (1.0 - tanh_c_all * tanh_c_all), of_gates, tanh_c_all * o * (1.0 - o), f * keep


EMBEDDING_WIDTH = 4
EMBEDDING_STD = 0.02
GAIN = math.sqrt(2.0)
HEAD_OUTPUT_GAIN = 0.01
VALUE_OUTPUT_GAIN = 0.1
FORGET_BIAS = 1.0
INITIAL_OP_LOGITS = {
    LifecycleOp.WAIT: 2.0,
    LifecycleOp.FOSSILIZE: 2.0,
    LifecycleOp.PRUNE: -1.0,
    LifecycleOp.SET_ALPHA_TARGET: -1.0,
}
"""Initial biases of operations, 0 for the others. A uniform policy prunes nearly every seed before it is active, and a
seed that is ready is seldom committed, so that a policy that starts so learns to wait."""
WIDTH_MULTIPLE = 8
"""The value head ends at an eighth of the recurrent width."""


@tensor_dataclass
class NetworkOutput:
    """Logits of each head `[N, size]` in the order of `HEADS`, value, next recurrent state."""

    logits: tuple[Float[Tensor, "N _"], ...]
    value: Float[Tensor, " N"]
    hidden: Hidden


@final
class RecurrentLayer(nn.Module):
    """Parameters of one LSTM layer, see `lstm_cell`."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.input_weight = nn.Parameter(torch.zeros(4 * width, width))
        self.recurrent_weight = nn.Parameter(torch.zeros(4 * width, width))
        self.bias = nn.Parameter(torch.zeros(4 * width))
        self.norm = nn.LayerNorm(width)

    def input_gates(self, x: Float[Tensor, "*R H"]) -> Float[Tensor, "*R G"]:
        """`W_x x + b`."""
        return F.linear(x, self.input_weight, self.bias)


@final
class TamiyoNetwork(nn.Module):
    """The policy network; all weights are zero until `initialize`.

    Args:
        num_slots: S.
        head_sizes: values of each head, in the order of `HEADS`; the blueprint head also sizes the embedding.
        feature_width: width of the feature net.
        hidden_width: width of the recurrent state and of the heads' input; a multiple of 8.
        num_layers: recurrent layers.

    Raises:
        ConfigError: an invalid size.
    """

    def __init__(
        self,
        *,
        num_slots: int,
        head_sizes: Sequence[int],
        feature_width: int = 128,
        hidden_width: int = 128,
        num_layers: int = 1,
    ) -> None:
        super().__init__()
        _require_sizes(feature_width, hidden_width, num_layers)
        self.feature_width, self.hidden_width, self.num_layers = feature_width, hidden_width, num_layers
        self.head_sizes = tuple(head_sizes)
        width, half = hidden_width, hidden_width // 2
        inputs = feature_dim(num_slots) + EMBEDDING_WIDTH * num_slots
        # The last row is that of -1, an empty slot.
        self.embedding = nn.Parameter(torch.zeros(self.head_sizes[Head.BLUEPRINT] + 1, EMBEDDING_WIDTH))
        self.feature_net = nn.Sequential(_linear(inputs, feature_width), nn.LayerNorm(feature_width), nn.ReLU())
        self.projection = _linear(feature_width, width) if feature_width != width else nn.Identity()
        self.core = nn.ModuleList(RecurrentLayer(width) for _ in range(num_layers))
        self._trunk_sizes = [*(width if head == Head.BLUEPRINT else half for head in Head), half]
        self.trunk = _linear(width, sum(self._trunk_sizes))
        self.head_blueprint = _linear(width, half)
        self.head_outputs = nn.ModuleList(_linear(half, size) for size in self.head_sizes)
        self.value_net = nn.Sequential(
            nn.LayerNorm(half), nn.ReLU(), _linear(half, width // 4),
            nn.LayerNorm(width // 4), nn.ReLU(), _linear(width // 4, width // 8),
            nn.ReLU(), _linear(width // 8, 1),
        )  # fmt: skip
        self.inverse_temperature: Tensor
        self.register_buffer("inverse_temperature", torch.ones(()))  # of every head; the larger, the more certain

    def initial_hidden(self, n: int, device: torch.device) -> Hidden:
        """Zeros, each [L, n, H]."""
        shape = (self.num_layers, n, self.hidden_width)
        return Hidden(h=torch.zeros(shape, device=device), c=torch.zeros(shape, device=device))

    def step(
        self, features: Float[Tensor, "N D"], blueprint_index: Int[Tensor, "N S"], hidden: Hidden
    ) -> NetworkOutput:
        """One step of all hosts."""
        x = self._encode(features, blueprint_index)
        states = []
        for layer, h, c in zip(self._layers(), hidden.h.unbind(0), hidden.c.unbind(0), strict=True):
            states.append(lstm_cell(layer.input_gates(x), h, c, layer.recurrent_weight))
            x = x + layer.norm(states[-1][0])
        logits, value = self._decode(x)
        h_L, c_L = zip(*states, strict=True)
        return NetworkOutput(logits=logits, value=value, hidden=Hidden(h=torch.stack(h_L), c=torch.stack(c_L)))

    def unroll(
        self,
        features: Float[Tensor, "N T D"],
        blueprint_index: Int[Tensor, "N T S"],
        hidden0: Hidden,
        reset: Bool[Tensor, "N T"],
    ) -> tuple[tuple[Float[Tensor, "N T _"], ...], Float[Tensor, "N T"]]:
        """Logits and values of whole sequences; the state of hosts with `reset[n, t]` is zeroed before step t."""
        x = self._encode(features, blueprint_index)
        for layer, h0, c0 in zip(self._layers(), hidden0.h.unbind(0), hidden0.c.unbind(0), strict=True):
            h = lstm_sequence(layer.input_gates(x), h0, c0, reset, layer.recurrent_weight)
            x = x + layer.norm(h)
        return self._decode(x)

    def trunk_slices(self) -> tuple[slice, ...]:
        """Rows of `trunk` that belong to each head in the order of `HEADS`, and last those of the value."""
        ends = torch.tensor(self._trunk_sizes).cumsum(0).tolist()
        return tuple(slice(end - size, end) for end, size in zip(ends, self._trunk_sizes, strict=True))

    def _layers(self) -> list[RecurrentLayer]:
        return [layer for layer in self.core if isinstance(layer, RecurrentLayer)]

    def _encode(self, features: Tensor, blueprint_index: Tensor) -> Float[Tensor, "*R H"]:
        """Feature net and projection; IndexError for a blueprint outside -1 .. B - 1."""
        # shifted by one, so that -1 is row 0 and the look-up checks the range
        rows = F.embedding(blueprint_index + 1, self.embedding.roll(1, dims=0))
        x: Tensor = self.projection(self.feature_net(torch.cat((features, rows.flatten(-2)), dim=-1)))
        return x

    def _decode(self, x: Tensor) -> tuple[tuple[Tensor, ...], Tensor]:
        """Logits of each head, and the value."""
        *head_sizes, value_size = self._trunk_sizes
        heads, value_input = self.trunk(x).split((sum(head_sizes), value_size), dim=-1)
        hidden = list(heads.relu().split(head_sizes, dim=-1))
        hidden[Head.BLUEPRINT] = self.head_blueprint(hidden[Head.BLUEPRINT]).relu()
        outputs = zip(self.head_outputs, hidden, strict=True)
        logits = tuple(self.inverse_temperature * output(h) for output, h in outputs)
        return logits, self.value_net(value_input).squeeze(-1)


def _require_sizes(feature_width: int, hidden_width: int, num_layers: int) -> None:
    """Raise ConfigError for an invalid size."""
    sizes = {"feature_width": feature_width, "hidden_width": hidden_width, "num_layers": num_layers}
    for name, size in sizes.items():
        if size < 1:
            raise ConfigError(f"{name} of the policy network is {size}, expected at least 1; raise ppo.{name}.")
    if hidden_width % WIDTH_MULTIPLE:
        nearest = max(WIDTH_MULTIPLE, round(hidden_width / WIDTH_MULTIPLE) * WIDTH_MULTIPLE)
        raise ConfigError(
            f"hidden_width of the policy network is {hidden_width}, expected a multiple of {WIDTH_MULTIPLE}, because "
            f"the value head divides it by 8; set ppo.hidden_width to {nearest}, the nearest that fits."
        )


def _linear(inputs: int, outputs: int) -> nn.Linear:
    """A linear layer of zeros; the constructor of `nn.Linear` would draw from the global generator."""
    layer: nn.Linear = nn.utils.skip_init(nn.Linear, inputs, outputs)
    nn.init.zeros_(layer.weight)
    nn.init.zeros_(layer.bias)
    return layer


@torch.no_grad()
def initialize(network: TamiyoNetwork, run_seed: int) -> None:
    """Draw all weights; equal for equal seeds on every device.

    Linear weights are orthogonal (Saxe et al., 2014) with gain sqrt(2), in the output layers with a small gain: the
    first policy hardly depends on the state and the first value is nearly zero. Each LSTM gate is orthogonal, and the
    forget gate starts open (Jozefowicz et al., 2015). LayerNorms are the identity. All other biases are zero, except
    that of WAIT: a seed must survive a dozen decisions to be fossilized, which a uniform policy hardly ever grants.
    """
    generator = local_generator(run_seed, Stream.POLICY_INIT)
    for parameter in network.parameters():
        nn.init.zeros_(parameter)
    for module in network.modules():
        if isinstance(module, nn.LayerNorm):
            module.reset_parameters()

    def orthogonal(weight: Tensor, gain: float) -> None:
        _fill(weight, lambda fresh: nn.init.orthogonal_(fresh, gain, generator=generator))

    _fill(network.embedding, lambda fresh: nn.init.normal_(fresh, std=EMBEDDING_STD, generator=generator))
    small_gains = dict.fromkeys(network.head_outputs, HEAD_OUTPUT_GAIN) | {network.value_net[-1]: VALUE_OUTPUT_GAIN}
    for module in network.modules():
        if isinstance(module, RecurrentLayer):
            for gate in (*module.input_weight.chunk(4), *module.recurrent_weight.chunk(4)):
                orthogonal(gate, gain=1.0)
            module.bias.chunk(4)[1].fill_(FORGET_BIAS)
        elif isinstance(module, nn.Linear):
            blocks = network.trunk_slices() if module is network.trunk else (slice(None),)
            for rows in blocks:
                orthogonal(module.weight[rows], small_gains.get(module, GAIN))
    op_bias = network.get_parameter(f"head_outputs.{int(Head.OP)}.bias")
    for op, logit in INITIAL_OP_LOGITS.items():
        op_bias[op] = logit


def _fill(weight: Tensor, draw: Callable[[Tensor], Tensor]) -> None:
    """Draw on the CPU, so that the numbers do not depend on the device."""
    weight.copy_(draw(torch.empty(weight.shape)))
