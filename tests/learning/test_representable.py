"""The heads can express the best schedule of the scripted task."""

import pytest
import torch

import hindsight
from esper.leyline.lifecycle import CANONICAL_ACTION, NUM_HEADS, Head
from esper.leyline.messages import ActResult, Observation
from esper.leyline.tensor_dataclass import replace
from esper.runs.assembly.assemble import engine_of
from esper.runs.assembly.presets import resolve
from esper.tamiyo.heads import sample_heads
from esper.tasks import null
from toys import ToyClient, even_logits

HOSTS, SURE = 4, 1000.0  # e^-1000 is 0 in float64


class SureClient(ToyClient):
    """Follows the best schedule through large logits alone: each entry as soon as it is due, in order, else WAIT.

    Hosts draw with the smallest and the largest uniform number in turn; all must draw the same action.
    """

    def follow(self) -> "SureClient":
        spec = self.spec
        self.due = list(null.best_schedule(spec.episode_length, spec.min_training_epochs, spec.num_slots))
        self.selectable = torch.zeros(spec.num_blueprints, dtype=torch.bool)
        self.selectable[list(spec.selectable)] = True
        self.certainty: list[float] = []
        return self

    def act(self, obs: Observation, *, deterministic: bool = False) -> ActResult:
        wanted = CANONICAL_ACTION
        if self.due and obs.t >= self.due[0].earliest:
            wanted = self.due.pop(0).action
        logits = tuple(even_logits(obs.num_envs, num_slots=self.spec.num_slots))
        for head, value in zip(logits, wanted, strict=True):
            head[..., value] = SURE
        uniforms = torch.tensor([0.0, 1.0 - 2.0**-24]).repeat(HOSTS // 2)[:, None].expand(HOSTS, NUM_HEADS)
        state = obs.legal, obs.has_gate, self.selectable
        drawn = sample_heads(logits, *state, uniforms)
        for decision in (drawn, sample_heads(logits, *state, deterministic=True)):
            assert decision.actions.tolist() == [list(wanted)] * HOSTS, obs.t
        self.certainty.append(drawn.log_prob.sum(dim=1).exp().min().item())
        return replace(super().act(obs), actions=drawn.actions, log_prob=drawn.log_prob)


def test_the_best_schedule_is_a_policy_of_the_heads_and_reaches_its_value_on_the_engine():
    config = resolve({"task": "null", "num_envs": HOSTS})
    engine = engine_of(config, None, torch.device("cpu"))
    client = SureClient(engine.spec).follow()
    engine.reset(client, episode=0)
    stats = engine.rollout(client)
    assert client.due == []
    ops = [step.effective_op[0].item() for step in client.steps if step.effective_op[0]]
    assert ops == [step.action[Head.OP] for step in null.best_schedule(60, 10, 3)]
    best = hindsight.best_schedule_value(60, 10, 3)
    assert stats.committed_acc.tolist() == pytest.approx([best] * HOSTS, abs=1e-4)
    assert min(client.certainty) > 1.0 - 1e-6  # no other op has any probability
