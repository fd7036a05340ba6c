"""Compares a trained controller with baselines."""

from pathlib import Path

from esper.api.run import Run
from esper.api.session import console, folder, given, in_process
from esper.leyline.errors import RegistryError, nearest
from esper.runs.comparison import Comparison, compare
from esper.runs.evaluate import names


def evaluate(
    run: Run | Path | str,
    *baselines: str,
    num_envs: int = 16,
    seed: int | None = None,
    best: bool = False,
    device: str | None = None,
    progress: bool = True,
) -> Comparison:
    """Compare the controller of a run with baselines on the same new networks, as `esper evaluate` does.

    The controller is not trained further; the run directory is not changed.

    Args:
        run: from `esper.train` or `esper.load`, or its directory.
        baselines: names of baselines or registered policies; none means all baselines. wait_only is always compared.
        num_envs: networks per controller.
        seed: of the networks; that of the run + 1,000,000 if not given.
        best: use the checkpoint with the highest mean J of ten rounds instead of the newest.
        device: as in the run if not given.
        progress: whether to print.

    Returns:
        The comparison, which prints as a table; `rows` has the numbers, `verdict` a sentence.

    Raises:
        ConfigError, RegistryError, CheckpointError: what cannot be compared, and the way out.
    """
    run = run if isinstance(run, Run) else Run(folder(run))
    for name in baselines:
        if name not in names():
            raise RegistryError(f"unknown baseline {name!r}; {nearest(name, names())}")
    with in_process(run.task):
        return compare(
            run.resolved(given({}, device=device)),
            run.directory,
            baselines,
            best=best,
            seed=seed,
            num_envs=num_envs,
            say=console(progress).say,
        )
