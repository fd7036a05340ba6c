"""A grown network: taken from an engine, saved as files, loaded again.

Several files that run are tried in a process of their own, and the first that gives the same outputs is kept:

    model.py     the network's own source, copied; if that fails, with imports of the user's modules
    model.pt2    a program of torch.export
    model.pkl    the parts of the network as cloudpickle writes them, classes included
"""

import copy
import json
import math
import subprocess
import sys
import tempfile
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from types import MappingProxyType, ModuleType
from typing import Any, Literal, final, get_args

import cloudpickle
import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save as serialized
from torch import Tensor, nn
from torch.nn.utils import parametrize

from esper.export import checking
from esper.export.grown import (
    Description,
    Grown,
    GrownModule,
    GrownSeed,
    Origin,
    Plain,
    fields_of,
    fill,
    load_state,
    plain,
    read_description,
    restored,
    slot_key,
    state_of,
)
from esper.export.source import UnwritableError, is_installed_module, written
from esper.kasmina.hosts.host import Host, HostSpec
from esper.kasmina.parameters.flops import flops_of_example
from esper.kasmina.parameters.initialization import deterministic_build
from esper.leyline.errors import ConfigError, ExportError, in_shell, in_words, nearest, option, refusing
from esper.leyline.files import mode_of, read_bytes, replacing_folder, require_regular
from esper.leyline.lifecycle import BLENDED, Algorithm, SeedStage
from esper.leyline.messages import EngineSpec, Objective
from esper.leyline.tensor_dataclass import below, state_digest
from esper.tasks.datasets import Dataset, Split
from esper.tasks.datasets.text import ByteTokenizer, TokenizerFile
from esper.tasks.losses import of_split, perplexity
from esper.tasks.registry import TaskSpec
from esper.tolaria.engine import VectorizedEngine
from esper.tolaria.state import RolloutStats

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
Tried = tuple[str | None, list[str]]
"""Why a file is not to be had, None if it is, and sentences about what is not as usual."""


def _write_runnable(
    folder: Path, network: "GrownNetwork", examples: Sequence[Example], formats: Collection[str]
) -> tuple[str | None, list[str]]:
    """Write what runs into a folder that holds the weights already, and files of `formats` besides.

    The file that was kept, None where none gave the same outputs, and sentences about what is not as usual.
    """
    missing = [name for name in ("onnx", "onnxscript") if find_spec(name) is None] if ONNX in formats else []
    wanted = [name for name in formats if name != ONNX or not missing]
    won, failed, said = None, dict[str, None](), list[str]()
    with tempfile.TemporaryDirectory() as place:
        pickled = Path(place) / PICKLE

        def tried(kind: str, source: Path, target: Path | None = None, *, fixed: bool = True) -> Tried:
            job = {"kind": kind, "source": source, "folder": folder, "examples": list(examples)}
            return _without_esper(pickled.with_name("job"), job | {"target": target, "fixed": fixed})

        def attempt(file: Path, form: Callable[[Plain], bytes]) -> Tried:
            if file.suffix == ".py":
                imports = file.stem == "imported"
                text, notes = written(network.plain, network.description, network.inputs, imports=imports)
                file.write_text(text, encoding="utf-8")
                return tried(SOURCE, file)[0], notes
            pickled.write_bytes(form(network.plain))
            return tried(PICKLE, pickled, file, fixed=False) if file.name == PROGRAM else tried(PICKLE, pickled)

        from_memory = ((name, form) for form in (_parts, _whole) for name in (PROGRAM, PICKLE))
        for name, form in (("copied.py", _parts), ("imported.py", _parts), *from_memory):
            file = Path(place) / name
            try:
                error, said = attempt(file, form)
            except Exception as raised:  # whatever a class of the user's raises when it is looked at
                error = str(raised) if isinstance(raised, UnwritableError) else in_words(raised)
            if error is None:
                won = SOURCE if file.suffix == ".py" else file.name
                (folder / won).write_bytes(file.read_bytes())
                break
            if form is _parts:  # from memory fails for the same reason, or for one of its own
                failed[error] = None
            said = []
        if won != SOURCE:
            how = HOW_TO_LOAD[won] if won else "esper.load(folder, task=task), from the weights"
            said.append(f"there is no {SOURCE} ({'; '.join(failed)}). The network is loaded by {how}.")
        for name in [name for name in wanted if name != won]:
            kind, source = (SOURCE, folder / SOURCE) if won == SOURCE else (PICKLE, pickled)
            error, notes = tried(kind, source, folder / name)
            if error is not None:
                (folder / name).unlink(missing_ok=True)
            said += notes if error is None else [f"there is no {name}: {error}."]
    if missing:
        said.append(f"there is no {ONNX}: it needs {' and '.join(missing)}; pip install 'esper-growth[onnx]' has them.")
    return won, said


