"""The loop of a run: rounds, records, checkpoints, and a clean stop on signals.

engine --on_step--> records: events.jsonl, listeners
engine --on_round-> metrics.jsonl, events.jsonl, listeners, best host, checkpoint
"""

import os
import signal
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from types import FrameType
from typing import final

from torch import Tensor

from esper.leyline.checkpoint_tree import below, with_prefix
from esper.leyline.protocols import ClientProtocol, StateTree
from esper.runs import best_host, events, report
from esper.runs.best_host import BestHost
from esper.runs.checkpoint import Checkpoint, Header, require_same_shape, save, state_digest
from esper.runs.config import RunConfig
from esper.runs.identity import data_of, fingerprint
from esper.runs.record_rows import record_writer
from esper.runs.records import Records
from esper.runs.report import Cost
from esper.runs.values import plain
from esper.tasks.datasets import Dataset
from esper.tasks.objectives import perplexity
from esper.telemetry.anomalies import Trend
from esper.telemetry.machine import memory_bytes
from esper.telemetry.run_directory import RunDirectory
from esper.telemetry.sinks import Hub
from esper.tolaria.engine import VectorizedEngine
from esper.tolaria.runtime import host_read, reads_so_far
from esper.tolaria.state import RolloutStats

_STOPPING = b"\nesper: stopping after this step; press Ctrl-C again to stop at once\n"


def restore(
    engine: VectorizedEngine, client: ClientProtocol, checkpoint: Checkpoint, shape: Mapping[str, object]
) -> None:
    """Load a checkpoint into engine and client; raises CheckpointError if its shape differs."""
    require_same_shape(checkpoint.header.shape, shape, checkpoint.path)
    if state := below("engine", checkpoint.state):
        engine.load_state_dict(state, client)  # resets the client, which is loaded next
    client.load_state_dict(below("policy", checkpoint.state))


