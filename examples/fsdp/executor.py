"""An executor (`esper.tolaria.executors.protocol.Executor`) whose one host is sharded over ranks with FSDP2.

Every rank runs the same engine, policy and learner, and gets the same numbers:

    train      each rank its share of a batch; weights are gathered, gradients summed and scattered by FSDP
    evaluate   each rank its share of the examples, for each coalition
    numbers    scores and norms of gradients are summed over the ranks in their order, to the same bits on all of them

Shape legend: N = hosts (1), S = slots, K = coalitions, B = examples of a batch, M = tensors of a module.
"""

import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from typing import NamedTuple

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from esper.kasmina.blending import blend, seed_input
from esper.kasmina.hosts.host import Apply, Host
from esper.kasmina.parameters.dropout import Draws, Moment, dropout_layers
from esper.kasmina.parameters.initialization import deterministic_build
from esper.kasmina.parameters.layout import Template
from esper.kasmina.parameters.optimizers import clip_factor, schedule_factor
from esper.kasmina.parameters.population import Kind, Population
from esper.leyline.errors import ConfigError
from esper.leyline.lifecycle import HAS_MODULE, Algorithm, HostFamily, SeedStage
from esper.leyline.messages import Scores, SeedCosts, SlotState, host_numbers
from esper.leyline.tensor_dataclass import StateTree, below, check_same_shapes, with_prefix
from esper.leyline.tensor_dataclass import replace as with_fields
from esper.tasks.datasets import Dataset
from esper.tasks.losses import of_measuring, of_split
from esper.tasks.registry import TaskSpec
from esper.tolaria.batches import SharedBatchIterator
from esper.tolaria.coalitions import Coalitions
from esper.tolaria.engine_config import EngineConfig
from esper.tolaria.executors.choice import training_bounds
from esper.tolaria.executors.network import SummedScores, examples, mean_factor, measured, train_pass
from esper.tolaria.executors.protocol import (
    EvaluationSplit,
    GradientStatistics,
    Structure,
    TrainPass,
    ValidationPass,
    empty_structure,
)
from esper.tolaria.executors.training import judge, not_measured, trained_mask
from fsdp.part import Part

CPU = torch.device("cpu")


class Share(NamedTuple):
    """The rows of a batch that a rank runs; only the first `counted` of them count.

    A rank without examples runs one of another rank's and counts none, because FSDP needs every rank in every pass.
    """

    batch: int
    start: int
    stop: int
    counted: int

    @classmethod
    def of(cls, batch: int, rank: int, ranks: int) -> "Share":
        """Neighbouring rows, as equal as possible."""
        start, stop = batch * rank // ranks, batch * (rank + 1) // ranks
        return cls(batch, start, max(stop, start + 1), stop - start)

    def rows(self, x: Tensor) -> Tensor:
        """Those of a tensor [B, ...]."""
        return x[self.start : self.stop]


class SharedDraws:
    """This rank's rows of the dropout masks that the whole batch would draw."""

    def __init__(self, draws: Draws, share: Share) -> None:
        self._draws, self._share = draws, share

    def kept(self, shape: tuple[int, ...], p: float) -> Tensor:
        """The rows of the next mask; where layers flatten examples, an example has several rows."""
        share = self._share
        each = shape[0] // (share.stop - share.start)
        whole = self._draws.kept((share.batch * each, *shape[1:]), p)
        return whole[share.start * each : share.stop * each]


