"""One transformer sharded over ranks with FSDP2, grown by the same engine, policy and learner as any other. One minute.

torchrun --standalone --nproc-per-node 2 examples/fsdp_host.py

The executor is in fsdp/executor.py. Every rank runs this program; they meet in the executor alone. Two runs, a fixed
schedule and two rounds of PPO, are made three times: by the streamed executor, by FSDP on one rank, and on all of them.
"""

import os
import sys
from collections.abc import Callable, Mapping
from hashlib import sha256
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import DeviceMesh

from esper.kasmina.hosts.transformer import TransformerHostSpec
from esper.kasmina.parameters.optimizers import OptimizerSpec
from esper.leyline.errors import ConfigError, EsperError
from esper.leyline.lifecycle import HostFamily, LifecycleOp, SeedStage, Style
from esper.leyline.messages import EngineSpec, Observation, StoredStep
from esper.runs.assembly.clients import learner_of
from esper.runs.assembly.presets import resolve
from esper.runs.assembly.run_config import RunConfig
from esper.simic.client import ScriptedClient
from esper.simic.rewards import make_reward
from esper.tamiyo.scripted import NoMemory, ScriptedPolicy, canonical_action
from esper.tasks import TaskSpec, register_task
from esper.tasks.datasets import Dataset, Split
from esper.tasks.losses import NextToken
from esper.tolaria.build import build_engine, load_dataset
from esper.tolaria.engine import VectorizedEngine
from esper.tolaria.state import StepReport
from fsdp.executor import FsdpExecutor

CPU = torch.device("cpu")
VOCABULARY, TOKENS = 11, 12
TOLERANCE = 1e-4
"""Largest difference to the streamed executor: of losses, of accuracies (percentage points) and of rewards."""
USAGE = "torchrun --standalone --nproc-per-node 2 examples/fsdp_host.py"


def periods(data_dir: object = None, run_seed: int = 0) -> Dataset:
    """Each token is the one three places before it. Some batches do not split evenly over two ranks."""
    generator = torch.Generator().manual_seed(run_seed)

    def split(count: int) -> Split:
        x = torch.randint(VOCABULARY, (count, 3), generator=generator).repeat(1, 1 + TOKENS // 3)
        return Split(x[:, :TOKENS], x[:, 1 : TOKENS + 1])

    return Dataset(identity={"name": "periods", "seed": run_seed}, train=split(221), val=split(61), test=split(61))


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
    optimizer=OptimizerSpec(kind="adamw", host_lr=1e-2, seed_lr=1e-2, schedule="cosine"),
    min_training_epochs=2,
)


class Timetable:
    """Germinates one seed in each slot, the second one with a gate, and fossilizes them as soon as that is legal."""

    def __init__(self, spec: EngineSpec) -> None:
        keep = [canonical_action(LifecycleOp.FOSSILIZE, slot=s) for s in range(spec.num_slots)]
        seeds = (("attention", Style.LINEAR_ADD), ("norm", Style.GATED_GATE))
        grow = [
            canonical_action(LifecycleOp.GERMINATE, slot=s, blueprint=spec.blueprint_names.index(name), style=style)
            for s, (name, style) in enumerate(seeds)
        ]
        self._rows = torch.tensor([*keep, *grow, canonical_action(LifecycleOp.WAIT)])  # in order of preference

    def begin(self, episode: int, hosts: Tensor) -> NoMemory:
        """Nothing has to be remembered."""
        return NoMemory()

    def decide(self, obs: Observation, memory: NoMemory) -> Tensor:
        """The first row that is legal."""
        always = torch.ones_like(obs.legal[:, 0, :1])
        possible = torch.cat((obs.legal[:, LifecycleOp.FOSSILIZE], obs.legal[:, LifecycleOp.GERMINATE], always), dim=1)
        return self._rows[possible.int().argmax(dim=1)]

    def remember(self, memory: NoMemory, step: StoredStep) -> NoMemory:
        """Nothing."""
        return memory


