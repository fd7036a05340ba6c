"""The population: N hosts and their seeds as slabs of parameters, and their structural changes.

    host    [N, P]         one row per host
    seeds   [N * S, P']    one row per slot: its seed, in the layout of its blueprint
    gates   [N * S, P'']   one row per slot: its gate network, if the seed has one

The slot states say which blueprint a row holds; the caller passes it in.
"""

from collections.abc import Iterable, Iterator
from typing import final

import numpy as np
import torch
from jaxtyping import Int
from torch import Tensor

from esper.kasmina.blueprints import registry
from esper.kasmina.blueprints.gate import num_gate_params
from esper.kasmina.hosts.host import Host
from esper.kasmina.parameters.dropout import Draws, Moment
from esper.kasmina.parameters.frozen import count_params, digest
from esper.kasmina.parameters.initialization import fresh_rows
from esper.kasmina.parameters.kinds import Features, Kind, MisfitError, gate_kind, host_kind, seed_kind
from esper.kasmina.parameters.optimizers import OptimizerSpec
from esper.kasmina.parameters.slab import Slab
from esper.kasmina.rules.lifecycle import SeedCosts
from esper.leyline.errors import CheckpointError, ConfigError
from esper.leyline.random import Stream, generator_seeds
from esper.leyline.stages import SeedStage
from esper.leyline.tensor_dataclass import StateTree, copy_into, with_prefix

GATE_BLOCK = 2**31
"""First random block of a gate, beyond those of any seed."""
REBUILD_BLOCK = 2**30
"""The random block that seeds the generator of a rebuilt seed, beyond those of any other."""