def _without_esper(file: Path, job: dict[str, object]) -> Tried:
    """Why a job of `checking` failed in a new interpreter, None if it did not; and its sentences."""
    file.write_bytes(cloudpickle.dumps(job))
    result = file.with_name("job.result")
    result.unlink(missing_ok=True)
    code = (
        f"import runpy, sys; sys.path[:] = {sys.path!r}; sys.argv[1:] = [{str(file)!r}]; "
        f"runpy.run_path({checking.__file__!r}, run_name='__main__')"
    )
    try:
        ended = subprocess.run(
            [sys.executable, "-W", "ignore", "-c", code], stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL, timeout=TIMEOUT, check=False,
        ).returncode  # fmt: skip
    except subprocess.TimeoutExpired:
        return f"it did not end within {TIMEOUT:.0f} seconds", []
    if not result.exists():
        return f"its process was killed by signal {-ended}" if ended < 0 else f"its process ended ({ended})", []
    error, notes = json.loads(result.read_text(encoding="utf-8"))
    return error, notes


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


def _parts(plain: Plain) -> bytes:
    """Pickled as the model that is built anew, and what it has learned: not every module can be pickled."""
    grown = {path: plain.module.grown[key] for path, key in zip(plain.seeds, plain.module.grown, strict=True)}
    weights = {name: value.detach().clone() for name, value in state_of(plain.module).items()}
    return _pickled(_Parts(plain.model, grown, weights))


def _whole(plain: Plain) -> bytes:
    """Pickled as it is in memory: a class that was changed since then builds another network."""
    module = plain.module
    if any(map(parametrize.is_parametrized, module.modules())):  # such layers refuse it
        module = copy.deepcopy(module)
        layers: list[Any] = [layer for layer in module.modules() if parametrize.is_parametrized(layer)]
        for layer in layers:
            # not remove_parametrizations, which would change the class, and with it the network that was copied
            values = {name: getattr(layer, name).detach() for name in layer.parametrizations}
            layer.__class__ = parametrize.type_before_parametrizations(layer)
            del layer.parametrizations
            for name, value in values.items():
                setattr(layer, name, nn.Parameter(value))
    return _pickled(module)


def _pickled(of: object) -> bytes:
    with _by_value():
        content: bytes = cloudpickle.dumps(of)
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


WEIGHTS, DESCRIPTION = "model.safetensors", "model.json"
TOKENIZER = "tokenizer.json"
ROUNDING = 1e-3
"""Difference of a figure, relative to it, that is rounding; besides, one example may fall on the other side."""
_SIZES = (5, 2, 1)
"""Examples in the batches on which files are compared."""
Format = Literal["pt2", "onnx"]


@final
@dataclass(frozen=True)
class Saved:
    """What `save` wrote: the folder, its files, how the network is loaded from them, and what is not as usual."""

    folder: Path
    files: tuple[Path, ...]
    loading: str
    notes: tuple[str, ...] = ()

    def __str__(self) -> str:
        return f"{self.folder}: {', '.join(file.name for file in self.files)}\nload it without esper: {self.loading}"

    __repr__ = __str__


@final
@dataclass(frozen=True, eq=False)
class Examples:
    """What a network is measured on: the data, in batches of `batch`, and what scores its outputs."""

    dataset: Dataset
    objective: Objective
    batch: int


