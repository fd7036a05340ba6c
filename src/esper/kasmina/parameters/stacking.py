"""Stacked modules: a module for one host becomes a module for G hosts.

    one host      x [B, C, H, W]                 weight [O, C, k, k]
    stacked       x [B * G, C, H, W]             weight [G, O, C, k, k]         row b * G + g belongs to host g

The rows of all hosts form one batch with the host as the fastest index, so operations on single examples need no
change, and `STACKED` replaces the layers with weights. [B * G, C, H, W] is [B, G * C, H, W] without a copy, so that
convolutions and normalizations of all hosts are one grouped kernel.

A layer whose weights are all frozen stays as it is, with one tensor for all hosts. A module with other weights, or
whose `forward` mixes examples (a trial finds out), runs through `torch.vmap`.
"""

import copy
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from inspect import signature
from typing import Any, NamedTuple, final

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.modules.linear import NonDynamicallyQuantizableLinear
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_flatten, tree_unflatten

from esper.kasmina.blueprints.layers import LayerScale, Positions, TanhScale
from esper.kasmina.hosts.host import Apply, near
from esper.kasmina.parameters.dropout import Draws, KeyedAttention, Moment, can_be_keyed, draw_for, dropout_layers
from esper.kasmina.parameters.initialization import deterministic_build
from esper.kasmina.parameters.layout import StackedTemplate, buffer_layout, drop_batch_counters, parameter_layout
from esper.leyline.errors import StackingError, in_words


def _affine(tensor: Tensor | None) -> Tensor | None:
    return None if tensor is None else tensor.flatten(0, 1)


def _flat_copy(tensor: Tensor | None) -> Tensor | None:
    return None if tensor is None else tensor.reshape(-1).clone()


