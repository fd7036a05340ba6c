"""One update: what it changes, what it leaves, and that the device decides."""

import math
import statistics

import pytest
import torch

from esper.leyline.errors import TrainingError
from esper.leyline.lifecycle import CANONICAL_ACTION, Head, LifecycleOp
from esper.leyline.random import Stream, permutation
from esper.simic import ppo
from esper.simic.advantages import masked_moments
from esper.simic.ppo import METRIC_NAMES, evaluate_minibatch, loss_sums, ppo_losses, run_ppo_updates
from esper.tamiyo.features import HOST_FEATURES

HOSTS = [0, 1, 2, 3]
PANICS = {1: [1], 3: [0], 4: [0, 2], 6: [3]}


@pytest.fixture
def rolled_out(make_client, make_engine):
    """A client after one episode with rollbacks; keyword arguments go to the configuration."""

    def build(**config):
        client = make_client(HOSTS, **config)
        make_engine(HOSTS).run(client, 0, PANICS)
        return client

    return build


def learn(client, **changes):
    return run_ppo_updates(client.agent, client.buffer, client.config, **{"update_index": 0, "run_seed": 7} | changes)


def weights(client) -> list[torch.Tensor]:
    return [p.detach().clone() for p in client.agent.network.parameters()]


def equal(a, b) -> bool:
    return all(torch.equal(x, y) for x, y in zip(a, b, strict=True))


def optimizer(client) -> list[torch.Tensor]:
    state = client.agent.optimizer
    return [state.exp_avg, state.exp_avg_sq, state.step]


def test_the_first_ratio_of_an_update_is_one(rolled_out):
    metrics = learn(rolled_out(update_epochs=1, num_minibatches=1))
    assert metrics["stored_log_prob_error"] < 1e-5
    assert metrics["clip_fraction"] == 0.0
    assert abs(metrics["approx_kl"]) < 1e-6


def test_an_update_moves_every_parameter_that_the_rollout_used(rolled_out):
    client = rolled_out()
    before = weights(client)
    metrics = learn(client)
    names = [name for name, _ in client.agent.network.named_parameters()]
    unmoved = {n for n, a, b in zip(names, before, weights(client), strict=True) if torch.equal(a, b)}
    assert not {name for name in unmoved if "head" not in name}, unmoved
    assert metrics["optimizer_steps"] == 8
    assert client.agent.optimizer.step == 8


def test_every_metric_of_the_table_is_known_after_an_update(rolled_out):
    client = rolled_out()
    metrics = learn(client, hidden=client.hidden)
    missing = {name for name, value in metrics.items() if math.isnan(value)}
    assert set(metrics) == set(METRIC_NAMES)
    # no op of the toy world reads these heads unless PRUNE was drawn and took effect
    assert missing <= {"entropy_alpha_speed", "entropy_alpha_curve"}
    assert metrics["forced_share"] == pytest.approx(3 / 19)


def test_the_same_update_gives_the_same_weights_and_another_index_another_order(rolled_out):
    a, b, c = rolled_out(), rolled_out(), rolled_out()
    another = next(k for k in range(1, 50) if first_group(k) != first_group(0))
    learn(a)
    learn(b)
    learn(c, update_index=another)
    assert equal(weights(a), weights(b))
    assert not equal(weights(a), weights(c))


def first_group(update_index: int) -> set[int]:
    """Hosts of the first minibatch of the first epoch."""
    zero = torch.zeros(1, dtype=torch.int64)
    return set(permutation(7, Stream.MINIBATCH_ORDER, zero, 4, episode=update_index, t=1)[0, :2].tolist())


def test_a_minibatch_that_is_not_finite_changes_nothing(rolled_out):
    client = rolled_out()
    before, moments = weights(client), optimizer(client)
    client.buffer.rollout.log_probs[:, 1] = float("nan")
    metrics = learn(client)
    assert equal(weights(client), before)
    assert equal(optimizer(client), moments)
    assert metrics["nonfinite_minibatches"] == 8
    assert metrics["optimizer_steps"] == 0
    assert math.isnan(metrics["policy_loss"])
    assert client.agent.schedule_position == 0


def test_three_updates_in_a_row_without_a_finite_minibatch_raise_with_what_is_known_of_the_reason(
    rolled_out, make_engine
):
    client = rolled_out(update_epochs=1)
    for episode, poisoned in enumerate((True, True, False, True, True, True)):
        make_engine(HOSTS).run(client, episode)
        if poisoned:
            client.buffer.rollout.actions[:, 1, Head.OP] = int(LifecycleOp.FOSSILIZE)  # never legal
        if episode < 5:
            learn(client)
    with pytest.raises(TrainingError, match=r"3 updates in a row .* gradient \(a stored action is outside its mask\)"):
        learn(client)