@final
@dataclass(frozen=True, kw_only=True, eq=False)
class GrownNetwork:
    """A network and what is known of it.

    Attributes:
        plain: the network, and what it is built from.
        inputs: how stored examples become inputs, None if they are stored so.
        tokenizer: content of tokenizer.json, where the description names it.
        examples: the data that its figures belong to; None if it was loaded, or if each host has data of its own.
    """

    plain: Plain
    description: Description
    inputs: object = None
    tokenizer: bytes | None = None
    examples: Examples | None = None

    @property
    def module(self) -> GrownModule:
        """The network in eval mode, on the CPU."""
        return self.plain.module

    @property
    def host(self) -> Host:
        """How the network is called for a batch, and what its result means."""
        return self.plain.host

    @classmethod
    def of(
        cls,
        engine: VectorizedEngine,
        task: TaskSpec,
        dataset: Dataset,
        stats: RolloutStats,
        *,
        host: int,
        test: float | None = None,
        live: bool = False,
        origin: Origin | None = None,
    ) -> "GrownNetwork":
        """One host, a row of an engine between two steps, with its permanent seeds.

        The engine was built from `task` and `dataset`, and `stats` are its present episode (`engine.rollout` or
        `engine.outcome`). `test` is the figure of merit on the test split, if it was measured; `live` says whether
        seeds in BLENDING and HOLDING belong to the network too, with their present alpha.

        Raises:
            ExportError: the task runs no networks, there is no such host, or its outputs are not finite.
            DataError: the tokenizer of its text is gone or was changed.
        """
        spec = engine.spec
        if task.host is None:
            raise ExportError(f"task {task.name!r} is scripted and has no networks; export a run of another task.")
        if not 0 <= host < spec.num_envs:
            raise ExportError(f"there is no host {host}; choose one of 0 to {spec.num_envs - 1}.")
        if not math.isfinite(stats.committed_loss[host]):
            raise ExportError(
                f"host {host} gives outputs, a loss or a metric that is NaN or infinite on the validation split, so it "
                "is not saved; lower the learning rate, or look for a division by 0 or a logarithm of it."
            )
        seeds = _seeds_of(spec, stats, host, BLENDED if live else {SeedStage.FOSSILIZED})
        inputs = dataset.sample()
        example = inputs[:1]
        plain_ = _taken(engine, _host(task.host, spec.slot_ids, example), host, seeds)
        host_params, grown_params = (sum(p.numel() for p in part.parameters()) for part in plain_.module.children())

        def run(x: Tensor) -> object:
            args, kwargs = plain_.host.arguments(x)
            return plain_.module(*args, **kwargs)

        tokenizer, content = None, None
        if isinstance(dataset.tokenizer, TokenizerFile):
            tokenizer, content = TOKENIZER, dataset.tokenizer.content()
        elif isinstance(dataset.tokenizer, ByteTokenizer):
            tokenizer = dataset.tokenizer.identity
        description = Description(
            task=task.name,
            data={name: x for name, x in dataset.identity.items() if not Path(str(x)).is_absolute()},
            host=fields_of(task.host),
            slots=spec.slot_ids,
            seeds=tuple(seeds.values()),
            input_shape=tuple(example.shape[1:]),
            input_dtype=str(example.dtype).removeprefix("torch."),
            normalization=fields_of(dataset.inputs),
            host_params=host_params,
            grown_params=grown_params,
            flops=flops_of_example(run, inputs, task.batch_train),
            unit=task.objective.unit,
            val=None if live else float(stats.committed_acc[host]),
            test=None if live else test,
            perplexity=None if live else perplexity(task.objective, float(stats.committed_loss[host])),
            classes=dataset.class_names or None,
            tokenizer=tokenizer,
            origin=origin,
        )
        examples = Examples(dataset, task.objective, task.batch_val) if task.instances is None else None
        return cls(plain=plain_, description=description, inputs=dataset.inputs, tokenizer=content, examples=examples)

    @property
    def summary(self) -> str:
        """What grew, sizes and figures of merit, in three lines; before them the round and host of a run."""
        d = self.description
        place = f"host {d.origin.host} of round {d.origin.round}, 100·J {d.origin.objective:.2f}\n" if d.origin else ""
        grown = ", ".join(f"{seed.blueprint} in {seed.slot} ({seed.algorithm})" for seed in d.seeds) or "nothing"
        of_text = "" if d.perplexity is None else f"; validation perplexity {d.perplexity:.2f}"
        points = ((name, value) for name, value in (("validation", d.val), ("test", d.test)) if value is not None)
        return (
            f"{place}grown: {grown}\n"
            f"parameters: {d.host_params:,} of the host, {d.grown_params:,} grown; {d.flops:,} FLOPs per example\n"
            f"{d.unit}: {', '.join(f'{name} {value:.2f}' for name, value in points) or 'not measured'}{of_text}"
        )

    def save(
        self,
        folder: Path | str,
        *,
        formats: Collection[str] = (),
        overwrite: bool = False,
        texts: Mapping[str, str] = MappingProxyType({}),
    ) -> Saved:
        """Write the folder: weights, description and model.py, and model.pt2 and model.onnx if `formats` ask for them.

        Where the source of the network is not to be had, model.pt2 or model.pkl takes the place of model.py. That file
        is compared with the network in another process, without esper, and measured on the validation and test split
        before the folder is called saved. `texts` are further files, by name.

        Raises:
            ExportError: the folder exists (with `overwrite`: and was not made by `save`), or cannot be written; or the
                file has other figures than the network: then it is there.
        """
        folder = Path(folder)
        for each in formats:
            if each not in get_args(Format):
                raise ExportError(f"there is no format {each!r}; {nearest(str(each), get_args(Format))}")
        require_free(folder, overwrite=overwrite)
        text = self.description.text()
        examples, notes = self._called()
        try:
            with replacing_folder(folder) as target:
                state = {name: x.detach().contiguous().clone() for name, x in state_of(self.module).items()}
                (target / WEIGHTS).write_bytes(serialized(state, metadata=_about(text, state)))
                for name, content in {DESCRIPTION: text, **texts}.items():
                    (target / name).write_text(content, encoding="utf-8")
                if self.tokenizer is not None:
                    (target / TOKENIZER).write_bytes(self.tokenizer)
                wanted = [f"model.{name}" for name in dict.fromkeys(formats)]
                file, more = _write_runnable(target, self, examples, wanted)
                wrong, random = None, list[str]()
                if file is not None:
                    loaded = deterministic_build(lambda: checking.load(file, target, target / file))
                    wrong, random = self._wrong_figure(loaded, examples[0])
        except (OSError, SafetensorError) as error:
            raise ExportError(f"{folder} cannot be written ({error}); name another folder.") from error
        if wrong:
            raise ExportError(f"{folder} is written, but {file} is not the network that was measured: {wrong}.")
        how = HOW_TO_LOAD[file] if file else "not possible"
        return Saved(folder, tuple(sorted(folder.iterdir())), how, (*notes, *more, *random))

    def _called(self) -> tuple[list[Example], list[str]]:
        """Calls of the network with batches of several sizes, and what it returns; and sizes that it does not take."""
        if self.examples is None:
            batch = self.description.example(_SIZES[0])
        else:
            batch = self.examples.dataset.as_inputs(self.examples.dataset.val.x[: _SIZES[0]]).cpu()
        found, notes = list[Example](), list[str]()
        for size in _SIZES:
            args, kwargs = self.host.arguments(batch[:size])
            try:
                found.append((args, kwargs, checking.outputs(self.module, args, kwargs)))
            except Exception as error:  # whatever the user's network raises
                notes.append(
                    f"the network itself does not take {size} examples at once ({error}), so no file was tried."
                )
        if not found:
            raise ExportError(f"the network cannot be run on examples of its data, so it cannot be saved: {notes[0]}")
        return found, notes

    def _wrong_figure(self, loaded: Any, call: Example) -> tuple[str | None, list[str]]:  # noqa: ANN401
        """The figure of a loaded file that is not that of the description, if one is not; and what was not compared."""
        d, examples, (args, kwargs, expected) = self.description, self.examples, call
        if examples is None or d.val is None:
            return None, []
        if checking.difference(checking.outputs(self.module, args, kwargs, seed=1), expected) is not None:
            return None, ["the network draws random numbers in evaluation mode too, so its figures were not compared."]
        for name, figure in (("val", d.val), ("test", d.test)):
            if figure is not None:
                found = _points(loaded, self.host, examples, examples.dataset.split(name))  # type: ignore[arg-type]
                rounding = max(1.0, abs(figure)) * ROUNDING + 100.0 / len(examples.dataset.split(name))  # type: ignore[arg-type]
                if not abs(found - figure) <= rounding:
                    return f"its {d.unit} on the {name} split is {found:.2f} instead of {figure:.2f}", []
        return None, []