class FsdpExecutor:
    """One host and its seeds, sharded over the ranks of a mesh.

    Args:
        config, task, dataset: as for `build_engine`; every rank gives the same.
        mesh: one axis of ranks, on CPUs.

    Raises:
        ConfigError: a setting, or a host, that this executor cannot run.
    """

    def __init__(self, config: EngineConfig, task: TaskSpec, dataset: Dataset, mesh: DeviceMesh) -> None:
        self._config, self._task, self._dataset, self._mesh = config, task, dataset, mesh
        self.ranks, self.rank = mesh.size(), mesh.get_local_rank()
        require_fit(config, task, self.ranks)
        self._spec, self._first = task.optimizer, config.schedule_begin
        self._length = config.episode_length - config.schedule_begin
        self._spec.require_length(self._length)
        self._hosts, self._moment = host_numbers(1, config.host_offset, config.distinct_hosts), Moment(config.run_seed)
        self._batches()
        population = self._population()
        problem = _problem(population.host_kind.template)
        if problem:
            raise ConfigError(f"the host of task {task.name!r} {problem}; use executor 'streamed'.")
        self.host_params, self._points = population.host_params, population.points
        self._order = {point.slot_id: s for s, point in enumerate(self._points)}
        self._costs = _without_misfits(population, population.costs(examples(dataset, 1)[0], task.batch_train))
        self._blank = {name: (x.shape, x.dtype) for name, x in population.state_dict().items()}
        self._frozen = population.state_dict().get("frozen")
        self._host: Part
        self._seeds: dict[int, Part] = {}
        self._gates: dict[int, Part] = {}
        self._loaded: StateTree | None = None
        self._structure = empty_structure(1, len(self._points))

    @property
    def costs(self) -> SeedCosts:
        """Of seeds and gates."""
        return self._costs

    def parts(self) -> dict[str, Part]:
        """All that there is now, by name."""
        seeds = {f"seed {self._points[s].slot_id}": part for s, part in self._seeds.items()}
        gates = {f"gate {self._points[s].slot_id}": part for s, part in self._gates.items()}
        return {"host": self._host, **seeds, **gates}

    def _batches(self) -> None:
        task, share = self._task, self._config.lifecycle.measured_share
        make = partial(SharedBatchIterator, num_envs=1, run_seed=self._config.run_seed, device=CPU)
        some = replace(self._dataset, val=self._dataset.val.part(share)) if share < 1.0 else self._dataset
        self._train = make(
            self._dataset, batch_size=task.batch_train, split="train",
            batches_per_step=task.batches_per_step, last_batch=task.last_batch,
        )  # fmt: skip
        self._measured = make(some, batch_size=task.batch_val, split="val")
        self._whole = {
            split: make(self._dataset, batch_size=task.batch_val, split=split)
            for split in ("val", "test") if len(self._dataset.split(split))
        }  # fmt: skip
        self._objective = of_split(task.objective, self._train.data.y)
        self._judges = {
            split: of_split(of_measuring(task.objective), batches.data.y) for split, batches in self._whole.items()
        }

    def _population(self) -> Population:
        """One whole host with its blueprints, from which parts are made, and which is not kept."""
        (x, _), spec, slots = examples(self._dataset, 1), self._task.host, self._config.slots
        assert spec is not None
        host = deterministic_build(lambda: spec.build(slots, x))
        assert isinstance(host, Host)
        smallest = min(stop - start for start, stop in training_bounds(self._task, self._dataset))
        return Population(
            host,
            self._spec,
            num_envs=1,
            run_seed=self._config.run_seed,
            device=CPU,
            host_ids=self._hosts,
            smallest_batch=max(1, smallest // self.ranks),
        )

    # -- structure ------------------------------------------------------------------------------------------------

    def reset(self, episode: int) -> None:
        """A fresh host with empty slots, and its snapshot."""
        self._moment.episode, self._structure = episode, empty_structure(1, len(self._points))
        self._born = np.zeros((1, 1 + len(self._points)), dtype=np.int64)
        self._seeds, self._gates, self._loaded = {}, {}, None
        population = self._population()
        population.reset(episode)
        self._host = self._part(population.host_kind, population.host.params[0], is_host=True)
        self._host.save()

    def _part(self, kind: Kind, row: Tensor, *, is_host: bool = False) -> Part:
        lr = self._spec.host_lr if is_host else self._spec.seed_lr
        return Part(kind, row, self._mesh, self._spec, lr=lr, decays=is_host)

    def apply_structure(self, structure: Structure) -> None:
        """Restore, clear, draw and save parts as the lifecycle decided."""
        if structure.panicked[0]:
            self._host.restore()
            for part in self._of(structure.stage[0] == SeedStage.FOSSILIZED):
                part.restore()
        for s in np.flatnonzero(structure.released[0]).tolist():
            self._seeds.pop(s, None)
            self._gates.pop(s, None)
        if structure.germinated.any():
            population = self._population()
            population.germinate(
                structure.germinated, structure.blueprint, structure.has_gate, self._moment.episode, structure.t
            )
            self._sow(population, structure, np.flatnonzero(structure.germinated[0]))
        if self._loaded is not None:
            state, self._loaded = self._loaded, None
            population = self._population()
            population.load_state_dict(state)
            self._sow(population, structure, np.flatnonzero(np.isin(structure.stage[0], tuple(HAS_MODULE))))
            for name, s, part in self._rows():
                if name != "host":
                    part.load(_row(state, name, s), state[f"{name}_snapshot.params"][s])
        if structure.snapshot[0]:
            self._host.save()
        for part in self._of(structure.keep[0] | structure.snapshot[0]):
            part.save()
        self._born[:, 1:][structure.germinated] = structure.t
        self._structure = structure

    def _sow(self, population: Population, structure: Structure, slots: np.ndarray) -> None:
        """The seeds of these slots, with their gates, from the rows of a population."""
        for s in slots.tolist():
            channels = self._points[s].channels
            kind = population.seed_kinds[channels, int(structure.blueprint[0, s])]
            self._seeds[s] = self._part(kind, population.seeds.params[s])
            if structure.has_gate[0, s]:
                self._gates[s] = self._part(population.gate_kinds[channels], population.gates.params[s])

    def _of(self, slots: np.ndarray) -> Iterator[Part]:
        """Seeds and gates in these slots [S]."""
        yield from (part for of in (self._seeds, self._gates) for s, part in of.items() if slots[s])

    # -- training -------------------------------------------------------------------------------------------------

    def train_epoch(self, t: int, slots: SlotState) -> TrainPass:
        """The host over the batches of a step."""
        structure, self._moment.t = self._structure, t
        seeds = {s: self._seeds[s] for s in np.flatnonzero(trained_mask(structure)[0]).tolist()}
        gates = {s: self._gates[s] for s in seeds if s in self._gates}
        trained = [self._host, *seeds.values(), *gates.values()]
        for column, part in ((0, self._host), *((1 + s, part) for of in (seeds, gates) for s, part in of.items())):
            born = max(0, int(self._born[0, column]) - self._first)
            part.set_lr(schedule_factor(self._spec, t - self._first, self._length, born=born))
        self._set_mode(training=True)
        draws = self._draws()
        gradients, total = not_measured(1, len(self._points), CPU), torch.zeros(3, dtype=torch.float64)
        self._train.begin(t, self._moment.episode, self._hosts)
        last = len(self._train) - 1
        apply = self._apply(slots.alpha[0], frozenset(self._seeds), training=True)
        for i, (x_NB, y_NB) in enumerate(() if structure.stopped[0] else self._train):
            total += self._backward(x_NB[0], y_NB[0], apply, draws)
            norms = self._norms(trained)
            if i == last:
                gradients = self._statistics(norms, seeds, gates)
            self._host.step(self._clip(norms[self._host]))
            for s, seed in seeds.items():
                group = [part for part in (seed, gates.get(s)) if part is not None]
                clip = self._clip(torch.cat([norms[part] for part in group]))
                for part in group:
                    part.step(clip)
        return train_pass(self._objective, Scores(*total[:, None]), gradients)

    def _backward(self, x: Tensor, y: Tensor, apply: Apply, draws: "dict[Part, Draws]") -> Tensor:
        """Gradients of the mean loss of a batch; its sums of loss, score and weight [3], of all ranks."""
        share = Share.of(len(x), self.rank, self.ranks)
        for part in self.parts().values():
            part.clear_gradients()
        for part, of in draws.items():
            for layer in dropout_layers(part.module):
                layer.draws = SharedDraws(of, share)  # type: ignore[assignment]
        with _views():
            outputs = self._host.module(share.rows(x), apply)
            scores = self._objective.scores(outputs.float(), share.rows(y))
            counted = torch.stack([of[: share.counted].sum(dtype=torch.float64) for of in scores]).detach()
            found = self._summed(counted)
            loss = scores[0][: share.counted].sum()
            if loss.requires_grad:  # else the whole host is frozen, and nothing grows in it
                (loss * mean_factor(found[2]).float()).backward()
        return found

    def _norms(self, trained: list[Part]) -> dict[Part, Tensor]:
        """Norm of each gradient [M] of these parts, float64, by one sum over the ranks."""
        squares = [part.squares() for part in trained]
        found = self._summed(torch.cat(squares)).sqrt().split([len(of) for of in squares])
        return dict(zip(trained, found, strict=True))

    def _clip(self, norms: Tensor) -> float:
        return clip_factor(torch.linalg.vector_norm(norms), self._spec.grad_clip).item()

    def _statistics(
        self, norms: dict[Part, Tensor], seeds: dict[int, Part], gates: dict[int, Part]
    ) -> GradientStatistics:
        """As the protocol asks, of seeds that are TRAINING or BLENDING."""
        out = not_measured(1, len(self._points), CPU)
        of_host = torch.linalg.vector_norm(norms[self._host])[None]
        rms = of_host / self._host.layout.num_params**0.5
        for s, seed in seeds.items():
            if self._structure.stage[0, s] not in (SeedStage.TRAINING, SeedStage.BLENDING):
                continue
            group = [part for part in (seed, gates.get(s)) if part is not None]
            count = sum(part.layout.num_params for part in group)
            of_seed = torch.cat([norms[part] for part in group])[None]
            for name, value in vars(judge(of_seed, count**0.5, of_host, rms, self._spec.grad_clip)).items():
                getattr(out, name)[0, s] = value[0]
        return out

    def _draws(self) -> "dict[Part, Draws]":
        """The random numbers of a pass of each part with dropout."""
        numbered = [(len(self._points), self._host), *self._seeds.items()]
        return {part: Draws(self._moment, self._hosts, s) for s, part in numbered if dropout_layers(part.module)}

    def _apply(self, alpha: Tensor, members: frozenset[int], *, training: bool) -> Apply:
        """What runs in the slots of the host: the seeds of `members` that are active, or trained."""
        structure, trained = self._structure, trained_mask(self._structure)[0] & training
        is_cnn = self._task.family is HostFamily.CNN

        def apply(slot_id: str, h: Tensor) -> Tensor:
            s = self._order[slot_id]
            active = bool(structure.alpha[0, s] > 0.0)
            if s not in members or not (active or trained[s]):
                return h
            x = seed_input(h, isolated=training and (is_cnn or not active))
            algorithm = Algorithm(int(structure.algorithm[0, s]))
            gate = self._gates[s].module(x) if algorithm is Algorithm.GATE else None
            return blend(h, self._seeds[s].module(x), algorithm, alpha[s] if active else None, gate)

        return apply

    def _set_mode(self, *, training: bool) -> None:
        for part in self.parts().values():
            part.module.train(training)

    def _summed(self, values: Tensor) -> Tensor:
        """The sum over the ranks, in their order."""
        of_ranks = [torch.empty_like(values) for _ in range(self.ranks)]
        dist.all_gather(of_ranks, values.contiguous(), group=self._mesh.get_group())
        return torch.stack(of_ranks).sum(dim=0)

    # -- measuring ------------------------------------------------------------------------------------------------

    def evaluate(self, t: int, slots: SlotState, coalitions: Coalitions) -> ValidationPass:
        """All coalitions of the host on the validation examples of a step."""
        sets = self._structure.sets[0][self._structure.sets_valid[0]]
        return self._measure(self._measured, slots.alpha[0], sets, coalitions.sets.shape[1])

    def committed(self, split: EvaluationSplit, slots: SlotState) -> ValidationPass:
        """The host with its fossils alone."""
        fossils = self._structure.stage == SeedStage.FOSSILIZED
        return self._measure(self._whole[split], slots.alpha[0], fossils, 1)

    @torch.no_grad()
    def _measure(
        self, batches: SharedBatchIterator, alpha: Tensor, sets: np.ndarray, num_columns: int
    ) -> ValidationPass:
        """Coalitions [K, S], one after another."""
        judge_of = self._judges[batches.split]
        self._set_mode(training=False)
        sums = torch.zeros(num_columns + 2, dtype=torch.float64)
        for x, y in batches:
            share = Share.of(len(x), self.rank, self.ranks)
            mine = share.rows(y)[: share.counted]
            for k, members in enumerate(sets):
                apply = self._apply(alpha, frozenset(np.flatnonzero(members).tolist()), training=False)
                outputs = self._host.module(share.rows(x), apply).float()[: share.counted]
                sums[k] += judge_of.score(outputs, mine).sum(dtype=torch.float64)
                if k == 0:
                    loss, _, weight = judge_of.scores(outputs, mine)
                    sums[-2] += loss.sum(dtype=torch.float64)
                    sums[-1] += weight.sum(dtype=torch.float64)
        sums = self._summed(sums)
        return measured(self._objective, SummedScores(sums[None, :num_columns], sums[-2:-1], sums[-1:]))

    # -- persistence ----------------------------------------------------------------------------------------------

    def state_dict(self) -> StateTree:
        """The state that the streamed executor of one host would have: whole, on every rank; all ranks call it."""
        tree = {name: torch.zeros(shape, dtype=dtype) for name, (shape, dtype) in self._blank.items()}
        if self._frozen is not None:
            tree["frozen"] = self._frozen.clone()
        for name, row, part in self._rows():
            for of, value in part.rows().items():
                if value.dim():
                    tree[f"{name}{of}"][row, : len(value)] = value
                else:
                    tree[f"{name}{of}"][row] = value
        return {
            **with_prefix("population", tree),
            "loss_scale": torch.ones(1),
            "good_steps": torch.zeros(1, dtype=torch.int64),
            "episode": torch.tensor(self._moment.episode),
            "born": torch.from_numpy(self._born.copy()),
        }

    def load_state_dict(self, state: StateTree) -> None:
        """Restore a state, also one of the streamed executor; seeds follow with the structure, which comes next.

        Raises:
            CheckpointError: names, shapes or frozen parameters differ.
        """
        check_same_shapes(state, self.state_dict(), "executor")
        own = below("population", state)
        population = self._population()
        population.load_state_dict(own)
        self._moment.episode, self._born = int(state["episode"]), state["born"].numpy().copy()
        self._host = self._part(population.host_kind, population.host.params[0], is_host=True)
        self._host.load(_row(own, "host", 0), own["host_snapshot.params"][0])
        self._seeds, self._gates, self._loaded = {}, {}, own

    def _rows(self) -> Iterator[tuple[str, int, Part]]:
        """Where each part lies in a state."""
        yield "host", 0, self._host
        yield from (("seeds", s, part) for s, part in self._seeds.items())
        yield from (("gates", s, part) for s, part in self._gates.items())


def _row(state: StateTree, name: str, row: int) -> StateTree:
    """One part of a state."""
    return {of: x[row] for of, x in below(name, state).items()}


def require_fit(config: EngineConfig, task: TaskSpec, ranks: int) -> None:
    """Raise ConfigError for settings that this executor does not know."""
    name = f"task {task.name!r}"
    if task.host is None or task.instances is not None:
        raise ConfigError(f"{name} has {'no network' if task.host is None else 'hosts that differ'}; FSDP shards one "
                          "network with data of its own: choose another task.")  # fmt: skip
    if config.num_envs != 1:
        raise ConfigError(f"num_envs is {config.num_envs}, but the ranks share one host; set num_envs to 1.")
    if config.amp != "off":
        raise ConfigError(f"amp is {config.amp!r}, but this executor trains in float32; set amp to 'off'.")
    if task.batch_train < ranks:
        raise ConfigError(
            f"{ranks} ranks cannot share a batch of {task.batch_train} examples; start at most {task.batch_train} "
            "ranks (--nproc-per-node), or enlarge batch_train."
        )


def _problem(template: Template) -> str:
    """Why a module would give other numbers on shares of a batch; "" if it does not."""
    normalizes = any(isinstance(layer, torch.nn.modules.batchnorm._BatchNorm) for layer in template.module.modules())
    if normalizes or template.buffers.total:
        return "normalizes over a batch, or keeps buffers of floats, and a rank sees its share of a batch alone"
    if template.global_rng:
        return "draws from the global random generators, which every rank has for itself"
    return ""


def _without_misfits(population: Population, costs: SeedCosts) -> SeedCosts:
    """Costs in which blueprints that cannot run on shares of a batch are not selectable, with a warning for each."""
    selectable = costs.selectable.clone()
    for (_, index), kind in population.seed_kinds.items():
        if selectable[index] and (problem := _problem(kind.template)):
            warnings.warn(f"blueprint {kind.name!r} is not grown in this run: it {problem}", stacklevel=3)
            selectable[index] = False
    return with_fields(costs, selectable=selectable)


@contextmanager
def _views() -> Iterator[None]:
    """Without the warning of FSDP that a module returned a view; nothing here writes into what a module returned."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=r"FSDP2-wrapped module .* returned a view tensor")
        yield
