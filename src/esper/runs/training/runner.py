"""The loop of a run: rounds, records, checkpoints, and a clean stop on signals.

engine --steps----> records: events.jsonl, listeners
engine --on_round-> metrics.jsonl, events.jsonl, listeners, best host, checkpoint

Every rank runs this loop with its own hosts. At the end of a round they meet, and the first one writes what belongs to
all: lines, checkpoint, summary.
"""

import hashlib
import json
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any, TypeVar, final

import numpy as np
import torch

from esper.cpp import compiler
from esper.leyline.errors import ConfigError, RankError, RunDirectoryError, option
from esper.leyline.ranks import Ranks, group, is_restarted, stop_signals
from esper.leyline.tensor_dataclass import StateTree, below, rows_of, state_digest, with_prefix
from esper.runs import report
from esper.runs.assembly.assemble import Parts, assemble, device_of
from esper.runs.assembly.clients import with_sizes_of_policy
from esper.runs.assembly.plugins import digests_of
from esper.runs.assembly.presets import config_of_run
from esper.runs.assembly.run_config import RunConfig, data_of, fingerprint, require_same_config
from esper.runs.assembly.values import flat, plain
from esper.runs.evaluation import tables
from esper.runs.records import Records, round_events, run_started
from esper.runs.report import Cost
from esper.runs.training import best_host
from esper.runs.training.best_host import BestHost
from esper.runs.training.checkpoint import (
    Checkpoint,
    Header,
    checkpoints,
    load_newest,
    require_same_shape,
    save,
    set_aside,
)
from esper.tasks.losses import perplexity
from esper.telemetry.anomalies import Trend
from esper.telemetry.machine import environment, memory_bytes, version
from esper.telemetry.progress import RunConsole, RunProgress, size, warn
from esper.telemetry.record.reader import open_record
from esper.telemetry.run_directory import (
    CHANGEABLE,
    CHECKPOINTS,
    SUMMARY,
    RunDirectory,
    about_of,
    continuing,
    missing_records,
    require_begun_round,
    require_free,
    require_nothing_to_lose,
)
from esper.telemetry.sinks import SINKS, Hub, require_installed
from esper.tolaria.executors.network import NetworkExecutor
from esper.tolaria.runtime import host_read, reads_so_far, usable_cores
from esper.tolaria.state import RolloutStats, stats_of_all


def restore(parts: Parts, checkpoint: Checkpoint) -> None:
    """Load a checkpoint into engine and client; raises CheckpointError if its shape differs."""
    require_same_shape(checkpoint.header.shape, parts.shape, checkpoint.path)
    own = of_rank(checkpoint.state, parts.ranks)
    if state := below("engine", own):
        parts.engine.load_state_dict(state, parts.client)  # resets the client, which is loaded next
    parts.client.load_state_dict(below("policy", own))


_PLACE = ".place"
"""End of the names of tensors that hold episode and step, for all hosts."""


def _has_hosts(name: str, value: torch.Tensor) -> bool:
    """Whether a tensor of a checkpoint has rows of hosts; those of the policy are what it carries in an episode."""
    of_hosts = name.startswith(("engine.", "policy.rollout."))
    return of_hosts and not name.endswith(_PLACE) and value.dim() > 0


def _axis(name: str) -> int:
    """The axis of hosts: a recurrent state is [L, N, H]."""
    return int(name.startswith("policy.") and name.endswith((".h", ".c")))


def of_rank(state: StateTree, ranks: Ranks) -> StateTree:
    """The part of a checkpoint of the hosts of this rank, and what has no hosts.

    Raises:
        CheckpointError: the hosts cannot share the rows of a tensor equally.
    """
    if ranks.alone:
        return state
    rows = {name: x.transpose(0, _axis(name)) for name, x in state.items() if _has_hosts(name, x)}
    own = rows_of(rows, ranks.num_envs, ranks.hosts, "checkpoint")
    return {**state, **{name: x.transpose(0, _axis(name)) for name, x in own.items()}}


