"""Counts the files and lines of the package, and checks how its modules import each other.

    python scripts/house.py              exit code 1: a circle, a chain of more than LONGEST modules, or a mutation
                                         (mutations.py) whose text is not in the sources once

Only imports that run when a module is imported count; a package counts where its `__init__` imports something.
"""

import ast
import sys
from functools import cache
from pathlib import Path

from mutations import MUTATIONS, place_of

ROOT = Path(__file__).resolve().parents[1]
PACKAGE = ROOT / "src" / "esper"
LONGEST = 12
"""Modules in the longest chain of imports."""


def name_of(path: Path) -> str:
    """The module of a file."""
    return ".".join(path.relative_to(PACKAGE.parent).with_suffix("").parts).removesuffix(".__init__")


def running(body: list[ast.stmt]) -> list[ast.Import | ast.ImportFrom]:
    """The imports that run with the statements of a module: none of functions or of `if TYPE_CHECKING`."""
    found: list[ast.Import | ast.ImportFrom] = []
    for statement in body:
        if isinstance(statement, ast.Import | ast.ImportFrom):
            found.append(statement)
        elif isinstance(statement, ast.If):
            found += running(statement.orelse)
            if "TYPE_CHECKING" not in ast.unparse(statement.test):
                found += running(statement.body)
        elif isinstance(statement, ast.Try | ast.With | ast.ClassDef):
            found += running(statement.body)
    return found


def graph(package: Path = PACKAGE) -> dict[str, set[str]]:
    """The modules that each module imports."""
    trees = {name_of(path): ast.parse(path.read_text(encoding="utf-8")) for path in sorted(package.rglob("*.py"))}
    imports: dict[str, set[str]] = {}
    for name, tree in trees.items():
        imports[name] = set()
        for statement in running(tree.body):
            if isinstance(statement, ast.Import):
                wanted = [alias.name for alias in statement.names]
            else:
                assert statement.level == 0, f"{name}: imports are absolute"
                own = statement.module or ""
                parts = [f"{own}.{alias.name}" for alias in statement.names]
                wanted = [part if part in trees else own for part in parts]
            imports[name] |= {one for one in wanted if one in trees and one != name}
    counted = {name for name in imports if imports[name] or not (package.parent / name.replace(".", "/")).is_dir()}
    return {name: imports[name] & counted for name in counted}


def circle(imports: dict[str, set[str]]) -> list[str]:
    """Modules that import each other in turn, the first one again at the end; [] if there are none."""
    done: set[str] = set()

    def visit(name: str, path: list[str]) -> list[str]:
        if name in path:
            return [*path[path.index(name) :], name]
        if name in done:
            return []
        for other in sorted(imports[name]):
            if found := visit(other, [*path, name]):
                return found
        done.add(name)
        return []

    return next((found for name in sorted(imports) if (found := visit(name, []))), [])


def longest_chain(imports: dict[str, set[str]]) -> list[str]:
    """The longest chain of imports, from the module that nothing in it imports; there must be no circle."""

    @cache
    def from_(name: str) -> tuple[str, ...]:
        return (name, *max((from_(other) for other in sorted(imports[name])), key=len, default=()))

    return list(max((from_(name) for name in sorted(imports)), key=len))


def main() -> int:
    """Print the counts and the longest chain."""
    for folder, kinds in (("src/esper", ("py", "cpp", "h", "js", "css")), ("tests", ("py",)), ("scripts", ("py",)),
                          ("benchmarks", ("py",))):  # fmt: skip
        files = {kind: sorted((ROOT / folder).rglob(f"*.{kind}")) for kind in kinds}
        lines = sum(len(path.read_text(encoding="utf-8").splitlines()) for paths in files.values() for path in paths)
        print(f"{folder}: {lines:,} lines, {len(files['py'])} Python files")
    imports = graph()
    if found := circle(imports):
        print("circle:", " -> ".join(found))
        return 1
    chain = longest_chain(imports)
    print(f"longest chain of imports: {len(chain)} modules\n  " + "\n  ".join(chain))
    lost = [mutation.name for mutation in MUTATIONS if place_of(mutation.old, PACKAGE) is None]
    for name in lost:
        print(f"the mutation {name!r} has a text that the sources do not have once: write it anew")
    return int(len(chain) > LONGEST or bool(lost))


if __name__ == "__main__":
    sys.exit(main())
