import math

import pytest
import torch

import hindsight
from esper.leyline.errors import ConfigError
from esper.leyline.lifecycle import CANONICAL_ACTION, AlphaMode, Head, LifecycleOp, SeedStage
from esper.tasks import null
from esper.tasks.null import BLUEPRINTS, Fault, NullSpec

SPEC = NullSpec()
HOLD, DOWN = AlphaMode.HOLD, AlphaMode.DOWN


def col(*values: float) -> torch.Tensor:
    return torch.tensor([values])


def test_strength_is_alpha_times_maturity_times_quality_times_algorithm():
    # p = 10: m = 1 - 1/e = .632121;  bottleneck 6, MULTIPLY .5, alpha .5 -> .948181;  no seed -> 0
    v = null.strengths(
        SPEC, col(0.5, 1.0, 0.0), torch.tensor([[10, 0, 10]]), torch.tensor([[5, 5, -1]]), torch.tensor([[2, 1, 0]])
    )
    torch.testing.assert_close(v, col(0.948181, 0.0, 0.0), atol=1e-5, rtol=0.0)


def scalar_accuracy(base: float, v: list[float], on: list[bool], w: float) -> float:
    total = base
    for i, vi in enumerate(v):
        if on[i]:
            total += vi + w * sum(vi * v[j] for j in range(i + 1, len(v)) if on[j])
    return min(100.0, max(0.0, total))


@pytest.mark.parametrize("w", [0.0, 0.3, -2.0])
def test_coalitions_agree_with_the_sum_over_pairs(w):
    gen = torch.Generator().manual_seed(3)
    v_NS = torch.rand(5, 4, generator=gen) * 10 - 3
    sets_NKS = torch.rand(5, 7, 4, generator=gen) < 0.5
    got = null.coalition_accuracy(NullSpec(interaction=w), torch.full((5,), 6), v_NS, sets_NKS)
    want = [
        [scalar_accuracy(null.host_accuracy(6), v_NS[n].tolist(), sets_NKS[n, k].tolist(), w) for k in range(7)]
        for n in range(5)
    ]
    torch.testing.assert_close(got, torch.tensor(want))


def test_noise_is_shared_by_the_coalitions_of_a_step_and_belongs_to_the_host():
    spec = NullSpec(sigma=2.0)
    z = null.scripted_noise(spec, 1, torch.arange(4_000), episode=0, t=3)
    assert abs(z.std().item() - 2.0) < 0.1
    assert z[7].item() == null.scripted_noise(spec, 1, torch.tensor([7]), episode=0, t=3).item()
    assert z[7].item() != null.scripted_noise(spec, 1, torch.tensor([7]), episode=0, t=4).item()
    sets = torch.tensor([[[True], [False]]])
    f = null.coalition_accuracy(spec, torch.tensor([10]), col(3.0), sets, z[:1])[0]
    assert (f[0] - f[1]).item() == pytest.approx(3.0, abs=1e-5)


def test_the_loss_of_zero_accuracy_is_that_of_guessing():
    torch.testing.assert_close(null.validation_loss(torch.tensor([0.0, 50.0])), torch.tensor([2.302585, 1.151293]))


def test_a_fault_hits_one_host_in_one_step():
    spec = NullSpec(faults=(Fault(host=9, t=4, loss=float("nan")), Fault(host=8, t=5, loss=30.0)))
    loss, hosts = torch.tensor([1.0, 1.0]), torch.tensor([8, 9])
    at_4 = null.inject_faults(spec, loss, hosts, t=4)
    assert at_4[0].item() == 1.0
    assert math.isnan(at_4[1].item())
    assert null.inject_faults(spec, loss, hosts, t=5).tolist() == [30.0, 1.0]
    assert null.inject_faults(spec, loss, hosts, t=6).tolist() == [1.0, 1.0]


STAGES = torch.tensor([[int(stage) for stage in SeedStage]])


def test_seeds_train_from_training_on_unless_they_are_frozen():
    for mode, expected in ((HOLD, {3, 4, 6, 7}), (DOWN, set())):
        live = null.trained(SPEC, STAGES, torch.full_like(STAGES, mode))
        assert set(STAGES[live].tolist()) == expected


def test_health_is_measured_in_training_and_blending_only():
    heavy = torch.full_like(STAGES, BLUEPRINTS["conv_heavy"].index)
    health = null.gradient_health(SPEC, STAGES, torch.full_like(STAGES, HOLD), heavy)
    assert set(STAGES[~health.isnan()].tolist()) == {3, 4}
    assert set(health[~health.isnan()].tolist()) == {0.5}
    assert null.gradient_health(SPEC, STAGES, torch.full_like(STAGES, DOWN), heavy).isnan().all()


