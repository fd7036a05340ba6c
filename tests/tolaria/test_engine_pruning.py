"""A seed that is pruned in any stage of its life leaves nothing of itself behind."""

import pytest

import tiny
from esper.leyline.lifecycle import LifecycleOp, SeedStage
from toys import ToyClient, action, script

Op, S = LifecycleOp, SeedStage
# born in 1, TRAINING from its tick, BLENDING from that of 2, alpha ticks in 3 to 5, HOLDING from the tick of 5
LIVES = [
    pytest.param(S.GERMINATED, 2, 0, 2, {"auto_g1": False}, id="germinated"),
    pytest.param(S.TRAINING, 2, 0, 2, {}, id="training"),
    pytest.param(S.TRAINING, 2, 3, 2, {}, id="training, with ticks, which count for nothing while alpha is 0"),
    pytest.param(S.BLENDING, 6, 0, 6, {"target": 0}, id="blending, resting at half, at once"),
    pytest.param(S.BLENDING, 6, 1, 8, {"target": 0}, id="blending, resting at half, in three ticks"),
    pytest.param(S.HOLDING, 6, 0, 6, {}, id="holding, at once"),
    pytest.param(S.HOLDING, 6, 1, 8, {}, id="holding, in three ticks"),
]


@pytest.mark.parametrize(
    ("executor", "stage", "t", "speed", "last", "rules"),
    [
        pytest.param(executor, *life.values, id=f"{executor}, {life.id}")
        for executor, lives in (("streamed", LIVES), ("fused", LIVES[-1:]))
        for life in lives
    ],
)
def test_after_a_prune_no_parameter_and_no_optimizer_state_remains(executor, stage, t, speed, last, rules):
    rules = dict(rules)
    target = rules.pop("target", 2)
    engine = tiny.engine(2, 12, rules=rules, executor=executor)
    plan = {
        1: action(Op.GERMINATE, slot=1, style=3, tempo=0, alpha_target=target),
        t: {0: action(Op.PRUNE, slot=1, alpha_speed=speed)},
    }
    client = ToyClient(engine.spec, script(2, 12, plan))
    engine.reset(client, 0)

    def remains(host: int) -> dict[str, bool]:
        engine.apply_structure()
        row = host * 3 + 1
        flats = {"seeds": engine.executor.population.seeds, "gates": engine.executor.population.gates}
        return {f"{k}.{name}": bool(x[row].any()) for k, flat in flats.items() for name, x in flat.tensors().items()}

    counts = []
    while engine.t < last:
        engine.step(client)
        counts.append(engine.state.slots.params[0, 1].item())
        if engine.t < last:
            assert remains(0)["seeds.params"]
            assert remains(0)["gates.params"]
    assert client.steps[t - 1].obs.slots.stage[0, 1] == stage
    assert client.steps[t - 1].effective_op[0] == Op.PRUNE
    # an immediate prune cools down from the tick of its own step, one that ends in a tick from the next
    assert engine.state.slots.stage[0, 1] == (S.EMBARGOED if last == t else S.PRUNED)
    assert not any(remains(0).values())
    assert remains(1)["seeds.params"]  # that of the other host lives on
    # the count is constant for the life of the module, frozen or not
    assert len(set(counts[:-1])) == 1
    assert counts[0] > counts[-1] == 0