def of_all(state: StateTree, ranks: Ranks) -> StateTree:
    """On the first rank the state of the hosts of all ranks, as one process would have it; elsewhere nothing."""
    if ranks.alone:
        return state
    parts = ranks.group.at_first({name: x.cpu() for name, x in state.items() if _has_hosts(name, x)})
    if not parts:
        return {}
    return {**state, **{name: torch.cat([part[name] for part in parts], dim=_axis(name)) for name in parts[0]}}


T = TypeVar("T")
_ASK_EVERY = 0.2
"""Seconds between two looks whether another rank was asked to stop."""


@final
class Runner:
    """Runs all rounds and writes records, checkpoints and the summary.

    Args:
        parts: of the run. directory: receives records and checkpoints; on other ranks than the first, it is made by
            `RunDirectory.share`. listeners: receive steps, rounds and events.
        start: header of the checkpoint that engine and client were restored from, None for a new run.
        best: the best host of the rounds before, if there is one.
    """

    def __init__(
        self,
        parts: Parts,
        directory: RunDirectory,
        listeners: Hub,
        start: Header | None = None,
        best: BestHost | None = None,
    ) -> None:
        self.config, self.engine, self.client, self.ranks = parts.config, parts.engine, parts.client, parts.ranks
        self.dataset, self.shape = parts.dataset, parts.shape
        self.directory, self.listeners = directory, listeners
        self.rounds_done = start.rounds_done if start else 0
        self.total, self.begun = (start.total, start.begun) if start else (Cost(), Cost())
        self.trend = start.trend if start else Trend()
        self.last: RolloutStats | None = None
        self.best = self._best_saved = best
        self.records = Records(
            directory, listeners, self.engine.spec, self.config.reward, self.client.terms, of_all=self._shown_of_all
        )
        self._saved_at = (start.rounds_done, start.step) if start else None
        self._asked = set[int]()  # signals to stop
        self._stopping = False  # agreed by all ranks
        self._met = self._until = -1
        self.bytes_of_update = 0
        self._asked_at = time.monotonic()
        self.engine.timer.enabled = True
        self.engine.listeners.append(self.records.step)

    def run(self) -> dict[str, object] | None:
        """Run to the end. Returns the summary, or None if a signal stopped the run after writing a checkpoint."""
        remaining = range(self.rounds_done, self.config.rounds)
        with stop_signals() as self._asked:
            if self._saved_at is None and self.ranks.group.is_first:
                params, device = self.engine.executor.host_params, self.engine.spec.device
                self.records.write_events([run_started(self.shape, fingerprint(self.config), params, device)])
            self._mark()
            try:
                complete = self.engine.train(
                    self.client, remaining, on_round=self._on_round, should_stop=self._should_stop
                )
            finally:
                self.records.flush()  # also after an exception: the last steps help to explain it
                self.records.write_parts()  # of a round that is not complete
            if complete:
                result = self._finish()
                return self.ranks.group.of_first(lambda: result)
            self._gather_events()
            self._save()
            return None

    def _should_stop(self) -> bool:
        """Whether to stop after this step: the same step on all ranks, though they exchange nothing before it.

        A rank that is asked to stop tells the others and waits for them. All go on to the step of the one that is
        furthest, which may be the last one of the round. At the latest they meet there.
        """
        if self.ranks.alone:
            return bool(self._asked)
        group, t, last = self.ranks.group, self.engine.t, self.config.episode_length
        if self._met != self.engine.episode and (t == last or self._stop_asked()):
            steps = group.meet(f"the end of round {self.engine.episode + 1}", t)
            self._met, self._until, self._stopping = self.engine.episode, max(steps), min(steps) < last
        return self._met == self.engine.episode and self._stopping and t >= self._until

    def _stop_asked(self) -> bool:
        if self._asked:
            self.ranks.group.ask_to_stop()
            return True
        if time.monotonic() < self._asked_at:
            return False
        self._asked_at = time.monotonic() + _ASK_EVERY
        return self.ranks.group.stop_asked()

    def _shown_of_all(self, shown: dict[str, object]) -> dict[str, object]:
        """Tell the first rank how far this one is; on that one what all of them have sent."""
        if self.ranks.alone:
            return shown
        known = self.ranks.group.newest(json.dumps((len(self.ranks.hosts), shown)))
        return report.step_of_all([json.loads(text) for text in known]) if known else shown

    def _gather_events(self) -> None:
        """Write the events of the hosts of other ranks."""
        for found in self.ranks.group.at_first(self.directory.take_unsent())[1:]:
            self.records.write_events(found)

    def _on_round(self, stats: RolloutStats, metrics: Mapping[str, float]) -> None:
        self.records.flush()
        own = stats
        all_stats, stop = zip(*self.ranks.group.gathered((stats, bool(self._asked))), strict=True)
        stats, self._stopping = stats_of_all(all_stats), self._stopping or any(stop)
        self._gather_events()
        update = time.monotonic() - self._began - stats.cost.seconds
        cost, self.begun = self.begun + Cost(**asdict(stats.cost), update_seconds=update), Cost()
        self.total += cost
        self.last, self.rounds_done = stats, stats.episode + 1
        self.trend, is_best = self.trend.after(float(report.objective_of(stats, self.config.reward).mean()))
        line = report.round_line(stats, cost, metrics, self.config.reward) | {
            "phase_milliseconds": self.engine.timer.read(),
            "memory_bytes": memory_bytes(self.engine.spec.device),
        }
        if not self.ranks.alone:
            self.bytes_of_update, self.ranks.group.bytes_received = self.ranks.group.bytes_received, 0
            line["bytes_reduced"] = self.bytes_of_update
        parts = self.ranks.group.at_first(self.records.write_parts())
        if self.ranks.group.is_first:
            spec, weights = self.engine.spec, self.config.reward
            self.records.write_events(round_events(stats, metrics, spec, self.trend, weights))
            self.directory.write_metrics(line | {"record": {name: part for of in parts for name, part in of.items()}})
            self.listeners.write("round", line)
        if self.dataset is not None:
            self._keep_better(own, stats)
        if is_best:
            self._write(0, best=True)
        if self.rounds_done % self.config.checkpoint_every == 0 or self._all_done:
            self._save()
        self._mark()

    def _keep_better(self, own: RolloutStats, stats: RolloutStats) -> None:
        """Keep the best host of the round if it is the best so far; its state goes to the first rank."""
        n = int(np.argmax(best_host.objective_of_living(stats, self.config.reward)))
        has_it = n in self.ranks.hosts
        found = best_host.better(self.best, self.engine, own, self.config.reward) if has_it else None
        if self.ranks.alone:
            self.best = found
            return
        known = self.ranks.group.at_first(found if found is not self.best else None)
        best = next((best for best in known if best is not None), self.best)
        about = self.ranks.group.of_first(lambda: best and replace(best, state={}))
        self.best = best if self.ranks.group.is_first else about

    def _mark(self) -> None:
        """Start the clocks of a round, or of the rest of one."""
        self._began, self._reads_before = time.monotonic(), reads_so_far()
        self.records.begin()

    @property
    def _all_done(self) -> bool:
        return self.rounds_done == self.config.rounds

    def _finish(self) -> dict[str, object] | None:
        """Summarize the complete run, also after a resume from its last checkpoint."""
        group = self.ranks.group
        if self.last is None:  # resumed at the end of the last episode
            self.last = stats_of_all(group.gathered(self.engine.outcome()))
        test_acc = np.concatenate(group.gathered(host_read(self.engine.test())[0]))
        population = of_all(with_prefix("engine", self.engine.executor.state_dict()), self.ranks)
        if not group.is_first:
            return None
        renamed = with_prefix("population", below("engine", population))
        digest = state_digest(with_prefix("policy", self.client.state_dict()) | renamed)
        device, about = self.engine.spec.device, None
        if self.best is not None and self.dataset is not None:
            if self.best.test is None:
                alone = best_host.engine_of_host(self.config, self.dataset, device, self.best)
                self.best = replace(self.best, test=float(host_read(alone.test())[0][0]))
            self._save_best()
            about = self.best.about | {"perplexity": perplexity(self.config.task_spec().objective, self.best.loss)}
        result = report.summary(self.config, device, self.last, test_acc, self.total, digest) | {
            "best_host": about,
            "data": data_of(self.shape),
            "dropped_records": self.listeners.num_lost,
            "memory_bytes": memory_bytes(device),
        }
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
        self._write(inside)
        self._saved_at = (self.rounds_done, inside)

    def _write(self, inside: int, *, best: bool = False) -> None:
        """Write a checkpoint; `inside` is the number of steps of an unfinished episode, else 0.

        Hosts, those of all ranks, are part of it only inside an episode and at the end of the run.
        """
        cursor = self.directory.cursor()  # also syncs the parts of this rank
        self.ranks.group.gathered(None)  # all have done so
        state: StateTree = with_prefix("policy", self.client.state_dict())
        if inside or self._all_done:
            state = of_all(state | with_prefix("engine", self.engine.state_dict()), self.ranks)
        begun = Cost()
        if inside:
            begun = replace(
                self.begun,
                steps=inside,
                env_steps=inside * self.config.num_envs,
                reads=self.begun.reads + reads_so_far() - self._reads_before,
                seconds=self.begun.seconds + time.monotonic() - self._began,
            )
        header = Header(
            rounds_done=self.rounds_done,
            step=inside,
            cursor=cursor,
            total=self.total,
            begun=begun,
            shape=self.shape,
            config=plain(self.config),
            trend=self.trend,
        )
        if self.ranks.group.is_first:
            save(self.directory.checkpoints, header, state, best=best)

    def _save_best(self) -> None:
        """Save the best host, unless the file has it."""
        if self.best is not None and self.best is not self._best_saved and self.ranks.group.is_first:
            best_host.save(self.directory.checkpoints, self.best)
            self._best_saved = self.best