def test_parameters_are_those_of_the_formulas_at_16_channels():
    c, index = 16, torch.tensor([-1, 0, 1, 2, 3, 4, 5, 6, 7])
    formulas = [0, 0, 9 * c * c + 3 * c, 2 * c * 4 + c, 2 * c + 1, c * c + 12 * c,
                2 * c * 8 + 9 * 64 + 3 * c, c * c + 3 * c, 18 * c * c + 5 * c]  # fmt: skip
    none = torch.zeros(9, dtype=torch.bool)
    assert null.params(SPEC, index, none).tolist() == formulas
    assert (null.params(SPEC, index, ~none) - null.params(SPEC, index, none)).tolist() == [16 * 8 + 2 * 8 + 1] * 9


@pytest.mark.parametrize("broken", [{"quality": (1.0,)}, {"sigma": -1.0}, {"sigma": float("nan")}])
def test_constants_that_cannot_be_are_refused(broken):
    with pytest.raises(ConfigError, match="null"):
        NullSpec(**broken)


def test_the_best_schedule_germinates_as_early_as_possible_and_fossilizes_at_the_first_legal_step():
    steps = null.best_schedule(60, 10, 3)
    summary = [(step.earliest, step.action[Head.OP], step.action[Head.SLOT]) for step in steps]
    grow, keep = LifecycleOp.GERMINATE, LifecycleOp.FOSSILIZE
    assert summary == [(1, grow, 0), (12, grow, 1), (17, keep, 0), (23, grow, 2), (28, keep, 1), (39, keep, 2)]
    assert steps[0].action == (0, 5, *CANONICAL_ACTION[2:7], grow)


PERMUTED = NullSpec(permuted=True)
USED = [row.index for row in BLUEPRINTS.values()]


def test_a_permuted_host_has_every_quality_once_and_none_elsewhere():
    assert null.qualities(SPEC, 1, torch.arange(2), episode=3).tolist() == [list(SPEC.quality)] * 2
    drawn = null.qualities(PERMUTED, 1, torch.arange(50), episode=0)
    assert drawn[:, USED].sort(dim=1).values.tolist() == [[-2.0, 1.0, 2.0, 3.0, 4.0, 6.0, 8.0]] * 50
    unused = [i for i in range(13) if i not in USED]
    assert not drawn[:, unused].any()

    # each blueprint is equally often the best; 7,000 hosts: 1,000 each with a standard deviation of 29
    best = null.qualities(PERMUTED, 1, torch.arange(7_000), episode=0).argmax(dim=1)
    assert (best.bincount(minlength=8)[1:] - 1_000).abs().max() < 120


def test_the_permutation_belongs_to_run_host_and_episode():
    def drawn(hosts: list[int], run_seed: int = 1, episode: int = 0) -> list[list[float]]:
        return null.qualities(PERMUTED, run_seed, torch.tensor(hosts), episode=episode).tolist()

    together = drawn([3, 4, 5, 6])
    assert drawn([5]) == [together[2]]
    assert drawn([6, 5, 4, 3]) == together[::-1]
    for other in (drawn([3, 4, 5, 6], run_seed=2), drawn([3, 4, 5, 6], episode=1)):
        assert other != together


def test_the_best_blueprint_of_a_host_is_the_best_one_that_passes_its_gate():
    hosts = torch.arange(300)
    quality = null.qualities(PERMUTED, 1, hosts, episode=2)
    healthy = hindsight.best_of_host(PERMUTED, 1, hosts, 2, min_health=0.7)
    blocked = quality[:, BLUEPRINTS["conv_heavy"].index] == 8.0
    assert 0 < blocked.sum() < 300
    assert healthy.quality.tolist() == [6.0 if host else 8.0 for host in blocked.tolist()]
    assert torch.equal(quality.gather(1, healthy.blueprint[:, None]).squeeze(1), healthy.quality)
    assert hindsight.best_of_host(PERMUTED, 1, hosts, 2, min_health=0.0).quality.tolist() == [8.0] * 300


def test_the_best_schedule_grows_what_it_is_given_and_is_worth_its_quality():
    assert {step.action[Head.BLUEPRINT] for step in null.best_schedule(60, 3, 2, blueprint=4)} == {4, 0}
    # 49.876062 + 8 * (2 - e^{-5.9} - e^{-5.5}): germinations in steps 1 and 5
    assert hindsight.best_schedule_value(60, 3, 2, quality=8.0) == pytest.approx(65.821452, abs=1e-5)
