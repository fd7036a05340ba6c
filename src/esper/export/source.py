"""model.py: a grown network as a file that a person can read and change, and that needs torch alone.

The network is built by what built it: its class or function, copied or imported. So are the seeds; the weights come
from model.safetensors. Nothing is rewritten, except that a second thing of one name gets another name:

    code of                              becomes
    torch, the standard library, ...     an import
    a module that can be imported        an import or a copy, as asked for
    esper, a script, a notebook          a copy of its source; values are written as they are
"""

import ast
import builtins
import dataclasses
import inspect
import linecache
import symtable
import sys
import sysconfig
import textwrap
from collections.abc import Callable, Iterator
from functools import lru_cache, partial
from pathlib import Path
from types import CodeType, FunctionType, ModuleType
from typing import Any, final

from torch import nn

from esper.export.grown import Description, Grown, GrownModule, GrownSeed, Plain, blueprint_of, load_state
from esper.kasmina.blueprints.layers import GateNetwork
from esper.kasmina.blueprints.registry import FunctionBlueprint
from esper.kasmina.hosts.host import Host
from esper.kasmina.hosts.weights import Copies

_INSTALLED = tuple(sysconfig.get_path(name) for name in ("stdlib", "platstdlib", "purelib", "platlib"))
_FUTURE = "from __future__ import annotations\n"


class UnwritableError(Exception):
    """Code whose source cannot be written out; the message is the end of "..., because"."""