@final
class Population:
    """N hosts of one kind with S slots each.

    Args:
        host: a new host, whose weights are not used; it is moved to the device.
        optimizer: how hosts and seeds are trained.
        num_envs: N. host_ids: global numbers [N] of the hosts, on the CPU; None for 0 to N - 1.
        run_seed: key of the random streams that draw weights.
        smallest_batch: examples of the smallest batch of training, for which blueprints must work.

    Attributes:
        features: the shapes of features with so many channels. left_out: blueprints that cannot run in all slots, and
            why; nothing grows from them in any slot.

    Raises:
        ConfigError: a blueprint runs in no slot, or none runs in all of them.
    """

    def __init__(
        self,
        host: Host,
        optimizer: OptimizerSpec,
        *,
        num_envs: int,
        run_seed: int,
        device: torch.device,
        host_ids: Int[Tensor, " N"] | None = None,
        smallest_batch: int = 2,
    ) -> None:
        self.num_envs, self.run_seed, self.device = num_envs, run_seed, device
        self.optimizer_spec = optimizer
        self.points = host.enabled
        self.num_slots = len(self.points)
        self._numbers = torch.arange(num_envs) if host_ids is None else host_ids
        self.host_ids = self._numbers.to(device)
        self.family = host.family
        self.host_module = host
        self.host_params, self._frozen = count_params(host, host.frozen), digest(host)
        self.moment = Moment(run_seed)
        self.host_kind = host_kind(host, device)
        shapes = {point.slot_id: host.features(point) for point in self.points}
        self.features = {
            channels: tuple({shapes[point.slot_id]: None for point in self.points if point.channels == channels})
            for channels in {point.channels: None for point in self.points}
        }
        self.gate_kinds = {channels: gate_kind(channels, host.causal, device) for channels in self.features}
        self.left_out: dict[int, str] = {}
        self.seed_kinds = self._seed_kinds(shapes, min(smallest_batch, 2))
        slots = num_envs * self.num_slots
        self.host, self.host_snapshot = self._slabs(num_envs, [self.host_kind])
        self.seeds, self.seeds_snapshot = self._slabs(slots, self.seed_kinds.values())
        self.gates, self.gates_snapshot = self._slabs(slots, self.gate_kinds.values())

    def _seed_kinds(self, shapes: dict[str, Features], rows: int) -> dict[tuple[int, int], Kind]:
        """The kinds by channels and blueprint; one that fits some slots but not all of them is left out."""
        found: dict[tuple[int, int], Kind] = {}
        for index in registry.selectable(self.family):
            blueprint, misfits = registry.blueprint_at(index, self.family), {}
            kinds: dict[tuple[int, int], Kind] = {}
            for point in self.points:
                try:
                    kind = seed_kind(blueprint, point.channels, shapes[point.slot_id], self.device, rows)
                    kinds.setdefault((point.channels, index), kind)
                except MisfitError as error:
                    misfits[point.slot_id] = error
            if misfits and not kinds:
                raise next(iter(misfits.values()))
            for slot_id, misfit in misfits.items():
                self.left_out[index] = f"slot {slot_id!r}: {misfit}"
            found |= {} if misfits else kinds
        if not found:
            raise ConfigError(
                f"no blueprint can run in every slot; enable fewer slots. {'; '.join(self.left_out.values())}"
            )
        return {key: found[key] for key in sorted(found, key=lambda key: (list(self.features).index(key[0]), key[1]))}

    def _slabs(self, rows: int, kinds: Iterable[Kind]) -> tuple[Slab, Slab]:
        """A slab whose rows can hold any of these kinds, and one for its snapshot."""
        totals = [(kind.template.parameters.total, kind.template.buffers.total) for kind in kinds]
        params, buffers = (max(sizes) for sizes in zip(*totals, strict=True))
        spec, shape = self.optimizer_spec, (rows, params, buffers)
        return Slab(shape, spec, self.device), Slab(shape, spec, self.device, trained=False)

    def costs(self) -> SeedCosts:
        """Parameters of each seed and gate by slot, and the selectable blueprints."""
        num = registry.num_blueprints()
        params = torch.zeros(self.num_slots, num, dtype=torch.int64)
        selectable = torch.zeros(num, dtype=torch.bool)
        for index in dict.fromkeys(index for _, index in self.seed_kinds):
            selectable[index] = True
            for s, point in enumerate(self.points):
                params[s, index] = self.seed_kinds[point.channels, index].template.parameters.num_params
        gates = torch.tensor([num_gate_params(point.channels) for point in self.points])
        return SeedCosts(
            seed_params=params.to(self.device), gate_params=gates.to(self.device), selectable=selectable.to(self.device)
        )

    def draws(self, hosts: Int[Tensor, " G"] | slice, slot: int, *, trains: bool = True) -> Draws:
        """The random numbers of one pass over the data for the seeds in one slot of some hosts (row numbers).

        Measurements (not `trains`) draw the same numbers in every step.
        """
        moment = self.moment if trains else Moment(self.run_seed)
        return Draws(moment, self.host_ids[hosts], slot, self._numbers[hosts] if isinstance(hosts, slice) else None)

    def host_draws(self, hosts: Int[Tensor, " G"] | slice, *, trains: bool = True) -> Draws | None:
        """The same for the layers of the hosts themselves: the number past the last slot. None if nothing is drawn."""
        return self.draws(hosts, self.num_slots, trains=trains) if self.host_kind.template.draws else None

    # -- germination and removal -------------------------------------------------------------------------------------

    def reset(self, episode: int) -> None:
        """N new hosts with empty slots, which are also the first snapshot."""
        everyone = torch.arange(self.num_envs, device=self.device)
        self.host.write(
            everyone, *self._drawn(self.host_kind, Stream.HOST_INIT, np.arange(self.num_envs), episode=episode)
        )
        slots = torch.arange(self.num_envs * self.num_slots, device=self.device)
        for slab in (self.seeds, self.gates, self.seeds_snapshot, self.gates_snapshot):
            slab.clear(slots)
        self.host_snapshot.copy_rows(self.host, everyone)

    def germinate(self, born: np.ndarray, blueprint: np.ndarray, has_gate: np.ndarray, episode: int, t: int) -> None:
        """Draw the seeds marked in `born` [N, S] in step `t`, with their `blueprint` and `has_gate` [N, S]."""
        for s, index, hosts in _groups(born, blueprint):
            channels = self.points[s].channels
            kind = self.seed_kinds[channels, index]
            self._plant(self.seeds, kind, hosts, s, episode, t, first_block=0)
            gated = hosts[has_gate[hosts, s]]
            if gated.size:
                self._plant(self.gates, self.gate_kinds[channels], gated, s, episode, t, first_block=GATE_BLOCK)

    def _plant(
        self, slab: Slab, kind: Kind, hosts: np.ndarray, s: int, episode: int, t: int, *, first_block: int
    ) -> None:
        drawn = self._drawn(kind, Stream.SEED_INIT, hosts, first_block=first_block, episode=episode, t=t, slot=s)
        slab.write(self.index(hosts) * self.num_slots + s, *drawn)

    def _drawn(
        self, kind: Kind, stream: Stream, hosts: np.ndarray, *, first_block: int = 0, **key: int
    ) -> tuple[Tensor, Tensor]:
        """Parameters and buffers of new modules of some hosts (row numbers)."""
        numbers = self.host_ids[self.index(hosts)]
        params = fresh_rows(kind.start.table, self.run_seed, stream, numbers, **key, first_block=first_block)
        buffers = kind.start.buffers.expand(len(hosts), -1)
        if kind.start.rebuilt:
            on_cpu = self._numbers[torch.from_numpy(hosts)]
            built, buffers = kind.rebuild(generator_seeds(self.run_seed, stream, on_cpu, **key, block=REBUILD_BLOCK))
            params = torch.where(kind.start.table.rebuilt, built.to(self.device), params)
        return params, buffers.to(self.device)

    def release(self, gone: np.ndarray) -> None:
        """Clear weights, gate and optimizer state of the seeds marked in `gone` [N, S]."""
        if gone.any():
            rows = self.index(np.flatnonzero(gone))
            self.seeds.clear(rows)
            self.gates.clear(rows)

    # -- snapshots ----------------------------------------------------------------------------------------------------

    def snapshot_hosts(self, hosts: np.ndarray) -> None:
        """Snapshot of the marked hosts [N] with all their seeds."""
        if hosts.any():
            self.host_snapshot.copy_rows(self.host, self.index(np.flatnonzero(hosts)))
            self.snapshot_seeds(np.repeat(hosts[:, None], self.num_slots, axis=1))

    def snapshot_seeds(self, seeds: np.ndarray) -> None:
        """Add the marked seeds [N, S] to the snapshots of their hosts."""
        if seeds.any():
            rows = self.index(np.flatnonzero(seeds))
            self.seeds_snapshot.copy_rows(self.seeds, rows)
            self.gates_snapshot.copy_rows(self.gates, rows)

    def restore(self, hosts: np.ndarray, stage: np.ndarray) -> None:
        """Restore the marked hosts [N] and their fossilized seeds from the snapshot, without optimizer state."""
        if not hosts.any():
            return
        rows = self.index(np.flatnonzero(hosts))
        self.host.copy_rows(self.host_snapshot, rows)
        self.host.forget_optimizer(rows)
        fossils = hosts[:, None] & (stage == SeedStage.FOSSILIZED)
        if fossils.any():
            rows = self.index(np.flatnonzero(fossils))
            for slab, snapshot in ((self.seeds, self.seeds_snapshot), (self.gates, self.gates_snapshot)):
                slab.copy_rows(snapshot, rows)
                slab.forget_optimizer(rows)

    # -- persistence --------------------------------------------------------------------------------------------------

    def state_dict(self) -> StateTree:
        """All slabs and snapshots, and a digest of the frozen parameters that hosts share."""
        tree: StateTree = {} if self._frozen is None else {"frozen": self._frozen.clone()}
        for name in ("host", "seeds", "gates"):
            tree |= with_prefix(name, getattr(self, name).tensors())
            snapshot: Slab = getattr(self, f"{name}_snapshot")
            tree |= with_prefix(f"{name}_snapshot", {"params": snapshot.params, "buffers": snapshot.buffers})
        return tree

    def load_state_dict(self, state: StateTree) -> None:
        """Restore the result of `state_dict`; raises CheckpointError if names, shapes or frozen parameters differ."""
        copy_into(self.state_dict(), state, "population")
        if self._frozen is not None and int(state["frozen"]) != int(self._frozen):
            raise CheckpointError(
                "the network has other frozen parameters than when the checkpoint was written; let the model load the "
                "same weights again, or start a new run."
            )

    def index(self, numbers: np.ndarray) -> Int[Tensor, "*shape"]:
        """Row numbers as an index on the device, without a read."""
        return torch.from_numpy(numbers.astype(np.int64, copy=False)).to(self.device, non_blocking=True)


def _groups(marked: np.ndarray, blueprint: np.ndarray) -> Iterator[tuple[int, int, np.ndarray]]:
    """(slot, blueprint, hosts) of the marked seeds [N, S]."""
    for s in np.flatnonzero(marked.any(axis=0)):
        hosts = np.flatnonzero(marked[:, s])
        kinds = blueprint[hosts, s]
        for index in np.unique(kinds):
            yield int(s), int(index), hosts[kinds == index]
