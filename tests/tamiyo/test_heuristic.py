import math
from dataclasses import dataclass, field

import pytest
import torch
from scripted_observations import TRANSFORMER, engine_spec, legal_only, observation, step

from esper.leyline.errors import ConfigError
from esper.leyline.lifecycle import CANONICAL_ACTION, AlphaMode, Head, LifecycleOp, SeedStage
from esper.leyline.messages import Observation
from esper.tamiyo.baselines import Heuristic, HeuristicRules, make_baseline
from esper.tamiyo.schedules import ScriptedPolicy

WAIT, GERMINATE, SET_TARGET, PRUNE, FOSSILIZE, ADVANCE = LifecycleOp
DORMANT, GERMINATED, TRAINING = SeedStage.DORMANT, SeedStage.GERMINATED, SeedStage.TRAINING
BLENDING, HOLDING, FOSSILIZED = SeedStage.BLENDING, SeedStage.HOLDING, SeedStage.FOSSILIZED
CNN_ROTATION = [4, 5, 3, 1, 2]
LIVE = (GERMINATED, TRAINING, BLENDING, HOLDING, FOSSILIZED)


@dataclass
class ScalarHeuristic:
    """The rules for one host, written as one would say them."""

    prune_count: dict[int, int] = field(default_factory=dict)
    rotation: int = 0

    def decide(self, obs: Observation, n: int, m: int) -> list[int]:
        for op in (PRUNE, FOSSILIZE, GERMINATE, ADVANCE):
            for slot in range(obs.num_slots):
                if obs.legal[n, op, slot] and self._wants(op, obs, n, slot, m):
                    action = list(CANONICAL_ACTION)
                    action[Head.OP], action[Head.SLOT] = op, slot
                    if op == GERMINATE:
                        action[Head.BLUEPRINT], action[Head.TEMPO] = self._blueprint(), 0
                    return action
        return list(CANONICAL_ACTION)

    def _wants(self, op: LifecycleOp, obs: Observation, n: int, s: int, m: int) -> bool:
        slots, t, end = obs.slots, obs.t, obs.episode_length
        stage, age = slots.stage[n, s], slots.age[n, s].item()
        if op == GERMINATE:
            return t + m + 3 + 2 <= end  # it trains, is blended in within 3 steps, and is held
        if op == ADVANCE:
            return stage != BLENDING or bool(slots.alpha_target[n, s] == 1 and slots.alpha_mode[n, s] == AlphaMode.HOLD)
        judged = stage == HOLDING and slots.contribution_step[n, s] == t and age >= (end - (t - age)) / 2
        host = obs.hosts.host_params[n].item()
        params = [slots.params[n, i].item() * (slots.stage[n, i] in LIVE) for i in range(obs.num_slots)]
        price = 3 * math.log((host + sum(params)) / (host + sum(params) - params[s]))
        earns = slots.contribution[n, s].item() > price
        if op == FOSSILIZE:
            return bool(judged and earns)
        return bool(judged and not earns) or bool(stage == TRAINING and slots.epochs_in_stage[n, s] >= 3 * m)

    def _blueprint(self) -> int:
        turn = CNN_ROTATION[self.rotation :] + CNN_ROTATION[: self.rotation]
        return min(turn, key=lambda b: self.prune_count.get(b, 0))  # min gives the first of equals

    def remember(self, action: list[int], effective: int, valid: bool, victim: int) -> None:
        if valid and effective == PRUNE:
            self.prune_count[victim] = self.prune_count.get(victim, 0) + 1
        if valid and effective == GERMINATE:
            self.rotation = (CNN_ROTATION.index(action[Head.BLUEPRINT]) + 1) % 5


def random_observation(t: int, n: int, gen: torch.Generator) -> Observation:
    def rand(*shape: int) -> torch.Tensor:
        return torch.rand(*shape, generator=gen)

    def one_of(values: list[float], *shape: int) -> torch.Tensor:
        return torch.tensor(values)[torch.randint(len(values), shape, generator=gen)]

    legal = rand(n, 6, 3) < 0.6
    legal[:, WAIT] = True
    return observation(
        t, legal,
        stage=one_of([1, 1, 2, 3, 4, 6, 6, 7, 8], n, 3), epochs_in_stage=one_of([0, 29, 30], n, 3),
        age=one_of([1, 10, 15, 20, 25, 30], n, 3).clamp(max=t), params=one_of([10, 100, 1000], n, 3),
        blueprint=one_of([1, 2, 3, 4, 5], n, 3), alpha_target=one_of([0.5, 1.0], n, 3),
        alpha_mode=one_of([0, 0, 1, 2], n, 3), contribution=one_of([-1.0, 0.2, 1.0, 3.0, 9.0, math.nan], n, 3),
        contribution_step=one_of([t, t, t - 1, -1], n, 3), hosts={"host_params": one_of([500, 5000], n)},
    )  # fmt: skip