@final
class Code:
    """Imports and definitions of one file, each once, in the order in which they are needed.

    With `imports`, classes and functions of modules that can be imported are imported from there, instead of copied;
    `needed` are those modules that no package has installed. `postponed`: annotations must not be evaluated.
    """

    def __init__(self, *, imports: bool) -> None:
        self.texts: list[str] = []
        self.needed: set[str] = set()
        self.postponed = False
        self._unfinished: set[str] = set()
        self._lines: list[tuple[str, str]] = []
        self._imports = imports
        self._known: dict[str, object] = {}

    @property
    def import_lines(self) -> str:
        """All import statements, those of modules first."""
        places: dict[str, list[str]] = {}
        for place, what in sorted(self._lines):
            places.setdefault(place, []).append(what)
        whole = [f"import {what}" for what in places.pop("", [])]
        return "\n".join((*whole, *(f"from {place} import {', '.join(names)}" for place, names in places.items())))

    def name(self, value: Any, wanted: str, place: ModuleType | None = None) -> str:  # noqa: ANN401
        """The name of `value` in the file, where it is defined if it is new: `wanted`, or that with underscores.

        `place` is the module in which it may be assigned; raises UnwritableError if there is no source for it.
        """
        while wanted in self._known:
            known = self._known[wanted]
            if known is value or (is_literal(value) and repr(known) == repr(value)):
                return wanted
            wanted += "_"
        self._known[wanted] = value
        own = getattr(value, "__name__", None)
        if isinstance(value, ModuleType):
            self._import_module(value, wanted)
        elif source := self._home(value):
            self._import(source, source, own, wanted)
        elif is_literal(value):
            self.texts.append(f"{wanted} = {value!r}")
        elif isinstance(value, FunctionType) and own == "<lambda>":
            self.texts.append(f"{wanted} = {self._lambda(value)[0]}")
        elif inspect.isclass(value) or inspect.isfunction(inspect.unwrap(value)):
            assert isinstance(own, str)
            if own == wanted.rstrip("_"):
                self._unfinished.add(wanted)
                self._define(value, wanted)
                self._unfinished.remove(wanted)
            else:
                self.texts.append(f"{wanted} = {self.name(value, own)}")
        elif dataclasses.is_dataclass(value):
            self.texts.append(f"{wanted} = {self.expression(value)}")
        else:
            self.texts.append(self._assigned(value, wanted, place))
        return wanted

    def expression(self, value: Any) -> str:  # noqa: ANN401 -- an argument of a user's function
        """Source whose value is like this one: a literal, a name, or a call that builds it; raises UnwritableError."""
        if is_literal(value):
            return repr(value)
        if isinstance(value, partial):
            return f"{self.name(partial, 'partial')}({', '.join((self.expression(value.func), *self._given(value)))})"
        if isinstance(value, FunctionType) and value.__name__ == "<lambda>":
            return f"({self._lambda(value)[0]})"
        if dataclasses.is_dataclass(value) and not isinstance(value, type):
            kind = type(value)
            fields = [(f.name, getattr(value, f.name)) for f in dataclasses.fields(value) if f.init]
            arguments = [f"{name}={self.expression(of)}" for name, of in fields]
            return f"{self.name(kind, kind.__name__)}({', '.join(arguments)})"
        if callable(value) and hasattr(value, "__name__") and not hasattr(value, "__self__"):
            return self.name(value, value.__name__)
        raise UnwritableError(f"it is built with a {type(value).__name__}")

    def call(self, model: Callable[[], nn.Module]) -> str:
        """A call of what builds a network; raises UnwritableError."""
        if isinstance(model, Copies):
            raise UnwritableError(
                "the task was given a network, whose source says nothing of its weights and arguments; give the class "
                "or function that builds it as model=, and weights=network.state_dict()"
            )
        if isinstance(model, partial):
            return f"{self.expression(model.func)}({', '.join(self._given(model))})"
        if isinstance(model, FunctionType) and model.__name__ == "<lambda>":
            return self._lambda(model)[1]
        return f"{self.expression(model)}()"

    def _given(self, value: partial[Any]) -> list[str]:
        """The arguments of a partial."""
        named = [f"{name}={self.expression(argument)}" for name, argument in value.keywords.items()]
        return [*map(self.expression, value.args), *named]

    def _home(self, value: Any) -> str | None:  # noqa: ANN401 -- whatever a name stands for
        """The module from which a class or function can be imported where there is no esper."""
        own, place = getattr(value, "__name__", None), getattr(value, "__module__", None)
        if not isinstance(own, str) or isinstance(value, ModuleType):
            return None
        places = (place.partition("._")[0], place) if isinstance(place, str) else ("torch", "torch.nn.functional")
        for source in places:  # the public package first
            module = sys.modules.get(source)
            found = getattr(module, own, None) is value and source.partition(".")[0] not in ("esper", "__main__")
            if module is not None and found and (self._imports or is_installed_module(module)):
                return source
        return None

    def _import_module(self, module: ModuleType, name: str) -> None:
        if not (self._imports or is_installed_module(module)) or module.__name__.partition(".")[0] == "esper":
            raise UnwritableError(f"its code uses the module {module.__name__!r}")
        place, _, own = module.__name__.rpartition(".")
        self._import(module.__name__, place, own, name)

    def _import(self, module: str, place: str, own: str | None, name: str) -> None:
        self._lines.append((place, f"{own}" + f" as {name}" * (own != name)))
        if not is_installed_module(sys.modules[module]):
            self.needed.add(module)

    def _define(self, value: Any, name: str) -> None:  # noqa: ANN401 -- a class or function
        function = value if inspect.isclass(value) else inspect.unwrap(value)
        scope = _scope(function)
        node, lines = _definition(function)
        kept = [f"@{ast.unparse(d)}" for d in node.decorator_list if not _is_of_esper(d, scope)]
        body = textwrap.dedent("\n".join(lines[node.lineno - 1 : node.end_lineno]))
        self.texts.append(self._with_names("\n".join((*kept, body)), scope, {value.__name__: name}))

    def _lambda(self, function: FunctionType) -> tuple[str, str]:
        """The source of a lambda, and of what it gives."""
        tree, text, _ = _parsed(function.__code__.co_filename)
        line = function.__code__.co_firstlineno
        found = [n for n in ast.walk(tree) if isinstance(n, ast.Lambda) and n.lineno <= line <= (n.end_lineno or 0)]
        if len(found) != 1:
            raise UnwritableError("a lambda in its code has no source of its own")
        whole, body = (ast.get_source_segment(text, part) or "" for part in (found[0], found[0].body))
        scope = _scope(function)
        return self._with_names(whole, scope, {}), self._with_names(body, scope, {})

    def _assigned(self, value: object, name: str, place: ModuleType | None) -> str:
        """The statement that assigns a name in a module."""
        if place is not None and getattr(place, "__file__", None) and place.__name__.partition(".")[0] != "esper":
            tree, text, _ = _parsed(str(place.__file__))
            for node in reversed(tree.body):
                targets = node.targets if isinstance(node, ast.Assign) else []
                if [target.id for target in targets if isinstance(target, ast.Name)] == [name]:
                    return self._with_names(ast.get_source_segment(text, node) or "", vars(place), {name: name})
        raise UnwritableError(f"its code uses {name!r}, a {type(value).__name__}")

    def _with_names(self, text: str, scope: dict[str, Any], own: dict[str, str]) -> str:
        """Source whose free names are defined; some may have another name in the file."""
        place = sys.modules.get(str(scope.get("__name__")))
        names = dict(own)
        for name in sorted(_free_names(text) - own.keys()):
            if name in scope and getattr(builtins, name, scope) is not scope[name]:
                names[name] = self.name(scope[name], name, place)
        for name in sorted(_free_names(text, annotations=True) - names.keys()):
            try:
                if name in scope and getattr(builtins, name, scope) is not scope[name]:
                    names[name] = self.name(scope[name], name, place)
                self.postponed |= names.get(name) in self._unfinished or not (name in scope or hasattr(builtins, name))
            except UnwritableError:
                self.postponed = True
        changed = {old: new for old, new in names.items() if old != new}
        return ast.unparse(_Renamed(changed).visit(ast.parse(text))) if changed else text


