"""Hill climbing on every host of a comparison: repeated growth steps, each kept if validation improves.

    first           the host alone
    each climb      it goes on beside copies of it that have one seed more, at random in an empty slot; the next climb
                    begins with the best of them, the host as it was included, by 100·J with validation
    then            the best one alone, to the end of the episode

After Elsken et al., "Simple and efficient architecture search for convolutional neural networks" (2017, arXiv
1711.04528). What came before a copy is paid once, which no training from the start can do. Copies are rows of one
engine: row c N + n is copy c of host n, with the same data and, at the start of its climb, the same weights. As in a
race, they are measured at the end of a climb only, and what is spent has no price in J until the end.

Shape legend: N = hosts, C = a host and its copies, T = steps, S = slots.
"""

import time
from collections.abc import Callable, Sequence
from dataclasses import replace

import numpy as np
import torch
from jaxtyping import Int

from esper.kasmina.parameters.flops import BACKWARD
from esper.leyline.architecture import architectures_of
from esper.leyline.random import Stream, permutation
from esper.runs.assembly.assemble import engine_of
from esper.runs.assembly.clients import baseline_of
from esper.runs.assembly.run_config import RunConfig
from esper.runs.evaluation.costs import CostMeter
from esper.runs.evaluation.races import of_seeds
from esper.runs.evaluation.results import HILL_CLIMBING, REFERENCE, Outcome, TrainingCost
from esper.simic.rewards.objective import objective_value
from esper.tasks.datasets import Dataset
from esper.tolaria.engine import VectorizedEngine
from esper.tolaria.runtime import host_read
from esper.tolaria.state import RolloutCost, StepReport

_MOST_CLIMBS = 4
_BEGIN, _END = 0.1, 0.6
"""Shares of the episode at which the first climb begins and the last one ends."""


def climbs_of(episode_length: int, num_slots: int) -> tuple[int, ...]:
    """The step after which the first climb begins, and those with which climbs end; one for each slot, at most 4."""
    number = min(_MOST_CLIMBS, num_slots)
    ends = [round((_BEGIN + (_END - _BEGIN) * i / number) * episode_length) for i in range(number + 1)]
    return tuple(sorted({max(1, end) for end in ends}))


