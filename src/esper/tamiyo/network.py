"""The recurrent policy network: features to the logits of eight heads and a value.

    host block ---------------------+
    slot block, seed, place --> +  Linear, LayerNorm, ReLU (--> Linear if the widths differ)           of every slot
                                            |
                        per layer:  x + LayerNorm(LSTM(x, mean of x over slots))    the only recurrent part
                                            |
           x of every slot -----------------+----------------- mean and maximum of x over slots
                |                           |                              |
        ReLU(Linear + Linear) <-------------+                      ReLU(Linear)   value V(s)
                |                                                          |
        slot, style, tempo, alpha_target, alpha_speed, alpha_curve        op
        blueprint: product with the description of each seed

Every slot goes through the same weights, and a blueprint is known by its description (`Menu`), so that one network
serves hosts with any number of slots and any set of blueprints: permuted slots give permuted logits (Zaheer et al.,
"Deep Sets", 2017), and slots and blueprints are pointed at (Vinyals et al., "Pointer Networks", 2015).

`step` computes one step of N hosts, `unroll` sequences [N, T] with gradient; in `unroll` everything but the recurrence
runs over all N * T rows at once.

Shape legend: N = hosts, T = steps, R = any leading axes, D = features, S = slots, B = blueprints, C = columns of a
description, F = feature width, H = recurrent width of a slot, L = recurrent layers, G = 4H (gates i, f, g, o).
"""

import math
from typing import Any, final

import torch
import torch.nn.functional as F
from jaxtyping import Bool, Float, Int
from torch import Tensor, nn

from esper.leyline.errors import ConfigError
from esper.leyline.lifecycle import HEADS, Head, LifecycleOp
from esper.leyline.messages import Hidden, Menu
from esper.leyline.random import Stream, local_generator
from esper.leyline.tensor_dataclass import tensor_dataclass
from esper.tamiyo.features import HOST_FEATURES, SLOT_FEATURES
from esper.tamiyo.heads import Logits


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
OF_SLOT = tuple(head for head in Head if head not in (Head.SLOT, Head.BLUEPRINT, Head.OP))
"""Heads with a fixed number of values, whose logits are given for each slot."""


@tensor_dataclass
class NetworkOutput:
    """Logits of each head for N hosts, value, next recurrent state."""

    logits: Logits
    value: Float[Tensor, " N"]
    hidden: Hidden


