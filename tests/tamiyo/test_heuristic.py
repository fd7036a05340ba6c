import math
from dataclasses import dataclass, field

import pytest
import torch
from scripted_observations import TRANSFORMER, engine_spec, legal_only, observation, step

from esper.leyline.errors import ConfigError
from esper.leyline.lifecycle import CANONICAL_ACTION, AlphaMode, Head, LifecycleOp, SeedStage
from esper.leyline.messages import Observation
from esper.tamiyo.baselines import make_baseline
from esper.tamiyo.heuristic import Heuristic, HeuristicRules
from esper.tamiyo.scripted import ScriptedPolicy

WAIT, GERMINATE, SET_TARGET, PRUNE, FOSSILIZE, ADVANCE = LifecycleOp
DORMANT, GERMINATED, TRAINING = SeedStage.DORMANT, SeedStage.GERMINATED, SeedStage.TRAINING
BLENDING, HOLDING, FOSSILIZED = SeedStage.BLENDING, SeedStage.HOLDING, SeedStage.FOSSILIZED
READY = {"stabilized": True, "plateau_count": 3, "val_acc": 50.0}
CNN_ROTATION = [1, 7, 2, 3, 4]


@dataclass
class ScalarHeuristic:
    """The rules for one host, written as one would say them."""

    last_prune: float = -math.inf
    prune_count: dict[int, int] = field(default_factory=dict)
    rotation: int = 0

    def decide(self, obs: Observation, n: int, m: int) -> list[int]:
        op, slot = self._intend(obs, n, m)
        action = list(CANONICAL_ACTION)
        if op == WAIT or not obs.legal[n, op, slot]:
            return action
        action[Head.OP], action[Head.SLOT] = op, slot
        if op == GERMINATE:
            action[Head.BLUEPRINT] = self._blueprint()
        return action

    def _intend(self, obs: Observation, n: int, m: int) -> tuple[int, int]:
        slots, hosts, t = obs.slots, obs.hosts, obs.t
        growing = (GERMINATED, TRAINING, BLENDING, HOLDING)
        candidates = [s for s in range(obs.num_slots) if slots.stage[n, s] in growing]
        if not candidates:
            legal = [s for s in range(obs.num_slots) if obs.legal[n, GERMINATE, s]]
            if t - self.last_prune < 5 or not hosts.stabilized[n] or t < 5 or not legal or hosts.plateau_count[n] < 3:
                return WAIT, 0
            return GERMINATE, legal[0]
        s = candidates[0]
        stage, age, can_prune = slots.stage[n, s], slots.epochs_in_stage[n, s], obs.legal[n, PRUNE, s]
        hurts = age >= 5 and hosts.val_acc[n] - slots.acc_at_stage_start[n, s] < -2.0
        if stage == GERMINATED:
            return ADVANCE, s
        if stage == TRAINING:
            return (PRUNE, s) if can_prune and (hurts or age >= 3 * m) else (ADVANCE, s)
        if stage == BLENDING:
            if can_prune and hurts:
                return PRUNE, s
            full = slots.alpha_target[n, s] == 1 and slots.alpha_mode[n, s] == AlphaMode.HOLD
            return (ADVANCE, s) if full else (WAIT, 0)
        if slots.contribution_step[n, s] != t:
            return WAIT, 0
        if slots.contribution[n, s] > 0.1 and hosts.val_acc[n] - slots.acc_at_germination[n, s] < 0:
            return PRUNE, s
        return (FOSSILIZE, s) if slots.contribution[n, s] > 0.5 else (PRUNE, s)

    def _blueprint(self) -> int:
        turn = CNN_ROTATION[self.rotation :] + CNN_ROTATION[: self.rotation]
        return min(turn, key=lambda b: self.prune_count.get(b, 0))  # min gives the first of equals

    def remember(self, action: list[int], effective: int, valid: bool, victim: int, t: int) -> None:
        if valid and effective == PRUNE:
            self.last_prune = t
            self.prune_count[victim] = self.prune_count.get(victim, 0) + 1
        if valid and effective == GERMINATE:
            self.rotation = (CNN_ROTATION.index(action[Head.BLUEPRINT]) + 1) % 5