def test_the_batched_rules_agree_with_the_rules_of_one_host():
    n, gen = 48, torch.Generator().manual_seed(0)
    policy = make_baseline("heuristic", engine_spec(num_envs=n))
    references, seen = [ScalarHeuristic() for _ in range(n)], set()
    for t in range(20, 60):
        obs = random_observation(t, n, gen)
        act = policy.act(obs)
        actions = act.actions.tolist()
        assert actions == [reference.decide(obs, i, m=10) for i, reference in enumerate(references)]
        refused, valid = torch.rand(n, generator=gen) < 0.1, torch.rand(n, generator=gen) < 0.9
        effective = act.actions[:, Head.OP] * ~refused
        policy.store(step(obs, act, effective_op=effective, valid=valid))
        for i, reference in enumerate(references):
            victim = obs.slots.blueprint[i, actions[i][Head.SLOT]].item()
            reference.remember(actions[i], effective[i].item(), bool(valid[i]), victim)
        seen |= {action[Head.OP] for action in actions}
    assert seen == {WAIT, GERMINATE, PRUNE, FOSSILIZE, ADVANCE}


HOST = {"host_params": 1000}


def decide(t: int, *legal: tuple[int, int], spec=None, **slots) -> list[int]:
    policy = make_baseline("heuristic", spec or engine_spec())
    return policy.act(observation(t, legal_only(1, 3, *legal), hosts=HOST, **slots)).actions[0].tolist()


def germination(slot: int, blueprint: int) -> list[int]:
    return [slot, blueprint, 2, 0, 2, 0, 0, GERMINATE]


def test_it_germinates_in_the_lowest_legal_slot_from_the_first_step():
    assert decide(1, (GERMINATE, 1), (GERMINATE, 2)) == germination(1, blueprint=4)
    assert decide(1, (GERMINATE, 0), spec=engine_spec(**TRANSFORMER)) == germination(0, blueprint=8)
    assert decide(1) == list(CANONICAL_ACTION)


def test_no_seed_germinates_that_cannot_be_judged():
    # born in step 45 of 60 it trains for 10 steps, is blended in within 3, and is measured in HOLDING in step 60
    assert [decide(t, (GERMINATE, 0))[Head.OP] for t in (45, 46)] == [GERMINATE, WAIT]


STAGE_AT_0 = {stage: torch.tensor([[stage, DORMANT, DORMANT]]) for stage in SeedStage}
ALL_AT_0 = [(op, 0) for op in LifecycleOp if op != GERMINATE]


@pytest.mark.parametrize(
    ("stage", "fields", "op"),
    [
        (GERMINATED, {}, ADVANCE),
        (TRAINING, {"epochs_in_stage": 29}, ADVANCE),
        (TRAINING, {"epochs_in_stage": 30}, PRUNE),  # 3 * M
        (BLENDING, {"epochs_in_stage": 30}, WAIT),
        (BLENDING, {"alpha_target": 1.0}, ADVANCE),
        (BLENDING, {"alpha_target": 0.7}, WAIT),
        (BLENDING, {"alpha_target": 1.0, "alpha_mode": 1}, WAIT),
    ],
)
def test_a_seed_that_is_not_held_is_advanced_unless_it_never_passes_its_gate(stage, fields, op):
    assert decide(30, *ALL_AT_0, stage=STAGE_AT_0[stage], **fields) == [*CANONICAL_ACTION[:7], op]


@pytest.mark.parametrize(
    ("fields", "op"),
    [
        # born in step 1 of 60: judged after half of the 59 steps that remained
        ({"age": 29, "contribution": -9.0}, WAIT),
        ({"age": 30, "contribution": -9.0}, PRUNE),
        # 1,000 parameters beside as many of the host cost 3 ln 2 = 2.079 points
        ({"age": 30, "contribution": 2.07}, PRUNE),
        ({"age": 30, "contribution": 2.09}, FOSSILIZE),
        ({"age": 30, "contribution": 2.09, "contribution_step": 29}, WAIT),
        ({"age": 30, "contribution": math.nan}, PRUNE),
        ({"age": 5, "contribution": 0.0}, WAIT),  # born in step 25, it is judged after 17.5
    ],
)
def test_a_held_seed_is_judged_late_by_what_its_parameters_cost(fields, op):
    t = 1 + 29 if fields["age"] == 29 else 31
    held = {"stage": STAGE_AT_0[HOLDING], "params": torch.tensor([[1000, 0, 0]]), "contribution_step": t}
    policy = make_baseline("heuristic", engine_spec())
    obs = observation(t, legal_only(1, 3, (PRUNE, 0), (FOSSILIZE, 0)), hosts=HOST, **{**held, **fields})
    assert policy.act(obs).actions[0, Head.OP] == op