class _Renamed(ast.NodeTransformer):
    def __init__(self, names: dict[str, str]) -> None:
        self._names = names

    def visit(self, node: ast.AST) -> ast.AST:
        """Another name for what has one of `names`."""
        if isinstance(node, ast.Name):
            node.id = self._names.get(node.id, node.id)
        elif isinstance(node, ast.ClassDef | ast.FunctionDef) and node.col_offset == 0:
            node.name = self._names.get(node.name, node.name)
        return self.generic_visit(node)


def is_literal(value: object) -> bool:
    """Whether the repr of a value is its source."""
    if type(value) is dict:
        return all(map(is_literal, (*value.keys(), *value.values())))
    if type(value) in (tuple, list, set):
        return all(map(is_literal, value)) and value != set()  # type: ignore[call-overload]
    return value is None or type(value) in (bool, int, str, bytes) or (type(value) is float and value - value == 0.0)


def is_installed_module(module: ModuleType) -> bool:
    """Whether a module is there wherever its package is installed; esper is not."""
    if module.__name__.partition(".")[0] in ("__main__", "esper"):
        return False
    file = getattr(module, "__file__", None)
    places = list(getattr(module, "__path__", ())) if file is None else [str(file)]
    return all(place.startswith(_INSTALLED) or "-packages/" in place for place in places)


def _is_of_esper(decorator: ast.expr, scope: dict[str, Any]) -> bool:
    """Whether a decorator registers something with esper."""
    roots = [scope.get(node.id) for node in ast.walk(decorator) if isinstance(node, ast.Name)]
    names = [str(getattr(root, "__module__", None) or getattr(root, "__name__", "")) for root in roots]
    return any(name.partition(".")[0] == "esper" for name in names)


def _scope(value: Any) -> dict[str, Any]:  # noqa: ANN401 -- a class or function
    """What the names in its code stand for."""
    functions = list(_functions(value)) if inspect.isclass(value) else [value]
    place = sys.modules.get(value.__module__)
    if place is None:
        raise UnwritableError(f"{value.__qualname__} has no source file")
    scope = dict(vars(place)) if inspect.isclass(value) else dict(value.__globals__)
    for function in functions:
        for name, cell in zip(function.__code__.co_freevars, function.__closure__ or (), strict=True):
            if name != "__class__":
                scope[name] = cell.cell_contents
    return scope


def _functions(kind: type) -> Iterator[FunctionType]:
    for member in vars(kind).values():
        found = member.fget if isinstance(member, property) else inspect.unwrap(getattr(member, "__func__", member))
        if isinstance(found, FunctionType):
            yield found


@lru_cache(maxsize=64)
def _parsed(filename: str) -> tuple[ast.Module, str, list[str]]:
    """Tree, text and lines of a file or a cell of a notebook."""
    lines = linecache.getlines(filename)
    try:
        return ast.parse("".join(lines)), "".join(lines), "".join(lines).split("\n")
    except SyntaxError as error:
        raise UnwritableError(f"{filename} cannot be read as Python") from error


def _definition(value: Any) -> tuple[ast.ClassDef | ast.FunctionDef, list[str]]:  # noqa: ANN401
    """The statement that defines a class or function, and the lines of its file."""
    for code in _codes(value):
        tree, _, lines = _parsed(code.co_filename)
        found = [
            node
            for node in ast.walk(tree)
            if isinstance(node, ast.ClassDef | ast.FunctionDef)
            and node.name == value.__name__
            and min([node.lineno, *(d.lineno for d in node.decorator_list)])
            <= code.co_firstlineno
            <= (node.end_lineno or 0)
        ]
        if found:
            return found[-1], lines
    raise UnwritableError(f"{value.__qualname__} has no source file")


def _codes(value: Any) -> Iterator[CodeType]:  # noqa: ANN401 -- a class or function
    """Pieces of code from which its place is found; a class without methods has none but that of its file."""
    if not inspect.isclass(value):
        yield value.__code__
        return
    yield from (function.__code__ for function in _functions(value))
    try:
        line = inspect.getsourcelines(value)[1]
        yield compile("0", str(inspect.getsourcefile(value)), "eval").replace(co_firstlineno=line)
    except (OSError, TypeError):
        return