def _side_by_side(x: Tensor, hosts: int) -> Tensor:
    """[B * G, C, ...] -> [B, G * C, ...]; a view where x is contiguous."""
    return x.reshape(x.shape[0] // hosts, hosts * x.shape[1], *x.shape[2:])


def _by_host(x: Tensor, hosts: int) -> Tensor:
    """[B * G, ...] -> [B, G, ...]."""
    return x.reshape(x.shape[0] // hosts, hosts, *x.shape[1:])


@final
class StackedConv2d(nn.Conv2d):
    """Grouped convolution: each host is a group. A pointwise one is a matrix product, which is faster."""

    def forward(self, x: Tensor) -> Tensor:
        """[B * G, C, H, W] -> [B * G, O, H', W']."""
        hosts, outputs = self.weight.shape[:2]
        if self.kernel_size == (1, 1) and self.stride == (1, 1) and self.padding == (0, 0) and self.groups == 1:
            return self._pointwise(x, hosts, outputs)
        return _grouped(F.conv2d, self, x)

    def _pointwise(self, x: Tensor, hosts: int, outputs: int) -> Tensor:
        rows, channels, height, width = x.shape
        weight = self.weight.reshape(hosts, outputs, channels)
        y = torch.matmul(weight, x.reshape(rows // hosts, hosts, channels, height * width))
        if self.bias is not None:
            y = y + self.bias[:, :, None]
        return y.view(rows, outputs, height, width)


@final
class StackedConv1d(nn.Conv1d):
    """Grouped convolution: each host is a group."""

    def forward(self, x: Tensor) -> Tensor:
        """[B * G, C, T] -> [B * G, O, T']."""
        return _grouped(F.conv1d, self, x)


def _grouped(convolve: Callable[..., Tensor], layer: nn.Conv1d | nn.Conv2d, x: Tensor) -> Tensor:
    hosts, outputs = layer.weight.shape[:2]
    weight, bias, groups = layer.weight.flatten(0, 1), _affine(layer.bias), hosts * layer.groups
    y = convolve(_side_by_side(x, hosts), weight, bias, layer.stride, layer.padding, layer.dilation, groups)
    return y.reshape(x.shape[0], outputs, *y.shape[2:])


@final
class StackedLinear(nn.Linear):
    """Batched matrix product: each host is a matrix."""

    def forward(self, x: Tensor) -> Tensor:
        """[B * G, ..., D] -> [B * G, ..., O]."""
        return _linear(x, self.weight, self.bias)


def _linear(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """[B * G, ..., D] -> [B * G, ..., O] with a weight [G, O, D] and a bias [G, O]."""
    hosts, outputs, inputs = weight.shape
    x_GRD = x.reshape(x.shape[0] // hosts, hosts, -1, inputs).transpose(0, 1).reshape(hosts, -1, inputs)
    weight_GDO = weight.transpose(1, 2)
    y_GRO = torch.bmm(x_GRD, weight_GDO) if bias is None else torch.baddbmm(bias[:, None], x_GRD, weight_GDO)
    y = y_GRO.view(hosts, x.shape[0] // hosts, -1, outputs).transpose(0, 1)
    return y.reshape(*x.shape[:-1], outputs)


@final
class StackedAttention(KeyedAttention):
    """Batched matrix products, and one attention over the rows of all hosts. `out_proj` is a `StackedLinear`."""

    def _linear(self, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        # without an axis of hosts if all of them share it, because it is frozen
        return _linear(x, weight, bias) if weight.dim() == 3 else F.linear(x, weight, bias)


@final
class StackedGroupNorm(nn.GroupNorm):
    """Group normalization over hosts x groups."""

    def forward(self, x: Tensor) -> Tensor:
        """[B * G, C, ...] -> the same."""
        hosts = self.weight.shape[0]
        y = F.group_norm(
            _side_by_side(x, hosts), hosts * self.num_groups, _affine(self.weight), _affine(self.bias), self.eps
        )
        return y.view(x.shape)


@final
class StackedLayerNorm(nn.LayerNorm):
    """Layer normalization, then each host's own scale and shift."""

    def forward(self, x: Tensor) -> Tensor:
        """[B * G, ..., D] -> the same."""
        hosts = self.weight.shape[0]
        between = (1,) * (x.dim() - 1 - len(self.normalized_shape))
        normed = _by_host(F.layer_norm(x, self.normalized_shape, eps=self.eps), hosts)
        scaled = normed * self.weight.view(hosts, *between, *self.normalized_shape)
        if self.bias is not None:
            scaled = scaled + self.bias.view(hosts, *between, *self.normalized_shape)
        return scaled.view(x.shape)


@final
class StackedBatchNorm(nn.BatchNorm2d):
    """Batch normalization over hosts x channels."""

    def forward(self, x: Tensor) -> Tensor:
        """[B * G, C, ...] -> the same; train mode updates the running statistics of each host."""
        hosts = self.weight.shape[0]
        mean, var = _flat_copy(self.running_mean), _flat_copy(self.running_var)  # rows are not contiguous
        batch_statistics = self.training or mean is None
        y = F.batch_norm(
            _side_by_side(x, hosts),
            mean,
            var,
            _affine(self.weight),
            _affine(self.bias),
            batch_statistics,
            self.momentum if self.momentum is not None else 0.0,
            self.eps,
        )
        if self.training and mean is not None and var is not None:
            assert self.running_mean is not None
            assert self.running_var is not None
            self.running_mean.copy_(mean.view_as(self.running_mean))
            self.running_var.copy_(var.view_as(self.running_var))
        return y.view(x.shape)


@final
class StackedEmbedding(nn.Embedding):
    """Each host's own table."""

    def forward(self, x: Tensor) -> Tensor:
        """[B * G, ...] -> [B * G, ..., D]."""
        hosts = self.weight.shape[0]
        numbers = torch.arange(hosts, device=x.device).view(-1, *(1,) * (x.dim() - 1))
        # by two indices, because rows of weights cannot be flattened into one table without a copy
        return _padded(self.weight[numbers, _by_host(x, hosts)].flatten(0, 1), x, self.padding_idx)


def _padded(h: Tensor, x: Tensor, padding_idx: int | None) -> Tensor:
    """Rows of a table for the indices x; that of the padding sends no gradient."""
    return h if padding_idx is None else torch.where((x == padding_idx)[..., None], h.detach(), h)


@final
class _UntrainedPadding(TorchFunctionMode):
    """Embeddings inside `torch.vmap`, which forgets that the row of the padding is not trained; whoever calls them."""

    def __torch_function__(
        self,
        function: Callable[..., Any],
        types: object,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:  # noqa: ANN401 -- what the function returns
        if function is not F.embedding:
            return function(*args, **(kwargs or {}))
        given = _EMBEDDING.bind(*args, **(kwargs or {})).arguments
        padding_idx, rows = given.pop("padding_idx", None), len(given["weight"])
        return _padded(F.embedding(**given), given["input"], None if padding_idx is None else padding_idx % rows)


_EMBEDDING = signature(F.embedding)


@final
class StackedPositions(Positions):
    """Each host's own positions."""

    def forward(self, h: Tensor) -> Tensor:
        """[B * G, T, D] -> the same."""
        return (_by_host(h, self.weight.shape[0]) + self.weight[:, : h.shape[1]]).view(h.shape)


@final
class StackedLayerScale(LayerScale):
    """One factor per host and channel."""

    def forward(self, h: Tensor) -> Tensor:
        """[B * G, C, H, W] or [B * G, T, D] -> the same."""
        gamma = self.gamma[:, None] if h.dim() == 3 else self.gamma[:, :, None, None]
        return (_by_host(h, gamma.shape[0]) * gamma).view(h.shape)


@final
class StackedTanhScale(TanhScale):
    """One bounded factor per host."""

    def forward(self, h: Tensor) -> Tensor:
        """[B * G, ...] -> the same."""
        hosts = self.strength.shape[0]
        factor = torch.tanh(self.strength).view(hosts, *(1,) * (h.dim() - 1))
        return (_by_host(h, hosts) * factor).view(h.shape)


STACKED: dict[type[nn.Module], type[nn.Module]] = {
    nn.Conv1d: StackedConv1d,
    nn.Conv2d: StackedConv2d,
    nn.Linear: StackedLinear,
    NonDynamicallyQuantizableLinear: StackedLinear,  # `out_proj` of attention
    nn.MultiheadAttention: StackedAttention,
    KeyedAttention: StackedAttention,
    nn.GroupNorm: StackedGroupNorm,
    nn.LayerNorm: StackedLayerNorm,
    nn.BatchNorm1d: StackedBatchNorm,
    nn.BatchNorm2d: StackedBatchNorm,
    nn.Embedding: StackedEmbedding,
    Positions: StackedPositions,
    LayerScale: StackedLayerScale,
    TanhScale: StackedTanhScale,
}
"""The stacked class of each class of layers with weights: the same object with another `forward`."""


def _same_for_all(layer: nn.Module) -> bool:
    """Whether all hosts share the weights of a layer and of those in it, because they are frozen."""
    shared = not any(p.requires_grad for p in layer.parameters()) and any(True for _ in layer.parameters())
    return shared and not any(b.is_floating_point() for b in layer.buffers())


def _unknown_layer(layer: nn.Module) -> bool:
    """Whether the layer has weights without a stacked class, or an option that its stacked class does not support."""
    if _same_for_all(layer):
        return False
    owns = any(True for _ in layer.named_parameters(recurse=False))
    owns |= any(b.is_floating_point() for _, b in layer.named_buffers(recurse=False))
    if type(layer) not in STACKED:
        return owns
    zero_padded = not isinstance(layer, nn.Conv1d | nn.Conv2d) or layer.padding_mode == "zeros"
    norm = isinstance(layer, nn.GroupNorm | nn.LayerNorm | nn.BatchNorm1d | nn.BatchNorm2d)
    special = isinstance(layer, nn.Embedding) and (
        layer.max_norm is not None or layer.scale_grad_by_freq or layer.sparse
    )
    special |= type(layer) is nn.MultiheadAttention and not can_be_keyed(layer)
    return not zero_padded or special or (norm and layer.weight is None)


class _InsideVmap(torch.autograd.Function):
    """A function of tensors that does something of its own inside `torch.vmap` over hosts."""

    @staticmethod
    def forward(function: Callable[..., Any], *tensors: Tensor) -> Any:  # noqa: ANN401 -- what it returns
        return function(*tensors)

    @staticmethod
    def setup_context(ctx: Any, inputs: object, output: object) -> None:  # noqa: ANN401
        """Nothing: `vmap` computes with operations that autograd records."""


class _Together(_InsideVmap):
    """A function of the rows [B * G, ...] of all hosts, such as a slot."""

    @staticmethod
    def vmap(
        info: Any,  # noqa: ANN401 -- of PyTorch
        in_dims: tuple[None, int | None],
        function: Callable[[Tensor], Tensor],
        h: Tensor,
    ) -> tuple[Tensor, int]:
        h_BG = h[:, None].expand(-1, info.batch_size, *h.shape[1:]) if in_dims[1] is None else h.movedim(in_dims[1], 1)
        return function(h_BG.flatten(0, 1)).unflatten(0, (-1, info.batch_size)), 1


class _EachAlone(_InsideVmap):
    """A function that gets the tensors of one host after another."""

    @staticmethod
    def vmap(
        info: Any,  # noqa: ANN401 -- of PyTorch
        in_dims: tuple[int | None, ...],
        function: Callable[..., tuple[Tensor, ...]],
        *tensors: Tensor,
    ) -> tuple[tuple[Tensor, ...], tuple[int, ...]]:
        given = list(zip(tensors, in_dims[1:], strict=True))
        alone = [function(*(t if d is None else t.select(d, g) for t, d in given)) for g in range(info.batch_size)]
        outputs = tuple(map(torch.stack, zip(*alone, strict=True)))
        return outputs, (0,) * len(outputs)


class _HostByHost(nn.RNNBase):
    """In front of a class of recurrent layers, which `torch.vmap` does not support: one host after another."""

    _plain = False

    def forward(self, *args: Any) -> Any:  # noqa: ANN401 -- those of the layer
        if self._plain:
            return super().forward(*args)
        names, weights = zip(*_own(self, "_parameters"), strict=True)
        given, form = tree_flatten(args)
        forms = []

        def run(*tensors: Tensor) -> tuple[Tensor, ...]:
            bound, inputs = dict(zip(names, tensors[: len(names)], strict=True)), tensors[len(names) :]
            self._plain = True
            try:
                outputs = torch.func.functional_call(self, bound, tree_unflatten(inputs, form))
            finally:
                self._plain = False
            flat, of_outputs = tree_flatten(outputs)
            forms.append(of_outputs)
            return tuple(flat)

        flat = _EachAlone.apply(run, *weights, *given)  # type: ignore[no-untyped-call]
        return tree_unflatten(flat, forms[0])


@final
class Vmapped(nn.Module):
    """Any module for many hosts through `torch.vmap`, which is slower than stacked layers.

    A function among the arguments, the slots of a host, sees the rows of all hosts.
    """

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self._modules.update(module._modules)  # the paths of the original, to which weights are bound
        self._parameters.update(module._parameters)
        self._buffers.update(module._buffers)
        single = _copied(module)
        _without_fast_paths(single)
        for layer in single.modules():
            if can_be_keyed(layer):
                layer.__class__ = KeyedAttention  # the same operations one by one
            elif isinstance(layer, nn.RNNBase):
                layer.__class__ = type(type(layer).__name__, (_HostByHost, type(layer)), {})
        self._single = [single]  # in a list, so that it is not a submodule
        self._dropouts = dropout_layers(module), dropout_layers(single)

    @property
    def single(self) -> nn.Module:
        """The module that runs inside `torch.vmap`."""
        return self._single[0]

    def _one(
        self, shared: dict[str, Tensor], tensors: dict[str, Tensor], host: Tensor, x: Tensor, *functions: Apply
    ) -> Tensor:
        """The module of one host."""
        ours, inner = self._dropouts
        if ours and ours[0].draws is not None:
            draw_for(inner, ours[0].draws.of(host[None]))
        arguments = (x, *map(_together, functions))
        # each path of a tied weight is given
        out: Tensor = torch.func.functional_call(self.single, {**shared, **tensors}, arguments, tie_weights=False)
        return out

    def train(self, mode: bool = True) -> "Vmapped":
        """Set the mode, also of the module that runs."""
        self.single.train(mode)
        super().train(mode)
        return self

    def forward(self, x: Tensor, *functions: Apply) -> Tensor:
        """[B * G, ...] -> [B * G, ...]."""
        tensors = {**dict(_own(self, "_parameters")), **dict(_own(self, "_buffers"))}
        # frozen parameters, and constants that are not floats
        shared = {name: t for name, t in tensors.items() if isinstance(t, nn.Parameter) or not t.is_floating_point()}
        # vmap would update a copy of running statistics that are not contiguous
        stacked = {name: tensor.contiguous() for name, tensor in tensors.items() if name not in shared}
        hosts = next(iter(stacked.values())).shape[0] if stacked else 1
        x_BG = x.unflatten(0, (-1, hosts))
        draws = self._dropouts[0][0].draws if self._dropouts[0] else None
        numbers = torch.arange(hosts, device=x.device) if draws is None else draws.hosts
        run: Any = torch.vmap(self._one, in_dims=(None, 0, 0, 1, *(None for _ in functions)), out_dims=1)
        # vmap supports the operations of which MATH consists
        with sdpa_kernel(SDPBackend.MATH), _UntrainedPadding(), warnings.catch_warnings():
            # that PyTorch runs an operation one host after another; no user can do anything about it
            warnings.filterwarnings("ignore", "There is a performance drop because we have not yet implemented")
            y: Tensor = run(shared, stacked, numbers, x_BG, *functions)
        if draws is not None:
            inner = self._dropouts[1][0].draws
            draws.count = draws.count if inner is None else inner.count
        if self.training:
            for name, buffer in _own(self, "_buffers"):
                if name in stacked and stacked[name] is not buffer:
                    buffer.copy_(stacked[name])
        return y.flatten(0, 1)


def _together(apply: Apply) -> Apply:
    """The slots inside `torch.vmap`."""

    def together(slot_id: str, h: Tensor) -> Tensor:
        out: Tensor = _Together.apply(partial(apply, slot_id), h)  # type: ignore[no-untyped-call]
        return out

    return together


def _own(module: nn.Module, kind: str) -> list[tuple[str, Tensor]]:
    """(path, tensor) of all bound tensors, of tied ones with each of their paths."""
    return [
        (f"{prefix}.{leaf}" if prefix else leaf, tensor)
        for prefix, layer in module.named_modules()
        for leaf, tensor in getattr(layer, kind).items()
        if tensor is not None
    ]


def _copied(module: nn.Module) -> nn.Module:
    """A copy; raises StackingError where the module keeps what cannot be copied, such as features of its last pass."""
    try:
        return copy.deepcopy(module)
    except Exception as error:  # any error of the user's code
        raise StackingError(
            f"{type(module).__name__} cannot be copied by copy.deepcopy ({in_words(error)}); use executor 'streamed'."
        ) from error


def vmapped(module: nn.Module) -> nn.Module:
    """The module for many hosts by `torch.vmap`."""
    return Vmapped(_copied(module))


def can_stack_layers(module: nn.Module) -> bool:
    """Whether `STACKED` has every layer with weights."""
    return not any(_unknown_layer(layer) for layer in module.modules())


def stack_layers(module: nn.Module) -> nn.Module:
    """The module for many hosts with the layers of `STACKED`; inner layers that it lacks run through `torch.vmap`."""
    stacked = _copied(module)
    _stack_in_place(stacked)
    _without_fast_paths(stacked)
    return stacked


def _without_fast_paths(module: nn.Module) -> None:
    """Let the encoders of PyTorch use their layers in evaluation too, instead of the weights themselves; in place."""
    for layer in module.modules():
        if isinstance(layer, nn.TransformerEncoderLayer):
            layer.activation_relu_or_gelu = 0
        elif isinstance(layer, nn.TransformerEncoder):
            layer.use_nested_tensor = False


def _stack_in_place(module: nn.Module) -> None:
    if _same_for_all(module):
        return
    if type(module) in STACKED:
        module.__class__ = STACKED[type(module)]
    for name, layer in module._modules.items():
        if layer is not None and _unknown_layer(layer):
            module._modules[name] = Vmapped(layer)
        elif layer is not None:
            _stack_in_place(layer)


_HOSTS, _EXAMPLES = 3, 4
HOST_EXAMPLES = _HOSTS * _EXAMPLES
"""How many examples the trial of a host takes."""
Way = Callable[[nn.Module], nn.Module]
"""A function from a module to its stacked module with the same parameter names; the module is not changed."""


class _Trial(NamedTuple):
    """Inputs [examples, hosts, ...], parameters and buffers [hosts, ...], and whether the module has slots."""

    x: Tensor
    rows: Tensor
    state: Tensor
    slots: bool = False

    def arguments(self, rows: int) -> tuple[Apply, ...]:
        """What a module gets besides so many inputs."""
        return (_unchanged(rows),) if self.slots else ()


def way_to_stack(name: str, module: nn.Module, example: Tensor) -> Way:
    """How to stack modules of the blueprint `name`: with stacked layers, or else with `torch.vmap`.

    A way is used if it reproduces outputs, gradients and buffers of `module` host by host, on random examples like
    `example` [1, ...], in train and in evaluation mode. Raises StackingError if neither does.
    """
    ways: tuple[Way, ...] = (stack_layers, vmapped) if can_stack_layers(module) else (vmapped,)
    generator = torch.Generator().manual_seed(0)
    rows = torch.randn(_HOSTS, parameter_layout(module).total, generator=generator)
    state = torch.rand(_HOSTS, buffer_layout(module).total, generator=generator) + 0.5
    trial = _Trial(torch.randn(_EXAMPLES, _HOSTS, *example.shape[1:], generator=generator), rows, state)
    for way in ways:
        if (problem := _problem(way(module), module, trial)) is None:
            return way
    raise StackingError(f"blueprint {name!r} {problem}; use executor 'streamed'.")


def stacked_host(build: Callable[[], nn.Module], examples: Tensor) -> nn.Module:
    """The module for many hosts, of a host from `build`: of stacked layers, or else the whole by `torch.vmap`.

    It reproduces three hosts one by one on inputs like `examples` [HOST_EXAMPLES, ...], on the CPU; raises
    StackingError if neither does.
    """
    builds = [deterministic_build(build, seed) for seed in range(_HOSTS)]
    for module in builds:
        drop_batch_counters(module)
    layout, buffers, generator = parameter_layout(builds[0]), buffer_layout(builds[0]), torch.Generator().manual_seed(0)
    rows = torch.stack([layout.pack(dict(module.named_parameters())) for module in builds])
    state = torch.stack([buffers.pack(dict(module.named_buffers())) for module in builds])
    x = examples
    if x.is_floating_point():  # normalization of constant examples has no meaningful gradient
        x = x + torch.randn(x.shape, generator=generator)
    trial = _Trial(
        x=x.unflatten(0, (_EXAMPLES, _HOSTS)),
        rows=rows + 0.02 * torch.randn(rows.shape, generator=generator),  # a weight that starts at zero hides errors
        state=state + 0.1 * torch.rand(state.shape, generator=generator),
        slots=True,
    )
    problems = []
    for way in (stack_layers, vmapped):
        stacked = way(builds[0])
        # a ReLU of a large network may get inputs so close to zero that float32 rounds them to either side
        problem = _problem(stacked, builds[0], trial)
        if problem is None or _problem(stacked, builds[0], trial, torch.float64) is None:
            return stacked
        problems.append(problem)
    raise StackingError(f"the host {problems[0]}; with torch.vmap it {problems[1]}; use executor 'streamed'.")


def _unchanged(rows: int) -> Apply:
    """Slots without seeds, which insist on features of all rows: inside `torch.vmap` they would see one host's."""

    def apply(slot_id: str, h: Tensor) -> Tensor:
        if h.shape[0] != rows:
            raise StackingError(f"slot {slot_id!r} has features {tuple(h.shape)}; expected {rows} rows.")
        return h

    return apply


def _problem(stack: nn.Module, module: nn.Module, trial: _Trial, dtype: torch.dtype = torch.float32) -> str | None:
    """Why the stacked module does not give each of three hosts the results of the module alone; None if it does.

    It is the error and its layer, or the first layer whose outputs differ, in this precision.
    """
    layout, buffers = parameter_layout(module), buffer_layout(module)
    stacked, alone = StackedTemplate(_copied(stack).to(dtype), layout, buffers), _copied(module).to(dtype)
    x = trial.x.to(dtype) if trial.x.is_floating_point() else trial.x
    trial = trial._replace(x=x, rows=trial.rows.to(dtype), state=trial.state.to(dtype))
    for training in (True, False):
        with _watched(stacked.module) as (running, together):
            try:
                results, pull = _trial_of_all(stacked, trial, training)
            except Exception as error:  # what a forward pass raises that needs one host, or more than vmap supports
                where = f" in layer {running[-1]!r}" if running and running[-1] else ""
                message = str(error).strip().split("\n")[0].rstrip(".")
                return f"fails for many hosts at once ({type(error).__name__}{where}: {message})"
        for g in range(_HOSTS):
            params = layout.unpack(trial.rows[g])
            state = {name: value.clone() for name, value in buffers.unpack(trial.state[g]).items()}  # each its version
            with _watched(alone.train(training)) as (_, single):
                expected = _trial_of_one(alone, g, params, state, trial, pull)
            if not all(near(ours[g], theirs) for ours, theirs in zip(results, expected, strict=True)):
                other = "gives other results for many hosts at once than for one,"
                for path, want in single.items():
                    if path and path in together and not near(together[path][g::_HOSTS], want):
                        return f"{other} first in layer {path!r} ({type(module.get_submodule(path)).__name__})"
                return (f"{other} in {type(module).__name__} itself (an operation across examples, or weights used "
                        "outside of a layer)")  # fmt: skip
    return None


@contextmanager
def _watched(module: nn.Module) -> Iterator[tuple[list[str], dict[str, Tensor]]]:
    """The paths of the layers that run now, the innermost last, and the outputs of those that have ended."""
    running: list[str] = []
    outputs: dict[str, Tensor] = {}

    def begin(path: str, *_: object) -> None:
        running.append(path)

    def end(path: str, layer: nn.Module, args: object, y: object) -> None:
        running.pop()
        if isinstance(y, Tensor) and not torch._C._functorch.is_batchedtensor(y):
            outputs.setdefault(path, y.detach())

    layers = dict(module.named_modules())
    for at, wrapped in list(layers.items()):
        if isinstance(wrapped, Vmapped):
            layers |= {
                ".".join(filter(None, (at, path))): layer for path, layer in wrapped.single.named_modules() if path
            }
    hooks = []
    for path, layer in layers.items():
        hooks += [
            layer.register_forward_pre_hook(partial(begin, path)),
            layer.register_forward_hook(partial(end, path)),
        ]
    try:
        yield running, outputs
    finally:
        for hook in hooks:
            hook.remove()


def _trial_of_all(stacked: StackedTemplate, trial: _Trial, training: bool) -> tuple[list[Tensor], Tensor]:
    """Outputs, gradients of inputs and parameters, and buffers after a pass; the host is the first axis of each.

    Second, the gradient of the outputs that was used.
    """
    leaves = tuple(view.requires_grad_() for view in stacked.views(trial.rows))
    moved = stacked.buffer_views(trial.state.clone())
    stacked.train(training)
    stacked.assign(leaves, moved)
    draw_for(stacked.dropouts, Draws(Moment(0), torch.arange(_HOSTS), 0))
    x = _trainable(trial.x)
    y = stacked(x.flatten(0, 1), *trial.arguments(HOST_EXAMPLES)).unflatten(0, (_EXAMPLES, _HOSTS))
    pull = torch.randn(y.shape, generator=torch.Generator().manual_seed(1))
    of_x, of_leaves = _gradients(y, pull, x, leaves)
    return [y.detach().transpose(0, 1), *(g.transpose(0, 1) for g in of_x), *of_leaves, *moved], pull


def _trial_of_one(
    alone: nn.Module, g: int, params: dict[str, Tensor], moved: dict[str, Tensor], trial: _Trial, pull: Tensor
) -> list[Tensor]:
    """The same for one host, by the module itself."""
    leaves = {name: value.clone().requires_grad_() for name, value in params.items()}
    draw_for(dropout_layers(alone), Draws(Moment(0), torch.tensor([g]), 0))
    x = _trainable(trial.x[:, g])
    y = torch.func.functional_call(alone, {**leaves, **moved}, (x, *trial.arguments(_EXAMPLES)))
    of_x, of_leaves = _gradients(y, pull[:, g], x, tuple(leaves.values()))
    return [y.detach(), *of_x, *of_leaves, *moved.values()]


def _trainable(x: Tensor) -> Tensor:
    """A copy that records gradients, unless it holds whole numbers (tokens)."""
    return x.clone().requires_grad_(x.is_floating_point())


def _gradients(y: Tensor, pull: Tensor, x: Tensor, leaves: tuple[Tensor, ...]) -> tuple[list[Tensor], list[Tensor]]:
    """The gradients of the inputs (none of tokens) and of the parameters."""
    inputs = (x,) if x.requires_grad else ()
    found = torch.autograd.grad((y * pull).sum(), (*inputs, *leaves), materialize_grads=True)
    return list(found[: len(inputs)]), list(found[len(inputs) :])
