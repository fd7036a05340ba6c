"""One transformer sharded over ranks with FSDP2, grown by the same engine, policy and learner as any other. 2 minutes.

torchrun --standalone --nproc-per-node 2 examples/fsdp_host.py

The executor is in fsdp/executor.py. Every rank runs this program; they meet in the executor alone. Two runs, a fixed
schedule and two rounds of PPO, are made three times: by the streamed executor, by FSDP on one rank, and on all of them.
"one rounding" is the streamed executor again, with weights that begin one rounding apart: what is to be expected.
"""

import os
import sys
from collections.abc import Callable, Mapping
from hashlib import sha256
from typing import NamedTuple

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from esper.kasmina.hosts.transformer import TransformerHostSpec
from esper.kasmina.parameters.optimizers import OptimizerSpec
from esper.leyline.errors import ConfigError, EsperError
from esper.leyline.lifecycle import HostFamily, LifecycleOp, SeedStage, Style
from esper.leyline.messages import EngineSpec, Observation
from esper.runs.assembly.clients import learner_of
from esper.runs.assembly.presets import resolve
from esper.runs.assembly.run_config import RunConfig
from esper.simic.client import ScriptedClient
from esper.simic.rewards import make_reward
from esper.tamiyo.schedules import NoMemory, ScriptedPolicy, Stateless, canonical_action
from esper.tasks import TaskSpec, register_task
from esper.tasks.datasets import Dataset, Split
from esper.tasks.losses import NextToken
from esper.tolaria.build import build_engine, load_dataset
from esper.tolaria.engine import VectorizedEngine
from esper.tolaria.executors.protocol import Executor
from esper.tolaria.executors.streamed import StreamedExecutor
from esper.tolaria.state import StepReport
from fsdp.executor import FsdpExecutor, require_fit

CPU = torch.device("cpu")
VOCABULARY, TOKENS = 11, 12
TOLERANCE = 1e-4
"""Largest difference to the streamed executor: of losses, of accuracies (percentage points) and of rewards."""
FIELDS = ("val_loss", "val_acc", "reward")
Say = Callable[[str], None]
USAGE = "torchrun --standalone --nproc-per-node 2 examples/fsdp_host.py"


