"""The repository as a whole: import order, public faces, commands, words, and who may read the device."""

import ast
import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
SOURCES = sorted((ROOT / "src" / "esper").rglob("*.py"))

READS = re.compile(
    "|".join(
        (
            r"\.(?:item|tolist|cpu|numpy|unique|masked_select)\(\)",
            r"(?<![\w.])nonzero\(|(?<!\bnp)\.nonzero\(",  # numpy's own reads no tensor
            r"\.to\((?:device=)?['\"]cpu",
            r"\bsynchronize\(",
            r"\btorch\.(?:equal|allclose|unique|masked_select|argwhere|bincount)\(",
        )
    )
)
MAY_READ = {
    "tolaria/executors/scoring.py": "an objective is tried once, on the CPU, before the first step",
    "api/arguments.py": "numbers of NumPy among arguments",
    "api/task.py": "tries a loss of the user's, before the run",
    "tolaria/runtime.py": "the border between device and host",
    "tolaria/build.py": "properties of instances, which are drawn on the CPU to be recorded",
    "tolaria/prefixes.py": "numpy arrays of the structure that was read",
    "tolaria/memory_prediction.py": "makes a structure for two passes of one host, before the run",
    "tolaria/executors/": "numpy arrays of the structure that was read (`tolist` alone: see ONLY)",
    "kasmina/rules/slot_fields.py": "checks a state that is loaded, before a run goes on",
    "kasmina/parameters/initialization.py": "compares two builds of a module, before the run",
    "kasmina/parameters/frozen.py": "compares two builds of a module, before the run",
    "kasmina/parameters/kinds.py": "compares two builds of a module, before the run",
    "kasmina/parameters/stacking_trial.py": "tries a stacked module, before the run",
    "kasmina/hosts/module_checks.py": "tries a user's network, before the run",
    "kasmina/hosts/module_pass.py": "tries a user's network, before the run",
    "kasmina/hosts/module_probe.py": "tries a user's network, before the run",
    "leyline/random.py": "seeds of framework generators, drawn on the CPU",
    "tolaria/executors/native/trial.py": "tries a rule on a module, when an executor is built",
    "export/": "files of a network, outside of any run",
    "runs/": "checkpoints, reports and events: after the step, or from arrays that were read",
    "simic/client.py": "counters of a checkpoint",
    "simic/agent/rollout_buffer.py": "counters of a checkpoint",
    "tasks/datasets/arrays.py": "checks the user's examples, before the run",
    "tasks/datasets/__init__.py": "numbers of the hosts, once per step with a user's function as augmentation",
    "tasks/datasets/text.py": "chooses the stories of a split, before the run",
    "tamiyo/network.py": "sizes of layers, in the constructor",
}
ONLY = {"tolaria/executors/": ".tolist()"}
"""Where arrays and tensors are side by side, the one call that arrays need; `test_engine_reads.py` watches it run."""
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
    "kasmina/parameters/kinds.py": "tries a blueprint, with a generator of its own",
    "kasmina/hosts/module_probe.py": "tries a user's network, with a generator of its own",
    "kasmina/parameters/initialization.py": "replays the draws of a constructor, to see whether it has drawn others",
    "kasmina/parameters/stacking_trial.py": "tries a stacked module, with a generator of its own",
    "tolaria/executors/native/trial.py": "tries a rule on a module, with a generator of its own",
    "export/checking.py": "lets random networks draw the same numbers wherever they are compared",
}
MAY_CATCH_ALL = {
    "tasks/datasets/plain_pickle.py": "a damaged pickle can raise anything, and becomes an error that names the file",
    "tasks/datasets/tokenizers.py": "the library raises plain exceptions, which become an error that names the file",
    "export/artefacts.py": "the source of a user's class may fail in any way; the next kind of file is tried then",
    "export/checking.py": "so may what was written, when it runs; the reason is passed on",
    "export/network.py": "so may a user's network for a batch of one example; it is not compared on that, and says so",
    "kasmina/parameters/stacking_trial.py": "whatever a stacked module raises, its hosts run one by one instead",
    "kasmina/parameters/kinds.py": "any error of a blueprint's passes is raised again with its name",
    "kasmina/hosts/module_probe.py": "any error in building a user's network is raised again",
    "tasks/datasets/__init__.py": "any error of a user's function on inputs is raised again with their shape",
    "tasks/datasets/arrays.py": "any error of a user's data set is raised again with the index",
    "tasks/objectives.py": "any error of a user's loss or metric is raised again with the shapes",
    "kasmina/hosts/module_pass.py": "any error of a user's forward pass is raised again with the inputs",
    "telemetry/record/writer.py": "whatever fails in writing a record, it does not stop a run",
    "telemetry/sinks.py": "whatever a listener or a sink does, it does not stop a run",
    "tolaria/executors/sharded/worker.py": "sends the exception to the process that asked, which raises it",
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


def reads_in(path: Path) -> dict[str, set[str]]:
    """What looks like a read in a file, by the entry of MAY_READ that allows it; "" where none does."""
    found: dict[str, set[str]] = {}
    for call in {match.group() for match in READS.finditer(code_of(path))}:
        names = (n for n in MAY_READ if inside(path) == n or (n.endswith("/") and inside(path).startswith(n)))
        found.setdefault(next((n for n in names if ONLY.get(n, call) == call), ""), set()).add(call)
    return found


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


def test_imports_flow_one_way():
    lint = Path(sys.executable).with_name("lint-imports")
    done = subprocess.run([lint, "--no-cache"], cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr


def test_only_files_with_a_reason_read_the_device_and_every_reason_is_still_needed():
    found = {inside(path): reads_in(path) for path in SOURCES}
    assert {name: reads[""] for name, reads in found.items() if "" in reads} == {}
    assert {entry for reads in found.values() for entry in reads} == set(MAY_READ)


@pytest.mark.parametrize(
    "code",
    [
        *("x.item()", "x.tolist()", "x.cpu()", "x.numpy()", "x.nonzero()", "torch.nonzero(x)", "x.unique()"),
        *('x.to("cpu")', "x.to(device='cpu')", "torch.cuda.synchronize(d)", "event.synchronize()", "torch.equal(x, y)"),
    ],
)
def test_the_lint_finds_each_kind_of_read(code):
    assert READS.search(code)
    assert not READS.search("np.nonzero(x), np.flatnonzero(x)")


def test_only_keyed_generators_draw():
    found = {inside(path) for path in SOURCES if DRAWS.search(code_of(path))}
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
    cli = (ROOT / "src" / "esper" / "cli" / "main.py").read_text(encoding="utf-8")
    commands = set(re.findall(r"^(?:\.venv/bin/)?esper ([a-z]+)", text, re.MULTILINE))
    assert commands
    for command in commands:
        assert f'"{command}": (' in cli
    for link in re.findall(r"\]\((?!https?:)([^)#]+)\)", text):
        assert (ROOT / link).exists(), link


def _code_in(page: Path) -> str:
    """What stands in backquotes or in fenced blocks."""
    text = page.read_text(encoding="utf-8")
    fenced = re.findall(r"^```\w*\n(.*?)^```", text, re.MULTILINE | re.DOTALL)
    return "\n".join([*fenced, *re.findall(r"`([^`\n]+)`", text)])