def start(config: RunConfig, path: Path, console: RunConsole) -> dict[str, Any] | None:
    """Train a new run in the directory `path`. Returns its summary, or None if it was stopped.

    A process that torchrun started again, because a rank had ended, continues its own run.

    Raises:
        RunDirectoryError: the directory exists. ConfigError, DataError: the run cannot be built.
    """
    asked = {"asked": fingerprint(config)}

    def continues() -> bool:
        """Whether the directory is that of this run before the ranks were started again."""
        if is_restarted() and asked.items() <= about_of(path).items():
            return True
        require_free(path)
        return False

    if group().of_first(continues):
        return resume(config_of_run(path, {}, trust=True), path, console)
    require_installed(config.sinks)
    config = with_sizes_of_policy(config)
    with suppress(KeyboardInterrupt):  # before the first step, or at once by a second Ctrl-C
        parts = _assembled(config, console)
        spec = parts.engine.spec
        about = {"version": version(), "environment": environment(spec.device), "slots": spec.slot_ids}
        about |= {
            "sources": digests_of(config.plugins),
            "blueprints": spec.blueprint_names,
            "terms": tuple(parts.client.terms),
            **asked,
        }
        with _directory(path, lambda: RunDirectory.create(path, plain(parts.config), about)) as directory:
            return _run(parts, directory, console, asked=config.executor)
    return None