class Climb:
    """The hosts of one seed, from the first step to the last.

    Args:
        config: of the task. dataset, device: those of `dataset_of` and `device_of`.
        run_seed: of the hosts. num_envs: N.
        copies: beside each host in a climb. pool: the seeds that they may get, as (slot, blueprint) indices.
        on_step: called after each step.
    """

    def __init__(
        self,
        config: RunConfig,
        dataset: Dataset,
        device: torch.device,
        *,
        run_seed: int,
        num_envs: int,
        copies: int,
        pool: Sequence[tuple[int, int]],
        on_step: Callable[[], None] = lambda: None,
    ) -> None:
        self._config, self._dataset, self._device = replace(config, compile="off"), dataset, device
        self._run_seed, self._num_envs, self._copies, self._pool = run_seed, num_envs, copies, pool
        self._on_step = on_step
        self._val_C = np.zeros(num_envs)  # of all rows after the last step
        self._engine = self._built(1)
        self._client = baseline_of(REFERENCE, config, self._engine.spec)
        spec, costs = self._engine.spec, self._engine.executor.costs
        self._meter = CostMeter(config.task_spec(), dataset, spec, costs)
        (self._params,) = host_read(costs.seed_params)
        self.grown = np.full((num_envs, spec.num_slots), -1)
        """Blueprint in each slot [N, S]; -1 without a seed."""
        self._val, self._training, self._measuring = (list[np.ndarray]() for _ in range(3))  # of each step
        self._rows_run = 0

    def _built(self, candidates: int) -> VectorizedEngine:
        hosts = self._config.engine(run_seed=self._run_seed, num_envs=candidates * self._num_envs)
        hosts = replace(hosts, distinct_hosts=self._num_envs)
        return engine_of(self._config, self._dataset, self._device, engine_config=hosts, on_step=self._listen)

    def _listen(self, report: StepReport) -> None:
        self._val_C = report.val_acc
        self._on_step()

    def run(self) -> Outcome:
        """All steps, and the test of what is kept."""
        began = time.perf_counter()
        self._engine.reset(self._client, episode=0)
        begin, *ends = climbs_of(self._config.episode_length, self._engine.spec.num_slots)
        self._advance(begin, self.grown[None])
        for number, end in enumerate(ends):
            candidates = self._candidates(number)
            self._continue([*range(self._num_envs)] * len(candidates))
            added = np.where(candidates != self.grown, candidates, -1).reshape(-1, candidates.shape[2])
            placed = [[(s, b) for s, b in enumerate(row) if b >= 0] for row in added.tolist()]
            self._engine.add_fossils([of_seeds(seeds, self._engine.spec) for seeds in placed])
            chosen = self._advance(end, candidates)
            self.grown = candidates[chosen, np.arange(self._num_envs)]
            self._continue([int(c) * self._num_envs + n for n, c in enumerate(chosen)])
        if self._engine.t < self._config.episode_length:
            self._advance(self._config.episode_length, self.grown[None])
        return self._outcome(time.perf_counter() - began)

    def _candidates(self, climb: int) -> Int[np.ndarray, "C N S"]:
        """The hosts as they are, and copies with one seed more; equal to the host where nothing is left to try."""
        hosts = self._engine.spec.host_ids().cpu()[: self._num_envs]
        order = permutation(self._run_seed, Stream.RANDOM_STRUCTURES, hosts, len(self._pool), t=1 + climb).tolist()
        found = np.repeat(self.grown[None], 1 + self._copies, axis=0)
        for n, of_host in enumerate(order):
            free = [self._pool[i] for i in of_host if self.grown[n, self._pool[i][0]] < 0]
            for copy, (slot, blueprint) in enumerate(free[: self._copies], 1):
                found[copy, n, slot] = blueprint
        return found

    def _continue(self, rows: Sequence[int]) -> None:
        """Go on with these rows, in this order."""
        state = self._engine.state_of(rows)
        self._engine = self._built(len(rows) // self._num_envs)
        self._client = baseline_of(REFERENCE, self._config, self._engine.spec)
        self._engine.load_state_dict(state, self._client)

    def _advance(self, until: int, candidates: Int[np.ndarray, "C N S"]) -> Int[np.ndarray, " N"]:
        """Train all rows up to step `until`, and count it; the best candidate of each host by J with validation."""
        count, val = len(candidates), list[np.ndarray]()
        present = candidates >= 0
        differs = np.array([(one != self.grown).any(axis=1) for one in candidates])
        differs[0] = True  # a copy that got nothing new costs nothing
        per_example = np.array([self._meter.per_example(one) for one in candidates]) * differs
        for _ in range(self._engine.t, until):
            self._engine.step(self._client)
            self._engine.apply_structure()  # the report comes now
            val.append(self._val_C.reshape(count, -1).astype(np.float64))
            self._training.append((1 + BACKWARD) * self._meter.train * per_example.sum(axis=0))
            self._measuring.append(np.zeros(self._num_envs))
            self._rows_run += count * self._num_envs
        self._measuring[-1] = self._meter.val_N * per_example.sum(axis=0)
        columns = np.arange(candidates.shape[2])
        params = np.where(present, self._params[columns, np.maximum(candidates, 0)], 0).sum(axis=2)
        host, alone = np.full_like(params, self._engine.executor.host_params), np.ones_like(val[-1])
        worth = objective_value(np.nan_to_num(val[-1], nan=0.0), params, host, alone, self._config.reward)
        chosen = worth.argmax(axis=0)
        self._val += [one[chosen, np.arange(self._num_envs)] for one in val]
        return np.asarray(chosen)

    def _outcome(self, seconds: float) -> Outcome:
        engine, stats = self._engine, self._engine.outcome()
        (test_acc,) = host_read(engine.test())
        training, measuring = np.stack(self._training), np.stack(self._measuring)
        alone = len(training) * (1 + BACKWARD) * self._meter.train * self._meter.host
        cost = RolloutCost(seconds=seconds, steps=len(training), env_steps=self._rows_run, reads=stats.cost.reads)
        return Outcome(
            name=HILL_CLIMBING,
            stats=replace(stats, compute=(training.sum(axis=0) / alone).astype(np.float32), cost=cost),
            test_acc=test_acc,
            val=np.stack(self._val).astype(np.float32),
            grown=architectures_of(stats.stage, stats.blueprint, stats.algorithm, engine.spec),
            cost=TrainingCost(self._meter.per_example(self.grown), training, measuring),
        )
