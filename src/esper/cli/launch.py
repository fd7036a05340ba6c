"""`--ranks N`: the same command in N processes of this machine, by the launcher that torchrun is made of."""

import logging
import os
import signal
import sys

from esper.cli.options import EXIT_ERROR, EXIT_STOPPED, given_arguments
from esper.leyline.errors import ConfigError


def in_ranks(ranks: int, *more: str) -> int:
    """Run the command of this process, and `more` arguments, in so many processes; returns the exit code.

    Raises:
        ConfigError: a number below 1, or this process is one of several already.
    """
    from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs, SignalException
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.launcher.api import LaunchConfig, elastic_launch

    from esper.leyline.ranks import is_launched
    from esper.tolaria.runtime import usable_cores

    if ranks < 1:
        raise ConfigError(f"ranks is {ranks}; at least 1 process is needed.")
    if is_launched():
        raise ConfigError(
            f"torchrun has started {os.environ['WORLD_SIZE']} processes already, so --ranks {ranks} would start more "
            "in each; leave one of them out."
        )
    os.environ.setdefault("OMP_NUM_THREADS", str(max(1, usable_cores() // ranks)))
    os.environ.setdefault("TORCH_ELASTIC_SHUTDOWN_TIMEOUT", "600")  # a step may take long, and a checkpoint follows
    logging.getLogger("torch.distributed.elastic").setLevel(logging.CRITICAL)  # the ranks say what is wrong
    config = LaunchConfig(
        min_nodes=1,
        max_nodes=1,
        nproc_per_node=ranks,
        rdzv_backend="c10d",
        rdzv_endpoint="localhost:0",
        run_id="esper",
        max_restarts=0,
        logs_specs=DefaultLogsSpecs(),
    )
    try:
        # the last one of several values holds
        elastic_launch(config, sys.executable)("-m", "esper", *given_arguments, "--ranks", "1", *more)
    except SignalException:
        return EXIT_STOPPED
    except ChildFailedError as error:
        codes = {rank: failure.exitcode for rank, failure in error.failures.items()}
        if {EXIT_STOPPED, -signal.SIGINT} & set(codes.values()):
            return EXIT_STOPPED
        # when one ends, the launcher ends the others by SIGTERM
        killed = {rank: -code for rank, code in codes.items() if code < 0 and code != -signal.SIGTERM}
        if killed and EXIT_ERROR not in codes.values():
            names = ", ".join(f"rank {rank} by signal {number}" for rank, number in killed.items())
            print(f"esper: killed: {names}, perhaps for lack of memory", file=sys.stderr)
        return EXIT_ERROR
    return 0
