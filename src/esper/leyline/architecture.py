"""The grown architecture of a host without its weights, from which the same architecture can be built again.

    {"slots": [{"slot": "r0c0", "blueprint": "conv_light", "algorithm": "ADD"}], "sha256": "5d4f..."}

The list has the fossilized seeds in the order of the slots; the digest is that of the list.
"""

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from esper.leyline.errors import ConfigError, nearest
from esper.leyline.lifecycle import Algorithm, SeedStage
from esper.leyline.messages import EngineSpec


@dataclass(frozen=True)
class PlacedSeed:
    """One permanent seed, e.g. PlacedSeed("r0c0", "conv_light", "ADD")."""

    slot: str
    blueprint: str
    algorithm: str


@dataclass(frozen=True)
class Architecture:
    """The permanent seeds of one host."""

    slots: tuple[PlacedSeed, ...] = ()

    @property
    def sha256(self) -> str:
        """Digest of the canonical JSON of the list."""
        rows = [asdict(grown) for grown in self.slots]
        return hashlib.sha256(json.dumps(rows, sort_keys=True, separators=(",", ":")).encode()).hexdigest()

    def tree(self) -> dict[str, Any]:
        """Plain values with the digest, for reports."""
        return {"slots": [asdict(grown) for grown in self.slots], "sha256": self.sha256}

    @property
    def lines(self) -> tuple[str, ...]:
        """One line per seed, for configuration files: "r0c0 conv_light ADD"."""
        return tuple(" ".join((grown.slot, grown.blueprint, grown.algorithm)) for grown in self.slots)

    @classmethod
    def of_lines(cls, lines: Sequence[str]) -> "Architecture":
        """The architecture of `lines`; raises ConfigError if one is not made of three words."""
        for line in lines:
            if len(line.split()) != 3:
                raise ConfigError(
                    f"{line!r} does not name a seed; write slot, blueprint and algorithm: 'r0c0 conv_light ADD'."
                )
        return cls(tuple(PlacedSeed(*line.split()) for line in lines))

    @classmethod
    def of(cls, tree: Mapping[str, Any]) -> "Architecture":
        """The architecture of a `tree`; raises ConfigError if the tree is malformed or does not match its digest."""
        try:
            architecture = cls(tuple(PlacedSeed(**row) for row in tree["slots"]))
            digest = tree["sha256"]
        except (KeyError, TypeError) as error:
            raise ConfigError(
                f"{json.dumps(tree, default=str)[:80]} is not the architecture of a host ({error}); use the output of "
                "`esper evaluate --out`."
            ) from error
        if digest != architecture.sha256:
            raise ConfigError(
                f"an architecture has the sha256 {str(digest)[:12]}..., but its list {architecture.sha256[:12]}...: "
                "it was changed after it was written; use the original output of `esper evaluate --out`."
            )
        return architecture


def architectures_of(
    stage: np.ndarray, blueprint: np.ndarray, algorithm: np.ndarray, spec: EngineSpec
) -> tuple[Architecture, ...]:
    """The architecture of each host, from its slots [N, S] at the end of an episode."""
    names = {int(a): a.name for a in Algorithm}
    return tuple(
        Architecture(
            tuple(
                PlacedSeed(spec.slot_ids[s], spec.blueprint_names[blueprint[n, s]], names[int(algorithm[n, s])])
                for s in range(spec.num_slots)
                if stage[n, s] == SeedStage.FOSSILIZED
            )
        )
        for n in range(len(stage))
    )


def architecture_arrays(grown: Sequence[Architecture], spec: EngineSpec) -> tuple[np.ndarray, np.ndarray]:
    """Blueprint [N, S], -1 where nothing grows, and algorithm [N, S] of one structure per host.

    Raises:
        ConfigError: the number of hosts differs from `spec`, or a slot, blueprint or algorithm is unknown.
    """
    if len(grown) != spec.num_envs:
        raise ConfigError(f"there are architectures of {len(grown)} hosts for {spec.num_envs}; give one per host.")
    selectable = {spec.blueprint_names[i]: i for i in spec.selectable}
    algorithms = {a.name: int(a) for a in Algorithm}
    slots = {slot: s for s, slot in enumerate(spec.slot_ids)}
    blueprint = np.full((spec.num_envs, spec.num_slots), -1, dtype=np.int64)
    algorithm = np.zeros_like(blueprint)
    for n, architecture in enumerate(grown):
        for seed in architecture.slots:
            for kind, name, known in (
                ("slot", seed.slot, slots),
                ("blueprint", seed.blueprint, selectable),
                ("algorithm", seed.algorithm, algorithms),
            ):
                if name not in known:
                    raise ConfigError(
                        f"an architecture has the {kind} {name!r}, which this run does not have; {nearest(name, known)}"
                    )
            place = n, slots[seed.slot]
            if blueprint[place] >= 0:
                raise ConfigError(f"an architecture names slot {seed.slot!r} twice; each slot holds one seed.")
            blueprint[place], algorithm[place] = selectable[seed.blueprint], algorithms[seed.algorithm]
    return blueprint, algorithm
