"""A module as a graph of PyTorch's own operations, whatever its class: what a program is written from.

    module --> make_fx --> graph of aten operations on (row of parameters, row of buffers, inputs)

Trained weights are slices of one flat row, so tied weights and modules that are used twice need no rule. A slot is the
operation `esper.slot`, a dropout `esper.dropout`, targets as integers `esper.whole`. Operations on constants alone are
computed here. Then parts of the graph that one kernel computes at once are joined (`fusions`).
"""

import math
import operator
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, Final

import torch
from torch import Tensor, fx
from torch._decomp import get_decompositions
from torch._guards import TracingContext, tracing
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx

from esper.kasmina.parameters.dropout import Dropout
from esper.kasmina.parameters.layout import FlatLayout, Template
from esper.leyline.errors import in_words

aten = torch.ops.aten
BATCH: Final = 5
"""Examples of the batch that is traced."""

_library = torch.library.Library("esper", "FRAGMENT")
for _schema, _meaning in (
    ("slot(str name, Tensor x) -> Tensor", lambda name, x: x.clone()),
    ("whole(Tensor x) -> Tensor", lambda x: x.long()),
    ("dropout(Tensor x, float p, bool channels) -> Tensor", lambda x, p, channels: x.clone()),
    ("dropped_attention(Tensor q, Tensor k, Tensor v, float p) -> Tensor", lambda q, k, v, p: v.clone()),
):
    _library.define(_schema)
    _library.impl(_schema.split("(")[0], _meaning, "CompositeExplicitAutograd")

slot = torch.ops.esper.slot
_HOOKS = ("_backward_pre_hooks", "_backward_hooks")


class NoRuleError(ValueError):
    """A module that cannot become a program; the message says which operation, and where."""


_COMPOSED: Final = (
    aten.chunk.default, aten.narrow.default, aten.flatten.using_ints, aten.unflatten.int, aten.expand_as.default,
    aten.relu6.default, aten.relu6_.default, aten.selu.default, aten.selu_.default, aten.softmax.int,
    aten.log_softmax.int, aten.var.dim, aten.std.dim, aten.var_mean.dim, aten.native_channel_shuffle.default,
    aten.tensor_split.sections, aten.broadcast_tensors.default, aten.l1_loss.default, aten.cross_entropy_loss.default,
    aten.poisson_nll_loss.default,
)  # fmt: skip
_WRITTEN_OUT: Final[dict[Any, Callable[..., Any]]] = {
    **{operation: operation.decompose for operation in _COMPOSED},
    **get_decompositions([
        aten.rsub, aten.clamp_min, aten.clamp_min_, aten.clamp_max, aten.clamp_max_, aten.norm, aten.pixel_shuffle,
        aten.pixel_unshuffle, aten.channel_shuffle, aten.glu, aten.tril, aten.triu,
        aten.mse_loss, aten.huber_loss, aten.smooth_l1_loss, aten.binary_cross_entropy_with_logits,
    ]),
}  # fmt: skip
"""Operations that PyTorch itself traces as others, which have rules."""


def trace(template: Template, x: Tensor, *, training: bool, lines: bool = False) -> fx.Graph:
    """The graph of a host or seed for inputs like x [1 or more, ...]: row of parameters, row of buffers, x -> outputs.

    `lines`: note where the user's model calls each operation, which takes a third of the time. The template is bound to
    other tensors afterwards.

    Raises:
        NoRuleError: it cannot be traced, e.g. because its path depends on values.
    """
    module, x = template.module, x[:1].expand(BATCH, *x.shape[1:]).clone()
    for path, layer in module.named_modules():
        if any(getattr(layer, hooks) for hooks in _HOOKS):
            raise NoRuleError(f"{path or 'it'} ({type(layer).__name__}) has backward hooks")
    if template.global_rng:
        raise NoRuleError("it draws from global random generators")
    takes_slots = hasattr(module, "execution_order")

    def run(row: Tensor, buffers: Tensor, x: Tensor) -> Tensor:
        template.assign(template.parameters.split(row), template.buffers.split(buffers))
        out: Tensor = module(x, slot) if takes_slots else module(x)
        return out

    mode = module.training
    template.train(training)
    rows = (torch.zeros(template.parameters.total), torch.zeros(template.buffers.total))
    for row, layout in zip(rows, (template.parameters, template.buffers), strict=True):
        row[~layout.padding_mask] = 0.5  # any value at which nothing is infinite
    try:
        # with a mode in the context PyTorch need not make one for each value, which takes half of the time
        with _dropout_as_operation(), tracing(TracingContext(FakeTensorMode(allow_fallback_kernels=True))):
            module_of_graph = make_fx(
                run, decomposition_table=_WRITTEN_OUT, pre_dispatch=True, record_stack_traces=lines
            )(*rows, x)
    except Exception as error:  # any error of the user's code, which PyTorch itself may run
        if "value out of a tracing tensor" in str(error):
            raise NoRuleError("it looks at values in Python, such as .item() or a condition on a tensor") from error
        raise NoRuleError(f"it cannot be traced: {in_words(error)[:200]}") from error
    finally:
        template.train(mode)
    graph = module_of_graph.graph
    _fold_constants(graph, module_of_graph)
    _name_parts(graph, (template.parameters, template.buffers))
    for fuse in FUSIONS:
        fuse(graph)
    graph.eliminate_dead_code()
    return graph