def _directory(path: Path, open_first: Callable[[], RunDirectory]) -> RunDirectory:
    """The run directory: opened by the first rank, and shared by the others."""
    opened = list[RunDirectory]()

    def open_it() -> int:
        opened.append(open_first())
        return path.stat().st_ino

    found = group().of_first(open_it)
    if opened:
        return opened[0]
    if not (path.is_dir() and path.stat().st_ino == found):
        raise RunDirectoryError(f"{path} is not the folder of rank 0; all ranks of a run need one shared folder.")
    return RunDirectory.share(path)


def resume(config: RunConfig, path: Path, console: RunConsole) -> dict[str, Any] | None:
    """Continue the run in the directory `path`. Returns its summary, or None if it was stopped.

    `config` is that of the run, with changes of what may be changed (`run_directory.CHANGEABLE`).

    Raises:
        CheckpointError, RunDirectoryError, ConfigError: there is nothing to continue from, or nothing to do.
    """
    require_installed(config.sinks)
    # checks everything before it changes anything
    with suppress(KeyboardInterrupt), _directory(path, lambda: RunDirectory.reopen(path)) as directory:
        checkpoint, damaged, problems = load_newest(directory.checkpoints)
        start = checkpoint.header if checkpoint else None
        if checkpoint and start:
            warn(f"{problem} Using {checkpoint.path.name} instead." for problem in problems)
            require_same_config(start.config, config)
            _require_something_to_do(path, checkpoint, config)
            warn(missing_records(path, start.cursor))
            if start.step:
                require_begun_round(path, start.rounds_done, start.step)
        else:
            require_nothing_to_lose(path)
        best = best_host.read(directory.checkpoints)
        # a checkpoint has all of the policy: the file that the run started from may be gone
        begun = replace(config, policy="") if checkpoint else config
        parts = _assembled(begun, console, start.rounds_done if start else 0)
        if checkpoint:
            restore(parts, checkpoint)
        group().gathered(None)  # all have read the checkpoint
        if group().is_first:
            directory.rewind(start.cursor if start else {}, plain(config), start.rounds_begun if start else 0)
            set_aside(damaged)
            if start and start.step:
                directory.merge_parts(start.rounds_begun)
        group().gathered(None)
        return _run(replace(parts, config=config), directory, console, start, best, asked=config.executor)
    return None


