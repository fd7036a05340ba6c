"""What every verb does around its work: names of tasks, settings, and the state of the caller's process.

A verb imports what it runs, as a command of the command line does.
"""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias, final

import torch

from esper.api import checked
from esper.api.task import Task
from esper.leyline.errors import ConfigError, RegistryError, RunDirectoryError, Stopped, nearest
from esper.leyline.files import expanded, read_json
from esper.runs.assembly.plugins import names_task, not_among, task_in_file
from esper.runs.assembly.presets import config_of_run, plugin_names, resolve
from esper.runs.assembly.run_config import RunConfig, free_folder
from esper.runs.assembly.values import Values, nested, read_toml
from esper.runs.evaluation.controllers import known_names
from esper.tamiyo.policy_files import is_policy_file
from esper.tasks.registry import TaskSpec, registered, task_by_name
from esper.telemetry.progress import RunConsole, ranks_of_job, warn
from esper.telemetry.run_directory import CONFIG, METRICS, SUMMARY, require_run

if TYPE_CHECKING:
    import pandas
    import polars

    from esper.runs.evaluation.comparison import Comparison
    from esper.runs.evaluation.rewards import RewardComparison
    from esper.telemetry.record.reader import Record


AnyTask: TypeAlias = Task | TaskSpec | str
"""A task, the name of a registered one, or FILE.py:NAME."""


def spec_of(task: AnyTask) -> TaskSpec:
    """The specification of a task; raises RegistryError for an unknown name, ConfigError for a wrong file."""
    if isinstance(task, str):
        return task_in_file(task) if names_task(task) else task_by_name(task)
    return task.spec if isinstance(task, Task) else task


@contextmanager
def in_process(task: TaskSpec | None) -> Iterator[None]:
    """`task` has its name inside; at the end PyTorch has as many threads as before."""
    threads = torch.get_num_threads()
    try:
        with nullcontext() if task is None else registered(task):
            yield
    finally:
        torch.set_num_threads(threads)


def given(settings: Mapping[str, Any], **named: object) -> Values:
    """Configuration values from keyword arguments, with dots or as tables; None among `named` means not given.

    Raises:
        ConfigError: a name is both a value and a table.
    """
    values = {name: value for name, value in named.items() if value is not None}
    if isinstance(reward := values.pop("reward", None), str):
        values["reward.mode"] = reward
    return nested({**settings, **values})


def console(progress: bool) -> RunConsole:
    """Where a verb prints, silent without `progress`."""
    return RunConsole(quiet=not progress)


@final
class Run:
    """A run directory, of a run that is complete or was stopped; raises RunDirectoryError if it is none.

    Attributes:
        directory: its path. task: specification of a task that only this process knows, or None.
    """

    def __init__(
        self, directory: Path, task: TaskSpec | None = None, *, allowed: Sequence[str] = (), trust: bool = False
    ) -> None:
        """The run in a directory, whose `allowed` plugins may be executed, or with `trust` all."""
        require_run(directory)
        self.directory, self.task, self._allowed, self._trust = directory, task, tuple(allowed), trust

    @property
    def config(self) -> dict[str, Any]:
        """All settings, as in config.toml."""
        return read_toml(self.directory / CONFIG)

    @property
    def summary(self) -> dict[str, Any] | None:
        """The results, as in summary.json; None until the run is complete. Raises RunDirectoryError if damaged."""
        file = self.directory / SUMMARY
        try:
            found: dict[str, Any] | None = read_json(file) if file.is_file() else None
        except ValueError as error:
            raise RunDirectoryError(f"{file} is damaged ({error}); restore it from a backup.") from error
        return found

    @property
    def rounds(self) -> list[dict[str, Any]]:
        """The metrics of each round, as in metrics.jsonl."""
        from esper.telemetry.record.reader import read_lines

        warnings: list[str] = []
        lines = read_lines(self.directory / METRICS, (), warnings)
        warn(warnings)
        return lines

    @property
    def objective(self) -> list[float]:
        """100·J of each round, the mean of its hosts."""
        return [line["objective_mean"] for line in self.rounds]

    def query(self, sql: str, params: Sequence[object] = ()) -> list[dict[str, Any]]:
        """The rows of a SELECT about the run, e.g. `select t, op from decisions where host = 3`; see docs/record.md.

        `params` fill its question marks. Raises QueryError, which names the tables.
        """
        with self._record() as record:
            return record.query(sql, params)

    def frame(self, table: str) -> "pandas.DataFrame":
        """A table of the record, such as "decisions", or the result of a SELECT, as a pandas frame."""
        with self._record() as record:
            return record.frame(_select(table))

    def polars(self, table: str) -> "polars.DataFrame":
        """The same as a polars frame."""
        with self._record() as record:
            return record.polars(_select(table))

    def _record(self) -> "Record":
        from esper.telemetry.record.reader import open_record

        record = open_record([self.directory])
        warn(record.warnings)
        return record

    @checked
    def resume(self, *, rounds: int | None = None, progress: bool = True) -> "Run":
        """Continue a run that was stopped, or make it longer: to `rounds` rounds in all. Returns this run.

        Raises:
            ConfigError, CheckpointError: there is nothing to do, or nothing to continue from.
            KeyboardInterrupt: it was stopped again; its text says how it goes on.
        """
        from esper.runs.training import runner

        with in_process(self.task):
            config = self.resolved(given({}, rounds=rounds))
            with ranks_of_job(config.rank_timeout):
                summary = runner.resume(config, self.directory, console(progress))
        require_finished(summary, self.directory, task=self.task is not None)
        return self

    def evaluate(self, *baselines: str, **options: Any) -> "Comparison | RewardComparison":  # noqa: ANN401 -- see `esper.evaluate`
        """`esper.evaluate(run, *baselines, **options)`."""
        return evaluate(self, *baselines, **options)

    def resolved(self, changes: Mapping[str, Any]) -> RunConfig:
        """The validated configuration with changes (`config_of_run`); imports the plugins that may be."""
        plugins = plugin_names(self.config)
        allowed = [name for name in self._allowed if not not_among([name], plugins)]
        allowed += changes.get("plugins", [])
        return config_of_run(self.directory, {**changes, "plugins": allowed}, trust=self._trust)

    def __repr__(self) -> str:
        objective = self.objective
        last = f", 100·J {objective[-1]:.2f}" if objective else ""
        return f"Run({str(self.directory)!r}: {self.config['task']}, {len(objective)} rounds{last})"


