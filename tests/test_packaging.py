"""The repository as a whole: public faces, commands, words, and who may draw or catch every exception."""

import ast
import re
import tomllib
from pathlib import Path

import pytest

from esper.cli import COMMANDS

ROOT = Path(__file__).parents[1]
SOURCES = sorted((ROOT / "src" / "esper").rglob("*.py"))

DRAWS = re.compile(
    "|".join(
        (
            r"\btorch\.(?:manual_seed|seed|get_rng_state|set_rng_state|random\b)",
            r"\btorch\.(?:rand|randn|randint|randperm|normal|bernoulli|multinomial)\((?!.*generator=)",
            # `nn.init` draws in constructors, which run under the seed of `deterministic_build`
            r"(?<!\binit)\.(?:bernoulli|normal|uniform|random|exponential)_\((?!.*generator=)",
            r"\btorch\.Generator\(",
            r"\bnp\.random\b",
            r"\bimport random\b",
        )
    )
)
MAY_DRAW = {
    "leyline/random.py": "the border: generators from a key, its own and the global ones",
    "kasmina/parameters/population.py": "tries a blueprint, with a generator of its own",
    "kasmina/hosts/module_host.py": "tries a user's network, with a generator of its own",
    "kasmina/parameters/initialization.py": "replays the draws of a constructor, to see whether it has drawn others",
    "kasmina/parameters/stacking.py": "tries a stacked module, with a generator of its own",
    "tolaria/executors/native/compare.py": "tries a graph on a module, with a generator of its own",
    "tolaria/executors/native/losses.py": "tries a loss, with a generator of its own",
    "export/checking.py": "lets random networks draw the same numbers wherever they are compared",
}
MAY_CATCH_ALL = {
    "tasks/datasets/cifar10.py": "a damaged pickle can raise anything, and becomes an error that names the file",
    "tasks/datasets/text.py": "the library raises plain exceptions, which become an error that names the file",
    "export/network.py": "the source of a user's class may fail in any way; the next kind of file is tried then",
    "export/checking.py": "so may what was written, when it runs; the reason is passed on",
    "leyline/errors.py": "the text of an exception of the user may raise another",
    "kasmina/parameters/stacking.py": "whatever a stacked module raises, its hosts run one by one instead",
    "kasmina/parameters/population.py": "any error of a blueprint's passes is raised again with its name",
    "kasmina/hosts/module_host.py": "any error in building or running a user's network is raised again with the inputs",
    "api/task.py": "any error of a user's network on its examples is raised again with the place of the data",
    "kasmina/hosts/weights.py": "a damaged file can raise anything, and so can a network that is copied",
    "tasks/datasets/__init__.py": "any error of a user's function on inputs is raised again with their shape",
    "tasks/datasets/arrays.py": "any error of a user's data set is raised again with the index",
    "simic/rewards/reward.py": "any error of a user's reward is raised again with its name and the step",
    "tamiyo/baselines.py": "any error of the constructor of a user's policy is raised again with its name",
    "tamiyo/schedules.py": "any error of a user's script is raised again with its name and the step",
    "tasks/losses.py": "any error of a user's loss or metric is raised again with the shapes",
    "tolaria/executors/native/trace.py": "any error of a user's code in a trace is why it has no rule",
    "tolaria/executors/native/compare.py": "whatever a copy of a user's network raises, it is run by PyTorch",
    "telemetry/sinks.py": "whatever a listener or a sink does, it does not stop a run",
    "tolaria/runtime.py": "any error of a user's code on a GPU is raised again with the name of the device",
    "cli/record.py": "any error of the thread of a query is raised again in the main one",
    "leyline/ranks.py": "every rank raises what the first one raises, and hears of what any raises",
}
FORBIDDEN = re.compile(
    "|".join(
        (
            r"\bTO" + r"DO\b",
            r"\bFIX" + r"ME\b",
            r"\bthe spec (?:says|asks|demands|requires)\b",
            r"/wo" + r"rk/",
            r"\bissue #\d",
            r"(?<!\w)\.lib" + r"rary",
        )
    )
)
DOCUMENTS = [ROOT / "README.md", ROOT / "CHANGELOG.md", *sorted((ROOT / "docs").glob("*.md"))]