@final
class Runner:
    """Runs all rounds and writes records, checkpoints and the summary.

    Args:
        config, engine, client: the run, its hosts and its learner. dataset: of the hosts, None for scripted ones.
        directory: receives records and checkpoints.
        listeners: receive steps, rounds and events. shape: of the run (`identity.run_shape`).
        start: header of the checkpoint that engine and client were restored from, None for a new run.
        best: the best host of the rounds before, if there is one.
    """

    def __init__(
        self,
        config: RunConfig,
        engine: VectorizedEngine,
        client: ClientProtocol,
        directory: RunDirectory,
        listeners: Hub,
        shape: Mapping[str, object],
        start: Header | None = None,
        *,
        dataset: Dataset | None,
        best: BestHost | None = None,
    ) -> None:
        self.config, self.engine, self.client, self.dataset = config, engine, client, dataset
        self.directory, self.listeners, self.shape = directory, listeners, dict(shape)
        self.new = start is None
        self.rounds_done = start.rounds_done if start else 0
        self.total, self.begun = (start.total, start.begun) if start else (Cost(), Cost())
        self.trend = start.trend if start else Trend()
        self.last: RolloutStats | None = None
        self.best = self._best_saved = best
        self.record = record_writer(directory.path, engine.spec, client.terms)
        self.records = Records(directory, listeners, engine.spec, config.reward, record=self.record)
        self._saved_at = (start.rounds_done, start.step) if start else (-1, 0)
        self._stop = False
        engine.timer.enabled = True
        self._mark()
        engine.on_step = self.records.step

    def run(self) -> dict[str, object] | None:
        """Run to the end. Returns the summary, or None if a signal stopped the run after writing a checkpoint."""
        remaining = range(self.rounds_done, self.config.rounds)
        with stop_signals(self._request_stop):
            if self.new:
                self.records.write_events([self._started()])
            self._mark()
            try:
                complete = self.engine.train(
                    self.client, remaining, on_round=self._on_round, should_stop=lambda: self._stop
                )
            finally:
                self.records.flush()  # also after an exception: the last steps help to explain it
                self.record.close()
            if complete:
                return self._finish()
            self._save()
            return None

    def _request_stop(self) -> None:
        self._stop = True

    def _on_round(self, stats: RolloutStats, metrics: Mapping[str, float]) -> None:
        cost = Cost(
            env_steps=stats.cost.env_steps,
            steps=stats.cost.steps,
            reads=stats.cost.reads,
            seconds=stats.cost.seconds,
            update_seconds=time.monotonic() - self._began - stats.cost.seconds,
        )
        cost, self.begun = self.begun + cost, Cost()
        self.total += cost
        self.last, self.rounds_done = stats, stats.episode + 1
        self.trend, is_best = self.trend.after(float(report.objective_of(stats, self.config.reward).mean()))
        self.records.write_events(events.round_events(stats, metrics, self.engine.spec, self.trend, self.config.reward))
        phases, memory = self.engine.timer.read(), memory_bytes(self.engine.spec.device)
        line = report.round_line(stats, cost, metrics, self.config.reward) | {
            "phase_milliseconds": phases,
            "memory_bytes": memory,
        }
        self.directory.write_metrics(line)
        self.listeners.write("round", line)
        self.record.round_ended()
        if self.dataset is not None:
            self.best = best_host.better(self.best, self.engine, stats, self.config.reward)
        if is_best:
            save(self.directory.checkpoints, *self._now(0), best=True)
        if self.rounds_done % self.config.checkpoint_every == 0 or self._all_done:
            self._save()
        self._mark()

    def _started(self) -> events.Event:
        return events.run_started(
            self.shape, fingerprint(self.config), self.engine.executor.host_params, self.engine.spec.device
        )

    def _mark(self) -> None:
        """Start the clocks of a round, or of the rest of one."""
        self._began, self._reads_before = time.monotonic(), reads_so_far()
        self.records.begin()

    @property
    def _all_done(self) -> bool:
        return self.rounds_done == self.config.rounds

    def _finish(self) -> dict[str, object]:
        """Summarize the complete run, also after a resume from its last checkpoint."""
        if self.last is None:
            self.last = self.engine.outcome()  # resumed at the end of the last episode
        (test_acc,) = host_read(self.engine.test())
        digest = state_digest(self._final_state())
        if self.best is not None and self.dataset is not None:
            self.best = best_host.with_test(self.config, self.dataset, self.engine.spec.device, self.best)
            self._save_best()
        result = report.summary(self.config, self.engine.spec.device, self.last, test_acc, self.total, digest)
        result["best_host"] = None
        if self.best is not None:
            found = perplexity(self.config.task_spec().objective, self.best.loss)
            result["best_host"] = self.best.about | {"perplexity": found}
        result["data"] = data_of(self.shape)
        result["dropped_records"] = self.listeners.num_lost + self.record.dropped
        result["memory_bytes"] = memory_bytes(self.engine.spec.device)
        head = {"kind": "run_finished", "round": self.rounds_done, "t": self.config.episode_length, "host": -1}
        self.records.write_events([head | result])
        self.directory.write_summary(result)
        return result

    def _save(self) -> None:
        """Save a checkpoint of the current state, unless there is one."""
        inside = self.engine.t if 0 < self.engine.t < self.config.episode_length else 0
        if self._saved_at == (self.rounds_done, inside):
            return
        self._save_best()  # first: a resume from the checkpoint finds the best host of its rounds
        save(self.directory.checkpoints, *self._now(inside))
        self._saved_at = (self.rounds_done, inside)

    def _save_best(self) -> None:
        """Save the best host, unless the file has it."""
        if self.best is not None and self.best is not self._best_saved:
            best_host.save(self.directory.checkpoints, self.best)
            self._best_saved = self.best

    def _now(self, inside: int) -> tuple[Header, StateTree]:
        """Header and state now; `inside` is the number of steps of an unfinished episode, else 0.

        Hosts are part of the state only inside an episode and at the end of the run.
        """
        state: StateTree = with_prefix("policy", self.client.state_dict())
        if inside or self._all_done:
            state |= with_prefix("engine", self.engine.state_dict())
        header = Header(
            rounds_done=self.rounds_done,
            step=inside,
            cursor=self.directory.cursor(),
            total=self.total,
            begun=self._begun_so_far() if inside else Cost(),
            shape=self.shape,
            config=plain(self.config),
            trend=self.trend,
        )
        return header, state

    def _begun_so_far(self) -> Cost:
        """Cost of the unfinished episode."""
        steps = self.engine.t
        return replace(
            self.begun,
            steps=steps,
            env_steps=steps * self.config.num_envs,
            reads=self.begun.reads + reads_so_far() - self._reads_before,
            seconds=self.begun.seconds + time.monotonic() - self._began,
        )

    def _final_state(self) -> dict[str, Tensor]:
        """Policy, optimizer, statistics and population at the end of a run."""
        return {
            **with_prefix("policy", self.client.state_dict()),
            **with_prefix("population", self.engine.executor.state_dict()),
        }


@contextmanager
def stop_signals(request_stop: Callable[[], None]) -> Iterator[None]:
    """SIGINT and SIGTERM call `request_stop`; a second signal raises KeyboardInterrupt where the program is.

    Signals reach the main thread alone: a run in another thread leaves them to it.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    requested = False

    def handle(number: int, frame: FrameType | None) -> None:
        nonlocal requested
        if requested:
            raise KeyboardInterrupt
        requested = True
        os.write(2, _STOPPING)  # Python streams are not safe in a signal handler
        request_stop()

    before = {number: signal.signal(number, handle) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield
    finally:
        for number, old in before.items():
            signal.signal(number, old)
