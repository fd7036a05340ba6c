"""Compares trained controllers with baselines."""

from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path

from esper.api.run import Run
from esper.api.session import AnyTask, console, folder, given, in_process, spec_of
from esper.leyline.errors import ConfigError, RegistryError, nearest
from esper.runs.comparison import Comparison, compare
from esper.runs.controllers import known_names
from esper.runs.presets import resolve
from esper.tamiyo.policy_files import SUFFIX


def evaluate(
    run: Run | Path | str | Sequence[Run | Path | str],
    *baselines: str,
    task: AnyTask | None = None,
    episode_length: int | None = None,
    num_envs: int = 16,
    seed: int | None = None,
    best: bool = False,
    out: Path | str | None = None,
    device: str | None = None,
    progress: bool = True,
) -> Comparison:
    """Compare the controller of a run with baselines on the same new networks, as `esper evaluate` does.

    The controller is not trained further; the run directory is not changed.

    Args:
        run: from `esper.train` or `esper.load`, or its directory; a list of runs that differ in their seed alone is one
            controller, trained several times.
        baselines: names of baselines or registered policies; none means all baselines. wait_only is always compared.
        task: another task that the controller is transferred to, with as many slots.
        episode_length: control steps; as in the run, or set by the task, if not given.
        num_envs: networks per controller and run.
        seed: of the networks; that of each run + 1,000,000 if not given, which is needed for several runs.
        best: use the checkpoint with the highest mean J of ten rounds instead of the newest.
        out: folder that keeps each outcome as soon as it is known; a second call continues there. Not for a task that
            only this program knows.
        device: as in the run if not given.
        progress: whether to print.

    Returns:
        The comparison, which prints as a table; `rows` has the numbers, `verdict` a sentence.

    Raises:
        ConfigError, RegistryError, CheckpointError: what cannot be compared, and the way out.
    """
    runs = [_opened(one) for one in ([run] if isinstance(run, Run | Path | str) else run)]
    if not runs:
        raise ConfigError("run is an empty list; name at least one run.")
    for name in baselines:
        if name not in known_names() and not name.endswith(SUFFIX):
            raise RegistryError(f"unknown baseline {name!r}; {nearest(name, known_names())}")
    other = None if task is None else spec_of(task)
    own = {spec.name: spec for spec in (other, *(one.task for one in runs)) if spec is not None}
    if out is not None and any(one.task is not None for one in runs):
        raise ConfigError("outcomes of a task that only a program knows cannot be recognized later; leave out out.")
    changes = given({}, device=device, episode_length=episode_length)
    with ExitStack() as stack:
        for spec in own.values():
            stack.enter_context(in_process(spec))
        stack.enter_context(in_process(None))
        if other is None:
            configs = [one.resolved(changes) for one in runs]
        else:
            kept = [one.policy_values() | {name: one.config[name] for name in ("seed", "num_envs")} for one in runs]
            configs = [resolve({"task": other.name, **values, **changes}) for values in kept]
        return compare(
            configs,
            [one.directory for one in runs],
            baselines,
            best=best,
            transfer=other is not None or episode_length is not None,
            seeds=() if seed is None else (seed,),
            num_envs=num_envs,
            out=None if out is None else Path(out),
            console=console(progress),
        )


def _opened(run: Run | Path | str) -> Run:
    return run if isinstance(run, Run) else Run(folder(run))