@final
class RecurrentLayer(nn.Module):
    """Parameters of one LSTM layer, see `lstm_cell`; a slot gets the mean of all."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.input_weight = nn.Parameter(torch.zeros(4 * width, width))
        self.others_weight = nn.Parameter(torch.zeros(4 * width, width))
        self.recurrent_weight = nn.Parameter(torch.zeros(4 * width, width))
        self.bias = nn.Parameter(torch.zeros(4 * width))
        self.norm = nn.LayerNorm(width)

    def input_gates(self, x: Float[Tensor, "*R S H"]) -> Float[Tensor, "*R S G"]:
        """`W_x x + W_o mean(x) + b`."""
        return F.linear(x, self.input_weight, self.bias) + F.linear(x.mean(dim=-2, keepdim=True), self.others_weight)


@final
class TamiyoNetwork(nn.Module):
    """The policy network; all weights are zero until `initialize`.

    Args:
        menu: slots and blueprints of the hosts; only its numbers of columns decide the shape of the weights.
        feature_width: width of the feature net.
        hidden_width: width of the recurrent state of a slot and of the heads' input; a multiple of 8.
        num_layers: recurrent layers.

    Raises:
        ConfigError: the recurrent width is not a multiple of 8.
    """

    def __init__(self, menu: Menu, *, feature_width: int = 128, hidden_width: int = 128, num_layers: int = 1) -> None:
        super().__init__()
        if hidden_width % WIDTH_MULTIPLE:
            nearest = max(WIDTH_MULTIPLE, round(hidden_width / WIDTH_MULTIPLE) * WIDTH_MULTIPLE)
            raise ConfigError(
                f"hidden_width of the policy network is {hidden_width}, expected a multiple of {WIDTH_MULTIPLE}, "
                f"because the value head divides it by 8; set ppo.hidden_width to {nearest}, the nearest that fits."
            )
        self.feature_width, self.hidden_width, self.num_layers = feature_width, hidden_width, num_layers
        width, half = hidden_width, hidden_width // 2
        place, seed = menu.places.shape[-1], menu.seeds.shape[-1]
        self.host_net = _linear(len(HOST_FEATURES), feature_width)
        self.slot_net = _linear(len(SLOT_FEATURES) + place + seed, feature_width)
        self.norm = nn.LayerNorm(feature_width)
        self.projection = _linear(feature_width, width) if feature_width != width else nn.Identity()
        self.core = nn.ModuleList(RecurrentLayer(width) for _ in range(num_layers))
        self.trunk_slot, self.trunk_others = _linear(width, width), _linear(2 * width, width)
        self.trunk_op = _linear(2 * width, half)
        self.head_op = _linear(half, HEADS[Head.OP].size)
        self.head_slot = _linear(width, 1)
        self.head_values = _linear(width, sum(HEADS[head].size for head in OF_SLOT))
        self.head_blueprint = _linear(width, half)
        self.seed_net = nn.Sequential(_linear(seed, half), nn.ReLU(), _linear(half, half))
        self.value_net = nn.Sequential(
            _linear(2 * width, half), nn.LayerNorm(half), nn.ReLU(), _linear(half, width // 4),
            nn.LayerNorm(width // 4), nn.ReLU(), _linear(width // 4, width // 8),
            nn.ReLU(), _linear(width // 8, 1),
        )  # fmt: skip
        self.inverse_temperature: Tensor
        self.register_buffer("inverse_temperature", torch.ones(()))  # of every head; the larger, the more certain
        self.num_slots, self.num_blueprints = menu.seeds.shape[:2]
        self._places = menu.places
        self._seeds = menu.seeds
        self._held = F.pad(menu.seeds, (0, 0, 1, 0))  # the first row is that of -1, an empty slot

    @property
    def state_width(self) -> int:
        """Width of the recurrent state of a host, all its slots: S H."""
        return self.num_slots * self.hidden_width

    def initial_hidden(self, n: int, device: torch.device) -> Hidden:
        """Zeros, each [L, n, S H]."""
        shape = (self.num_layers, n, self.state_width)
        return Hidden(h=torch.zeros(shape, device=device), c=torch.zeros(shape, device=device))

    def step(
        self, features: Float[Tensor, "N D"], blueprint_index: Int[Tensor, "N S"], hidden: Hidden
    ) -> NetworkOutput:
        """One step of all hosts."""
        x = self._encode(features, blueprint_index)
        states = []
        for layer, h, c in zip(self._layers(), hidden.h.unbind(0), hidden.c.unbind(0), strict=True):
            gates = layer.input_gates(x).flatten(0, 1)
            states.append(lstm_cell(gates, self._of_slots(h), self._of_slots(c), layer.recurrent_weight))
            x = x + layer.norm(states[-1][0]).view_as(x)
        logits, value = self._decode(x)
        h_L, c_L = ([of.unflatten(0, x.shape[:2]).flatten(1) for of in each] for each in zip(*states, strict=True))
        return NetworkOutput(logits=logits, value=value, hidden=Hidden(h=torch.stack(h_L), c=torch.stack(c_L)))

    def unroll(
        self,
        features: Float[Tensor, "N T D"],
        blueprint_index: Int[Tensor, "N T S"],
        hidden0: Hidden,
        reset: Bool[Tensor, "N T"],
    ) -> tuple[Logits, Float[Tensor, "N T"]]:
        """Logits and values of whole sequences; the state of hosts with `reset[n, t]` is zeroed before step t."""
        x = self._encode(features, blueprint_index)
        hosts, slots = x.shape[0], self.num_slots
        reset_of_slots = reset.repeat_interleave(slots, dim=0)
        for layer, h0, c0 in zip(self._layers(), hidden0.h.unbind(0), hidden0.c.unbind(0), strict=True):
            gates = layer.input_gates(x).transpose(1, 2).flatten(0, 1)
            h = lstm_sequence(gates, self._of_slots(h0), self._of_slots(c0), reset_of_slots, layer.recurrent_weight)
            x = x + layer.norm(h).unflatten(0, (hosts, slots)).transpose(1, 2)
        return self._decode(x)

    def _of_slots(self, state: Float[Tensor, "N _"]) -> Float[Tensor, "N_S H"]:
        """The recurrent state with a row for each slot."""
        rows: Tensor = state.unflatten(-1, (self.num_slots, -1)).flatten(0, 1)
        return rows

    def _layers(self) -> list[RecurrentLayer]:
        return [layer for layer in self.core if isinstance(layer, RecurrentLayer)]

    def _encode(self, features: Tensor, blueprint_index: Tensor) -> Float[Tensor, "*R S H"]:
        """What is known of each slot; IndexError for a blueprint above B - 1."""
        host, slots = features.split((len(HOST_FEATURES), self.num_slots * len(SLOT_FEATURES)), dim=-1)
        held = self._held[torch.arange(self.num_slots, device=features.device), blueprint_index + 1]
        own = slots.unflatten(-1, (self.num_slots, -1)) * (blueprint_index >= 0).to(features.dtype)[..., None]
        places = self._places.expand(*own.shape[:-1], -1)
        known = torch.cat((own, held, places), dim=-1)
        x: Tensor = self.projection(self.norm(self.slot_net(known) + self.host_net(host)[..., None, :]).relu())
        return x

    def _decode(self, x: Float[Tensor, "*R S H"]) -> tuple[Logits, Tensor]:
        """Logits of each head, and the value."""
        of_all = torch.cat((x.mean(dim=-2), x.amax(dim=-2)), dim=-1)
        op = self.head_op(self.trunk_op(of_all).relu())
        y = (self.trunk_slot(x) + self.trunk_others(of_all)[..., None, :]).relu()
        values = self.head_values(y).split([HEADS[head].size for head in OF_SLOT], dim=-1)
        pointer = self.head_blueprint(y)[..., None, :] * self.seed_net(self._seeds)
        found = dict(zip(OF_SLOT, values, strict=True)) | {
            Head.SLOT: self.head_slot(y).squeeze(-1),
            Head.BLUEPRINT: pointer.sum(dim=-1) / math.sqrt(pointer.shape[-1]),
            Head.OP: op,
        }
        logits = tuple(self.inverse_temperature * found[head] for head in Head)
        return logits, self.value_net(of_all).squeeze(-1)


def _linear(inputs: int, outputs: int) -> nn.Linear:
    """A linear layer of zeros; the constructor of `nn.Linear` would draw from the global generator."""
    layer = nn.Linear(inputs, outputs, device="meta")
    layer.weight, layer.bias = nn.Parameter(torch.zeros(outputs, inputs)), nn.Parameter(torch.zeros(outputs))
    return layer


@torch.no_grad()
def initialize(network: TamiyoNetwork, run_seed: int) -> None:
    """Draw all weights; equal for equal seeds on every device.

    Linear weights are orthogonal (Saxe et al., 2014) with gain sqrt(2), in the output layers with a small gain: the
    first policy hardly depends on the state and the first value is nearly zero. Each LSTM gate is orthogonal, and the
    forget gate starts open (Jozefowicz et al., 2015). LayerNorms are the identity. All other biases are zero, except
    those of operations (`INITIAL_OP_LOGITS`).
    """
    generator = local_generator(run_seed, Stream.POLICY_INIT)
    for parameter in network.parameters():
        nn.init.zeros_(parameter)
    for module in network.modules():
        if isinstance(module, nn.LayerNorm):
            module.reset_parameters()

    def orthogonal(weight: Tensor, gain: float) -> None:
        """Drawn on the CPU, so that the numbers do not depend on the device."""
        weight.copy_(nn.init.orthogonal_(torch.empty(weight.shape), gain, generator=generator))

    outputs = (network.head_op, network.head_slot, network.head_values, network.head_blueprint)
    small_gains = dict.fromkeys(outputs, HEAD_OUTPUT_GAIN) | {network.value_net[-1]: VALUE_OUTPUT_GAIN}
    for module in network.modules():
        if isinstance(module, RecurrentLayer):
            weights = (module.input_weight, module.others_weight, module.recurrent_weight)
            for gate in (gate for weight in weights for gate in weight.chunk(4)):
                orthogonal(gate, gain=1.0)
            module.bias.chunk(4)[1].fill_(FORGET_BIAS)
        elif isinstance(module, nn.Linear):
            orthogonal(module.weight, small_gains.get(module, GAIN))
    for op, logit in INITIAL_OP_LOGITS.items():
        network.head_op.bias[op] = logit