def random_observation(t: int, n: int, gen: torch.Generator) -> Observation:
    def rand(*shape: int) -> torch.Tensor:
        return torch.rand(*shape, generator=gen)

    def one_of(values: list[float], *shape: int) -> torch.Tensor:
        return torch.tensor(values)[torch.randint(len(values), shape, generator=gen)]

    legal = rand(n, 6, 3) < 0.8
    legal[:, WAIT] = True
    stage = one_of([1, 1, 2, 3, 4, 6, 7, 8], n, 3)
    stage = torch.where(rand(n, 1) < 0.4, 1, stage)
    return observation(
        t, legal,
        stage=stage, epochs_in_stage=one_of([0, 4, 5, 20, 29, 30], n, 3), blueprint=one_of([1, 2, 3, 4, 7], n, 3),
        alpha_target=one_of([0.5, 1.0], n, 3), alpha_mode=one_of([0, 0, 1, 2], n, 3),
        acc_at_stage_start=one_of([48.0, 51.0, 53.0, math.nan], n, 3),
        acc_at_germination=one_of([49.0, 50.0, 51.0, math.nan], n, 3),
        contribution=one_of([-1.0, 0.0, 0.3, 0.5, 0.6, 2.0], n, 3), contribution_step=one_of([t, t, t - 1, -1], n, 3),
        hosts={"val_acc": torch.full((n,), 50.0), "stabilized": rand(n) < 0.9, "plateau_count": one_of([2, 3, 9], n)},
    )  # fmt: skip


@pytest.mark.parametrize("seed", range(3))
def test_the_batched_rules_agree_with_the_rules_of_one_host(seed):
    n, gen = 48, torch.Generator().manual_seed(seed)
    policy = make_baseline("heuristic", engine_spec(num_envs=n))
    references, seen = [ScalarHeuristic() for _ in range(n)], set()
    for t in range(1, 40):
        obs = random_observation(t, n, gen)
        act = policy.act(obs)
        actions = act.actions.tolist()
        assert actions == [reference.decide(obs, i, m=10) for i, reference in enumerate(references)]
        refused, valid = torch.rand(n, generator=gen) < 0.1, torch.rand(n, generator=gen) < 0.9
        effective = act.actions[:, Head.OP] * ~refused
        policy.store(step(obs, act, effective_op=effective, valid=valid))
        for i, reference in enumerate(references):
            victim = obs.slots.blueprint[i, actions[i][Head.SLOT]].item()
            reference.remember(actions[i], effective[i].item(), bool(valid[i]), victim, t)
        seen |= {action[Head.OP] for action in actions}
    assert seen == {WAIT, GERMINATE, PRUNE, FOSSILIZE, ADVANCE}


def decide(t: int, *legal: tuple[int, int], spec=None, hosts=None, **slots) -> list[int]:
    policy = make_baseline("heuristic", spec or engine_spec())
    return policy.act(observation(t, legal_only(1, 3, *legal), hosts=hosts or READY, **slots)).actions[0].tolist()


def germination(slot: int, blueprint: int) -> list[int]:
    return [slot, blueprint, 2, 1, 2, 0, 0, GERMINATE]


def test_it_germinates_in_the_lowest_legal_slot_on_a_plateau():
    assert decide(5, (GERMINATE, 1), (GERMINATE, 2)) == germination(1, blueprint=1)
    assert decide(5, (GERMINATE, 0), spec=engine_spec(**TRANSFORMER)) == germination(0, blueprint=8)


@pytest.mark.parametrize("change", [{"stabilized": False}, {"plateau_count": 2}])
def test_it_waits_without_stability_or_plateau(change):
    assert decide(5, (GERMINATE, 0), hosts=READY | change) == list(CANONICAL_ACTION)


