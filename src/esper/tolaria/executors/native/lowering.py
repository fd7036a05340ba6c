"""From graphs to instructions: values, rules of operations, and the backward pass.

A rule writes the instructions of one aten operation, and registers what writes its backward pass:

    @rule("relu.default")
    def relu(low, x):
        y = low.like(x)
        low.emit(Operation.ACTIVATE, x.rows, y.rows, sizes=(x.size,), flag=RELU)

        def backward(g):                       # rows of the gradient of y; shared with other values
            g = low.own(g)                     # these may be overwritten
            low.emit(Operation.ACTIVATE_BACKWARD, y.rows, g, sizes=(x.size,), flag=RELU)
            low.give(x, g)                     # adds to the gradient of x

        return low.result(y, backward, x)      # `low.in_place` and `low.afresh` make such functions

A rule gets the arguments of the operation: each tensor is a `Value` (activations of a batch), a `Weight` (numbers of a
parameter or buffer) or a constant Tensor; `low.value` makes a `Value` of any of them. What a rule cannot do it refuses
with `low.refuse`.
"""

import math
import operator
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache
from hashlib import sha256
from typing import Any, Final, TypeVar, final

import torch
from torch import Tensor, fx

from esper.tolaria.executors.native.program import NUM_WORKING, Assembler, Operation, Place, Rows
from esper.tolaria.executors.native.trace import BATCH, NoRuleError, constant, part

AXES: Final = 6
"""Most axes of an elementwise operation, as in tensors.h."""
KEYS: Final = NUM_WORKING + 5
"""The space of keys of masks of dropout, as in lanes.h."""
Dims = tuple[int, ...]


