"""What the controller of a run looks at, measured on new hosts and kept in RUN/importance.json.

The record holds decisions, not features, so one episode is played with the frozen policy, on the first hosts that
`esper evaluate` uses. Its decisions are compared with those on shuffled features: how much they change when a group of
inputs comes from other hosts.

    features of host 2, one group from host 5        all steps of the episode, so that the recurrent state stays that
        host block | slot 0 | slot 1 | ...           of one episode; legal operations stay those of host 2
                     ^^^^^^^^

The step of the episode is the same for all hosts; there the host gets that of another step. Permutation importance:
Breiman, "Random forests" (2001). Columns that vary together share a group, as each could stand in for the other.

Shape legend: N = hosts, T = steps, D = features, S = slots, G = groups.
"""

import json
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from esper.leyline.errors import ConfigError
from esper.leyline.files import read_json, replacing
from esper.leyline.lifecycle import Head, LifecycleOp
from esper.leyline.tensor_dataclass import tensor_dataclass
from esper.runs.assembly.assemble import dataset_of, device_of, engine_of
from esper.runs.assembly.presets import config_of_run
from esper.runs.assembly.run_config import RunConfig
from esper.runs.evaluation.controllers import Trained, trained
from esper.runs.evaluation.outcomes import SEED_OFFSET
from esper.simic.client import SimicClient
from esper.tamiyo.features import CLOCK, HOST_FEATURES, SLOT_FEATURES, Feature
from esper.telemetry.progress import duration
from esper.telemetry.run_directory import IMPORTANCE, plain_json
from esper.tolaria.runtime import host_read

MEASURES = ("kl", "changed", "value")
SHIFTS = 4
"""Other hosts (or steps) that each host is measured with."""
Policy = Callable[[Float[Tensor, "N T D"], Int[Tensor, "N T S"]], tuple[Float[Tensor, "N T 6"], Float[Tensor, "N T"]]]
"""Features and blueprint indices of whole episodes to logits of the operations and values."""


@dataclass(frozen=True)
class FeatureGroup:
    """Inputs of the policy that belong together.

    Attributes:
        name: in words. kind: "all", "what" (columns that tell the same) or "where" (the host block, or a slot).
        columns: places in the features. blueprints: slots whose blueprint index belongs to it.
        names: of the columns; those that every slot has are named once.
    """

    name: str
    kind: str
    columns: tuple[int, ...]
    blueprints: tuple[int, ...] = ()
    names: tuple[str, ...] = ()


def feature_groups(slot_ids: Sequence[str]) -> list[FeatureGroup]:
    """Everything, each group that the feature tables name, the blueprints, the host block, and each slot."""
    layout: list[tuple[str, Feature]] = [("host block", feature) for feature in HOST_FEATURES]
    layout += [(f"slot {slot}", feature) for slot in slot_ids for feature in SLOT_FEATURES]

    def group(
        name: str, kind: str, belongs: Callable[[str, Feature], bool], blueprints: Sequence[int] = ()
    ) -> FeatureGroup:
        columns = tuple(i for i, column in enumerate(layout) if belongs(*column))
        names = dict.fromkeys(layout[i][1].name for i in columns)
        return FeatureGroup(name, kind, columns, tuple(blueprints), (*names, *(["blueprint"] if blueprints else [])))

    def of_topic(name: str) -> FeatureGroup:
        return group(name, "what", lambda place, feature: feature.group == name)

    def held(place: str, *blueprints: int) -> FeatureGroup:
        return group(place, "where", lambda where, feature: where == place, blueprints)

    all_slots = range(len(slot_ids))
    return [
        group("everything", "all", lambda place, feature: True, all_slots),
        *(of_topic(name) for name in dict.fromkeys(feature.group for _, feature in layout)),
        group("blueprints of the seeds", "what", lambda place, feature: False, all_slots),
        held("host block"),
        *(held(f"slot {slot}", number) for number, slot in enumerate(slot_ids)),
    ]


@tensor_dataclass
class Situations:
    """What a policy saw in an episode of N hosts; `valid` is False in a step that was rolled back."""

    features: Float[Tensor, "N T D"]
    blueprint_index: Int[Tensor, "N T S"]
    legal: Bool[Tensor, "N T 6"]
    valid: Bool[Tensor, "N T"]


@torch.no_grad()
def importance(policy: Policy, seen: Situations, groups: Sequence[FeatureGroup]) -> Float[Tensor, "G N 3"]:
    """How far the policy moves for each group and host: means over `SHIFTS` others and over the decisions of the host.

    A decision is a valid step with another legal operation than WAIT. The measures are the KL divergence (nats) of the
    new probabilities of the operations from the old ones, whether another operation is the most probable one, and the
    absolute change of the value.

    Returns:
        The measures in the order of `MEASURES`; NaN for a host without a decision, and for the clock of one step.

    Raises:
        ValueError: there is one host only.
    """
    if len(seen.features) < 2:
        raise ValueError("one host cannot be given the features of another; play at least two.")
    before = policy(seen.features, seen.blueprint_index)
    chooses = seen.valid & seen.legal[..., LifecycleOp.WAIT + 1 :].any(dim=-1)
    return torch.stack([_of_group(policy, seen, group, before, chooses) for group in groups])


