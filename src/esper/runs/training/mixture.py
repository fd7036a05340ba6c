"""One controller for many networks: several tasks take turns, a round each, and all of them train one policy.

    round    1        2        3        4
    task     A        B        C        A ...       its own hosts, slots and blueprints
    policy   weights, statistics of observations, optimizer and schedules go on from task to task

Only the scale of the returns belongs to a task. OUT/policy.safetensors is the policy (`policy_files`), and
OUT/mixture.safetensors what a second call continues from.
"""

import json
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from esper.leyline.errors import CheckpointError
from esper.leyline.files import replacing
from esper.leyline.ranks import stop_signals
from esper.leyline.settings import AtLeast0
from esper.leyline.tensor_dataclass import StateTree, below, with_prefix
from esper.runs.assembly.assemble import assemble, device_of
from esper.runs.assembly.clients import with_sizes_of, with_sizes_of_policy, write_learned
from esper.runs.assembly.run_config import RunConfig, fingerprint
from esper.runs.report import objective_of, standard_deviation
from esper.runs.state_file import read_checked, write_state
from esper.simic.client import POLICY_PARTS, SimicClient
from esper.telemetry.progress import RunConsole, duration, with_spread

POLICY, STATE, METRICS = "policy.safetensors", "mixture.safetensors", "mixture.jsonl"


def train_mixture(configs: Sequence[RunConfig], path: Path, console: RunConsole) -> Path | None:
    """Train one policy over the tasks of these configurations; rounds and settings of PPO are those of the first.

    A signal stops the training at the end of a step, and that round is lost. A second call with the same arguments
    continues.

    Returns:
        The file of the policy, or None if a signal stopped the training.

    Raises:
        ConfigError, DataError: a task cannot be built. CheckpointError: `path` holds something else.
    """
    rounds, every = configs[0].rounds, configs[0].checkpoint_every
    shared = {name: getattr(configs[0], name) for name in ("rounds", "schedule_rounds", "ppo", "seed", "policy")}
    configs = [replace(config, **shared) for config in configs]
    key = [rounds, *map(fingerprint, configs)]
    policy, scales, lines = _begun(path, key)
    if policy:  # the file that the training started from may be gone
        ppo = with_sizes_of(policy, path / STATE, configs[0].ppo)
        configs = [replace(config, policy="", ppo=ppo) for config in configs]
    else:
        configs = [with_sizes_of_policy(config) for config in configs]
    if not lines:  # a folder that cannot be written is known before the first round
        _write(path, key, {}, {}, [])
    device = device_of(configs[0])
    console.say(f"esper: {len(configs)} tasks, {rounds} rounds: {', '.join(config.task for config in configs)}")
    parts = [assemble(config, device, lambda text: None) for config in configs]
    begun, began = len(lines), time.monotonic()
    with stop_signals() as stop:
        for done in range(begun, rounds):
            task = done % len(parts)
            config, engine, client = configs[task], parts[task].engine, parts[task].client
            assert isinstance(client, SimicClient), "a mixture trains a controller"
            client.load_state_dict({**client.state_dict(), **policy, **scales.get(task, {})})
            engine.reset(client, episode=done)
            stats = engine.rollout(client, should_stop=lambda: bool(stop))
            if stats is None:
                _write(path, key, policy, scales, lines)
                return None
            metrics = client.update()
            state = client.state_dict()
            scales[task] = {name: x for name, x in state.items() if name.startswith("returns.")}
            policy = {name: x for name, x in state.items() if name not in scales[task]}
            found = objective_of(stats, config.reward)
            lines.append({"round": done + 1, "task": config.task, "objective_mean": float(found.mean()), **metrics})
            left = (time.monotonic() - began) / (done + 1 - begun) * (rounds - done - 1)
            score = with_spread(float(found.mean()), standard_deviation(found))
            console.say(f"round {done + 1}/{rounds}  eta {duration(left)}  {config.task}  100·J {score}")
            if (done + 1) % every == 0 or done + 1 == rounds:
                _write(path, key, policy, scales, lines)
    decides = {name: x for name, x in policy.items() if name.startswith(POLICY_PARTS)}
    first, names = configs[0], [config.task for config in configs]
    card = {"tasks": names, "rounds": rounds, "hosts": first.num_envs, "seed": first.seed}
    write_learned(path / POLICY, decides, card)
    with replacing(path / METRICS) as file:
        file.writelines(json.dumps(line) + "\n" for line in lines)
    return path / POLICY


def _write(
    path: Path, key: list[Any], policy: StateTree, scales: dict[int, StateTree], lines: list[dict[str, Any]]
) -> None:
    """Write what a second call continues from; the arguments after `key` are what `_begun` gives."""
    trees = [with_prefix(f"scale.{i}", scale) for i, scale in scales.items()]
    tensors = {name: x for tree in (with_prefix("policy", policy), *trees) for name, x in tree.items()}
    write_state(path / STATE, {"key": key, "lines": lines, "scales": sorted(scales)}, tensors)


@dataclass(frozen=True)
class _Begun:
    key: list[Any]
    lines: list[dict[str, Any]]
    scales: tuple[AtLeast0, ...]


def _begun(path: Path, key: list[Any]) -> tuple[StateTree, dict[int, StateTree], list[dict[str, Any]]]:
    """The policy, the scale of the returns of each task, and the rounds of a training that was begun."""
    if not path.exists():
        return {}, {}, []
    if not (path / STATE).is_file():
        raise CheckpointError(f"{path} exists and holds no training over several tasks; name another folder.")
    begun, state = read_checked(path / STATE, _Begun, "; remove it to begin again")
    if begun.key != key:
        raise CheckpointError(f"{path} was begun with other tasks or settings; give the same ones, or another folder.")
    return below("policy", state), {i: below(f"scale.{i}", state) for i in begun.scales}, begun.lines