def _require_something_to_do(path: Path, checkpoint: Checkpoint, config: RunConfig) -> None:
    done = checkpoint.header.rounds_done
    has_hosts = any(name.startswith("engine.") for name in checkpoint.state)  # needed for the test accuracy
    only_summary_missing = done == config.rounds and has_hosts and not (path / SUMMARY).exists()
    if done >= config.rounds and not only_summary_missing:
        raise ConfigError(
            f"{path} has completed {done} rounds and rounds is {config.rounds}; ask for more: "
            f"{continuing(path, done + 10)}."
        )


def _assembled(config: RunConfig, console: RunConsole, rounds_done: int = 0) -> Parts:
    """Print the first lines of a run, then build its parts, which may take a while."""
    device = device_of(config)
    sizes = ((config.num_envs, "host"), (config.episode_length, "step"), (config.rounds, "round"))
    counts = " x ".join(f"{number} {unit}{'s' * (number != 1)}" for number, unit in sizes)
    console.say(f"esper: {config.task}, {counts}, reward {config.reward_name}, seed {config.seed}")
    if config.is_compiled(device):
        console.say("compiling (a minute or more in the first run, seconds once the compiler cache is filled)")
    parts = assemble(config, device, console.say, rounds_done=rounds_done)
    if not parts.ranks.alone:
        settings = {n: str(v) for n, v in flat(plain(parts.config)).items() if n not in CHANGEABLE}
        data = hashlib.sha256(json.dumps(parts.shape["data"], sort_keys=True, default=str).encode()).hexdigest()
        program = {"the version of esper": version(), "the version of torch": torch.__version__}
        parts.ranks.group.require_same({**program, **settings, "the digest of the data": data})
    return parts