def _seeds_of(spec: EngineSpec, stats: RolloutStats, host: int, stages: Collection[int]) -> dict[int, GrownSeed]:
    """The seeds of a host that are in these stages, by slot number."""
    return {
        s: GrownSeed(
            spec.slot_ids[s],
            spec.blueprint_names[stats.blueprint[host, s]],
            Algorithm(int(stats.algorithm[host, s])).name,
            float(stats.alpha[host, s]),
        )
        for s in range(spec.num_slots)
        if stats.stage[host, s] in stages
    }


def _taken(engine: VectorizedEngine, host: Host, row: int, seeds: Mapping[int, GrownSeed]) -> Plain:
    """A host and its seeds, by slot number, with the weights of a row of an engine."""
    state = {name: x.to("cpu") for name, x in below("population", engine.executor.state_dict()).items()}
    fill(host, state["host.params"][row], state["host.buffers"][row])
    found = plain(host, tuple(seeds.values()))
    for s, seed in seeds.items():
        at = row * engine.spec.num_slots + s
        (grown,) = (found.module.grown[slot_key(path)] for path, of in found.seeds.items() if of == seed)
        fill(grown.seed, state["seeds.params"][at], state["seeds.buffers"][at])  # type: ignore[arg-type]
        if grown.gate is not None:
            fill(grown.gate, state["gates.params"][at], state["gates.buffers"][at])  # type: ignore[arg-type]
    return found