def test_the_divergence_stop_turns_later_epochs_into_no_ops(rolled_out):
    stopped, single, free = rolled_out(target_kl=1e-12), rolled_out(update_epochs=1), rolled_out(target_kl=1e3)
    metrics = learn(stopped)
    learn(single)
    free_metrics = learn(free)
    assert metrics["epochs_done"] == 1
    assert metrics["stopped_early"] == 1
    assert metrics["optimizer_steps"] == 2
    assert equal(weights(stopped), weights(single))
    assert equal(optimizer(stopped), optimizer(single))
    assert free_metrics["epochs_done"] == 4
    assert free_metrics["stopped_early"] == 0


def test_a_rollout_without_a_valid_step_teaches_nothing(make_client, make_engine):
    client = make_client(HOSTS)
    make_engine(HOSTS).run(client, 0, {t: HOSTS for t in range(1, 7)})
    before = weights(client)
    metrics = learn(client)
    assert equal(weights(client), before)
    assert metrics["optimizer_steps"] == 0
    assert metrics["nonfinite_minibatches"] == 0
    assert client.agent.failed_updates == 0


def test_statistics_move_once_after_the_epochs_and_the_buffer_is_empty(rolled_out):
    client = rolled_out()
    raw, valid = client.buffer.rollout.raw_states.clone(), client.buffer.rollout.valid.clone()
    learn(client)
    want = raw[valid].double().mean(0)[: len(HOST_FEATURES)]
    torch.testing.assert_close(client.agent.observations.host.mean, want)
    assert client.agent.returns.started
    assert client.buffer.num_steps == 0
    assert not client.buffer.rollout.valid.any()


def test_an_update_reads_once(rolled_out, monkeypatch):
    client, tolist, calls = rolled_out(), torch.Tensor.tolist, []

    def read(x):
        calls.append("read")
        return tolist(x)

    def forbid(name):
        original = getattr(torch.Tensor, name)

        def recorded(*args, **kwargs):
            calls.append(name)
            return original(*args, **kwargs)

        monkeypatch.setattr(torch.Tensor, name, recorded)

    for name in ("item", "tolist", "cpu", "numpy", "__bool__", "__int__", "__float__", "__index__", "nonzero"):
        forbid(name)
    learn(client, read=read)
    assert calls == ["read"]


def test_more_minibatches_than_hosts_are_one_per_host(rolled_out):
    assert learn(rolled_out(num_minibatches=50, update_epochs=1))["optimizer_steps"] == 4


def test_a_stored_action_outside_its_mask_is_named_in_the_one_read_of_the_update(rolled_out):
    client, reads = rolled_out(), []
    assert learn(client)["actions_outside_mask"] == 0.0

    client = rolled_out()
    client.buffer.rollout.actions[1, 3, Head.OP] = int(LifecycleOp.FOSSILIZE)  # never legal in the toy world
    metrics = learn(client, read=lambda x: reads.append(x) or x.tolist())
    assert metrics["actions_outside_mask"] == 1.0
    assert metrics["nonfinite_logits"] == 0.0
    assert metrics["nonfinite_minibatches"] == metrics["optimizer_steps"] == 4  # one with that host in each epoch
    assert all(bool(w.isfinite().all()) for w in weights(client))
    assert math.isfinite(metrics["policy_loss"])
    assert client.agent.schedule_position == 1
    assert len(reads) == 1


def test_a_stored_action_outside_its_mask_is_named_where_no_loss_would_show_it(rolled_out):
    client = rolled_out()
    assert client.buffer.rollout.forced[
        1, 2
    ]  # only WAIT was legal, so the step is left out of policy and entropy losses
    client.buffer.rollout.actions[1, 2, Head.OP] = int(LifecycleOp.GERMINATE)
    metrics = learn(client)
    assert metrics["actions_outside_mask"] == 1.0
    assert metrics["nonfinite_minibatches"] == 0


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), float("-inf")])
def test_a_logit_that_is_not_finite_is_named_in_the_one_read_of_the_update(rolled_out, bad):
    client, reads = rolled_out(), []
    with torch.no_grad():
        client.agent.network.head_op.bias[0] = bad
    metrics = learn(client, read=lambda x: reads.append(x) or x.tolist())
    assert metrics["nonfinite_logits"] == 1.0
    assert metrics["actions_outside_mask"] == 0.0
    assert len(reads) == 1