def _select(table: str) -> str:
    """The SELECT of a whole table; a SELECT stays as it is."""
    return f"SELECT * FROM {table}" if table.isidentifier() else table


def require_finished(summary: dict[str, Any] | None, path: Path, *, task: bool) -> None:
    """Raise Stopped, which says how the run goes on, if it was stopped; `task`: only this program knows its task."""
    if summary is None:
        from esper.runs.training import runner

        raise Stopped(runner.stopped(path, task=task))


def train(
    task: AnyTask,
    rounds: int = 30,
    num_envs: int = 8,
    *,
    preset: str | None = None,
    reward: str | None = None,
    device: str | None = None,
    out: Path | str | None = None,
    progress: bool = True,
    **settings: Any,  # noqa: ANN401 -- validated with the configuration
) -> Run:
    """Train a controller that grows networks of a task, as `esper train` does, in this process.

    Ctrl-C stops after the current step, and `Run.resume` continues.

    Args:
        task: an `esper.Task`, the name of a registered one, or "FILE.py:NAME".
        rounds: rounds of training; coefficients are annealed over as many.
        num_envs: networks that train in parallel.
        preset: base settings: "quickstart" (default), "small", "learn" or "paper".
        reward: name of a reward, built in or registered ("objective").
        device: "auto", "cpu", "cuda" or "cuda:N".
        out: run directory to create; a new folder under runs/ if not given.
        progress: whether to print.
        settings: any key of the configuration, such as threads=1, ppo={"lr": 1e-3} or **{"ppo.lr": 1e-3}.

    Raises:
        ConfigError, RegistryError, DataError, RunDirectoryError: what is wrong, and how to continue.
        KeyboardInterrupt: the run was stopped; its text says how it goes on.
    """
    from esper.runs.training import runner

    spec, named = spec_of(task), {"rounds": rounds, "num_envs": num_envs, "preset": preset, "reward": reward}
    values = given({"schedule_rounds": rounds, **settings}, **named, device=device)
    values["task"] = task if isinstance(task, str) else spec.name
    with in_process(None if isinstance(task, str) else spec):
        config = resolve(values)
        with ranks_of_job(config.rank_timeout) as group:
            path = group.of_first(lambda: free_folder(config, config.preset) if out is None else expanded(out))
            summary = runner.start(config, path, console(progress))
    require_finished(summary, path, task=not isinstance(task, str))
    return Run(path, None if isinstance(task, str) else spec, trust=True)