def periods(data_dir: object = None, run_seed: int = 0) -> Dataset:
    """Each token is the one three places before it. Some batches do not split evenly over two ranks."""
    generator = torch.Generator().manual_seed(run_seed)

    def split(count: int) -> Split:
        x = torch.randint(VOCABULARY, (count, 3), generator=generator).repeat(1, 1 + TOKENS // 3)
        return Split(x[:, :TOKENS], x[:, 1 : TOKENS + 1])

    return Dataset(identity={"name": "periods", "seed": run_seed}, train=split(157), val=split(61), test=split(61))


TASK = TaskSpec(
    name="periods",
    description="Tokens with a period of three; a transformer of two layers.",
    family=HostFamily.TRANSFORMER,
    host=TransformerHostSpec(vocabulary=VOCABULARY, width=32, heads=4, layers=2, segments=2, context=16, dropout=0.1),
    load=periods,
    enabled=("r0c0", "r0c1"),
    objective=NextToken(VOCABULARY),
    episode_length=12,
    batch_train=16,
    batch_val=16,
    optimizer=OptimizerSpec(kind="adamw", host_lr=3e-3, seed_lr=3e-3, schedule="cosine"),
    min_training_epochs=2,
)


class Timetable(Stateless):
    """Germinates one seed in each slot, the second one with a gate, and fossilizes them as soon as that is legal."""

    def __init__(self, spec: EngineSpec) -> None:
        keep = [canonical_action(LifecycleOp.FOSSILIZE, slot=s) for s in range(spec.num_slots)]
        seeds = (("attention", Style.LINEAR_ADD), ("norm", Style.GATED_GATE))
        grow = [
            canonical_action(LifecycleOp.GERMINATE, slot=s, blueprint=spec.blueprint_names.index(name), style=style)
            for s, (name, style) in enumerate(seeds)
        ]
        self._rows = torch.tensor([*keep, *grow, canonical_action(LifecycleOp.WAIT)])  # in order of preference

    def decide(self, obs: Observation, memory: NoMemory) -> Tensor:
        """The first row that is legal."""
        always = torch.ones_like(obs.legal[:, 0, :1])
        possible = torch.cat((obs.legal[:, LifecycleOp.FOSSILIZE], obs.legal[:, LifecycleOp.GERMINATE], always), dim=1)
        return self._rows[possible.int().argmax(dim=1)]


class Run(NamedTuple):
    """The reports of its steps, the policy after it (none of a schedule), and what ran the host."""

    steps: list[StepReport]
    policy: Mapping[str, Tensor]
    executor: Executor


def settings() -> RunConfig:
    """One host, and a lifecycle short enough for twelve steps."""
    return resolve(
        {
            "task": "periods", "num_envs": 1, "rounds": 2, "device": "cpu", "executor": "streamed",
            "lifecycle": {"min_blending_epochs": 1, "sequential": False},
            "ppo": {"num_minibatches": 1, "feature_width": 16, "hidden_width": 16},
        }
    )  # fmt: skip


def engine_on(mesh: DeviceMesh | None, config: RunConfig, steps: list[StepReport]) -> VectorizedEngine:
    """An engine whose host is sharded over a mesh; by the streamed executor without one."""
    task, engine = config.task_spec(), config.engine()
    dataset = load_dataset(task, config.seed, CPU, None)
    assert dataset is not None
    executor = None if mesh is None else FsdpExecutor(engine, task, dataset, mesh)
    return build_engine(engine, task, dataset, CPU, executor=executor, on_step=steps.append)


def scheduled(mesh: DeviceMesh | None, config: RunConfig, *, nudge: bool = False) -> Run:
    """An episode of the timetable; with `nudge` half of the streamed host's weights begin one rounding further away."""
    steps: list[StepReport] = []
    engine = engine_on(mesh, config, steps)
    policy = ScriptedPolicy(Timetable(engine.spec), engine.spec)
    client = ScriptedClient(policy, make_reward(config.reward.mode, config.reward))
    engine.reset(client, episode=0)
    if nudge:
        assert isinstance(engine.executor, StreamedExecutor)
        weights = engine.executor.population.host.params
        weights[:, ::2] *= 1.0 + torch.finfo(torch.float32).eps
    engine.rollout(client)
    return Run(steps, {}, engine.executor)


def learned(mesh: DeviceMesh | None, config: RunConfig) -> Run:
    """Two rounds of PPO."""
    steps: list[StepReport] = []
    engine = engine_on(mesh, config, steps)
    client = learner_of(config, engine.spec)
    engine.train(client, range(config.rounds), on_round=lambda stats, metrics: None)
    return Run(steps, client.policy(), engine.executor)


def apart(run: Run, other: Run, field: str) -> list[float]:
    """Largest difference of a number in each step; infinite where only one is a number."""
    pairs = [(getattr(a, field), getattr(b, field)) for a, b in zip(run.steps, other.steps, strict=True)]
    return [
        float(np.where(np.isnan(a) & np.isnan(b), 0.0, np.nan_to_num(abs(a - b), nan=np.inf)).max()) for a, b in pairs
    ]


def same_choices(run: Run, other: Run) -> bool:
    """Whether actions and structure were the same in every step."""
    return all(
        np.array_equal(getattr(a, field), getattr(b, field))
        for a, b in zip(run.steps, other.steps, strict=True)
        for field in ("actions", "stage", "blueprint", "serial")
    )


def digest(*runs: Run) -> str:
    """Of every bit of the reports and of the policy."""
    found = sha256()
    for run in runs:
        for value in (*(value for step in run.steps for value in vars(step).values()), *run.policy.values()):
            found.update(np.asarray(value).tobytes())
    return found.hexdigest()


def show_steps(say: Say, want: Run, others: Mapping[str, Run]) -> None:
    """The schedule, step by step."""
    say("A fixed schedule: by the streamed executor, and how far others are from it (loss, accuracy)")
    say(
        f"{'step':>4}  {'seeds':<22}{'loss':>8}{'accuracy':>10}{'reward':>9}"
        + "".join(f"{name:>18}" for name in others)
    )
    far = [list(zip(*(apart(want, run, field) for field in FIELDS[:2]), strict=True)) for run in others.values()]
    for i, step in enumerate(want.steps):
        seeds = ", ".join(SeedStage(int(stage)).name.lower() for stage in step.stage[0])
        numbers = f"{step.val_loss[0]:>8.4f}{step.val_acc[0]:>10.2f}{step.reward[0]:>9.4f}"
        say(f"{step.t:>4}  {seeds:<22}{numbers}" + "".join(f"{of[i][0]:>11.0e}{of[i][1]:>7.0e}" for of in far))


def show_difference(say: Say, what: str, want: Run, run: Run) -> bool:
    """One line for a whole run; whether it agrees."""
    far = [max(apart(want, run, field)) for field in FIELDS]
    if want.policy:
        far.append(max(float((x.double() - run.policy[name].double()).abs().max()) for name, x in want.policy.items()))
    same = same_choices(want, run)
    say(f"{what:<32}" + "".join(f"{x:>10.0e}" for x in far).ljust(40) + f"  {'the same' if same else 'OTHERS'}")
    return same and max(far) <= TOLERANCE


def compare(say: Say, mine: DeviceMesh, all_ranks: DeviceMesh) -> bool:
    """Print both runs of all executors, and what a rank keeps; whether they agree, on every rank."""
    config, ranks = settings(), f"FSDP, {all_ranks.size()} rank{'s' * (all_ranks.size() > 1)}"
    require_fit(config.engine(), config.task_spec(), all_ranks.size())
    meshes = {"FSDP, 1 rank": mine, ranks: all_ranks}
    want, ppo = scheduled(None, config), learned(None, config)
    runs, learners = ({name: run(mesh, config) for name, mesh in meshes.items()} for run in (scheduled, learned))
    show_steps(say, want, {"one rounding": scheduled(None, config, nudge=True), **runs})

    say("\nLargest difference to the streamed executor")
    say(f"{'':<32}{'loss':>10}{'accuracy':>10}{'reward':>10}{'policy':>10}  actions and structure")
    agree = [show_difference(say, f"schedule, {name}", want, run) for name, run in runs.items()]
    agree += [show_difference(say, f"2 rounds of PPO, {name}", ppo, run) for name, run in learners.items()]

    say("\nBytes that the fullest rank keeps after the schedule")
    say(f"{'':<32}{'weights':>10}{'moments':>10}{'snapshot':>10}")
    for name, run in runs.items():
        assert isinstance(run.executor, FsdpExecutor)
        for of, part in run.executor.parts().items():
            kept = torch.tensor(list(part.bytes_here().values()))
            dist.all_reduce(kept, dist.ReduceOp.MAX)
            say(f"{f'{name}, {of}':<32}" + "".join(f"{x:>10,}" for x in kept.tolist()))

    of_ranks: list[str] = [""] * all_ranks.size()
    dist.all_gather_object(of_ranks, digest(runs[ranks], learners[ranks]))
    equal = len(set(of_ranks)) == 1
    say(f"\nReports and policies of the ranks are {'equal to the bit' if equal else 'DIFFERENT'}")
    say(f"FSDP is within {TOLERANCE:g} of the streamed executor: {'yes' if all(agree) else 'NO'}")
    return all(agree) and equal


def start() -> None:
    """Join the ranks that torchrun started; raises ConfigError where it did not, or without gloo."""
    if "TORCHELASTIC_RUN_ID" not in os.environ:
        raise ConfigError(f"this program runs on several ranks, which torchrun starts: {USAGE}")
    if not (dist.is_available() and dist.is_gloo_available()):
        raise ConfigError(
            f"this PyTorch ({torch.__version__} on {sys.platform}) was built without gloo, which connects ranks on "
            "CPUs; install one that has it, e.g. from https://download.pytorch.org/whl/cpu."
        )
    dist.init_process_group("gloo")


def main() -> int:
    """0 if all executors agree, 1 if not, 2 for what the user can mend."""
    first = os.environ.get("RANK", "0") == "0"
    try:
        start()
        alone, _ = dist.new_subgroups(group_size=1)
        mine, all_ranks = DeviceMesh.from_group(alone, "cpu"), DeviceMesh("cpu", torch.arange(dist.get_world_size()))
        register_task(TASK)
        agree = compare(lambda line: print(line, flush=True) if first else None, mine, all_ranks)
        dist.destroy_process_group()
        return 0 if agree else 1
    except EsperError as error:
        if first:
            print(f"error: {error}", file=sys.stderr)
        return 2


if __name__ == "__main__":
    sys.exit(main())