def _of_group(
    policy: Policy, seen: Situations, group: FeatureGroup, before: tuple[Tensor, Tensor], chooses: Bool[Tensor, "N T"]
) -> Float[Tensor, "N 3"]:
    """The measures of one group."""
    axis = 1 if group.name == CLOCK else 0
    columns, slots = list(group.columns), list(group.blueprints)
    sums_N3 = torch.zeros(len(chooses), len(MEASURES), dtype=torch.float64, device=chooses.device)
    counts_N1 = torch.zeros(len(chooses), 1, device=chooses.device)
    for shift in _shifts(seen.features.shape[axis]):
        features, blueprints = seen.features.clone(), seen.blueprint_index.clone()
        features[..., columns] = features[..., columns].roll(shift, dims=axis)
        blueprints[..., slots] = blueprints[..., slots].roll(shift, dims=axis)
        counted_NT = chooses & seen.valid.roll(shift, dims=axis)
        found_NT3 = _moved(before, policy(features, blueprints), seen.legal)
        sums_N3 += found_NT3.masked_fill(~counted_NT[..., None], 0.0).sum(dim=1)
        counts_N1 += counted_NT.sum(dim=1, keepdim=True)
    return sums_N3 / counts_N1  # NaN for 0 / 0


def _shifts(length: int) -> list[int]:
    """At most `SHIFTS` numbers from 1 to `length` - 1, evenly spaced."""
    most = min(SHIFTS, length - 1)
    return [(i + 1) * length // (most + 1) for i in range(most)]


def _moved(
    before: tuple[Tensor, Tensor], after: tuple[Tensor, Tensor], legal: Bool[Tensor, "N T 6"]
) -> Float[Tensor, "N T 3"]:
    """The measures of each step."""
    # in float64, because the divergence of similar policies is the small sum of larger parts
    old, new = (x.double().masked_fill(~legal, -torch.inf).log_softmax(dim=-1) for x, _ in (before, after))
    kl = (old.exp() * (old - new)).masked_fill(~legal, 0.0).sum(dim=-1)
    changed = old.argmax(dim=-1) != new.argmax(dim=-1)
    return torch.stack((kl, changed.to(kl.dtype), (after[1] - before[1]).abs()), dim=-1)


HOSTS = 16
LONGEST = 60.0
"""Seconds that an episode may take, by the speed of the run, if nobody asked for it."""


def importance_of(
    run: Path,
    *,
    hosts: int | None = None,
    allowed: Sequence[str] = (),
    trust: bool = False,
    on_step: Callable[[int, int], None] = lambda done, total: None,
) -> dict[str, Any]:
    """The content of RUN/importance.json, which is measured and written unless it is that of the newest checkpoint.

    None for `hosts` means 16, if playing them takes less than a minute. Plugins of the run that are `allowed`, or with
    `trust` all, may be imported. `on_step` is called with the control steps done, and with their number.

    Raises:
        ConfigError, CheckpointError, DataError: it cannot be measured. OSError: the file cannot be written.
    """
    config = replace(config_of_run(run, {"plugins": allowed}, trust=trust), compile="off")
    found = trained(run, config)
    policy = found.controller.identity["policy"]
    with suppress(OSError, ValueError):  # there is nothing, or it is damaged
        kept = read_json(run / IMPORTANCE)
        if isinstance(kept, dict) and kept.get("policy") == policy and hosts in (None, kept.get("hosts")):
            return kept
    seconds = found.cost.seconds / max(found.cost.env_steps, 1) * HOSTS * config.episode_length
    if hosts is None and seconds > LONGEST:
        raise ConfigError(
            f"an episode of {HOSTS} hosts takes about {duration(seconds)}; ask for it with --num-envs {HOSTS}."
        )
    measured = {"controller": found.place, "policy": policy, **_measured(config, found, hosts or HOSTS, on_step)}
    with replacing(run / IMPORTANCE) as file:
        json.dump(plain_json(measured), file, indent=1)
    return measured


def _measured(config: RunConfig, found: Trained, hosts: int, on_step: Callable[[int, int], None]) -> dict[str, Any]:
    """Play an episode and compare its decisions with those on shuffled features."""
    device, seed = device_of(config), config.seed + SEED_OFFSET
    on_step(0, config.episode_length)
    engine = engine_of(
        config,
        dataset_of(config, device),
        device,
        engine_config=config.engine(run_seed=seed, num_envs=hosts),
        on_step=lambda report: on_step(report.t, config.episode_length),
    )
    client = found.controller.make(engine.spec)
    assert isinstance(client, SimicClient)
    engine.reset(client, episode=0)
    engine.rollout(client)
    steps, network = client.buffer.rollout, client.agent.network

    def policy(features: Tensor, blueprints: Tensor) -> tuple[Tensor, Tensor]:
        logits, value = network.unroll(features, blueprints, steps.hidden0, steps.reset)
        return logits[Head.OP], value

    seen = Situations(
        features=steps.states, blueprint_index=steps.blueprint_index, legal=steps.legal.any(dim=-1), valid=steps.valid
    )
    groups = feature_groups(engine.spec.slot_ids)
    values, valid, legal = host_read(importance(policy, seen, groups), seen.valid, seen.legal)
    chooses = valid & legal[..., LifecycleOp.WAIT + 1 :].any(axis=-1)
    return {
        "hosts": hosts,
        "seed": seed,
        "steps": config.episode_length,
        "decisions": int(chooses.sum()),
        "others": min(SHIFTS, hosts - 1),
        "groups": [_described(group, of_hosts) for group, of_hosts in zip(groups, values, strict=True)],
    }


def _described(group: FeatureGroup, of_hosts: np.ndarray) -> dict[str, Any]:
    """Means over the hosts with a decision, and half widths of their 95 % intervals; `of_hosts` is [N, 3]."""
    known = of_hosts[np.isfinite(of_hosts).all(axis=1)]
    measured: dict[str, Any] = {"group": group.name, "kind": group.kind, "columns": list(group.names)}
    for name, values in zip(MEASURES, known.T, strict=True):
        measured[name] = float(values.mean()) if values.size else None
        half = 1.96 * values.std(ddof=1) / np.sqrt(values.size) if values.size > 1 else float("nan")
        measured[f"{name}_half"] = float(half)
    return measured