@dataclass(frozen=True, eq=False)
class Value:
    """Activations of a batch, as rows of lanes.

    Attributes:
        rows: one for each number of an example, in row-major order of `dims`.
        shape: as PyTorch sees it, with BATCH examples.
        axis: the axis of the examples; None: the same for all examples (made of parameters alone). Where a reshape has
            merged axes, its size is `outer` * BATCH * inner.
        needs: whether its gradient is needed.
    """

    rows: Rows
    shape: Dims
    axis: int | None = 0
    outer: int = 1
    needs: bool = False

    @property
    def dims(self) -> Dims:
        """The shape of one example, with an axis for each of `shape`."""
        if self.axis is None:
            return self.shape
        return (*self.shape[: self.axis], self.shape[self.axis] // BATCH, *self.shape[self.axis + 1 :])

    @property
    def size(self) -> int:
        """Rows."""
        return math.prod(self.dims)

    @property
    def leads(self) -> bool:
        """Whether the first axis is that of the examples alone, as layers expect it."""
        return self.axis == 0 and self.shape[0] == BATCH

    @property
    def features(self) -> Dims:
        """The shape of one example without the axis of the examples; of a value that `leads`."""
        return self.shape[1:]


@dataclass(frozen=True, eq=False)
class Mask(Value):
    """A value that PyTorch sees as true or false: 1 or 0."""


@dataclass(frozen=True, eq=False)
class Weight:
    """Numbers of a row of parameters or buffers, consecutive and in row-major order of `shape`.

    `grad`: where their gradient belongs; None if they are not trained.
    """

    place: Place
    shape: Dims
    grad: Place | None = None

    @property
    def size(self) -> int:
        """Numbers."""
        return math.prod(self.shape)

    def part(self, offset: int, shape: Dims) -> "Weight":
        """Numbers from `offset` on."""
        size, places = math.prod(shape), (self.place, self.grad)
        place, grad = (p and Place(p.space, p.offset + offset, size) for p in places)
        assert place is not None
        return Weight(place, shape, grad)


Backward = Callable[[Rows], None]
Rule = Callable[..., Any]
R = TypeVar("R", bound=Rule)
RULES: dict[Any, Rule] = {}
"""By the target of a node."""


def rule(*targets: Any) -> Callable[[R], R]:
    """Register a rule for aten operations by name, such as "add.Tensor", and for targets of fusions, as they are."""

    def register(found: R) -> R:
        for target in targets:
            RULES[operator.attrgetter(target)(torch.ops.aten) if isinstance(target, str) else target] = found
        return found

    return register


def strides_of(dims: Sequence[int]) -> list[int]:
    """Of rows in row-major order; 0 along axes of size 1, which broadcast."""
    strides, step = [0] * len(dims), 1
    for k in reversed(range(len(dims))):
        strides[k] = step if dims[k] > 1 else 0
        step *= dims[k]
    return strides


def loop(dims: Sequence[int], *strides: Sequence[int]) -> tuple[int, ...]:
    """Sizes of an instruction that visits positions of `dims`: axes that follow each other in all operands are one.

    Raises:
        NoRuleError: too many axes remain.
    """
    return _loop(tuple(dims), *map(tuple, strides))


@lru_cache(maxsize=4096)
def _loop(dims: Dims, *strides: Dims) -> tuple[int, ...]:
    axes: list[list[int]] = []
    for size, *steps in zip(dims, *strides, strict=True):
        if size == 1:
            continue
        if axes and all(before == step * size for before, step in zip(axes[-1][1:], steps, strict=True)):
            axes[-1] = [axes[-1][0] * size, *steps]
        else:
            axes.append([size, *steps])
    axes = axes or [[1, *(1 for _ in strides)]]
    if len(axes) > AXES:
        raise NoRuleError(f"an operation over {len(axes)} axes")
    padded = [axis + [0] * (AXES - len(axes)) for axis in (list(x) for x in zip(*axes, strict=True))]
    return (len(axes), *(number for axis in padded for number in axis))


@final
@dataclass(kw_only=True)
class Lowering(Assembler):
    """Writes the instructions of graphs.

    Attributes:
        trainable: a backward pass will follow. constants: numbers that all hosts share, and their space.
        slot: the number of whose random numbers masks of dropout are made (`Draws`).
    """

    trainable: bool
    constants: "Constants"
    slot: int = 0
    needs: bool = True
    """Whether gradients are enabled in the part of the graph that is being written."""
    _tape: list[tuple[Value, Backward]] = field(default_factory=list)
    _grads: dict[int, Rows] = field(default_factory=dict)
    _users: dict[int, int] = field(default_factory=dict)
    _running: int = -1
    """The first row of the gradient whose rule is being written: the rule may still read it."""
    _spread: dict[tuple[Place, Place | None], Value] = field(default_factory=dict)

    # -- for rules -----------------------------------------------------------------------------------------------------

    def refuse(self, why: str) -> NoRuleError:
        """The error of a rule that cannot do something."""
        return NoRuleError(why)

    def value(self, x: object) -> Value:
        """A value, parameter, buffer, constant tensor or number as a value."""
        if isinstance(x, Value):
            return x
        if isinstance(x, Weight):
            return self._spread_out(x.place, x.shape, x.grad)
        if isinstance(x, bool | int | float):
            x = torch.tensor(float(x))
        if not isinstance(x, Tensor):
            raise self.refuse(f"an argument that is {type(x).__name__}")
        return self._spread_out(self.constants.place(x), tuple(x.shape), None)

    def number(self, x: object) -> float | None:
        """A number, also if it comes as a tensor; None for anything else."""
        if isinstance(x, Tensor) and x.numel() == 1:
            return float(x)
        return float(x) if isinstance(x, bool | int | float) else None

    def weight(self, x: object, *shape: int) -> Weight:
        """A parameter, buffer or constant whose numbers a kernel reads as they are; it must have this shape."""
        if isinstance(x, Tensor):
            x = Weight(self.constants.place(x), tuple(x.shape))
        if not isinstance(x, Weight):
            raise self.refuse("weights that are computed in the forward pass")
        if x.shape != shape:
            raise self.refuse(f"weights of shape {x.shape}, expected {shape}")
        return x

    def trains(self, *of: Value | Weight | None) -> bool:
        """Whether the gradient of any of these is needed."""
        if not (self.trainable and self.needs):
            return False
        return any(x.needs if isinstance(x, Value) else x is not None and x.grad is not None for x in of)

    def grad_of(self, weight: Weight | None) -> Place | None:
        """Where the gradient of a weight belongs; None if it is not trained."""
        return weight.grad if weight is not None and self.trainable and self.needs else None

    def rows(self, count: int) -> Rows:
        """New rows, at least one: kernels and the placement of rows do not expect none."""
        if count < 1:
            raise self.refuse("a tensor without numbers")
        return super().rows(count)

    def like(self, x: Value, shape: Dims | None = None) -> Value:
        """New rows with the shape of another value, or another one whose examples lie along the same axis."""
        y = replace(x, shape=x.shape if shape is None else shape, needs=False)
        return replace(y, rows=self.rows(y.size))

    def make(self, *features: int) -> Value:
        """New rows for values [BATCH, *features]."""
        return Value(self.rows(math.prod(features)), (BATCH, *features))

    def leading(self, x: object) -> Value:
        """A value whose first axis is that of the examples alone."""
        found = self.value(x)
        if not found.leads:
            raise self.refuse(f"features {found.shape} whose first axis is not that of the examples")
        return found

    def view(self, x: Value, shape: Dims, axis: int | None, outer: int = 1) -> Value:
        """The same rows with another shape."""
        return self.result(replace(x, shape=shape, axis=axis, outer=outer, needs=False), lambda g: self.give(x, g), x)

    def result(self, y: Value, backward: Backward, *inputs: Value | Weight | None) -> Value:
        """The value of a rule; `backward(g)` writes its backward pass, if the gradient of an input is needed."""
        return self.leaf(y, backward) if self.trains(*inputs) else y

    def leaf(self, y: Value, backward: Backward) -> Value:
        """A value whose gradient is needed though it comes from no other."""
        y = replace(y, needs=True)
        self._tape.append((y, backward))
        return y

    def give(self, x: Value, rows: Rows) -> None:
        """Add rows to the gradient of a value; others may read the same rows."""
        if not x.needs:
            return
        old = self._grads.get(id(x))
        if old is None:
            self._grads[id(x)] = rows
            self._users[rows.first] = self._users.get(rows.first, 0) + 1
            return
        self._users[old.first] -= 1
        new = old if not self._users[old.first] and old.first != self._running else self.rows(old.size)
        sizes = loop((x.size,), (1,), (1,), (1,))
        self.emit(Operation.COMBINE, old, rows, new, sizes=sizes, flag=ADDED, numbers=(1.0,))
        self._grads[id(x)] = new
        self._users[new.first] = self._users.get(new.first, 0) + 1

    def own(self, rows: Rows) -> Rows:
        """These rows if nobody else reads them any more, else a copy; they may be overwritten."""
        if not self._users.get(rows.first):
            return rows
        new = self.rows(rows.size)
        self.emit(Operation.COPY, rows, new, sizes=loop((rows.size,), (1,), (1,)))
        return new

    def next_masks(self, count: int = 1) -> Place:
        """The keys of the next masks of dropout of each batch (`sequences.pass_keys`)."""
        self.masks += [self.slot] * count
        return Place(KEYS, len(self.masks) - count, count)

    def gradient(self, x: Value) -> Rows:
        """The gradient of a value that needs one so far, zero at first; the caller adds to it."""
        old = self._grads.get(id(x))
        if old is not None and self._users[old.first] == 1 and old.first != self._running:
            return old
        new = self.rows(x.size)
        if old is None:
            self.emit(Operation.FILL, new, sizes=(x.size,), numbers=(0.0,))
        else:
            self._users[old.first] -= 1
            self.emit(Operation.COPY, old, new, sizes=loop((x.size,), (1,), (1,)))
        self._grads[id(x)] = new
        self._users[new.first] = self._users.get(new.first, 0) + 1
        return new

    def into(self, x: Value, write: Callable[[Rows], None]) -> None:
        """Let `write` fill new rows with a gradient of `x`, and add them; nothing if it needs none."""
        if x.needs:
            rows = self.rows(x.size)
            write(rows)
            self.give(x, rows)

    def afresh(self, x: Value, operation: Operation, *before: Rows | Place | None, **options: Any) -> Backward:
        """A backward pass that writes new rows: operands are those `before`, the gradient, and that of `x`."""

        def backward(g: Rows) -> None:
            self.into(x, lambda grad: self.emit(operation, *before, g, grad, **options))

        return backward

    def in_place(
        self, x: Value, operation: Operation, *before: Rows | Place | None, after: Sequence[Place | None] = (),
        **options: Any,
    ) -> Backward:  # fmt: skip
        """One that turns the gradient into that of `x`: operands are those `before`, the gradient, those `after`."""

        def backward(g: Rows) -> None:
            g = self.own(g)
            self.emit(operation, *before, g, *after, **options)
            self.give(x, g)

        return backward

    # -- the whole pass ------------------------------------------------------------------------------------------------

    def backward(self) -> None:
        """Write the backward pass of everything so far, from the gradients that were given."""
        while self._tape:
            y, backward = self._tape.pop()
            grad = self._grads.pop(id(y), None)
            if grad is not None:
                self._users[grad.first] -= 1
                self._running = grad.first
                backward(grad)

    def _spread_out(self, place: Place, shape: Dims, grad: Place | None) -> Value:
        found = self._spread.get((place, grad))  # a detached weight has no gradient
        if found is None:
            rows = self.rows(math.prod(shape))
            self.emit(Operation.SPREAD, place, rows, sizes=(rows.size,))
            found = Value(rows, shape, axis=None)
            if grad is not None and self.trainable:
                sizes = (rows.size,)
                found = self.leaf(found, lambda g: self.emit(Operation.SPREAD_BACKWARD, g, grad, sizes=sizes))
            self._spread[place, grad] = found
        return found if found.shape == shape else self.view(found, shape, None)


ADDED, SUBTRACTED, MULTIPLIED, DIVIDED = range(4)
"""`flag` of COMBINE."""


@final
class Constants:
    """Numbers that all hosts share, in one space."""

    def __init__(self, space: int) -> None:
        self.space, self._tensors, self._places = space, list[Tensor](), dict[tuple[torch.dtype, bytes], Place]()
        self._size = 0
        self._joined: Tensor | None = None

    def place(self, x: Tensor) -> Place:
        """Where a tensor lies; it is added if there are no equal numbers yet, which other programs may have added."""
        flat = x.detach().reshape(-1)
        key = flat.dtype, sha256(flat.view(torch.uint8).numpy().tobytes()).digest()
        if key not in self._places:
            self._places[key] = Place(self.space, self._size, x.numel())
            self._tensors.append(flat)
            self._size += x.numel()
        return self._places[key]

    def tensor(self, dtype: torch.dtype = torch.float32) -> Tensor:
        """All of them so far."""
        if self._joined is None or len(self._joined) != self._size or self._joined.dtype is not dtype:
            self._joined = torch.cat([torch.zeros(0), *self._tensors]).to(dtype)
        return self._joined


State = frozenset[str]
"""Slots that are on."""
_NO_SLOT: Final = State()


def run_graph(
    low: Lowering,
    graph: fx.Graph,
    row: Weight,
    buffers: Weight,
    x: Value,
    states: Sequence[State] = (frozenset(),),
    at_slot: Callable[[str, Value], Value] | None = None,
) -> list[Value]:
    """Write the forward pass of a graph; its outputs in each of the states.

    What does not depend on a slot is computed once for all states, and so is what depends on slots that two states
    agree on.

    Raises:
        NoRuleError: an operation has no rule.
    """
    every = frozenset().union(*states)
    upstream: dict[fx.Node, State] = {}
    env: dict[tuple[fx.Node, State], Any] = {}
    inputs = iter((row, buffers, x))
    found: list[Value] = []
    current: dict[fx.Node, fx.Node] = {}
    enabled = low.needs
    for node in graph.nodes:
        if node.op == "placeholder":
            upstream[node], env[node, _NO_SLOT] = _NO_SLOT, next(inputs)
            continue
        if node.target is part:
            source, offset, shape = node.args
            upstream[node], env[node, _NO_SLOT] = _NO_SLOT, env[source, _NO_SLOT].part(offset, shape)
            continue
        sources = [current.get(source, source) for source in node.all_input_nodes]
        own = frozenset().union(*(upstream[source] for source in sources)) if sources else frozenset()
        is_slot = node.target is torch.ops.esper.slot.default
        if is_slot and node.args[0] in every:
            own |= {node.args[0]}
        upstream[node] = own
        if node.op == "output":
            (out,) = node.args
            out = out[0] if isinstance(out, tuple | list) and len(out) == 1 else out
            if not isinstance(out, fx.Node):
                raise NoRuleError("it returns several tensors")
            out = current.get(out, out)
            found = [low.value(env[out, state & upstream[out]]) for state in states]
            break
        if node.target is torch._C._set_grad_enabled:
            low.needs = enabled and bool(node.args[0])
            continue
        for key in dict.fromkeys(state & own for state in states):

            def of(source: fx.Node, key: State = key) -> Any:
                source = current.get(source, source)
                return env[source, key & upstream[source]]

            args, kwargs = fx.map_arg((node.args, node.kwargs), of)
            if not low.needs and _edits(node) and getattr(args[0], "needs", False):
                raise NoRuleError("an edit without gradient of what has one")
            if is_slot:
                slot_id, h = args
                env[node, key] = at_slot(slot_id, h) if at_slot is not None and slot_id in key else h
                continue
            env[node, key] = _apply(low, node, args, kwargs)
        _note_edit(node, current)
    low.needs = enabled
    return found


def _apply(low: Lowering, node: fx.Node, args: Any, kwargs: Any) -> Any:
    """What a node gives."""
    if node.target is constant:
        return args[0]
    if node.target is operator.getitem:
        return args[0][args[1]]
    found = RULES.get(node.target)
    name = getattr(node.target, "_opname", getattr(node.target, "__name__", str(node.target)))
    try:
        if found is None:
            raise NoRuleError(f"there is no rule for {name}")
        return found(low, *args, **kwargs)
    except NoRuleError as error:
        place = _line(node)
        raise NoRuleError(f"{error}{'' if found is None else f', in {name}'}{place and f' ({place})'}") from None
    except TypeError as error:
        raise NoRuleError(f"{name} has arguments without a rule ({error})") from None


def _line(node: fx.Node) -> str:
    """Where the user's model calls a node: the innermost line outside PyTorch."""
    lines = [
        line.strip() for line in (node.meta.get("stack_trace") or "").splitlines() if line.strip().startswith("File ")
    ]
    own = [line for line in lines if "/torch/" not in line]
    if not (own or lines):
        return ""
    path, number = (own or lines)[-1].removeprefix('File "').split('", line ')
    return f"{path.rsplit('/', 1)[-1]}, line {number.split(',')[0]}"


def _note_edit(node: fx.Node, current: dict[fx.Node, fx.Node]) -> None:
    """After an operation in place: whoever reads its first argument reads the result.

    Raises:
        NoRuleError: the argument shares its memory with another tensor that is read later, or with a weight.
    """
    if not _edits(node):
        return
    edited, name = node.args[0], node.target._schema.name.split("::")[1]  # type: ignore[union-attr]
    assert isinstance(edited, fx.Node)
    root, family = _memory(edited)
    if root.meta.get("kept") or root.target is part or root in list(node.graph.find_nodes(op="placeholder"))[:2]:
        raise NoRuleError(f"{name} edits a parameter or buffer")
    later = {user for member in family if member is not edited for user in member.users if user > node}
    if later:
        raise NoRuleError(f"{name} edits a tensor that is seen through another one")
    current[edited] = node
    for member, target in list(current.items()):
        if target is edited:
            current[member] = node


def _edits(node: fx.Node) -> bool:
    """Whether an operation edits its first argument in place."""
    schema = getattr(node.target, "_schema", None)
    return schema is not None and schema.is_mutable and schema.name.endswith("_")


def _memory(node: fx.Node) -> tuple[fx.Node, set[fx.Node]]:
    """The node that has made the memory of a node, and all that may share it."""

    def is_view(x: fx.Node) -> bool:
        if x.target is operator.getitem:  # of a list of views, such as chunks
            return is_view(x.all_input_nodes[0])
        schema = getattr(x.target, "_schema", None)
        if schema is None or schema.is_mutable:
            return False
        return schema.name == "aten::dropout" or any(r.alias_info is not None for r in schema.returns)

    root = node
    while is_view(root) and root.all_input_nodes:
        root = root.all_input_nodes[0]
    family, todo = {root}, [root]
    while todo:
        for user in todo.pop().users:
            if user not in family and is_view(user):
                family.add(user)
                todo.append(user)
    return root, family