@contextmanager
def _dropout_as_operation() -> Iterator[None]:
    """Until the end of the context, keyed dropout is one operation of a graph."""
    forward, attend = Dropout.forward, Dropout.attend

    def dropout(self: Dropout, x: Tensor) -> Tensor:
        if not self.training or self.p == 0.0:
            return x
        out: Tensor = torch.ops.esper.dropout(x, self.p, self.channels)
        return out

    def dropped(self: Dropout, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        out: Tensor = torch.ops.esper.dropped_attention(q, k, v, self.p)
        return out

    Dropout.forward, Dropout.attend = dropout, dropped  # type: ignore[method-assign]
    try:
        yield
    finally:
        Dropout.forward, Dropout.attend = forward, attend  # type: ignore[method-assign]


def part(row: Tensor, offset: int, shape: tuple[int, ...]) -> Tensor:
    """The target of a node that is one tensor of a row of parameters or buffers."""
    return row[offset : offset + math.prod(shape)].view(shape)


def _name_parts(graph: fx.Graph, layouts: tuple[FlatLayout, FlatLayout]) -> None:
    """Join what a layout does to a row (one split, then a view) to one node for each tensor."""
    rows = [node for node in graph.nodes if node.op == "placeholder"]
    for node in list(graph.nodes):
        split = node.args[0] if item(node) else None
        if not (isinstance(split, fx.Node) and split.target is aten.split_with_sizes.default and split.args[0] in rows):
            continue
        tensors = layouts[rows.index(split.args[0])].tensors
        spec = next((spec for spec in tensors if spec.part == node.args[1]), None)
        if spec is None:  # padding
            continue
        view = only_user(node, (aten.view.default,)) if len(spec.shape) != 1 else None
        joined(graph, view or node, part, split.args[0], spec.offset, spec.shape)
        if view is not None:
            graph.erase_node(node)


def constant(tensor: Tensor) -> Tensor:
    """The target of a node that is a constant."""
    return tensor


def _fold_constants(graph: fx.Graph, owner: fx.GraphModule) -> None:
    """Compute what depends on constants alone, and leave out conversions to the type that a tensor has."""
    for node in list(graph.nodes):
        if node.target is aten.detach_.default and node.args[0].target is constant:  # of torch.tensor([...])
            node.target = aten.detach.default
        if node.target is aten.to.dtype and node.args[0].meta["val"].dtype is node.args[1]:
            node.replace_all_uses_with(node.args[0])
            graph.erase_node(node)
            continue
        if node.op == "get_attr":
            value: Any = owner
            for name in str(node.target).split("."):
                value = getattr(value, name)
        elif (
            node.op == "call_function"
            and isinstance(node.target, torch._ops.OpOverload)
            and not node.target._schema.is_mutable
            and all(source.target is constant for source in node.all_input_nodes)
            and isinstance(node.meta.get("val"), Tensor)
        ):
            args, kwargs = fx.map_arg((node.args, node.kwargs), lambda source: source.args[0])
            value = node.target(*args, **kwargs)
        else:
            continue
        with graph.inserting_before(node):
            folded = graph.call_function(constant, (value,))
        folded.meta = {**node.meta, "kept": node.op == "get_attr"}
        node.replace_all_uses_with(folded)
        graph.erase_node(node)


# -- fusions -----------------------------------------------------------------------------------------------------------

FUSIONS: list[Callable[[fx.Graph], None]] = []


def only_user(node: fx.Node, targets: tuple[Any, ...]) -> fx.Node | None:
    """The node with one of these targets that alone reads `node`; None if there is no such node."""
    users = list(node.users)
    return users[0] if len(users) == 1 and users[0].op == "call_function" and users[0].target in targets else None


def joined(graph: fx.Graph, last: fx.Node, target: Callable[..., Any], *args: Any) -> fx.Node:
    """Replace the node `last` by one with this target."""
    with graph.inserting_before(last):
        node = graph.call_function(target, args)
    node.meta = dict(last.meta)
    last.replace_all_uses_with(node)
    graph.erase_node(last)
    return node


def item(node: fx.Node) -> bool:
    """Whether a node takes an element of a tuple."""
    return node.target is operator.getitem
