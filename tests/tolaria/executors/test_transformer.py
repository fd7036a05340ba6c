"""The transformer host with its blueprints: fused as streamed, and learning."""

import pytest
import torch
from against_streamed import EXECUTORS, compare

import tokens
from esper.kasmina.blueprints import names, selectable
from esper.kasmina.hosts.transformer import TransformerHost, TransformerHostSpec
from esper.kasmina.parameters.initialization import deterministic_build
from esper.leyline.lifecycle import Algorithm, HostFamily, SeedStage
from tiny import Bench

S = SeedStage
LIVES = ((S.TRAINING, 0.0), (S.BLENDING, 0.4), (S.HOLDING, 1.0), (S.FOSSILIZED, 1.0))
ALGORITHMS = (Algorithm.ADD, Algorithm.MULTIPLY, Algorithm.GATE)
BLUEPRINTS = [names()[index] for index in selectable(HostFamily.TRANSFORMER)]


def settings(dropout: float = 0.0) -> dict:
    spec = TransformerHostSpec(
        vocabulary=tokens.VOCABULARY, width=8, heads=2, layers=2, segments=2, context=tokens.TOKENS, dropout=dropout
    )
    host = deterministic_build(lambda: TransformerHost(spec, ["r0c0", "r0c1"], tokens=tokens.TOKENS))
    return {"host": host, "data": tokens.tokens(), "objective": tokens.OBJECTIVE}


@pytest.mark.parametrize("executor", ["fused", "native"])
@pytest.mark.parametrize("dropout", [0.0, 0.2])
def test_every_blueprint_is_run_as_streamed(dropout, executor):
    def grow(bench: Bench) -> None:
        for n, name in enumerate(BLUEPRINTS):
            stage, alpha = LIVES[n % 4]
            bench.grow("r0c0", name, stage, alpha=alpha, algorithm=ALGORITHMS[n % 3], hosts=[n])
            bench.grow("r0c1", BLUEPRINTS[n - 1], S.HOLDING, alpha=0.7, algorithm=ALGORITHMS[n // 3], hosts=[n])

    compare(EXECUTORS[executor], grow, num_envs=len(BLUEPRINTS), **settings(dropout))


def test_a_transformer_learns_and_its_hosts_are_drawn_apart():
    bench = Bench(2, **settings())
    weights = bench.population.host.params.clone()
    assert not torch.equal(weights[0], weights[1])
    first = bench.train().loss
    assert (bench.train(15).loss < 0.9 * first).all()
