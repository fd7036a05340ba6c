"""A grown network: taken from an engine, saved as files, loaded again."""

import math
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Literal, final

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save as serialized
from torch import Tensor, nn
from torch.utils.flop_counter import FlopCounterMode

from esper.export import programs
from esper.export.definitions import UnwritableError
from esper.export.description import Description, Origin, fields_of, read_description, restored
from esper.export.grown import GrownModule, GrownSeed, build, fill, restore_frozen, slot_key, state_of
from esper.export.source import run, written
from esper.kasmina.hosts.host import Host, HostSpec
from esper.kasmina.parameters.initialization import deterministic_build
from esper.leyline.checkpoint_tree import below
from esper.leyline.errors import ConfigError, ExportError
from esper.leyline.files import mode_of, remove, replacing_folder
from esper.leyline.stages import Algorithm, SeedStage
from esper.leyline.wording import option
from esper.tasks.datasets import Dataset
from esper.tasks.datasets.tokenizers import ByteTokenizer, TokenizerFile
from esper.tasks.objectives import perplexity
from esper.tasks.registry import TaskSpec
from esper.tolaria.engine import VectorizedEngine
from esper.tolaria.state import RolloutStats

WEIGHTS, DESCRIPTION, SOURCE, PROGRAM, ONNX = (
    "model.safetensors",
    "model.json",
    "model.py",
    "model.pt2",
    "model.onnx",
)
TOKENIZER = "tokenizer.json"
Format = Literal["pt2", "onnx"]


@final
@dataclass(frozen=True, kw_only=True, eq=False)
class GrownNetwork:
    """A network and what is known of it.

    Attributes:
        module: in eval mode, on the CPU. inputs: how stored examples become inputs, None if they are stored so.
        tokenizer: content of tokenizer.json, where the description names it.
    """

    module: GrownModule
    description: Description
    inputs: object = None
    tokenizer: bytes | None = None

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
        """One host of an engine with its permanent seeds.

        Args:
            engine: between two steps.
            task: what the engine was built from.
            dataset: as well.
            stats: its present episode (`engine.rollout` or `engine.outcome`).
            host: row in the engine.
            test: figure of merit on the test split, if it was measured.
            live: whether seeds in BLENDING and HOLDING belong to the network too, with their present alpha.
            origin: the round and host of a run, if it grew in one.

        Raises:
            ExportError: the task runs no networks, there is no such host, or its outputs are not finite.
            DataError: the tokenizer of its text is gone or was changed.
        """
        spec, num_hosts = engine.spec, engine.spec.num_envs
        if task.host is None:
            raise ExportError(f"task {task.name!r} is scripted and has no networks; export a run of another task.")
        if not 0 <= host < num_hosts:
            raise ExportError(f"there is no host {host}; choose one of 0 to {num_hosts - 1}.")
        if not math.isfinite(stats.committed_loss[host]):
            raise ExportError(
                f"host {host} gives outputs, a loss or a metric that is NaN or infinite on the validation split, so it "
                "is not saved; lower the learning rate, or look for a division by 0 or a logarithm of it."
            )
        stages = {SeedStage.FOSSILIZED, *((SeedStage.BLENDING, SeedStage.HOLDING) if live else ())}
        rows = [s for s in range(spec.num_slots) if stats.stage[host, s] in stages]
        seeds = [
            GrownSeed(
                spec.slot_ids[s],
                spec.blueprint_names[stats.blueprint[host, s]],
                Algorithm(int(stats.algorithm[host, s])).name,
                float(stats.alpha[host, s]),
            )
            for s in rows
        ]
        example = dataset.as_inputs(dataset.train.x[:1].to("cpu"))
        module = build(_host(task.host, spec.slot_ids, example), seeds)
        _fill(module, engine, host, dict(zip(rows, seeds, strict=True)))
        host_params, grown_params = module.num_params()
        tokenizer, content = _tokenizer(dataset)
        description = Description(
            task=task.name,
            data={name: x for name, x in dataset.identity.items() if not Path(str(x)).is_absolute()},
            host=fields_of(task.host),
            slots=spec.slot_ids,
            seeds=tuple(seeds),
            input_shape=tuple(example.shape[1:]),
            input_dtype=str(example.dtype).removeprefix("torch."),
            normalization=fields_of(dataset.inputs),
            host_params=host_params,
            grown_params=grown_params,
            flops=flops(module, example),
            unit=task.objective.unit,
            val=None if live else float(stats.committed_acc[host]),
            test=None if live else test,
            perplexity=None if live else perplexity(task.objective, float(stats.committed_loss[host])),
            classes=dataset.class_names or None,
            tokenizer=tokenizer,
            origin=origin,
        )
        return cls(module=module, description=description, inputs=dataset.inputs, tokenizer=content)

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
        formats: Collection[Format] = (),
        overwrite: bool = False,
        texts: Mapping[str, str] = MappingProxyType({}),
    ) -> list[str]:
        """Write the folder: weights, description and model.py, and model.pt2 and model.onnx if `formats` ask for them.

        `texts` are further files, by name.

        Every file that runs is run once and compared with the network before the folder gets its name.

        Returns:
            A sentence for each thing that is not as usual, e.g. why there is no model.py.

        Raises:
            ExportError: the folder exists (with `overwrite`: and was not made by `save`), cannot be written, or a file
                that was asked for cannot be made.
        """
        folder = Path(folder)
        require_free(folder, overwrite=overwrite)
        notes: list[str] = []
        text = self.description.text()
        try:
            with replacing_folder(folder) as draft:
                state = {name: x.contiguous().clone() for name, x in state_of(self.module).items()}
                (draft / WEIGHTS).write_bytes(serialized(state, metadata={"description": text}))
                for name, content in {DESCRIPTION: text, **texts}.items():
                    (draft / name).write_text(content, encoding="utf-8")
                if self.tokenizer is not None:
                    (draft / TOKENIZER).write_bytes(self.tokenizer)
                model: nn.Module = self.module
                try:
                    source = written(self.module, self.description, self.inputs)
                    model = run(source, self.module, self.description.example())
                    (draft / SOURCE).write_text(source, encoding="utf-8")
                except UnwritableError as error:
                    notes.append(f"there is no {SOURCE}, because {error}; {PROGRAM} holds the whole network instead.")
                example = self.description.example()
                if "pt2" in formats or notes:
                    programs.save_program(model, example, draft / PROGRAM)
                if "onnx" in formats:
                    notes += programs.save_onnx(model, example, draft / ONNX)
        except (OSError, SafetensorError) as error:
            raise ExportError(f"{folder} cannot be written ({error}); name another folder.") from error
        for left in folder.parent.glob(f".{folder.name}.draft-*"):
            remove(left)
        return notes