def test_it_waits_before_step_5_and_without_a_legal_slot():
    assert decide(4, (GERMINATE, 0)) == list(CANONICAL_ACTION)
    assert decide(5) == list(CANONICAL_ACTION)


def test_the_first_growing_slot_in_action_order_is_the_candidate():
    stage = torch.tensor([[FOSSILIZED, HOLDING, HOLDING]])
    said = decide(9, (FOSSILIZE, 1), (FOSSILIZE, 2), stage=stage, contribution_step=9, contribution=1.0)
    assert (said[Head.OP], said[Head.SLOT]) == (FOSSILIZE, 1)


STAGE_AT_0 = {stage: torch.tensor([[stage, DORMANT, DORMANT]]) for stage in SeedStage}
ALL_AT_0 = [(op, 0) for op in LifecycleOp]


@pytest.mark.parametrize(
    ("stage", "fields", "op"),
    [
        (GERMINATED, {}, ADVANCE),
        (TRAINING, {"epochs_in_stage": 5, "acc_at_stage_start": 52.0}, ADVANCE),  # -2.0 is not below -2.0
        (TRAINING, {"epochs_in_stage": 5, "acc_at_stage_start": 52.1}, PRUNE),
        (TRAINING, {"epochs_in_stage": 4, "acc_at_stage_start": 60.0}, ADVANCE),
        (TRAINING, {"epochs_in_stage": 29}, ADVANCE),
        (TRAINING, {"epochs_in_stage": 30}, PRUNE),  # 3 * M
        (BLENDING, {"epochs_in_stage": 5, "acc_at_stage_start": 52.1}, PRUNE),
        (BLENDING, {"epochs_in_stage": 30}, WAIT),
        (BLENDING, {"alpha_target": 1.0}, ADVANCE),
        (BLENDING, {"alpha_target": 0.7}, WAIT),
        (BLENDING, {"alpha_target": 1.0, "alpha_mode": 1}, WAIT),
        (HOLDING, {"contribution": 3.0, "contribution_step": 8}, WAIT),
        (HOLDING, {"contribution": 3.0, "contribution_step": 9, "acc_at_germination": 50.1}, PRUNE),
        (HOLDING, {"contribution": 3.0, "contribution_step": 9, "acc_at_germination": 50.0}, FOSSILIZE),
        (HOLDING, {"contribution": 0.5, "contribution_step": 9, "acc_at_germination": 40.0}, PRUNE),
        (HOLDING, {"contribution": -3.0, "contribution_step": 9, "acc_at_germination": 40.0}, PRUNE),
    ],
)
def test_the_candidate_is_treated_by_the_rules(stage, fields, op):
    said = decide(9, *ALL_AT_0, stage=STAGE_AT_0[stage], **fields)
    assert said == [*CANONICAL_ACTION[:7], op]


def test_an_intention_that_is_not_legal_becomes_waiting():
    assert decide(9, stage=STAGE_AT_0[GERMINATED]) == list(CANONICAL_ACTION)
    held = {"contribution": 3.0, "contribution_step": 9}
    assert decide(9, (PRUNE, 0), stage=STAGE_AT_0[HOLDING], **held) == list(CANONICAL_ACTION)


def test_a_seed_that_cannot_be_pruned_is_advanced_instead():
    said = decide(9, (ADVANCE, 0), stage=STAGE_AT_0[TRAINING], epochs_in_stage=30)
    assert said[Head.OP] == ADVANCE


def germinated_blueprints(policy, times: int, t: int = 10) -> list[int]:
    grown = []
    for _ in range(times):
        obs = observation(t, legal_only(1, 3, (GERMINATE, 0)), hosts=READY)
        act = policy.act(obs)
        policy.store(step(obs, act))
        grown.append(act.actions[0, Head.BLUEPRINT].item())
    return grown


