"""Assembles a run: its data, engine and client, and the memory they need."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial

import torch

from esper.leyline.architecture import Architecture, architecture_arrays
from esper.leyline.errors import option
from esper.leyline.lifecycle import TEMPO_TICKS
from esper.leyline.messages import ClientProtocol
from esper.leyline.ranks import Ranks, group, local_ranks, require_own_gpus
from esper.runs.assembly.clients import baseline_of, learner_of
from esper.runs.assembly.run_config import RunConfig, run_shape
from esper.simic.client import policy_bytes, rollout_bytes
from esper.simic.compilation import CompiledStep
from esper.tamiyo.baselines import STATIC
from esper.tasks.datasets import Dataset, cautions
from esper.tasks.registry import TaskSpec
from esper.telemetry.progress import duration
from esper.tolaria.build import build_engine, load_dataset
from esper.tolaria.engine import StepListener, VectorizedEngine
from esper.tolaria.engine_config import EngineConfig
from esper.tolaria.executors.choice import training_bounds
from esper.tolaria.memory import MemoryPrediction, available_bytes, gigabytes, predict, resident_bytes
from esper.tolaria.runtime import choose_device, keep_freed_memory, usable_cores


def device_of(config: RunConfig) -> torch.device:
    """The device of the run. Also sets the threads and the allocator; raises ConfigError if the device is missing."""
    keep_freed_memory()
    torch.set_num_threads(config.threads or min(torch.get_num_threads(), usable_cores()))
    return choose_device(config.device)


def dataset_of(config: RunConfig, device: torch.device) -> Dataset | None:
    """The data set of the task; raises DataError if files are missing or broken."""
    return load_dataset(config.task_spec(), config.seed, device, config.data_path())


def engine_of(
    config: RunConfig,
    dataset: Dataset | None,
    device: torch.device,
    *,
    engine_config: EngineConfig | None = None,
    on_step: StepListener | None = None,
    task: TaskSpec | None = None,
    lr_factors: Sequence[float] | None = None,
) -> VectorizedEngine:
    """The engine of a run.

    `engine_config` and `task` replace those of the configuration; `lr_factors` as in `build_engine`.
    """
    engine = build_engine(
        engine_config or config.engine(),
        task or config.task_spec(),
        dataset,
        device,
        on_step=on_step,
        lr_factors=lr_factors,
    )
    if config.is_compiled(device):
        engine.compile_phases(partial(CompiledStep, name="a phase of the control step"))
    return engine


@dataclass(frozen=True)
class Parts:
    """The parts of a run.

    `config` names the executor, blocks, compile setting and precision that were actually chosen, so that a resumed run
    uses the same ones even if a later version would choose others. `shape` is the `run_shape` stored in checkpoints.
    `dataset` is None for scripted hosts. `engine` and `client` have the hosts of this rank.
    """

    config: RunConfig
    engine: VectorizedEngine
    client: ClientProtocol
    shape: dict[str, object]
    dataset: Dataset | None
    ranks: Ranks


_MEASURED_PER_TRAINED = 3
"""Examples that are measured in the time in which one is trained."""


def require_memory(
    config: RunConfig,
    task: TaskSpec,
    dataset: Dataset | None,
    device: torch.device,
    say: Callable[[str], None],
    *,
    num_envs: int,
    episodes: int,
    available: int | None = None,
    setting: str = "num_envs",
) -> None:
    """Say how much memory and time `num_envs` hosts will need, and before it what makes their results poor.

    Nothing is said of the memory of scripted hosts that fit. All of them are trained in `episodes`. This process can
    still take `available` bytes, which are measured if they are not given. `setting` is the name under which the user
    gave the number of hosts: where that is best_of, control steps are called steps.

    Raises:
        ConfigError: they do not fit; it names the largest number that does.
    """
    engine, slots = config.engine(num_envs=num_envs), len(config.slots)
    rollout, policy = rollout_bytes(config.episode_length, slots, config.ppo), policy_bytes(slots, config.ppo)
    free = available_bytes(device) if available is None else available
    # germinate in step 1, train, blend at the fastest tempo, hold, and FOSSILIZE
    first = 1 + config.lifecycle.min_training_epochs + min(TEMPO_TICKS) + 1
    if first > config.episode_length and not config.architecture:
        longer = option("steps" if setting == "best_of" else "episode_length")
        say(
            f"note: no seed can be fossilized before step {first}, but an episode ends with step "
            f"{config.episode_length}; use a larger {longer}, or a smaller lifecycle.min_training_epochs"
        )
    for note in () if dataset is None else cautions(dataset):
        say(note)
    if dataset is None:
        scripted = MemoryPrediction(
            process=resident_bytes(), host=rollout, at_once=0, together=False, threads=1, policy=policy
        )
        scripted.require(num_envs, free, setting)
        return
    predicted = replace(predict(engine, task, dataset, device, others=rollout), policy=policy)
    predicted.require(num_envs, free, setting)
    total, here = predicted.total(num_envs), free + predicted.process
    say(f"memory: about {gigabytes(total)} of {gigabytes(here)}, {predicted.host / 2**20:.1f} MiB for each host")
    trainings = num_envs * episodes
    batches = len(training_bounds(task, dataset))
    measured = len(dataset.val) / task.batch_train / _MEASURED_PER_TRAINED
    each = config.episode_length * (batches + measured) * predicted.batch_seconds
    seconds = trainings * each / predicted.threads
    say(
        f"cost: {trainings:,} training{'s' * (trainings != 1)} of {config.episode_length} steps with {batches:,} "
        f"batch{'es' * (batches != 1)} each, about {duration(seconds)} "
        f"by a trial of one network{' at a time' * predicted.together}"
    )


def assemble(
    config: RunConfig, device: torch.device, say: Callable[[str], None] = lambda line: None, *, rounds_done: int = 0
) -> Parts:
    """A new run before its first step, compiled and warmed up; `say` gets lines about its memory and its time.

    Raises:
        DataError: data are missing or broken. ConfigError: the configuration cannot run on this device, or does not fit
            into its memory.
    """
    require_own_gpus(device)
    config = replace(config, blocks=config.blocks or min(group().size, config.num_envs))
    ranks = Ranks(config.num_envs, config.blocks, group())
    hosts = replace(config.engine(), num_envs=len(ranks.hosts), host_offset=ranks.hosts.start)
    dataset = dataset_of(config, device)
    free = available_bytes(device) // (1 if ranks.alone or device.type == "cuda" else local_ranks())
    require_memory(
        config,
        config.task_spec(),
        dataset,
        device,
        say,
        num_envs=hosts.num_envs,
        episodes=config.rounds - rounds_done,
        available=free,
    )
    engine = engine_of(config, dataset, device, engine_config=hosts)
    shape = run_shape(config, engine.spec, dict(dataset.identity) if dataset else {})
    chosen = replace(
        config,
        executor=engine.config.executor,
        amp=engine.config.amp,
        compile="on" if config.is_compiled(device) else "off",
    )
    client: ClientProtocol
    if config.architecture:
        client = baseline_of(STATIC, config, engine.spec)
        engine.architectures = (Architecture.of_lines(config.architecture),) * engine.spec.num_envs
        architecture_arrays(engine.architectures, engine.spec)  # refuses what does not fit
    else:
        client = learner_of(config, engine.spec, ranks)
    engine.warm_up(len(client.terms))
    return Parts(chosen, engine, client, shape, dataset, ranks)
