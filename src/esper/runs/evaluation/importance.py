"""What the controller of a run looks at, measured on new hosts and kept in RUN/importance.json.

The record holds decisions, not features, so one episode is played with the frozen policy, on the first hosts that
`esper evaluate` uses. `tamiyo.importance` compares its decisions with those on shuffled features.
"""

import json
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
from torch import Tensor

from esper.leyline.errors import ConfigError
from esper.leyline.files import read_json, replacing
from esper.leyline.lifecycle import Head, LifecycleOp
from esper.runs.assembly.assemble import dataset_of, device_of, engine_of
from esper.runs.assembly.presets import config_of_run
from esper.runs.assembly.run_config import RunConfig
from esper.runs.evaluation.controllers import Trained, trained
from esper.runs.evaluation.outcomes import SEED_OFFSET
from esper.simic.client import SimicClient
from esper.tamiyo.importance import MEASURES, SHIFTS, FeatureGroup, Situations, feature_groups, importance
from esper.telemetry.progress import duration
from esper.telemetry.run_directory import IMPORTANCE, plain_json
from esper.tolaria.runtime import host_read

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
        "groups": [_of_group(group, of_hosts) for group, of_hosts in zip(groups, values, strict=True)],
    }


def _of_group(group: FeatureGroup, of_hosts: np.ndarray) -> dict[str, Any]:
    """Means over the hosts with a decision, and half widths of their 95 % intervals; `of_hosts` is [N, 3]."""
    known = of_hosts[np.isfinite(of_hosts).all(axis=1)]
    measured: dict[str, Any] = {"group": group.name, "kind": group.kind, "columns": list(group.names)}
    for name, values in zip(MEASURES, known.T, strict=True):
        measured[name] = float(values.mean()) if values.size else None
        half = 1.96 * values.std(ddof=1) / np.sqrt(values.size) if values.size > 1 else float("nan")
        measured[f"{name}_half"] = float(half)
    return measured