def inside(path: Path) -> str:
    return path.relative_to(ROOT / "src" / "esper").as_posix()


def code_of(path: Path) -> str:
    """The source without comments and docstrings."""
    return ast.unparse(_without_docstrings(ast.parse(path.read_text(encoding="utf-8"))))


def _without_docstrings(tree: ast.Module) -> ast.Module:
    for node in ast.walk(tree):
        body = getattr(node, "body", None)
        if isinstance(body, list):
            kept = [s for s in body if not (isinstance(s, ast.Expr) and isinstance(s.value, ast.Constant))]
            node.body = kept or [ast.Pass()]
    return tree


def test_what_is_compiled_on_the_users_machine_is_part_of_the_package():
    settings = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
    patterns = settings["tool"]["setuptools"]["package-data"]["esper"]
    package = ROOT / "src" / "esper"
    found = [path for path in package.rglob("*") if path.suffix in (".cpp", ".h")]
    assert len(found) > 2
    assert {path for path in found if not any(path.relative_to(package).match(p) for p in patterns)} == set()


def test_only_keyed_generators_draw():
    candidates = [path for path in SOURCES if DRAWS.search(path.read_text(encoding="utf-8"))]
    found = {inside(path) for path in candidates if DRAWS.search(code_of(path))}
    assert found == set(MAY_DRAW)


@pytest.mark.parametrize(
    "code",
    [
        *("torch.manual_seed(0)", "torch.rand(3)", "x.normal_()", "torch.randperm(n)", "torch.Generator()"),
        *("np.random.default_rng(0)", "import random", "x.uniform_(0, 1)"),
    ],
)
def test_the_lint_finds_each_kind_of_draw(code):
    assert DRAWS.search(code)
    assert not DRAWS.search("torch.rand(3, generator=own), nn.init.normal_(weight)")


def test_only_named_files_swallow_every_exception():
    def swallows_all(path):
        handlers = [node for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, ast.ExceptHandler)]
        broad = [h for h in handlers if h.type is None or ast.unparse(h.type) in ("Exception", "BaseException")]
        return any(ast.unparse(h.body[-1]) != "raise" for h in broad)  # cleaning up and raising again is fine

    assert {inside(path) for path in SOURCES if swallows_all(path)} == set(MAY_CATCH_ALL)


def test_the_repository_speaks_of_the_product_alone():
    files = [*SOURCES, *DOCUMENTS, *sorted((ROOT / "tests").rglob("*.py")), *sorted((ROOT / "scripts").glob("*.py"))]
    found = {str(f.relative_to(ROOT)): FORBIDDEN.findall(f.read_text(encoding="utf-8")) for f in files}
    assert {name: words for name, words in found.items() if words} == {}


def test_every_export_of_a_package_is_explicit_and_exists():
    for face in (path for path in SOURCES if path.name == "__init__.py"):
        tree = ast.parse(face.read_text(encoding="utf-8"))
        assert ast.get_docstring(tree), f"{face} does not say what it is"
        package = ".".join(("esper", *face.parent.relative_to(ROOT / "src" / "esper").parts))
        module = __import__(package, fromlist=["_"])
        for node in tree.body:
            if isinstance(node, ast.ImportFrom):
                for name in node.names:
                    if name.asname is not None:
                        assert name.asname == name.name, f"{package} renames {name.name}"
                        assert hasattr(module, name.name)


def test_targets_of_make_that_documents_name_exist():
    targets = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    named = {t for page in DOCUMENTS for t in re.findall(r"\bmake ([a-z][a-z-]+)", _code_in(page))}
    assert named
    assert named <= targets


def test_options_and_files_that_the_readme_names_exist():
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    commands = set(re.findall(r"^(?:\.venv/bin/)?esper ([a-z]+)", text, re.MULTILINE))
    assert commands
    assert commands <= COMMANDS.keys()
    for link in re.findall(r"\]\((?!https?:)([^)#]+)\)", text):
        assert (ROOT / link).exists(), link


def _code_in(page: Path) -> str:
    """What stands in backquotes or in fenced blocks."""
    text = page.read_text(encoding="utf-8")
    fenced = re.findall(r"^```\w*\n(.*?)^```", text, re.MULTILINE | re.DOTALL)
    return "\n".join([*fenced, *re.findall(r"`([^`\n]+)`", text)])
