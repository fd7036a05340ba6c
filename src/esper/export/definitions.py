"""Python source of classes and functions, with everything that their code refers to.

Code of torch, the standard library and installed packages is imported; other code is copied, without what needs esper:
shape annotations, abstract bases and `final`.
"""

import ast
import builtins
import inspect
import sys
import sysconfig
import textwrap
from collections.abc import Callable, Iterable
from types import ModuleType
from typing import Any, final

from torch import nn
from torch.nn import functional

_REPLACED = {
    "esper.kasmina.hosts.pooling.max_pool_2x2": """\
def max_pool_2x2(h: Tensor) -> Tensor:
    return F.max_pool2d(h, 2)""",
    "esper.kasmina.blueprints.transformer.block_mask_attention": """\
def block_mask_attention(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return F.scaled_dot_product_attention(q, k, v, is_causal=True)""",
}
"""Fast versions of plain functions, and the plain ones."""
_DROPPED_DECORATORS = {"final", "override", "runtime_checkable"}
_INSTALLED = tuple(sysconfig.get_path(name) for name in ("stdlib", "platstdlib", "purelib", "platlib"))


class UnwritableError(Exception):
    """A network whose source cannot be written out; the message is the end of "..., because"."""


@final
class Definitions:
    """Collects imports and definitions of one file, each once, in the order in which they are needed."""

    def __init__(self) -> None:
        self._imports: list[tuple[str, str]] = []
        self.texts: dict[str, str] = {}
        self._bound: dict[str, object] = {}

    def claim(self, name: str, value: object) -> bool:
        """Whether `name` is new in the file; raises UnwritableError if it stands for something else."""
        if name in self._bound and self._bound[name] is not value:
            raise UnwritableError(f"two different things are named {name!r}")
        new = name not in self._bound
        self._bound[name] = value
        return new

    def use(self, name: str, value: object) -> None:
        """Make `name` stand for `value` in the file."""
        if is_literal(value):
            if name not in self.texts or self.texts[name] != f"{name} = {value!r}":
                self.claim(name, value)
                self.texts[name] = f"{name} = {value!r}"
        elif self.claim(name, value):
            if isinstance(value, ModuleType):
                self._import_module(name, value)
            elif is_installed(value):
                self._import_name(name, value)
            else:
                self._define(name, value)

    def import_lines(self) -> str:
        """The import statements, one per module."""
        places: dict[str, list[str]] = {}
        for place, name in sorted(self._imports):
            places.setdefault(place, []).append(name)
        whole = [f"import {name}" for name in places.pop("", [])]
        return "\n".join((*whole, *(f"from {place} import {', '.join(names)}" for place, names in places.items())))

    def _import_module(self, name: str, module: ModuleType) -> None:
        if not _is_installed_file(module):
            raise UnwritableError(f"its code uses the module {module.__name__!r}, which is not installed")
        place, _, own = module.__name__.rpartition(".")
        self._imports.append((place, own if own == name else f"{own} as {name}"))

    def _import_name(self, name: str, value: Any) -> None:  # noqa: ANN401 -- whatever a name stands for
        own = value.__name__
        for place in (value.__module__.partition("._")[0], value.__module__):  # the public package first
            if getattr(sys.modules.get(place), own, None) is value:
                self._imports.append((place, own if own == name else f"{own} as {name}"))
                return
        raise UnwritableError(f"{name!r} in its code is not found in {value.__module__}")

    def _define(self, name: str, value: Any) -> None:  # noqa: ANN401
        if (plain := _REPLACED.get(f"{getattr(value, '__module__', None)}.{name}")) is not None:
            self.use("F", functional)
            self.texts[name] = plain
            return
        if not inspect.isclass(value) and not inspect.isfunction(inspect.unwrap(value)):
            raise UnwritableError(f"{name!r} in its code is {type(value).__name__}, which has no source")
        if value.__name__ != name:
            raise UnwritableError(f"{name!r} in its code is another name of {value.__name__}")
        tree = source_tree(value)
        self.clean(tree, value)
        self.texts[name] = ast.unparse(tree)

    def clean(self, tree: ast.AST, owner: Any) -> None:  # noqa: ANN401 -- a function or a class
        """Remove what needs esper from a function or class, in place, and define the names that are left."""
        scope = vars(sys.modules[owner.__module__])
        for node in ast.walk(tree):
            if isinstance(node, ast.ClassDef | ast.FunctionDef):
                node.decorator_list = [d for d in node.decorator_list if ast.unparse(d) not in _DROPPED_DECORATORS]
            if isinstance(node, ast.FunctionDef):
                node.returns = _plain_annotation(node.returns, scope)
                for inner in (part for part in ast.walk(node) if isinstance(part, ast.AnnAssign)):
                    inner.annotation = _plain_annotation(inner.annotation, scope) or ast.Name("object")
            elif isinstance(node, ast.arg):
                node.annotation = _plain_annotation(node.annotation, scope)
        local = {n.id for n in ast.walk(tree) if isinstance(n, ast.Name) and not isinstance(n.ctx, ast.Load)}
        local |= {node.arg for node in ast.walk(tree) if isinstance(node, ast.arg)}
        local |= {node.name for node in ast.walk(tree) if isinstance(node, ast.ClassDef | ast.FunctionDef)}
        for node in ast.walk(tree):
            if isinstance(node, ast.Name) and node.id not in local and not hasattr(builtins, node.id):
                if node.id not in scope:
                    raise UnwritableError(f"{node.id!r} in {owner.__qualname__} is not defined in its module")
                self.use(node.id, scope[node.id])


