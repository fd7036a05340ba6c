"""The forward pass of a grown network as the source of a method, traced by torch.fx."""

import ast
from collections.abc import Callable
from typing import Any, final

from torch import Tensor, fx, nn

from esper.export.definitions import Definitions, UnwritableError
from esper.export.grown import GrownModule
from esper.kasmina.hosts.host import Host

_NAMES = "xyzabcdefghijklmnopqrstuvw"


class _Value(fx.Proxy):
    """A value of the traced pass, which passes for a tensor where a forward pass asks with `isinstance`."""

    @property  # type: ignore[misc]
    def __class__(self) -> type:
        return Tensor


@final
class _Tracer(fx.Tracer):
    """Takes every module as one step, except hosts and modules with hooks inside, which it follows."""

    def proxy(self, node: fx.Node) -> fx.Proxy:
        """See `fx.Tracer`."""
        return _Value(node, self)

    def create_arg(self, a: Any) -> Any:  # noqa: ANN401 -- see `fx.Tracer`
        """A value is its node, not a constant tensor."""
        return a.node if type(a) is _Value else super().create_arg(a)

    def is_leaf_module(self, m: nn.Module, module_qualified_name: str) -> bool:
        """See `fx.Tracer`."""
        del module_qualified_name
        inside = (part for part in m.modules() if part is not m)
        hooked = m._forward_pre_hooks or any(part._forward_hooks or part._forward_pre_hooks for part in inside)
        return not (isinstance(m, Host | GrownModule | fx.GraphModule) or hooked)

    def call_module(
        self, m: nn.Module, forward: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:  # noqa: ANN401 -- see `fx.Tracer`
        """A step, and then its hooks, which torch.fx leaves out."""
        output = super().call_module(m, forward, args, kwargs)
        if self.is_leaf_module(m, ""):
            for hook in m._forward_hooks.values():
                changed = hook(m, args, output)
                output = output if changed is None else changed
        return output


def traced_forward(module: GrownModule, definitions: Definitions) -> tuple[str, set[type[nn.Module]]]:
    """The method `forward` of the class Network, indented, and the classes of the modules that it calls.

    Raises:
        UnwritableError: the forward pass depends on its inputs in a way that cannot be traced.
    """
    try:
        graph = _Tracer().trace(module)
    except (fx.proxy.TraceError, TypeError, NotImplementedError, RuntimeError) as error:
        raise UnwritableError(f"its forward pass cannot be traced ({str(error).splitlines()[0]})") from error
    code = graph.python_code("self")
    tree = ast.parse(code.src.strip())
    (function,) = (node for node in tree.body if isinstance(node, ast.FunctionDef))
    used = {node.id for node in ast.walk(function) if isinstance(node, ast.Name)}
    renamed: dict[str, str] = {}
    for name, value in code.globals.items():
        if name in used:
            own = value.__name__ if callable(value) else name
            definitions.use(own, value)
            renamed[name] = own
    function.body = [s for s in map(_Readable().visit, function.body) if not _is_release(s)]
    _reuse_names(function)
    for node in ast.walk(function):
        if isinstance(node, ast.Name):
            node.id = renamed.get(node.id, node.id)
    function.returns = ast.Name("Tensor")
    function.args.args[1].annotation = ast.Name("Tensor")
    function.body.insert(0, ast.Expr(ast.Constant("Outputs [batch, ...] of inputs [batch, ...].")))
    lines = ast.unparse(ast.fix_missing_locations(function)).splitlines()
    steps = [module.get_submodule(str(node.target)) for node in graph.nodes if node.op == "call_module"]
    called = {type(part) for step in steps for part in step.modules()}
    return "\n".join(f"    {line}".rstrip() for line in lines), called


def _is_release(statement: ast.stmt) -> bool:
    """`x = None`, with which torch.fx gives up memory."""
    return (
        isinstance(statement, ast.Assign)
        and isinstance(statement.value, ast.Constant)
        and statement.value.value is None
    )


@final
class _Readable(ast.NodeTransformer):
    """getattr(self.host.blocks, "0") is self.host.blocks[0]; annotations go."""

    def visit_Call(self, node: ast.Call) -> ast.AST:
        """A look-up of a numbered module."""
        self.generic_visit(node)
        if isinstance(node.func, ast.Name) and node.func.id == "getattr" and len(node.args) == 2:
            name = node.args[1]
            if isinstance(name, ast.Constant) and isinstance(name.value, str) and name.value.isdigit():
                return ast.Subscript(node.args[0], ast.Constant(int(name.value)), ast.Load())
        return node

    def visit_AnnAssign(self, node: ast.AnnAssign) -> ast.AST:
        """A plain assignment."""
        self.generic_visit(node)
        assert node.value is not None, "torch.fx annotates values alone"
        return ast.Assign([node.target], node.value, lineno=0)


def _reuse_names(function: ast.FunctionDef) -> None:
    """Short names for variables; one that is needed no more gives its name to the next."""
    arguments = function.args.args[1:]
    last, assigned = {}, {argument.arg for argument in arguments}
    for i, statement in enumerate(function.body):
        for node in _variables(statement):
            last[node.id] = i
            if isinstance(node.ctx, ast.Store):
                assigned.add(node.id)
    free, names = list(_NAMES), {}
    for argument in arguments:
        names[argument.arg] = argument.arg = free.pop(0)
    for i, statement in enumerate(function.body):
        loads = [node for node in _variables(statement) if isinstance(node.ctx, ast.Load) and node.id in assigned]
        stores = [node for node in _variables(statement) if isinstance(node.ctx, ast.Store)]
        ended = {names[node.id] for node in loads if last[node.id] == i}
        for node in loads:
            node.id = names[node.id]
        free = sorted((*free, *ended), key=_NAMES.index)
        for node in stores:
            if not free:
                raise UnwritableError("its forward pass holds too many values at once")
            names[node.id] = node.id = free.pop(0)


def _variables(statement: ast.stmt) -> list[ast.Name]:
    return [node for node in ast.walk(statement) if isinstance(node, ast.Name)]