# -- what is learned from -------------------------------------------------------------------------------------------


def one_step_rows(client, rewards: torch.Tensor, values: torch.Tensor) -> None:
    """Every row of the buffer is an episode of its own, so that its return is its reward."""
    stored = client.buffer.rollout
    stored.valid.fill_(True)
    stored.terminal.fill_(True)
    stored.rewards.copy_(rewards.expand(4, 6))
    stored.values.copy_(values.expand(4, 6))


def test_a_rollout_is_scaled_by_the_returns_of_those_before_it_and_the_first_by_its_own(rolled_out, make_engine):
    client = rolled_out(return_momentum=0.75)
    rewards = torch.tensor([3.0, -3.0]).repeat(3)  # mean 0, deviation 3
    one_step_rows(client, rewards, torch.zeros(6))
    found = [learn(client)["return_scale"]]
    for update, factor in ((1, 5.0), (2, 1.0)):
        make_engine(HOSTS).run(client, update)
        one_step_rows(client, factor * rewards, torch.zeros(6))
        found.append(learn(client, update_index=update)["return_scale"])
    # 9, then 9 again because 225 comes after it, then 0.75 * 9 + 0.25 * 225 = 63
    assert found == pytest.approx([3.0, 3.0, math.sqrt(63.0)])


def test_advantages_and_returns_are_in_scaled_units(rolled_out):
    client = rolled_out()
    one_step_rows(client, torch.tensor([2.0, -2.0, 2.0, -2.0, 2.0, 50.0]), torch.full((6,), 0.5))
    client.agent.returns.update(masked_moments(torch.tensor([2.0, -2.0]), torch.ones(2, dtype=torch.bool)))
    metrics = learn(client)
    # scale 2: 1, -1, 1, -1, 1 and 25
    assert metrics["return_scale"] == pytest.approx(2.0)
    assert metrics["return_mean"] == pytest.approx(26 / 6)
    assert metrics["advantage_mean"] == pytest.approx(26 / 6 - 0.5)
    assert metrics["value_mean"] == pytest.approx(0.5)


def test_a_value_that_tells_half_of_the_return_explains_three_quarters_of_its_variance(rolled_out):
    client = rolled_out()
    returns = torch.tensor([2.0, -2.0]).repeat(3)
    one_step_rows(client, returns, 0.25 * returns)  # 0.5 of the scaled return
    client.agent.returns.update(masked_moments(returns, torch.ones(6, dtype=torch.bool)))
    assert learn(client)["explained_variance"] == pytest.approx(0.75)


def test_of_a_return_that_never_varies_nothing_can_be_explained(rolled_out):
    client = rolled_out()
    one_step_rows(client, torch.ones(6), torch.linspace(0, 1, 6))
    assert math.isnan(learn(client)["explained_variance"])


@pytest.mark.parametrize("took_effect", [False, True])
def test_a_fossilization_that_was_refused_in_every_step_teaches_the_op_head_alone(rolled_out, took_effect):
    client = rolled_out()
    stored, op = client.buffer.rollout, LifecycleOp.FOSSILIZE
    stored.valid.fill_(True)
    stored.forced.fill_(False)
    stored.legal.fill_(False)
    stored.legal[:, :, [LifecycleOp.WAIT, op]] = True
    stored.actions.copy_(torch.tensor(CANONICAL_ACTION))
    stored.actions[..., Head.OP], stored.actions[..., Head.SLOT] = int(op), 1
    stored.effective_op.fill_(int(op if took_effect else LifecycleOp.WAIT))
    stored.advantages.copy_(torch.linspace(-1, 1, 24).view(4, 6))
    x, _ = evaluate_minibatch(client.agent, client.buffer.sequences(torch.arange(4)))
    found = ppo_losses(loss_sums(x, 0.2, 0.2), ppo.loss_weights(client.agent, client.config, torch.device("cpu")))
    (found.policy + found.entropy).backward()
    network = client.agent.network
    outputs = {Head.OP: network.head_op, Head.SLOT: network.head_slot, Head.BLUEPRINT: network.head_blueprint}
    moved = {head for head, output in outputs.items() if output.weight.grad.any()}
    assert moved == ({Head.OP, Head.SLOT} if took_effect else {Head.OP})
    assert not network.head_values.weight.grad.any()


