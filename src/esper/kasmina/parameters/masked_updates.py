"""Structural changes of a population by masks on the device, without a read.

`Population` makes the same changes by index and touches the changed rows only; here every row is written, with its old
or its new values. The results are equal to the bit. Weights are drawn for every host, whether it germinates or not.
"""

from collections.abc import Iterable

from jaxtyping import Bool, Int
from torch import Tensor

from esper.kasmina.parameters.initialization import fresh
from esper.kasmina.parameters.kinds import Kind
from esper.kasmina.parameters.population import GATE_BLOCK, Population
from esper.kasmina.parameters.slab import Slab, put_where
from esper.leyline.random import Stream, word_rows
from esper.leyline.stages import SeedStage


def restore(population: Population, panicked: Bool[Tensor, " N"], stage: Int[Tensor, "N S"]) -> None:
    """`Population.restore` of the marked hosts."""
    p = population
    fossils = (panicked[:, None] & (stage == SeedStage.FOSSILIZED)).flatten()
    for slab, snapshot, marked in (
        (p.host, p.host_snapshot, panicked),
        (p.seeds, p.seeds_snapshot, fossils),
        (p.gates, p.gates_snapshot, fossils),
    ):
        slab.copy_where(snapshot, marked)
        slab.forget_optimizer_where(marked)


def release(population: Population, gone: Bool[Tensor, "N S"]) -> None:
    """`Population.release` of the marked seeds."""
    for slab in (population.seeds, population.gates):
        slab.clear_where(gone.flatten())


def germinate(
    population: Population,
    born: Bool[Tensor, "N S"],
    blueprint: Int[Tensor, "N S"],
    has_gate: Bool[Tensor, "N S"],
    episode: int,
    t: int,
) -> None:
    """`Population.germinate` of at most one seed per host."""
    p = population
    p.seeds.clear_where(born.flatten())
    p.gates.clear_where((born & has_gate).flatten())
    slot_N = born.int().argmax(dim=1)
    seed_words = _words(p, p.seed_kinds.values(), slot_N, episode, t, first_block=0)
    gate_words = _words(p, p.gate_kinds.values(), slot_N, episode, t, first_block=GATE_BLOCK)
    for s, point in enumerate(p.points):
        for (channels, index), kind in p.seed_kinds.items():
            if channels == point.channels:
                _plant(p.seeds, slice(s, None, p.num_slots), kind, seed_words, born[:, s] & (blueprint[:, s] == index))
        gated = born[:, s] & has_gate[:, s]
        _plant(p.gates, slice(s, None, p.num_slots), p.gate_kinds[point.channels], gate_words, gated)


def _words(
    population: Population, kinds: Iterable[Kind], slot_N: Tensor, episode: int, t: int, *, first_block: int
) -> Int[Tensor, "N W"]:
    """Random words for a new seed of each host, enough for the largest kind; smaller ones use the first of them."""
    length = max(kind.template.parameters.total for kind in kinds)
    seed, hosts = population.run_seed, population.host_ids
    return word_rows(seed, Stream.SEED_INIT, hosts, length, episode=episode, t=t, slot=slot_N, first_block=first_block)


def _plant(slab: Slab, rows: slice, kind: Kind, words: Tensor, born: Bool[Tensor, " N"]) -> None:
    """Write new modules of one kind into the marked ones of these rows, which were cleared."""
    width, num_buffers = kind.template.parameters.total, kind.template.buffers.total
    put_where(born, fresh(kind.start.table, words[:, :width]), slab.params[rows, :width])
    put_where(born, kind.start.buffers.expand(len(born), -1), slab.buffers[rows, :num_buffers])


def snapshot_hosts(population: Population, hosts: Bool[Tensor, " N"]) -> None:
    """`Population.snapshot_hosts` of the marked hosts."""
    population.host_snapshot.copy_where(population.host, hosts)
    snapshot_seeds(population, hosts[:, None].expand(-1, population.num_slots))


def snapshot_seeds(population: Population, seeds: Bool[Tensor, "N S"]) -> None:
    """`Population.snapshot_seeds` of the marked seeds."""
    population.seeds_snapshot.copy_where(population.seeds, seeds.flatten())
    population.gates_snapshot.copy_where(population.gates, seeds.flatten())