def why_chosen(executor: str, device: torch.device) -> str:
    """Why "auto" chose this executor."""
    if executor == "native":
        return " (C++ compiled for this CPU)"
    if device.type == "cpu" and compiler() is None:
        return " (install a C++ compiler such as g++ to run small hosts several times faster)"
    if device.type != "cpu":
        return ""
    return " (chosen by the size of activations)"


def _executor_lines(parts: Parts, asked: str) -> Iterator[str]:
    """What a run says about how its hosts are run; nothing for a task without networks."""
    engine = parts.engine
    if engine.config.executor != "auto":
        why = why_chosen(engine.config.executor, engine.spec.device) if asked == "auto" else ""
        threads = min(usable_cores(), engine.spec.num_envs) if engine.config.executor == "native" else 1
        yield f"executor: {engine.config.executor}{why}{f', {threads} threads' * (threads > 1)}"
    if not parts.ranks.alone:
        yield f"ranks: {parts.ranks.group.size}, hosts of this one: {len(parts.ranks.hosts)}"
    elif isinstance(engine.executor, NetworkExecutor) and engine.config.executor != "native":
        most = min(usable_cores(), engine.spec.num_envs) if engine.spec.device.type == "cpu" else 1
        if most > 1:
            yield f"note: {option('ranks', most)} would share these hosts over {most} cores"
    if isinstance(engine.executor, NetworkExecutor) and engine.executor.refused:
        reasons = "; ".join(f"{name} ({reason})" for name, reason in engine.executor.refused.items())
        yield f"hosts with these blueprints are run by PyTorch, which is slower: {reasons}"


def _run(
    parts: Parts,
    directory: RunDirectory,
    console: RunConsole,
    start: Header | None = None,
    best: BestHost | None = None,
    *,
    asked: str,
) -> dict[str, Any] | None:
    """Run the parts to the end, with everything that is printed; `asked` is the executor that the user wanted."""
    if not group().is_first:
        return _with_way_to_continue(Runner(parts, directory, Hub({}), start, best).run, directory.path)
    config = parts.config
    console.say(f"run directory: {directory.path}, device: {parts.engine.spec.device}")
    if (data := data_of(parts.shape)) not in ("none", config.task):
        console.say(f"data: {data}")
    if (proposal := config.task_spec().proposal) is not None:
        console.say(proposal)
    for line in _executor_lines(parts, asked):
        console.say(line)
    if start is not None:
        console.say(f"continuing after {start.place} (of {config.rounds})")
    done = start.rounds_done * config.episode_length + start.step if start else 0
    progress = RunProgress(console, rounds=config.rounds, steps=config.episode_length, done=done)
    listeners = Hub({"progress": progress})
    listeners.add_registered(directory.path)
    for name in config.sinks:
        where = SINKS[name].where.format(directory.path)
        console.say(f"sink: {name}{f' ({where})' * bool(where)}")
    listeners.start_sinks(config.sinks, directory.path)
    runner = Runner(parts, directory, listeners, start, best)
    with listeners, progress:
        summary = _with_way_to_continue(runner.run, directory.path)
    if summary is not None:
        console.say(tables.done(summary))
        if not parts.ranks.alone:
            console.say(f"sums of an update: each rank received {size(runner.bytes_of_update)}")
        with open_record([directory.path]) as record:
            warn(record.warnings)
            for line in record.anomaly_lines():
                console.say(f"look at {line}")
    return summary


def _with_way_to_continue(act: Callable[[], T], path: Path) -> T:
    """Call `act`; where ranks failed, the error says how the run continues."""
    try:
        return act()
    except RankError as error:
        raise RankError(f"{str(error).removesuffix('.')}; the run is {stopped(path)}") from error


def stopped(path: Path, *, task: bool = False) -> str:
    """How a run that was stopped goes on; `task` says that only a program knows its task."""
    if not checkpoints(path / CHECKPOINTS):
        return "stopped before the first checkpoint; nothing was kept"
    return f"stopped; continue with: {continuing(path, task=task)}"