def source_tree(value: Callable[..., object]) -> ast.ClassDef | ast.FunctionDef:
    """The syntax tree of a class or function; raises UnwritableError if it has no source."""
    try:
        tree = ast.parse(textwrap.dedent(inspect.getsource(value))).body[0]
    except (OSError, TypeError, SyntaxError) as error:
        raise UnwritableError(f"{value.__qualname__} has no source file") from error
    if not isinstance(tree, ast.ClassDef | ast.FunctionDef):
        raise UnwritableError(f"{value.__qualname__} is not defined by `class` or `def`")
    return tree


def is_literal(value: object) -> bool:
    """Whether the repr of a value is its source."""
    if isinstance(value, tuple | list):
        return all(map(is_literal, value))
    return value is None or type(value) in (bool, int, str, float)


def is_installed(value: Any) -> bool:  # noqa: ANN401 -- whatever a name stands for
    """Whether a class or function can be imported where torch is installed, without esper."""
    place = getattr(value, "__module__", None)
    return isinstance(place, str) and hasattr(value, "__name__") and _is_installed_file(sys.modules.get(place))


def _is_installed_file(module: ModuleType | None) -> bool:
    if module is None or module.__name__ == "__main__" or module.__name__.partition(".")[0] == "esper":
        return False
    file = getattr(module, "__file__", None)
    return file is None or file.startswith(_INSTALLED)


def _plain_annotation(annotation: ast.expr | None, scope: dict[str, object]) -> ast.expr | None:
    """The annotation if builtins and torch explain it, `Tensor` for a shape of jaxtyping, else none."""
    if isinstance(annotation, ast.Subscript) and isinstance(annotation.slice, ast.Tuple):
        first = annotation.slice.elts[0]
        if isinstance(first, ast.Name) and first.id == "Tensor":
            return first
    if annotation is None or any(isinstance(n, ast.Constant) and n.value is not None for n in ast.walk(annotation)):
        return None
    names: Iterable[str] = (node.id for node in ast.walk(annotation) if isinstance(node, ast.Name))
    known = all(hasattr(builtins, n) or _is_of_torch(scope.get(n)) for n in names)
    return annotation if known else None


def _is_of_torch(value: object) -> bool:
    place = value.__name__ if isinstance(value, ModuleType) else getattr(value, "__module__", None)
    return isinstance(place, str) and place.partition(".")[0] == "torch"


def methods_of(kind: type[nn.Module], names: Iterable[str]) -> dict[str, tuple[type, ast.FunctionDef]]:
    """These methods with the class that defines each, and those that they call on `self`; forward first.

    Raises:
        UnwritableError: one of them has no source.
    """
    found: dict[str, tuple[type, ast.FunctionDef]] = {}
    wanted = list(names)
    while wanted:
        name = wanted.pop(0)
        owner = next((c for c in kind.__mro__ if name in vars(c)), None)
        if name in found or owner is None or owner in (nn.Module, object) or not callable(_function(owner, name)):
            continue
        body = source_tree(owner).body
        tree = next((node for node in body if isinstance(node, ast.FunctionDef) and node.name == name), None)
        if tree is None:
            raise UnwritableError(f"{owner.__qualname__}.{name} has no source in its class")
        found[name] = owner, tree
        wanted += attributes_of(tree)
    return found


def _function(owner: type, name: str) -> object:
    value = vars(owner)[name]
    return value.fget if isinstance(value, property) else getattr(value, "__func__", value)


def attributes_of(tree: ast.AST) -> list[str]:
    """The names X in `self.X`, each once."""
    found = [
        node.attr
        for node in ast.walk(tree)
        if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id == "self"
    ]
    return list(dict.fromkeys(found))
