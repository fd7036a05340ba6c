"""The files that run: several are tried in a process of their own, and the first that gives the same outputs is kept.

model.py     the network's own source, copied; if that fails, with imports of the user's modules
model.pt2    a program of torch.export
model.pkl    the parts of the network as cloudpickle writes them, classes included
"""

import json
import subprocess
import sys
import tempfile
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path
from types import ModuleType
from typing import Any, NamedTuple, final

import cloudpickle
from torch import Tensor, nn

from esper.export import checking
from esper.export.copied_code import UnwritableError, is_installed_module
from esper.export.description import Description
from esper.export.grown import Grown, GrownModule, load_state, state_of
from esper.export.plain_hosts import Plain
from esper.export.source import written

SOURCE, PROGRAM, PICKLE, ONNX = "model.py", "model.pt2", "model.pkl", "model.onnx"
TIMEOUT = 300.0
"""Seconds after which a process that checks files is taken to hang."""
HOW_TO_LOAD = {
    SOURCE: "load_model() of model.py",
    PROGRAM: 'torch.export.load("model.pt2").module()',
    PICKLE: 'pickle.load(open("model.pkl", "rb")), which needs cloudpickle and executes code (trust its maker)',
}
Example = tuple[tuple[Any, ...], dict[str, Any], list[Tensor]]
"""Positional and named arguments of a call, and the tensors that the network returns."""


class Artefact(NamedTuple):
    """The file that was kept, None where none gave the same outputs, and sentences about what is not as usual."""

    file: str | None
    notes: list[str]


class _Try(NamedTuple):
    """A file to try; `name` is for the results, `file` the name that it gets if it is kept."""

    name: str
    file: str
    path: Path


class _Outcome(NamedTuple):
    error: str | None
    notes: list[str]


def write(
    folder: Path,
    plain: Plain,
    description: Description,
    inputs: object,
    examples: Sequence[Example],
    formats: Collection[str],
) -> Artefact:
    """Write what runs into a folder that holds the weights already, and files of `formats` besides."""
    missing = [name for name in ("onnx", "onnxscript") if find_spec(name) is None] if ONNX in formats else []
    wanted = [name for name in formats if name != ONNX or not missing]
    with tempfile.TemporaryDirectory() as place:
        work, tries, failed, notes = Path(place), list[_Try](), dict[str, str](), dict[str, list[str]]()
        for name, imports in ((SOURCE, False), (f"{SOURCE} with imports", True)):
            try:
                text, notes[name] = written(plain, description, inputs, imports=imports)
            except Exception as error:  # whatever a class of the user's raises when it is looked at
                failed[name] = str(error) if isinstance(error, UnwritableError) else repr(error)
                continue
            tries.append(_Try(name, SOURCE, work / f"source{imports}.py"))
            tries[-1].path.write_text(text, encoding="utf-8")
        try:
            (work / PICKLE).write_bytes(_pickled(plain))
            tries += [_Try(PROGRAM, PROGRAM, work / PROGRAM), _Try(PICKLE, PICKLE, work / PICKLE)]
        except Exception as error:  # whatever a class of the user's raises
            failed[PICKLE] = f"it cannot be pickled, {error}"
        outcomes = _checked(work, folder, tries, wanted, examples)
        failed |= {name: found.error for name, found in outcomes.items() if found.error is not None}
        won = next((each for each in tries if each.name in outcomes and each.name not in failed), None)
        said = [] if won is None else notes.get(won.name, [])
        if won is not None:
            (folder / won.file).write_bytes(won.path.read_bytes())
        if won is None or won.file != SOURCE:
            why = "; ".join(dict.fromkeys(failed[each] for each in failed if each not in wanted))
            how = HOW_TO_LOAD[won.file] if won else "esper.load(folder, task=task), from the weights"
            said.append(f"there is no {SOURCE} ({why}). The network is loaded by {how}.")
        said += [note for name in wanted if name in outcomes for note in outcomes[name].notes]
        said += [f"there is no {name}: {failed[name]}." for name in wanted if name in failed]
    if missing:
        said.append(f"there is no {ONNX}: it needs {' and '.join(missing)}; pip install 'esper-growth[onnx]' has them.")
    return Artefact(won.file if won else None, said)


