"""Opens a folder that esper wrote."""

from pathlib import Path

from esper.api.grown import Grown
from esper.api.run import Run
from esper.api.session import AnyTask, folder, spec_of
from esper.api.timeline import Timeline
from esper.export import network
from esper.export.grown import read_description
from esper.kasmina.hosts.host import Host
from esper.kasmina.parameters.initialization import deterministic_build
from esper.leyline.errors import RunDirectoryError
from esper.telemetry.run_directory import CONFIG


def load(path: Path | str, *, task: AnyTask | None = None, trust: bool = False) -> Run | Grown:
    """The run or the network in a folder. No code of the folder is executed unless you allow it.

    Args:
        path: a run directory, or a folder of `Grown.save` or `esper export`.
        task: the task of the run or network, where it was made in a Python program.
        trust: whether plugins that a run names may be executed.

    Raises:
        RunDirectoryError: it is neither. ExportError: the network is damaged, or its host needs `task`.
    """
    place = folder(path)
    spec = None if task is None else spec_of(task)
    if (place / network.DESCRIPTION).is_file():
        host: Host | None = None
        if spec is not None and spec.host is not None:
            architecture, described = spec.host, read_description(place / network.DESCRIPTION)
            built = deterministic_build(lambda: architecture.build(described.slots, described.example()))
            assert isinstance(built, Host)
            host = built
        found = network.load(place, host=host)
        return Grown(found, Timeline.read(place, found.description.unit))
    if (place / CONFIG).is_file():
        return Run(place, None if isinstance(task, str) else spec, trust=trust)
    raise RunDirectoryError(
        f"{place} holds neither a run ({CONFIG}) nor a network ({network.DESCRIPTION}); name the folder of one."
    )