def germinated_blueprints(policy, times: int, t: int = 10) -> list[int]:
    grown = []
    for _ in range(times):
        obs = observation(t, legal_only(1, 3, (GERMINATE, 0)), hosts=HOST)
        act = policy.act(obs)
        policy.store(step(obs, act))
        grown.append(act.actions[0, Head.BLUEPRINT].item())
    return grown


def prune(policy, blueprint: int, t: int) -> None:
    obs = observation(
        t, legal_only(1, 3, (PRUNE, 0)), hosts=HOST,
        stage=STAGE_AT_0[TRAINING], epochs_in_stage=30, blueprint=torch.tensor([[blueprint, -1, -1]]),
    )  # fmt: skip
    act = policy.act(obs)
    assert act.actions[0, Head.OP] == PRUNE
    policy.store(step(obs, act))


def test_blueprints_are_grown_in_turn():
    assert germinated_blueprints(make_baseline("heuristic", engine_spec()), 7) == [*CNN_ROTATION, 4, 5]


def test_blueprints_that_were_pruned_come_last():
    policy = make_baseline("heuristic", engine_spec())
    for blueprint in (4, 3, 3):
        prune(policy, blueprint, t=1)
    # prune counts: 4 -> 1, 3 -> 2, others 0; in turn from the start: 5, 1, 2, then 5 again
    assert germinated_blueprints(policy, 4) == [5, 1, 2, 5]


def test_a_new_episode_forgets_what_was_pruned():
    policy = make_baseline("heuristic", engine_spec())
    prune(policy, 4, t=10)
    policy.begin_rollout(1, torch.arange(1))
    assert germinated_blueprints(policy, 1, t=11) == [4]


def test_only_selectable_blueprints_are_in_rotation():
    assert germinated_blueprints(make_baseline("heuristic", engine_spec(selectable=(2, 4, 6))), 3) == [4, 2, 4]
    with pytest.raises(ConfigError, match="this run allows 6"):
        Heuristic(engine_spec(selectable=(6,)))


def with_rules(**rules) -> ScriptedPolicy:
    return ScriptedPolicy(Heuristic(engine_spec(), HeuristicRules(**rules)), engine_spec())


def test_its_choices_can_be_other_ones():
    policy = with_rules(blueprints=(5, 4), slots=(2, 0), tempo=2, first_step=3)
    everywhere = legal_only(1, 3, *[(GERMINATE, slot) for slot in range(3)])
    assert policy.act(observation(2, everywhere, hosts=HOST)).actions[0, Head.OP] == WAIT
    obs = observation(3, everywhere, hosts=HOST)
    assert policy.act(obs).actions[0].tolist() == [2, 5, 2, 2, 2, 0, 0, GERMINATE]
    policy.store(step(obs, policy.act(obs)))
    only_0 = observation(4, legal_only(1, 3, (GERMINATE, 0), (GERMINATE, 1)), hosts=HOST)
    assert policy.act(only_0).actions[0].tolist() == [0, 4, 2, 2, 2, 0, 0, GERMINATE]
    only_1 = observation(4, legal_only(1, 3, (GERMINATE, 1)), hosts=HOST)
    assert policy.act(only_1).actions[0, Head.OP] == WAIT  # not among its slots


def test_its_thresholds_can_be_other_ones():
    policy = with_rules(patience=0.25, price=6.0, fossilize_above=1.0)
    held = {"stage": STAGE_AT_0[HOLDING], "params": torch.tensor([[1000, 0, 0]]), "contribution_step": 20}

    def op(**slots) -> int:
        return (
            policy.act(observation(20, legal_only(1, 3, *ALL_AT_0[2:4]), hosts=HOST, **held, **slots))
            .actions[0, 7]
            .item()
        )

    # judged after a quarter of the time from birth to step 60; 6 ln 2 + 1 = 5.159
    assert [op(age=13, contribution=9.0), op(age=14, contribution=9.0)] == [WAIT, FOSSILIZE]
    assert [op(age=14, contribution=x) for x in (5.15, 5.17)] == [PRUNE, FOSSILIZE]
