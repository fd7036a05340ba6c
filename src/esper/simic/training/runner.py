"""The loop of a run: rounds, records, checkpoints, a clean end when somebody asks for it."""

import json
import signal
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from types import FrameType
from typing import final

from torch import Tensor

from esper.leyline.protocols import EngineSpec, StateTree
from esper.leyline.state_tree import below, with_prefix
from esper.simic.client import SimicClient
from esper.simic.training import report
from esper.simic.training.checkpoint import Checkpoint, Header, require_same_shape, save, state_digest
from esper.simic.training.config import RunConfig
from esper.simic.training.events import events_of
from esper.telemetry.progress import RunProgress
from esper.telemetry.run_directory import RunDirectory
from esper.tolaria.engine import VectorizedEngine
from esper.tolaria.runtime import host_read
from esper.tolaria.state import RolloutStats, StepReport

_TOTALS = ("env_steps", "steps", "reads", "seconds")


def run_shape(config: RunConfig, spec: EngineSpec, identity: Mapping[str, object]) -> dict[str, object]:
    """What a checkpoint and the run that loads it must have in common; `identity` is that of the data set."""
    shape = {
        "task": config.task,
        "data": identity,
        "seed": config.seed,
        "slots": config.slots,
        "num_envs": config.num_envs,
        "episode_length": config.episode_length,
        "reward": config.reward.mode,
        "head_sizes": spec.head_sizes,
        "feature_width": config.ppo.feature_width,
        "hidden_width": config.ppo.hidden_width,
        "num_layers": config.ppo.num_layers,
    }
    plain: dict[str, object] = json.loads(json.dumps(shape, default=dict))  # tuples become lists, as in the header
    return plain


def restore(engine: VectorizedEngine, client: SimicClient, checkpoint: Checkpoint, shape: Mapping[str, object]) -> None:
    """Bring engine and client to a checkpoint; raises CheckpointError where it belongs to another kind of run."""
    require_same_shape(checkpoint.header.shape, shape, checkpoint.path)
    if state := below("engine", checkpoint.state):
        engine.load_state_dict(state, client)  # begins the episode anew, so the client comes after it
    client.load_state_dict(below("policy", checkpoint.state))


@final
class Runner:
    """Owns the order of things in a run, and nothing else.

    Args:
        config: the run. engine, client: who is trained and who learns. directory: where records go.
        progress: what is shown meanwhile. shape: what its checkpoints say of the run (`run_shape`).
        start: header of the checkpoint that engine and client were restored from, None for a new run.
    """

    def __init__(
        self,
        config: RunConfig,
        engine: VectorizedEngine,
        client: SimicClient,
        directory: RunDirectory,
        progress: RunProgress,
        shape: Mapping[str, object],
        start: Header | None = None,
    ) -> None:
        self.config, self.engine, self.client = config, engine, client
        self.directory, self.progress, self.shape = directory, progress, dict(shape)
        self.rounds_done = start.rounds_done if start else 0
        self.totals = {name: float(getattr(start, name)) if start else 0.0 for name in _TOTALS}
        self.last: RolloutStats | None = None
        self._so_far = report.RoundSoFar()
        self._round_began = time.monotonic()
        self._stop = False
        engine.on_step = self._on_step

    def run(self) -> dict[str, object] | None:
        """Run to the end. Returns the summary, or None where a signal ended the run early (a checkpoint is there)."""
        remaining = range(self.rounds_done, self.config.rounds)
        with _stop_signals(self._ask_to_stop), self.progress:
            self._round_began = time.monotonic()
            complete = self.engine.train(
                self.client, remaining, on_round=self._on_round, should_stop=lambda: self._stop
            )
        if not complete:
            self._save()
            self.directory.close()
            return None
        assert self.last is not None
        (test_acc,) = host_read(self.engine.test())
        result = report.summary(
            self.config, self.engine.spec.device, self.last, test_acc, self.totals, state_digest(self._final_state())
        )
        self.directory.write_summary(result)
        self.directory.close()
        return result

    def _ask_to_stop(self) -> None:
        self._stop = True

    def _on_step(self, step: StepReport) -> None:
        self.directory.write_events(events_of(step, self.engine.spec))
        self.progress.step(self._so_far.add(step, time.monotonic() - self._round_began))

    def _on_round(self, stats: RolloutStats, metrics: Mapping[str, float]) -> None:
        self.last = stats
        self.rounds_done = stats.episode + 1
        for name in _TOTALS:
            self.totals[name] += getattr(stats.cost, name)
        self.directory.write_metrics(report.round_line(stats, metrics))
        self.progress.round(report.shown_round(stats))
        self._round_began = time.monotonic()
        done = self.rounds_done
        if (done % self.config.checkpoint_every == 0 or done == self.config.rounds) and not self._stop:
            self._save()

    def _save(self) -> None:
        inside = self.engine.t if 0 < self.engine.t < self.config.episode_length else 0
        state: StateTree = with_prefix("policy", self.client.state_dict())
        if inside:
            state |= with_prefix("engine", self.engine.state_dict())
        header = Header(
            rounds_done=self.rounds_done,
            step=inside,
            cursor=self.directory.cursor(),
            shape=self.shape,
            env_steps=int(self.totals["env_steps"]),
            steps=int(self.totals["steps"]),
            reads=int(self.totals["reads"]),
            seconds=self.totals["seconds"],
        )
        save(self.directory.checkpoints, header, state)

    def _final_state(self) -> dict[str, Tensor]:
        """Policy, optimizer, statistics and population at the end of a run."""
        return {
            **with_prefix("policy", self.client.state_dict()),
            **with_prefix("population", self.engine.executor.state_dict()),
        }


@contextmanager
def _stop_signals(ask: Callable[[], None]) -> Iterator[None]:
    """Ctrl-C and SIGTERM ask the run to end after the current step; a second one ends it at once."""
    asked = False

    def handle(number: int, frame: FrameType | None) -> None:
        nonlocal asked
        if asked:
            raise KeyboardInterrupt
        asked = True
        ask()

    before = {number: signal.signal(number, handle) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield
    finally:
        for number, old in before.items():
            signal.signal(number, old)