def _checked(
    work: Path, folder: Path, tries: Sequence[_Try], formats: Sequence[str], examples: Sequence[Example]
) -> dict[str, _Outcome]:
    """What became of each file; those behind the first good one are not tried. A crash costs one more process."""
    done: dict[str, _Outcome] = {}
    while True:
        won = [each for each in tries if each.name in done and done[each.name].error is None]
        left = won[:1] or [each for each in tries if each.name not in done]
        rest = [name for name in formats if name not in done]
        if not left or (won and not rest):
            return done
        job = {"folder": folder, "examples": list(examples), "tries": left, "formats": rest, "pickle": work / PICKLE}
        lines, ended = _process(work, job)
        for line in lines:
            if "end" in line:
                done[line["end"]] = _Outcome(line["error"], line["notes"])
        begun = [line["start"] for line in lines if "start" in line]
        unfinished = [name for name in begun if name not in done] or ([] if begun else [left[0].name])
        done |= {name: _Outcome(ended, []) for name in unfinished}


def _process(work: Path, job: dict[str, Any]) -> tuple[list[dict[str, Any]], str]:
    """The results of a job in a new interpreter, and how that ended."""
    file, results = work / "job", work / "results"
    results.write_text("", encoding="utf-8")
    tries = [tuple(each) for each in job["tries"]]
    file.write_bytes(cloudpickle.dumps(job | {"tries": tries, "results": results}))
    code = (
        f"import runpy, sys; sys.path[:] = {sys.path!r}; sys.argv[1:] = [{str(file)!r}]; "
        f"runpy.run_path({checking.__file__!r}, run_name='__main__')"
    )
    with (work / "output").open("wb+") as output:
        command = [sys.executable, "-W", "ignore", "-c", code]
        try:
            found = subprocess.run(
                command, stdin=subprocess.DEVNULL, stdout=output, stderr=output, timeout=TIMEOUT, check=False
            )
            code_of = found.returncode
            ended = f"its process was killed by signal {-code_of}" if code_of < 0 else f"its process ended ({code_of})"
        except subprocess.TimeoutExpired:
            ended = f"it did not end within {TIMEOUT:.0f} seconds"
    return [json.loads(line) for line in results.read_text(encoding="utf-8").splitlines()], ended


@final
class _Parts:
    """Pickles as the call that builds the network from its parts, because not every module can be pickled."""

    def __init__(self, *parts: object) -> None:
        self._parts = parts

    def __reduce__(self) -> tuple[Callable[..., GrownModule], tuple[object, ...]]:
        return rebuilt, self._parts


def rebuilt(model: Callable[[], nn.Module], grown: Mapping[str, Grown], weights: Mapping[str, Tensor]) -> GrownModule:
    """What unpickling gives: the network, in eval mode."""
    network = model()
    module = GrownModule(getattr(network, "_orig_mod", network), grown)
    load_state(module, weights)
    return module.eval()


def _pickled(plain: Plain) -> bytes:
    grown = {path: plain.module.grown[key] for path, key in zip(plain.seeds, plain.module.grown, strict=True)}
    weights = {name: value.detach().clone() for name, value in state_of(plain.module).items()}
    with _by_value():
        content: bytes = cloudpickle.dumps(_Parts(plain.model, grown, weights))
    return content


@contextmanager
def _by_value() -> Iterator[None]:
    """Classes of esper and of the user's own modules are written as code, those of installed packages as names."""
    names = {name.partition(".")[0] for name in list(sys.modules)} - {"__main__", "__mp_main__"}
    own = [sys.modules[name] for name in sorted(names) if isinstance(sys.modules.get(name), ModuleType)]
    own = [module for module in own if not is_installed_module(module)]
    for module in own:
        cloudpickle.register_pickle_by_value(module)
    try:
        yield
    finally:
        for module in own:
            cloudpickle.unregister_pickle_by_value(module)