@torch.no_grad()
def _points(model: Any, host: Host, examples: Examples, split: Split) -> float:  # noqa: ANN401
    """The figure of merit of a network on a split, on the CPU."""
    objective, sums = of_split(examples.objective, split.y), torch.zeros(2, dtype=torch.float64)
    for x, y in zip(split.x.split(examples.batch), split.y.split(examples.batch), strict=True):
        args, kwargs = host.arguments(examples.dataset.as_inputs(x).cpu())
        scores = objective.scores(host.collected(model(*args, **kwargs)), y.cpu())
        sums += torch.stack((scores.score.sum(dtype=torch.float64), scores.weight.sum(dtype=torch.float64)))
    return float(objective.points(*sums))


def load(folder: Path | str, *, host: Host | None = None) -> GrownNetwork:
    """The network in a folder of `GrownNetwork.save`. No code of the folder is executed, nothing is unpickled.

    Args:
        folder: with model.safetensors and model.json.
        host: a host of the same architecture, for one that the description alone cannot build. It is taken.

    Raises:
        ExportError: a file is missing, damaged or does not fit the others, or the host or a seed cannot be built.
    """
    folder = Path(folder)
    description = read_description(folder / DESCRIPTION)
    try:
        host = _described_host(description, folder) if host is None else host
        found = plain(host, description.seeds)
        inputs = restored(description.normalization, "esper.tasks.datasets")
    except (TypeError, KeyError, ConfigError) as error:
        raise ExportError(f"{folder / DESCRIPTION}: the network cannot be built ({error}).") from error
    weights, own = _weights(folder / WEIGHTS, description), state_of(found.module)
    for name in sorted(weights.keys() | own.keys()):
        is_, expected = (_kind(some.get(name)) for some in (weights, own))
        if is_ != expected:
            raise ExportError(
                f"{folder / WEIGHTS} has {is_} for {name!r}, but the network has {expected}; use the "
                f"{WEIGHTS} and {DESCRIPTION} of one export."
            )
    load_state(found.module, weights)
    with refusing(ExportError, f"{folder / TOKENIZER} cannot be read", "export the network again"):
        tokenizer = read_bytes(folder / TOKENIZER) if description.tokenizer == TOKENIZER else None
    return GrownNetwork(plain=found, description=description, inputs=inputs, tokenizer=tokenizer)


def _kind(tensor: Tensor | None) -> str:
    """Dtype and shape, for a message."""
    return "nothing" if tensor is None else f"{tensor.dtype} {list(tensor.shape)}"


def _host(spec: HostSpec, slots: Collection[str], example: Tensor) -> Host:
    host = deterministic_build(lambda: spec.build(slots, example))
    assert isinstance(host, Host), f"{type(host).__name__} is not a host"
    return host


def _described_host(description: Description, folder: Path) -> Host:
    spec = restored(description.host, "esper.kasmina.hosts")
    if not isinstance(spec, HostSpec):
        ways = next((f", or load it without esper: {how}" for name, how in HOW_TO_LOAD.items()
                     if (folder / name).exists()), "")  # fmt: skip
        raise ExportError(
            f"{folder / DESCRIPTION}: the host is not an architecture of esper, so the file alone cannot build it; "
            f"give {'--task FILE.py:NAME' if in_shell() else 'esper.load its task'}{ways}."
        )
    return _host(spec, description.slots, description.example())


def _about(description: str, weights: Mapping[str, Tensor]) -> dict[str, str]:
    """What the file of weights says of itself: one key, because safetensors orders several at random."""
    return {"description": json.dumps([state_digest(weights), description])}


def _weights(path: Path, description: Description) -> dict[str, Tensor]:
    try:
        require_regular(path)
        with safe_open(path, framework="pt") as file:
            weights = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 -- it is not a mapping
            if file.metadata() != _about(description.text(), weights):
                raise ExportError(
                    f"{path} belongs to another network than the {DESCRIPTION} beside it, or one of them was edited or "
                    "damaged; restore both from one export."
                )
            return weights
    except (OSError, SafetensorError) as error:
        raise ExportError(f"{path} is missing or damaged ({error}); export the network again.") from error


def require_free(folder: Path, *, overwrite: bool) -> None:
    """Raise ExportError if a folder cannot be written or, with `overwrite`, was not made by `GrownNetwork.save`."""
    if not mode_of(folder):
        return
    if not overwrite:
        raise ExportError(
            f"{folder} exists already; name a new folder, or replace it with {option('overwrite', True)}."
        )
    if not (folder / DESCRIPTION).is_file() or folder.is_symlink():
        raise ExportError(f"{folder} is not a folder of an exported network, so it is not replaced; name a new folder.")