def _free_names(text: str, *, annotations: bool = False) -> set[str]:
    """Names in a piece of source that come from around it; those of annotations are not evaluated."""
    found: set[str] = set()
    tables = [symtable.symtable(text if annotations else _FUTURE + text, "<source>", "exec")]
    while tables:
        table = tables.pop()
        outer = table.get_type() == "module"
        for symbol in table.get_symbols():
            given = symbol.is_assigned() or symbol.is_imported() if outer else not symbol.is_global()
            if symbol.is_referenced() and not given:
                found.add(symbol.get_name())
        tables += table.get_children()
    return found


def written(plain: Plain, description: Description, inputs: object, *, imports: bool) -> tuple[str, list[str]]:
    """The text of model.py, and sentences about what is not as usual; `inputs` is `Dataset.inputs`.

    With `imports`, classes of modules that can be imported are imported from there; else they are copied. Raises
    UnwritableError if the source of the network or of a seed is not to be had.
    """
    code = Code(imports=imports)
    host = code.call(plain.model) + "._orig_mod" * plain.compiled
    names = [code.name(value, value.__name__) for value in (GrownModule, Grown, load_state)]
    seeds = "".join(
        f"        {path!r}: {_seed(code, names[1], seed, plain.host)},\n" for path, seed in plain.seeds.items()
    )
    grown = f"{{\n{seeds}    }}" if seeds else "{}"
    prepare, notes = "", []
    if inputs is not None:
        try:
            prepare = _PREPARE.format(expression=code.expression(inputs))
        except UnwritableError as error:
            notes.append(f"model.py has no function `prepare`, because {error}; prepare inputs as the task does.")
    path = code.name(Path, "Path")
    text = _TEMPLATE.format(
        about=_about(description),
        future="from __future__ import annotations\n\n" * code.postponed,
        imports=code.import_lines,
        definitions="\n\n\n".join(code.texts),
        prepare=prepare,
        module=names[0],
        built=f"{names[0]}({host}, {grown})",
        load_state=names[2],
        path=path,
    )
    if code.needed:
        notes.append(
            f"model.py imports {', '.join(sorted(code.needed))}, which must be importable where it is loaded; "
            "formats=['pt2'] writes a file that needs torch alone."
        )
    return text, notes


_PREPARE = '''def prepare(x):
    """Inputs of the network from examples as they are stored."""
    return {expression}(x)


'''
_TEMPLATE = '''"""{about}
"""

{future}{imports}


{definitions}


{prepare}def build() -> {module}:
    """The network with untrained weights."""
    return {built}


def load_model(folder={path}(__file__).parent) -> {module}:
    """The network with its weights, in eval mode."""
    from safetensors.torch import load_file

    model = build()
    {load_state}(model, load_file({path}(folder) / "model.safetensors"))
    return model.eval()
'''


def _seed(code: Code, grown: str, seed: GrownSeed, host: Host) -> str:
    """A call of `Grown`."""
    blueprint, point = blueprint_of(seed, host)
    if not isinstance(blueprint, FunctionBlueprint):
        raise UnwritableError(f"the blueprint {seed.blueprint!r} is not a function")
    parts = [code.call(partial(blueprint.network, point.channels)), repr(seed.algorithm)]
    if seed.algorithm == "GATE":
        causal = "" if host.causal else ", causal=False"
        parts.append(f"{code.name(GateNetwork, GateNetwork.__name__)}({point.channels}{causal})")
    if seed.alpha != 1.0:
        parts.append(f"alpha={seed.alpha!r}")
    if point.transposed:
        parts.append("transposed=True")
    return f"{grown}({', '.join(parts)})"


def _about(d: Description) -> str:
    """The docstring of the file."""
    lines = [f"A network that grew on the task {d.task}.", ""]
    for seed in d.seeds:
        alpha = f"  alpha {seed.alpha:g}" if seed.alpha != 1.0 else ""
        lines.append(f"    {seed.slot:<8}{seed.blueprint:<16}{seed.algorithm}{alpha}")
    lines += [""] * bool(d.seeds)
    lines.append(
        f"{d.host_params:,} parameters of the host, {d.grown_params:,} of what grew; {d.flops:,} FLOPs per example."
    )
    measured = [(name, value) for name, value in (("validation", d.val), ("test", d.test)) if value is not None]
    lines += [f"{name.capitalize()} {d.unit} {value:.2f}." for name, value in measured]
    shape = ", ".join(("batch", *map(str, d.input_shape)))
    lines += ["", f"    outputs = load_model()(x)  # x: {d.input_dtype} [{shape}]", ""]
    lines.append("Generated by esper. It needs torch, and safetensors to load the weights; it is yours to change.")
    return "\n".join(lines)