def train_policy(
    tasks: Sequence[AnyTask],
    out: Path | str,
    rounds: int = 200,
    num_envs: int = 16,
    *,
    preset: str | None = None,
    reward: str | None = None,
    device: str | None = None,
    progress: bool = True,
    **settings: Any,  # noqa: ANN401 -- validated with the configuration
) -> Path:
    """Train one policy over several tasks, as `esper train` with several --task does.

    The rounds take turns. The policy serves any network: `esper.grow(task, "OUT/policy.safetensors")` grows one by it,
    and `esper.train(task, policy="OUT/policy.safetensors")` trains it further.

    Args:
        tasks: at least two, each as in `train`.
        out: folder to create; with one of an unfinished training and the same arguments, it is continued.
        rounds: of all tasks together.
        num_envs: networks of a round.
        preset: as in `train`.
        reward: as in `train`.
        device: as in `train`.
        progress: whether to print.
        settings: any key of the configuration.

    Returns:
        The file of the policy.

    Raises:
        ConfigError, RegistryError, DataError, CheckpointError: what is wrong, and how to continue.
        KeyboardInterrupt: it was stopped; its text says how it goes on.
    """
    from esper.runs.training.mixture import train_mixture

    if len(tasks) < 2:
        raise ConfigError(f"tasks is {tasks!r}; give a list of at least two tasks, or train a run on one.")
    values = given({"schedule_rounds": rounds, **settings}, rounds=rounds, num_envs=num_envs, preset=preset,
                   reward=reward, device=device)  # fmt: skip
    with ExitStack() as stack:
        for task in tasks:
            stack.enter_context(in_process(None if isinstance(task, str) else spec_of(task)))
        names = [task if isinstance(task, str) else spec_of(task).name for task in tasks]
        configs = [resolve({**values, "task": name}) for name in names]
        file = train_mixture(configs, expanded(out), console(progress))
    if file is None:
        raise Stopped(f"stopped; the same call continues with what {out} holds")
    return file


def _is_baseline(name: Run | Path | str) -> bool:
    """Whether it is the name of a baseline, or a policy file, and not a run."""
    return not isinstance(name, Run) and (str(name) in known_names() or is_policy_file(str(name)))


def evaluate(
    run: Run | Path | str | Sequence[Run | Path | str],
    *baselines: str,
    task: AnyTask | None = None,
    episode_length: int | None = None,
    num_envs: int = 16,
    seed: int | None = None,
    flops_per_host: float | None = None,
    best: bool = False,
    out: Path | str | None = None,
    device: str | None = None,
    progress: bool = True,
) -> "Comparison | RewardComparison":
    """Compare the controller of a run with baselines on the same new networks, as `esper evaluate` does.

    The controller is not trained further; the run directory is not changed.

    Args:
        run: from `esper.train` or `esper.load`, or its directory; a list of runs that differ in their seed alone is one
            controller, trained several times; with other rewards or settings of the learner they are compared. Or a
            baseline, which needs `task`.
        baselines: names of baselines or registered policies; none means all baselines. wait_only is always compared.
        task: another task that the controller is transferred to; that of baselines without a run.
        episode_length: control steps; as in the run, or set by the task, if not given.
        num_envs: networks per controller and run.
        seed: of the networks; that of each run + 1,000,000 if not given, which is needed for several runs.
        flops_per_host: compare all of them once more at this budget for training and measuring a network: each run as
            often as fits, validation keeps the best.
        best: use the checkpoint with the highest mean J of ten rounds instead of the newest.
        out: folder that keeps each outcome as soon as it is known; a second call continues there. Not for a task that
            only this program knows.
        device: as in the run if not given.
        progress: whether to print.

    Returns:
        The comparison, which prints as a table; `rows` has the numbers, `verdict` a sentence.

    Raises:
        ConfigError, RegistryError, CheckpointError: what cannot be compared, and how to continue.
    """
    from esper.runs.evaluation.comparison import compare
    from esper.runs.evaluation.rewards import compare_rewards, differ_in_learning

    first = [run] if isinstance(run, Run | Path | str) else run
    if not first:
        raise ConfigError("run is an empty list; name at least one run.")
    runs = [one if isinstance(one, Run) else Run(expanded(one)) for one in first if not _is_baseline(one)]
    for name in baselines:
        if not _is_baseline(name):
            raise RegistryError(f"unknown baseline {name!r}; {nearest(name, known_names())}")
    baselines = (*(str(one) for one in first if _is_baseline(one)), *baselines)
    if not runs and (task is None or best):
        raise ConfigError(f"{', '.join(baselines)} and no run: give task, on which they are compared, and not best.")
    other = None if task is None else spec_of(task)
    own = {spec.name: spec for spec in (other, *(one.task for one in runs)) if spec is not None}
    if out is not None and (isinstance(task, Task) or any(one.task is not None for one in runs)):
        raise ConfigError("outcomes of a task that only a program knows cannot be recognized later; leave out out.")
    changes = given({}, device=device, episode_length=episode_length, task=None if other is None else other.name)
    with ExitStack() as stack:
        for spec in own.values():
            stack.enter_context(in_process(spec))
        stack.enter_context(in_process(None))
        stack.enter_context(ranks_of_job())
        configs = [one.resolved(changes) for one in runs] or [resolve(changes)]
        return (partial(compare_rewards, compare) if differ_in_learning(configs) else compare)(
            configs,
            [one.directory for one in runs],
            baselines,
            best=best,
            seeds=() if seed is None else (seed,),
            num_envs=num_envs,
            flops=flops_per_host,
            out=None if out is None else expanded(out),
            console=console(progress),
        )