def _fill(module: GrownModule, engine: VectorizedEngine, host: int, seeds: Mapping[int, GrownSeed]) -> None:
    """Copy the weights of a host and of its seeds, by slot number, from an engine."""
    state = {name: x.to("cpu") for name, x in below("population", engine.executor.state_dict()).items()}
    fill(module.host, state["host.params"][host], state["host.buffers"][host])
    for s, seed in seeds.items():
        row, grown = host * engine.spec.num_slots + s, module.grown[slot_key(seed.slot)]
        fill(grown.seed, state["seeds.params"][row], state["seeds.buffers"][row])  # type: ignore[arg-type]
        if grown.gate is not None:
            fill(grown.gate, state["gates.params"][row], state["gates.buffers"][row])  # type: ignore[arg-type]
    restore_frozen(module.host)


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
        module = build(_described_host(description, folder) if host is None else host, description.seeds)
        restore_frozen(module.host)
        inputs = restored(description.normalization, "esper.tasks.datasets")
    except (TypeError, KeyError, ConfigError) as error:
        raise ExportError(f"{folder / DESCRIPTION}: the network cannot be built ({error}).") from error
    weights, own = _weights(folder / WEIGHTS, description), state_of(module)
    for name in sorted(weights.keys() | own.keys()):
        found, expected = (_kind(some.get(name)) for some in (weights, own))
        if found != expected:
            raise ExportError(
                f"{folder / WEIGHTS} has {found} for {name!r}, but the network has {expected}; use the "
                f"{WEIGHTS} and {DESCRIPTION} of one export."
            )
        own[name].copy_(weights[name])
    try:
        tokenizer = (folder / TOKENIZER).read_bytes() if description.tokenizer == TOKENIZER else None
    except OSError as error:
        raise ExportError(
            f"{folder / TOKENIZER} cannot be read ({error.strerror}); export the network again."
        ) from error
    return GrownNetwork(module=module, description=description, inputs=inputs, tokenizer=tokenizer)


def _tokenizer(dataset: Dataset) -> tuple[str | None, bytes | None]:
    """What model.json says of the tokenizer, and the content of its file; nothing of one of the user's."""
    match dataset.tokenizer:
        case ByteTokenizer(identity=name):
            return name, None
        case TokenizerFile() as file:
            return TOKENIZER, file.content()
    return None, None


def _kind(tensor: Tensor | None) -> str:
    """Dtype and shape, for a message."""
    return "nothing" if tensor is None else f"{tensor.dtype} {list(tensor.shape)}"


def flops(module: GrownModule, example: Tensor) -> int:
    """Floating-point operations of matrix products and convolutions for one example; a multiply-add counts as two.

    `example` is a batch as hosts get it.
    """
    args, kwargs = module.host.arguments(example[:1])
    with FlopCounterMode(display=False) as counter, torch.no_grad():
        module(*args, **kwargs)
    return int(counter.get_total_flops())


def _host(spec: HostSpec, slots: Collection[str], example: Tensor) -> Host:
    host = deterministic_build(lambda: spec.build(slots, example))
    assert isinstance(host, Host), f"{type(host).__name__} is no host"
    return host


def _described_host(description: Description, folder: Path) -> Host:
    spec = restored(description.host, "esper.kasmina.hosts")
    if not isinstance(spec, HostSpec):
        raise ExportError(
            f"{folder / DESCRIPTION}: the host is no architecture of esper, so the file alone cannot build it; give "
            f"`load` a new host, or esper.load its task; or use `load_model` of {SOURCE}, or torch.export.load of "
            f"{PROGRAM}."
        )
    return _host(spec, description.slots, description.example())


def _weights(path: Path, description: Description) -> dict[str, Tensor]:
    try:
        with safe_open(path, framework="pt") as file:
            if (file.metadata() or {}).get("description") != description.text():
                raise ExportError(
                    f"{path} belongs to another network than the {DESCRIPTION} beside it, or one of them was edited; "
                    "restore both from one export."
                )
            return {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 -- it is no mapping
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
        raise ExportError(f"{folder} is no folder of an exported network, so it is not replaced; name a new folder.")