def settings() -> RunConfig:
    """One host, and a lifecycle short enough for twelve steps."""
    return resolve(
        {
            "task": "periods", "num_envs": 1, "rounds": 2, "device": "cpu",
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


def scheduled(mesh: DeviceMesh | None, config: RunConfig) -> tuple[list[StepReport], VectorizedEngine]:
    """An episode of the timetable."""
    steps: list[StepReport] = []
    engine = engine_on(mesh, config, steps)
    policy = ScriptedPolicy(Timetable(engine.spec), engine.spec)
    client = ScriptedClient(policy, make_reward(config.reward.mode, config.reward))
    engine.reset(client, episode=0)
    engine.rollout(client)
    return steps, engine


def learned(mesh: DeviceMesh | None, config: RunConfig) -> tuple[list[StepReport], Mapping[str, Tensor]]:
    """Two rounds of PPO, and the policy after them."""
    steps: list[StepReport] = []
    engine = engine_on(mesh, config, steps)
    client = learner_of(config, engine.spec)
    engine.train(client, range(config.rounds), on_round=lambda stats, metrics: None)
    return steps, client.policy()


def difference(steps: list[StepReport], others: list[StepReport], field: str) -> float:
    """Largest absolute difference of a number of each step; infinite where only one is a number."""
    pairs = [(getattr(a, field), getattr(b, field)) for a, b in zip(steps, others, strict=True)]
    return max(
        float(np.max(np.where(np.isnan(a) & np.isnan(b), 0.0, np.nan_to_num(abs(a - b), nan=np.inf)))) for a, b in pairs
    )


def same_choices(steps: list[StepReport], others: list[StepReport]) -> bool:
    """Whether actions and structure were the same in every step."""
    fields = ("actions", "stage", "blueprint", "serial")
    return all(
        np.array_equal(getattr(a, field), getattr(b, field))
        for a, b in zip(steps, others, strict=True)
        for field in fields
    )


def digest(steps: list[StepReport], tensors: Mapping[str, Tensor]) -> str:
    """Of every bit of the reports and of some tensors."""
    found = sha256()
    for step in steps:
        for value in vars(step).values():
            found.update(np.asarray(value).tobytes())
    for tensor in tensors.values():
        found.update(tensor.detach().contiguous().numpy().tobytes())
    return found.hexdigest()


def compare(say: Callable[[str], None], mine: DeviceMesh, all_ranks: DeviceMesh) -> bool:
    """Print both runs of the three executors, and what a rank keeps; whether they agree on every rank."""
    config, ranks = settings(), all_ranks.size()
    meshes = {"streamed": None, "1 rank": mine, f"{ranks} ranks": all_ranks}
    runs = {name: scheduled(mesh, config) for name, mesh in meshes.items()}
    policies = {name: learned(mesh, config) for name, mesh in meshes.items()}

    say("a fixed schedule: loss and accuracy by the streamed executor, and how far FSDP is from them")
    say(f"{'step':>4}  {'seeds':<22}{'loss':>8}{'accuracy':>10}{'reward':>9}" + "".join(f"{n:>20}" for n in list(runs)[1:]))
    want, *others = (steps for steps, _ in runs.values())
    for i, step in enumerate(want):
        seeds = ", ".join(SeedStage(int(stage)).name.lower() for stage in step.stage[0])
        apart = (
            "/".join(f"{difference([step], [other[i]], field):.0e}" for field in ("val_loss", "val_acc")) for other in others
        )
        say(
            f"{step.t:>4}  {seeds:<22}{step.val_loss[0]:>8.4f}{step.val_acc[0]:>10.2f}{step.reward[0]:>9.4f}"
            + "".join(f"{text:>20}" for text in apart)
        )

    agree = True
    say("\nlargest difference to the streamed executor")
    say(f"{'':<34}{'loss':>9}{'accuracy':>10}{'reward':>9}{'policy':>9}  actions and structure")
    for name in list(runs)[1:]:
        rounds = {"fixed schedule": (runs["streamed"][0], runs[name][0]), "2 rounds of PPO": (policies["streamed"][0], policies[name][0])}
        for what, (a, b) in rounds.items():
            apart = [difference(a, b, field) for field in ("val_loss", "val_acc", "reward")]
            if what != "fixed schedule":
                old, new = policies["streamed"][1], policies[name][1]
                apart.append(max(float((old[key].double() - new[key].double()).abs().max()) for key in old))
            same = same_choices(a, b)
            agree &= same and max(apart) <= TOLERANCE
            numbers = "".join(f"{x:>9.0e}" if i != 1 else f"{x:>10.0e}" for i, x in enumerate(apart))
            say(f"{what + ', ' + name:<34}{numbers:<37}  {'the same' if same else 'OTHERS'}")

    say("\nbytes that a rank keeps after the schedule (the fullest one)")
    say(f"{'':<20}{'weights':>10}{'moments':>10}{'snapshot':>10}")
    for name in list(runs)[1:]:
        executor: Any = runs[name][1].executor
        for of, part in executor.parts().items():
            kept = torch.tensor(list(part.bytes_here().values()))
            dist.all_reduce(kept, dist.ReduceOp.MAX)
            say(f"{name + ', ' + of:<20}" + "".join(f"{x:>10,}" for x in kept.tolist()))

    own = digest(runs[f"{ranks} ranks"][0] + policies[f"{ranks} ranks"][0], policies[f"{ranks} ranks"][1])
    of_ranks: list[str] = [""] * ranks
    dist.all_gather_object(of_ranks, own)
    equal = len(set(of_ranks)) == 1
    say(f"\nreports and policy of all ranks are {'equal to the bit' if equal else 'DIFFERENT'}")
    say(f"within {TOLERANCE:g} of the streamed executor: {'yes' if agree else 'NO'}")
    return agree and equal


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
    try:
        start()
        alone, _ = dist.new_subgroups(group_size=1)
        mine = DeviceMesh.from_group(alone, "cpu")
        all_ranks = DeviceMesh("cpu", torch.arange(dist.get_world_size()))
        register_task(TASK)
        first = dist.get_rank() == 0
        return 0 if compare(lambda line: print(line, flush=True) if first else None, mine, all_ranks) else 1
    except EsperError as error:
        if int(os.environ.get("RANK", "0")) == 0:
            print(f"error: {error}", file=sys.stderr)
        return 2
    finally:
        if dist.is_available() and dist.is_initialized():
            dist.destroy_process_group()


if __name__ == "__main__":
    sys.exit(main())