# -- the divergence of a pass ---------------------------------------------------------------------------------------


def test_the_divergence_of_a_pass_weighs_its_minibatches_by_their_valid_steps(rolled_out, monkeypatch):
    client, seen = rolled_out(update_epochs=1, num_minibatches=2, lr=5e-3), []
    client.buffer.rollout.valid[0, 1:] = False
    original = ppo.approx_kl

    def watched(sums):
        seen.append((original(sums).item(), sums.valid.item()))
        return original(sums)

    monkeypatch.setattr(ppo, "approx_kl", watched)
    found = learn(client)["approx_kl"]
    (first, n_first), (second, n_second) = seen
    assert n_first != n_second
    assert second > 1e-4
    assert found == pytest.approx((first * n_first + second * n_second) / (n_first + n_second), rel=1e-5)


@pytest.mark.parametrize(("share_of_limit", "epochs"), [(1.01, 1), (0.99, 2)])
def test_a_pass_is_the_last_where_its_divergence_exceeds_one_and_a_half_times_the_target(
    rolled_out, share_of_limit, epochs
):
    divergence = learn(rolled_out(update_epochs=1, target_kl=1e3))["approx_kl"]
    metrics = learn(rolled_out(update_epochs=2, target_kl=divergence / 1.5 / share_of_limit))
    assert metrics["epochs_done"] == epochs


# -- settings reach their place -------------------------------------------------------------------------------------


def test_discount_and_decay_of_the_configuration_are_those_of_returns_and_advantages(rolled_out):
    client = rolled_out(gae_lambda=0.25)
    stored = client.buffer.rollout
    one_step_rows(client, torch.ones(6), torch.ones(6))
    stored.terminal[:, :-1] = False
    stored.reset.fill_(False)
    advantages, _ = client.buffer.compute_advantages_and_returns(torch.zeros(4, 6))
    # the last has -1, the one before 0.995 - 1 - 0.995 * 0.25
    assert advantages[0, -2:].tolist() == pytest.approx([-0.25375, -1.0])
    accumulated = [sum(0.995**k for k in range(steps)) for steps in range(1, 7)]
    assert learn(client)["return_scale"] == pytest.approx(statistics.pstdev(accumulated))


def test_the_gradient_is_clipped_before_it_enters_the_moments(rolled_out):
    client = rolled_out(update_epochs=1, num_minibatches=1, max_grad_norm=1e-3)
    metrics = learn(client)
    assert metrics["grad_norm"] > 1e-2
    assert client.agent.optimizer.exp_avg.norm().item() == pytest.approx(0.1 * 1e-3, rel=1e-3)


def test_every_pass_over_the_hosts_has_an_order_of_its_own(rolled_out, monkeypatch):
    client, groups = rolled_out(update_epochs=3, num_minibatches=2, target_kl=1e3), []
    rows = client.buffer.sequences
    monkeypatch.setattr(client.buffer, "sequences", lambda hosts: groups.append(hosts.tolist()) or rows(hosts))
    learn(client, update_index=4)
    zero = torch.zeros(1, dtype=torch.int64)
    orders = [permutation(7, Stream.MINIBATCH_ORDER, zero, 4, episode=4, t=k)[0].tolist() for k in (1, 2, 3)]
    assert [groups[2 * k] + groups[2 * k + 1] for k in range(3)] == orders
    assert len({tuple(order) for order in orders}) > 1


def test_the_coefficients_of_an_update_are_those_of_its_place_in_the_run(rolled_out):
    client = rolled_out(
        lr=1e-3, lr_final_fraction=0.05, ent_coef=0.05, ent_coef_end=0.012, vf_coef_start=0.05, vf_coef=0.5,
        vf_coef_warmup=36, final_inverse_temperature=5.0,
    )  # fmt: skip
    client.agent.schedule_position = 18  # the last but one of 20 updates
    metrics = learn(client)
    names = ("lr", "ent_coef", "vf_coef", "floor_scale", "inverse_temperature")
    # 18 of 19 intervals; half of the warm-up; 1 - 2 (18 / 19 - 0.75); the logits are multiplied after the update
    want = [0.1e-3, 0.014, 0.275, 1.0 - 2.0 * (18 / 19 - 0.75), 1.0]
    assert [metrics[name] for name in names] == pytest.approx(want)
    assert client.agent.network.inverse_temperature == pytest.approx(3.0)  # 19 of 20: in the middle of the last tenth
