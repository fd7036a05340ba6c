"""An executor beside the streamed one, on the same seeds: passes, weights, measurements, whole runs."""

import itertools

import numpy as np
import torch

from esper.kasmina.blueprints import registry
from esper.leyline.actions import LifecycleOp
from esper.leyline.stages import Algorithm, HostFamily, SeedStage
from esper.leyline.tensor_dataclass import named_tensors
from tiny import Bench, engine, same_tree
from toys import ToyClient, script

ALL = [registry.blueprint_at(i, HostFamily.CNN).name for i in registry.selectable(HostFamily.CNN)]
CONDITIONS = [
    (SeedStage.TRAINING, 0.0),
    (SeedStage.BLENDING, 0.4),
    (SeedStage.HOLDING, 1.0),
    (SeedStage.FOSSILIZED, 1.0),
]
ALGORITHMS = (Algorithm.ADD, Algorithm.MULTIPLY, Algorithm.GATE)


def same_pass(a, b, atol=2e-5):
    for (name, x), (_, y) in zip(named_tensors(a), named_tensors(b), strict=True):
        torch.testing.assert_close(x, y, atol=atol, rtol=1e-4, equal_nan=True, msg=lambda text, n=name: f"{n}: {text}")


def compare(wrap, grow, *, num_envs=3, epochs=2, **settings):
    """Grow the same seeds on two benches, train one streamed and one as `wrap` says, compare all."""
    streamed, other = Bench(num_envs, **settings), Bench(num_envs, **settings)
    for bench in (streamed, other):
        grow(bench)
    assert same_tree(other.population.state_dict(), streamed.population.state_dict()), "they start with other weights"
    executor = wrap(other.executor.data)
    for t in range(1, epochs + 1):
        same_pass(executor.train_epoch(t, other.slots), streamed.executor.train_epoch(t, streamed.slots))
    for name, want in streamed.population.state_dict().items():
        torch.testing.assert_close(other.population.state_dict()[name], want, atol=2e-5, rtol=1e-3, msg=name)
    found, want = streamed.measure(fossils_as_players=True)
    other.executor.apply_structure(other.structure(found))
    outputs = executor.evaluate(epochs, other.slots, found)
    torch.testing.assert_close(outputs.accuracy[found.valid], want.accuracy[found.valid], atol=1e-4, rtol=0.0)
    torch.testing.assert_close(outputs.loss, want.loss, atol=1e-4, rtol=1e-4)
    committed, expected = (
        one.committed("test", of.slots) for one, of in ((executor, other), (streamed.executor, streamed))
    )
    torch.testing.assert_close(committed.accuracy, expected.accuracy, atol=1e-4, rtol=0.0)
    torch.testing.assert_close(committed.loss, expected.loss, atol=1e-4, rtol=1e-4)


def compare_in_every_stage_and_blend(wrap, blueprint):
    """Twelve hosts with the same seed, each in another stage or with another blend."""

    def grow(bench):
        for n, ((stage, alpha), algorithm) in enumerate(itertools.product(CONDITIONS, ALGORITHMS)):
            bench.grow("r0c1", blueprint, stage, alpha=alpha, algorithm=algorithm, hosts=[n])

    compare(wrap, grow, num_envs=len(CONDITIONS) * len(ALGORITHMS), epochs=1)


def grow_different_seeds(bench):
    """In five hosts, so that no two of them are alike."""
    bench.grow("r0c0", "conv_light", SeedStage.TRAINING, hosts=[0, 3])
    bench.grow("r0c0", "conv_light", SeedStage.HOLDING, alpha=1.0, hosts=[2])
    bench.grow("r0c0", "norm", SeedStage.BLENDING, alpha=0.5, algorithm=Algorithm.MULTIPLY, hosts=[4])
    bench.grow("r0c1", "attention", SeedStage.FOSSILIZED, alpha=1.0, algorithm=Algorithm.GATE, hosts=[0, 1, 4])
    bench.grow("r1c0", "bottleneck", SeedStage.HOLDING, alpha=1.0, hosts=[0, 2, 4])
    bench.grow("r1c0", "depthwise", SeedStage.TRAINING, algorithm=Algorithm.GATE, hosts=[3])


def whole_run(executor):
    """Reports of the steps, test accuracies and state of an episode in which seeds grow up and become permanent."""
    germinate = (0, 1, 2, 0, 2, 0, 0, int(LifecycleOp.GERMINATE))
    second = (2, 4, 1, 0, 2, 0, 0, int(LifecycleOp.GERMINATE))
    fossilize = (0, 0, 2, 1, 2, 0, 0, int(LifecycleOp.FOSSILIZE))
    plan = {1: germinate, 4: second, 7: {0: fossilize, 2: fossilize}}
    seen = []
    run = engine(3, 9, executor=executor, on_step=seen.append)
    client = ToyClient(run.spec, script(3, 9, plan))
    run.reset(client, 0)
    run.rollout(client)
    return seen, run.test(), run.executor.state_dict()


def compare_whole_runs(executor):
    """The same episode streamed and otherwise."""
    want, outputs = whole_run("streamed")[0], whole_run(executor)[0]
    for a, b in zip(want, outputs, strict=True):
        assert np.array_equal(a.stage, b.stage)
        np.testing.assert_allclose(a.val_loss, b.val_loss, atol=2e-3)
        np.testing.assert_allclose(a.train_loss, b.train_loss, atol=2e-3)
    assert outputs[-1].stage[0].tolist()[0] == SeedStage.FOSSILIZED
