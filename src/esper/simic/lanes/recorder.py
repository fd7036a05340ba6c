"""Follows every operator of a function of hosts, and writes down what it does to one host.

The function runs once, in PyTorch, on two hosts. Beside every storage lies an array of codes, one for each number:

    code < 0             a constant: its value does not depend on the arguments
    code = 4 r + 0, 1    register r of host 0, 1
    code = 4 r + 3       register r, the same for all hosts

What only moves numbers (views, copies, concatenation) moves their codes. What computes is turned by a rule (`rules.py`)
into instructions on registers, one for each different combination of operands; so both hosts lead to the same
registers, and a number that is computed twice is computed once. Operands of two different hosts are refused: the
function would not be one of single hosts.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, final

import numpy as np
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from esper.leyline.errors import ConfigError
from esper.simic.lanes.program import KINDS, Draft, Instruction, Kind, Value

HOSTS = 2
"""Hosts that a function is recorded with."""
_EVERY_HOST = 3

Codes = np.ndarray
Rule = Callable[..., Codes]
"""From the recorder, the answer and the arguments of an operator."""
Rules = Mapping[str, Rule | Callable[..., Any]]
"""By name of the operator; a rule gives a list where the operator has several answers."""


class RecordingError(ConfigError):
    """The function does what no rule is written for."""


@dataclass(frozen=True)
class Argument:
    """One tensor that the function is given.

    Attributes:
        number: its place among the arguments.
        first: register of its first number; those of a host, or all of them, follow in order.
        axis: the axis of hosts, None where all hosts share it.
        recorded: what stands for it while the function is recorded.
    """

    number: int
    first: int
    axis: int | None
    recorded: Tensor


@final
class Recorder(TorchDispatchMode):
    """What was recorded so far; as a context it follows the operators inside."""

    def __init__(self, rules: Rules) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.draft = Draft()
        self.arguments: list[Argument] = []
        self._rules = rules
        self._cells: dict[int, tuple[torch.dtype, Codes]] = {}  # by storage: type of the numbers, and their codes
        self._alive: list[Tensor] = []  # a storage that is gone would hand on its address
        self._live: set[int] = set()  # storages with numbers that depend on the arguments
        self._made: set[int] = set()  # storages that the function made itself
        self._known: dict[tuple[Any, ...], int] = {}

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """Nobody compiles what is recorded; to say that otherwise would import the compiler, which takes a second."""
        return False

    # -- tensors and their codes -------------------------------------------------------------------------------------

    def argument(self, recorded: Tensor, axis: int | None) -> Tensor:
        """From now on the numbers of this tensor, contiguous and of two hosts, are fresh registers."""
        shape = tuple(recorded.shape)
        each = recorded.numel() // (1 if axis is None else HOSTS)
        first = len(self.draft.kinds)
        self.draft.kinds.extend([self.kind(recorded)] * each)
        codes = 4 * np.arange(first, first + each)
        if axis is None:
            codes = (codes + _EVERY_HOST).reshape(shape)
        else:
            rest = shape[:axis] + shape[axis + 1 :]
            codes = np.stack([(codes + host).reshape(rest) for host in range(HOSTS)], axis=axis)
        self.write(recorded, codes)
        self.arguments.append(Argument(len(self.arguments), first, axis, recorded))
        return recorded

    def kind(self, tensor: Tensor) -> Kind:
        """What kind of number a tensor holds."""
        if tensor.dtype not in KINDS:
            raise RecordingError(f"a tensor is {tensor.dtype}, expected one of {', '.join(map(str, KINDS))}")
        return KINDS[tensor.dtype]

    def codes(self, tensor: Tensor) -> Codes:
        """The codes of a tensor, in its shape; a view, so that writing into it is seen by all who share the storage."""
        storage = tensor.untyped_storage()
        if storage._cdata not in self._cells:  # nobody has computed it, so it is a constant of the function
            self._keep(tensor, self.constants(torch.empty(0, dtype=tensor.dtype).set_(storage)))
        dtype, cells = self._cells[storage._cdata]
        if dtype != tensor.dtype:
            raise RecordingError(f"the bits of {dtype} are read as {tensor.dtype}")
        strides = [cells.itemsize * stride for stride in tensor.stride()]
        return np.lib.stride_tricks.as_strided(cells[tensor.storage_offset() :], tuple(tensor.shape), strides)

    def write(self, tensor: Tensor, codes: Codes) -> None:
        """A tensor of the function holds these numbers from now on."""
        storage = tensor.untyped_storage()
        if storage._cdata not in self._cells:
            self._keep(tensor, np.zeros(storage.nbytes() // tensor.element_size(), dtype=np.int64))
        self.codes(tensor)[...] = codes
        if (codes >= 0).any():
            self._live.add(storage._cdata)

    def constants(self, tensor: Tensor) -> Codes:
        """The codes of the numbers that a tensor holds now."""
        kind, values = self.kind(tensor), tensor.detach().contiguous().numpy()
        # by their bits, because 0 and -0 differ and NaN is equal to nothing
        bits, places = np.unique(values.reshape(-1).view(f"u{values.itemsize}"), return_inverse=True)
        codes = [self.draft.constant(kind, value) for value in bits.view(values.dtype).tolist()]
        return np.array(codes, dtype=np.int64)[places].reshape(values.shape)

    def _keep(self, tensor: Tensor, cells: Codes) -> None:
        self._cells[tensor.untyped_storage()._cdata] = (tensor.dtype, cells)
        self._alive.append(tensor)

    # -- operators ---------------------------------------------------------------------------------------------------

    def __torch_dispatch__(
        self,
        func: Any,  # noqa: ANN401 -- an operator, which has no type of its own
        types: Sequence[type],
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:  # noqa: ANN401 -- whatever the operator answers
        """Carry out the operator, and write down what became of the codes."""
        named = kwargs or {}
        given = _tensors((args, named))
        shared = {x.untyped_storage()._cdata for x in given}
        live = not self._live.isdisjoint(shared)
        written = _written(func, args, named)
        if not self._made.issuperset(x.untyped_storage()._cdata for x in written):
            raise RecordingError(f"the operator {func} writes into what the function was given")
        answer = func(*args, **named)
        outputs = written or [x for x in _tensors(answer) if x.untyped_storage()._cdata not in shared]
        if live and not _tensors(answer) and not written:
            raise RecordingError(f"the operator {func} reads a number that is not known yet")
        if not outputs:  # a view
            return answer
        several = len(outputs) > 1
        if live:
            name = str(func._schema.name).removeprefix("aten::").removesuffix("_")
            if name not in self._rules:
                raise RecordingError(f"no rule is written for the operator {func}")
            named = {key: value for key, value in named.items() if key != "out"}
            codes_of: Any = self._rules[name](self, outputs if several else outputs[0], *args, **named)
            found = list(codes_of) if several else [codes_of]
        else:
            found = [self.constants(x) for x in outputs]
        for output, codes in zip(outputs, found, strict=True):
            self.write(output, codes)
            self._made.add(output.untyped_storage()._cdata)
        return answer

    # -- for rules ---------------------------------------------------------------------------------------------------

    def operand(self, x: Tensor | Value, kind: Kind, shape: Sequence[int]) -> Codes:
        """The codes of an operand as numbers of this kind, expanded to this shape."""
        codes = self.as_kind(x, kind) if isinstance(x, Tensor) else np.array(self.draft.constant(kind, x))
        return np.broadcast_to(codes, tuple(shape))

    def as_kind(self, x: Tensor, kind: Kind) -> Codes:
        """The codes of the numbers of a tensor as another kind."""
        return self.converted(self.codes(x), self.kind(x), kind)

    def converted(self, codes: Codes, own: Kind, kind: Kind) -> Codes:
        """The same numbers of a kind as another."""
        if own == kind:
            return codes
        if (codes < 0).all():
            known, places = np.unique(codes, return_inverse=True)
            to = {"B": bool, "I": int}.get(kind, float)
            constants = [self.draft.constant(kind, to(self.draft.value_of(code))) for code in known.tolist()]
            return np.array(constants, dtype=np.int64)[places].reshape(codes.shape)
        return self.apply(f"TO_{kind}_{own}", kind, codes)

    def apply(self, operation: str, kind: Kind, *operands: Codes, actual: Tensor | None = None) -> Codes:
        """One instruction for each different combination of operands, which have one shape; the codes of the results.

        Args:
            operation: its name with the kind of its operands.
            kind: of the results.
            operands: codes.
            actual: what PyTorch computed; where all operands are constants, so is the result.
        """
        columns = np.stack([codes.reshape(-1) for codes in operands], axis=1)
        return self.emit(operation, kind, columns, (), actual).reshape(operands[0].shape)

    def emit(
        self, operation: str, kind: Kind, columns: Codes, head: tuple[int, ...] = (), actual: Tensor | None = None
    ) -> Codes:
        """As `apply`, of operands [E, k], with words that come before the elements."""
        host = _host_of(columns)
        sure = np.all(columns < 0, axis=1) if actual is not None else np.zeros(len(columns), dtype=np.bool_)
        values = self.constants(actual).reshape(-1) if actual is not None and sure.any() else columns
        known, kinds, found, rows = self._known, self.draft.kinds, [], []
        for row in map(tuple, registers_of(columns[~sure]).tolist()):
            register = known.get((operation, head, row))
            if register is None:
                register = known[operation, head, row] = len(kinds)
                kinds.append(kind)
                rows.append((register, *row))
            found.append(register)
        if rows:
            self.draft.instructions.append(Instruction(operation, tuple(rows), head))
        result = np.empty(len(columns), dtype=np.int64)
        result[~sure] = 4 * np.array(found, dtype=np.int64) + host[~sure]
        if sure.any():
            result[sure] = values[sure]
        return result

    def layer(
        self,
        operation: str,
        head: tuple[int, ...],
        shared: tuple[int, ...],
        columns: Sequence[tuple[int, ...]],
        outputs: int,
        kind: Kind,
    ) -> list[int]:
        """The registers of an instruction whose elements belong together, of the same operands the same ones.

        Args:
            operation: its name with the kind of its operands.
            head: words that come before the elements.
            shared: registers that every element reads.
            columns: for each operand of the elements, their registers.
            outputs: how many elements.
            kind: of the results.
        """
        key = (operation, head, shared, *columns)
        if key not in self._known:
            fresh = [self.draft.register(kind) for _ in range(outputs)]
            rows = tuple(zip(fresh, *columns, strict=True))
            self.draft.instructions.append(Instruction(operation, rows, head, shared))
            self._known[key] = fresh[0]
        return list(range(self._known[key], self._known[key] + outputs))

    def lies_in(self, tensor: Tensor) -> Argument | None:
        """The argument, shared by all hosts, that a tensor is a view of."""
        storage = tensor.untyped_storage()._cdata
        same = (x for x in self.arguments if x.axis is None and x.recorded.untyped_storage()._cdata == storage)
        return next(same, None)

    def row_of(self, registers: Sequence[int]) -> tuple[int, int] | None:
        """Argument and place, where these registers are numbers in a row of an argument that all hosts share."""
        first, size = registers[0], len(registers)
        if list(registers) == list(range(first, first + size)):
            for x in self.arguments:
                if x.axis is None and x.first <= first <= x.first + x.recorded.numel() - size:
                    return x.number, first - x.first
        return None


def register_of(code: int) -> int:
    """The register (or constant) of a code."""
    return code if code < 0 else code >> 2


def registers_of(codes: Codes) -> Codes:
    """The registers (or constants) of codes."""
    registers: Codes = np.where(codes < 0, codes, codes >> 2)
    return registers


def is_shared(codes: Codes) -> Codes:
    """Where a code is that of a constant, or of a number that is the same for all hosts."""
    shared: Codes = (codes < 0) | (codes & 3 == _EVERY_HOST)
    return shared


def host_and_registers(codes: Codes) -> tuple[int, tuple[int, ...]]:
    """The one host that these codes belong to (3: any), and their registers."""
    (host,) = _host_of(codes.reshape(1, -1))
    return int(host), tuple(registers_of(codes).reshape(-1).tolist())


def _host_of(columns: Codes) -> Codes:
    """The host of each row of codes [E, k]."""
    tags = np.where(columns < 0, _EVERY_HOST, columns & 3)
    host: Codes = tags.min(axis=1, initial=_EVERY_HOST)
    if ((tags != _EVERY_HOST) & (tags != host[:, None])).any():
        raise RecordingError("a number is computed from numbers of several hosts")
    return host


def _tensors(tree: object) -> list[Tensor]:
    """The tensors of nested tuples, lists and dictionaries, in order."""
    found, rest = [], [tree]
    while rest:
        part = rest.pop()
        if isinstance(part, Tensor):
            found.append(part)
        elif isinstance(part, dict):
            rest += reversed(part.values())
        elif isinstance(part, tuple | list):
            rest += reversed(part)
    return found


def _written(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[Tensor]:  # noqa: ANN401
    """The tensors that an operator writes into."""
    written: list[Tensor] = []
    for i, argument in enumerate(func._schema.arguments):
        if argument.alias_info is not None and argument.alias_info.is_write:
            written += _tensors(args[i] if i < len(args) else kwargs.get(argument.name))
    return written
