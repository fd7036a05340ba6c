"""A module as an expression that builds it, and the classes that this expression needs.

A layer of PyTorch is a call of its class. Any other module is a call of a class that is written out: its constructor
takes the parts that the module has, its methods are copied.
"""

import ast
import inspect
import textwrap
from collections import OrderedDict
from collections.abc import Collection
from dataclasses import dataclass
from typing import Any, final

import torch
from torch import Tensor, nn

from esper.export.definitions import Definitions, UnwritableError, attributes_of, is_installed, is_literal, methods_of

WIDTH = 110
_PER_AXIS = ("kernel_size", "stride", "padding", "dilation")
"""Arguments that layers repeat for each axis."""
_INDENT = "    "


@dataclass(frozen=True)
class Expression:
    """A call or a list, printed over several lines where one is too short."""

    head: str
    parts: tuple[tuple[str, "Expression | str"], ...] = ()
    tail: str = ""

    def text(self, indent: int = 0) -> str:
        """Source that continues a line indented by `indent` levels."""
        short = ", ".join(prefix + (p if isinstance(p, str) else p.text()) for prefix, p in self.parts)
        line = f"{self.head}{short}{self.tail}"
        if "\n" not in line and len(line) + len(_INDENT) * indent <= WIDTH:
            return line
        inner, last = _INDENT * (indent + 1), _INDENT * indent
        rows = (f"{inner}{prefix}{p if isinstance(p, str) else p.text(indent + 1)},\n" for prefix, p in self.parts)
        return f"{self.head}\n{''.join(rows)}{last}{self.tail}"


@final
class Layers:
    """Writes modules; classes and imports go to `definitions`. Only classes of `called` have methods."""

    def __init__(self, definitions: Definitions, called: Collection[type[nn.Module]]) -> None:
        self._definitions, self._called = definitions, called
        self._parts: dict[str, set[str]] = {}

    def expression(self, module: nn.Module | None) -> Expression:
        """The module.

        Raises:
            UnwritableError: it cannot be built from its attributes.
        """
        if module is None:
            return Expression("None")
        kind, children = type(module), list(module.named_children())
        if kind is nn.ModuleDict:
            parts = tuple((f"{name!r}: ", self.expression(child)) for name, child in children)
            return Expression("nn.ModuleDict({", parts, "})")
        if kind is nn.ModuleList or (kind is nn.Sequential and all(name.isdigit() for name, _ in children)):
            opening, closing = ("[", "])") if kind is nn.ModuleList else ("", ")")
            parts = tuple(("", self.expression(child)) for _, child in children)
            return Expression(f"nn.{kind.__name__}({opening}", parts, closing)
        if kind is nn.Sequential:
            self._definitions.use("OrderedDict", OrderedDict)
            parts = tuple((f"{n}=", self.expression(child)) for n, child in children)
            return Expression("nn.Sequential(OrderedDict(", parts, "))")
        if is_installed(kind):
            return self._call(module)
        return self._own(module)

    def _call(self, module: nn.Module) -> Expression:
        """A class of an installed package, called with attributes of the names of its constructor's arguments."""
        kind, arguments = type(module), []
        for name, p in list(inspect.signature(kind.__init__).parameters.items())[1:]:
            if p.kind in (p.VAR_POSITIONAL, p.VAR_KEYWORD) or name in ("device", "dtype"):
                continue
            value = getattr(module, name, p.default)
            if isinstance(value, Tensor) or (value is None and isinstance(p.default, bool)):
                value = value is not None  # `bias` is a flag in the constructor and a parameter in the module
            if value is p.empty or not is_literal(value):
                raise UnwritableError(f"argument {name!r} of its layer {kind.__name__} is not known")
            if name in _PER_AXIS and isinstance(value, tuple) and len(set(value)) == 1:
                value = value[0]
            if value != p.default:
                arguments.append(repr(value) if p.default is p.empty else f"{name}={value!r}")
        if getattr(nn, kind.__name__, None) is kind:
            name = f"nn.{kind.__name__}"
        else:
            name = kind.__name__
            self._definitions.use(name, kind)
        return Expression(f"{name}({', '.join(arguments)})")

    def _own(self, module: nn.Module) -> Expression:
        kind = type(module)
        found = methods_of(kind, ["forward"]) if kind in self._called else {}
        used = dict.fromkeys(name for _, tree in found.values() for name in attributes_of(tree))
        parts: dict[str, Expression | str] = {name: self.expression(m) for name, m in module._modules.items()}
        parts |= {name: _tensor(p, "nn.Parameter({})") for name, p in module._parameters.items()}
        parts |= {name: _tensor(b, "{}") for name, b in module._buffers.items()}
        for name in used:
            if name not in (*parts, *found, "training") and hasattr(module, name):
                value = getattr(module, name)
                if not callable(value) or name in vars(module):
                    parts[name] = self._plain(kind.__name__, name, value)
        if self._definitions.claim(kind.__name__, kind):
            self._parts[kind.__name__] = set(parts)
            self._definitions.texts[kind.__name__] = self._class(module, tuple(parts), found)
        elif self._parts[kind.__name__] != set(parts):
            raise UnwritableError(f"two of its modules of class {kind.__name__} have different parts")
        return Expression(f"{kind.__name__}(", tuple((f"{name}=", part) for name, part in parts.items()), ")")

    def _plain(self, owner: str, name: str, value: Any) -> str:  # noqa: ANN401 -- an attribute of a user's class
        if is_literal(value):
            return repr(value)
        if isinstance(value, torch.dtype):
            return str(value)
        if inspect.isfunction(value) or inspect.isbuiltin(value) or inspect.isclass(value):
            self._definitions.use(value.__name__, value)
            return value.__name__
        raise UnwritableError(f"{owner}.{name} is a {type(value).__name__}")

    def _class(self, module: nn.Module, parts: tuple[str, ...], found: dict[str, tuple[type, ast.FunctionDef]]) -> str:
        kind = type(module)
        doc = inspect.cleandoc(kind.__doc__ or f"The layers of {kind.__name__}.")
        lines = [f"def __init__(self{''.join(f', {name}' for name in parts)}):", f"{_INDENT}super().__init__()"]
        for name in parts:
            is_buffer = name in module._buffers
            assigned = f"self.register_buffer({name!r}, {name})" if is_buffer else f"self.{name} = {name}"
            lines.append(_INDENT + assigned)
        blocks = ["\n".join(lines)]
        for owner, tree in found.values():
            self._definitions.clean(tree, owner)
            blocks.append(ast.unparse(tree))
        body = "\n\n".join((_quoted(doc), *blocks))
        return f"class {kind.__name__}(nn.Module):\n{textwrap.indent(body, _INDENT)}"


def _quoted(doc: str) -> str:
    return f'"""{doc}"""' if "\n" not in doc else f'"""{doc}\n"""'


def _tensor(tensor: Tensor | None, around: str) -> str:
    """A tensor of zeros, which loading fills."""
    if tensor is None:
        return "None"
    shape = ", ".join(map(str, tensor.shape)) or "()"
    dtype = "" if tensor.dtype is torch.float32 else f", dtype={tensor.dtype}"
    return around.format(f"torch.zeros({shape}{dtype})")