def prune(policy, blueprint: int, t: int) -> None:
    obs = observation(
        t, legal_only(1, 3, (PRUNE, 0)), hosts=READY,
        stage=STAGE_AT_0[TRAINING], epochs_in_stage=30, blueprint=torch.tensor([[blueprint, -1, -1]]),
    )  # fmt: skip
    act = policy.act(obs)
    assert act.actions[0, Head.OP] == PRUNE
    policy.store(step(obs, act))


def test_blueprints_are_grown_in_turn():
    assert germinated_blueprints(make_baseline("heuristic", engine_spec()), 7) == [*CNN_ROTATION, 1, 7]


def test_blueprints_that_were_pruned_come_last():
    policy = make_baseline("heuristic", engine_spec())
    for blueprint in (1, 2, 2):
        prune(policy, blueprint, t=1)
    # prune counts: 1 -> 1, 2 -> 2, others 0; in turn from the start: 7, 3, 4, then 7 again
    assert germinated_blueprints(policy, 4) == [7, 3, 4, 7]


def test_it_rests_for_five_steps_after_a_prune():
    policy = make_baseline("heuristic", engine_spec())
    prune(policy, 1, t=10)
    legal = legal_only(1, 3, (GERMINATE, 0))
    ops = [policy.act(observation(t, legal, hosts=READY)).actions[0, Head.OP].item() for t in (14, 15)]
    assert ops == [WAIT, GERMINATE]


def test_a_new_episode_forgets_what_was_pruned():
    policy = make_baseline("heuristic", engine_spec())
    prune(policy, 1, t=10)
    policy.begin_rollout(1, torch.arange(1))
    assert germinated_blueprints(policy, 1, t=11) == [1]


def test_only_selectable_blueprints_are_in_rotation():
    assert germinated_blueprints(make_baseline("heuristic", engine_spec(selectable=(2, 4, 6))), 3) == [2, 4, 2]
    with pytest.raises(ConfigError, match="this run allows 6"):
        Heuristic(engine_spec(selectable=(6,)))


def with_rules(**rules) -> ScriptedPolicy:
    return ScriptedPolicy(Heuristic(engine_spec(), HeuristicRules(**rules)), engine_spec())


def test_its_choices_can_be_other_ones():
    policy = with_rules(blueprints=(5, 4), slots=(2, 0), tempo=0, first_step=1, plateau_epochs=0)
    obs = observation(1, legal_only(1, 3, *[(GERMINATE, slot) for slot in range(3)]), hosts={"val_acc": 50.0})
    assert policy.act(obs).actions[0].tolist() == [2, 5, 2, 0, 2, 0, 0, GERMINATE]  # neither stable nor on a plateau
    policy.store(step(obs, policy.act(obs)))
    only_0 = observation(2, legal_only(1, 3, (GERMINATE, 0), (GERMINATE, 1)), hosts={"val_acc": 50.0})
    assert policy.act(only_0).actions[0].tolist() == [0, 4, 2, 0, 2, 0, 0, GERMINATE]
    only_1 = observation(2, legal_only(1, 3, (GERMINATE, 1)), hosts={"val_acc": 50.0})
    assert policy.act(only_1).actions[0, Head.OP] == WAIT  # not among its slots


def test_its_thresholds_can_be_other_ones():
    policy = with_rules(fossilize_above=4.0, drop=10.0, patience=3)
    held = {"stage": STAGE_AT_0[HOLDING], "contribution_step": 9, "acc_at_germination": 40.0}
    training = {"stage": STAGE_AT_0[TRAINING], "epochs_in_stage": 3}

    def op(**slots) -> int:
        return policy.act(observation(9, legal_only(1, 3, *ALL_AT_0), hosts=READY, **slots)).actions[0, Head.OP].item()

    assert [op(**held, contribution=x) for x in (4.0, 4.1)] == [PRUNE, FOSSILIZE]
    assert [op(**training, acc_at_stage_start=x) for x in (60.0, 60.1)] == [ADVANCE, PRUNE]
