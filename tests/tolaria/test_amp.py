"""Precision of host training: what "auto" means, how a loss scale adapts, and that low precision still trains."""

import pytest
import torch

import tiny
from esper.leyline.lifecycle import Algorithm, LifecycleOp, SeedStage
from esper.tolaria.engine_config import LossScaler, amp_dtype
from tiny import BATCH, CPU, Bench, bit_equal, dataset, same_tree
from toys import ToyClient, action, script

CUDA = torch.device("cuda", 0)
START, MOST = 2.0**14, 2.0**16


@pytest.mark.parametrize(
    ("mode", "dtype"), [("off", None), ("auto", None), ("bf16", torch.bfloat16), ("fp16", torch.float16)]
)
def test_a_mode_names_a_type_on_the_cpu(mode, dtype):
    assert amp_dtype(mode, CPU) is dtype


@pytest.mark.parametrize(("supported", "dtype"), [(True, torch.bfloat16), (False, None)])
def test_auto_is_bf16_on_a_gpu_that_supports_it(monkeypatch, supported, dtype):
    monkeypatch.setattr(torch.cuda, "is_bf16_supported", lambda: supported)
    assert amp_dtype("auto", CUDA) is dtype
    assert amp_dtype("off", CUDA) is None


def flags(*finite):
    return torch.tensor(finite)


def test_only_half_precision_scales_the_loss():
    for dtype, enabled, scale in ((None, False, 1.0), (torch.bfloat16, False, 1.0), (torch.float16, True, START)):
        scaler = LossScaler(dtype, 2, CPU)
        assert (scaler.enabled, scaler.scale.tolist()) == (enabled, [scale] * 2)


def test_a_step_that_overflows_halves_the_scale_of_its_host_alone():
    scaler = LossScaler(torch.float16, 3, CPU)
    scaler.update(flags(True, False, True))
    scaler.update(flags(True, False, False))
    assert scaler.scale.tolist() == [START, START / 4, START / 2]
    assert scaler.good_steps.tolist() == [2, 0, 0]


def test_two_thousand_good_steps_in_a_row_double_the_scale():
    scaler = LossScaler(torch.float16, 2, CPU)
    scaler.good_steps.copy_(torch.tensor([1998, 1999]))
    scaler.update(flags(True, True))
    assert scaler.scale.tolist() == [START, 2 * START]
    assert scaler.good_steps.tolist() == [1999, 0]
    scaler.update(flags(False, True))
    assert scaler.scale.tolist() == [START / 2, 2 * START]
    assert scaler.good_steps.tolist() == [0, 1]


def test_the_scale_stays_between_one_and_its_maximum():
    scaler = LossScaler(torch.float16, 2, CPU)
    scaler.scale.copy_(torch.tensor([1.0, MOST]))
    scaler.good_steps.fill_(1999)
    scaler.update(flags(False, True))
    assert scaler.scale.tolist() == [1.0, MOST]


def test_autocast_is_on_only_where_a_type_was_chosen():
    x = torch.ones(2, 2)
    for dtype, want in ((None, torch.float32), (torch.bfloat16, torch.bfloat16)):
        with LossScaler(dtype, 1, CPU).autocast():
            assert (x @ x).dtype is want


def grown(dtype, **settings):
    bench = Bench(2, scaler_dtype=dtype, **settings)
    bench.grow("r0c0", "conv_light", SeedStage.BLENDING, alpha=0.5, algorithm=Algorithm.GATE)
    bench.grow("r1c0", "norm", SeedStage.TRAINING, algorithm=Algorithm.MULTIPLY)
    return bench


def test_bf16_trains_nearly_as_float32_does():
    exact, rough = grown(None), grown(torch.bfloat16)
    got, want = rough.train(3), exact.train(3)
    torch.testing.assert_close(got.loss, want.loss, rtol=0.05, atol=0.02)
    assert not bit_equal(got.loss, want.loss)  # something was computed with fewer digits
    measured = ~want.grad_norm.isnan()
    assert bool((got.grad_norm.isnan() == ~measured).all())
    torch.testing.assert_close(got.grad_norm[measured], want.grad_norm[measured], rtol=0.2, atol=0.02)
    _, rough_val = rough.measure()
    _, exact_val = exact.measure()
    torch.testing.assert_close(rough_val.loss, exact_val.loss, rtol=0.1, atol=0.02)
    state = rough.executor.state_dict()
    assert {x.dtype for name, x in state.items() if name.endswith(("params", "buffers"))} == {torch.float32}
    start = grown(None)
    for name, value in rough.host_params().items():
        moved = (exact.host_params()[name] - start.host_params()[name]).norm()
        assert (value - exact.host_params()[name]).norm() < 0.25 * moved + 1e-3, name


def test_an_engine_runs_a_life_in_bf16():
    engine = tiny.engine(2, 8, amp="bf16")
    plan = {1: action(LifecycleOp.GERMINATE, tempo=0, style=3), 6: action(LifecycleOp.FOSSILIZE)}
    client = ToyClient(engine.spec, script(2, 8, plan))
    engine.reset(client, 0)
    stats = engine.rollout(client)
    assert stats.fossilized.tolist() == [1, 1]
    assert (stats.val_acc > 100 / 3).all()


# -- half precision, with the CPU standing in ------------------------------------------------------------------------


def test_a_scaled_loss_gives_the_same_training():
    plain, scaled = grown(None), grown(None)
    scaled.executor.data.scaler.enabled = True
    scaled.executor.data.scaler.scale.copy_(torch.tensor([START, START / 2]))  # powers of two: exact in float32
    got, want = scaled.train(2), plain.train(2)
    assert bit_equal(got.loss, want.loss)
    torch.testing.assert_close(got.grad_norm, want.grad_norm, equal_nan=True)
    for host in (0, 1):
        for name, value in plain.host_params(host).items():
            torch.testing.assert_close(scaled.host_params(host)[name], value)
        for slot in ("r0c0", "r1c0"):
            for name, value in plain.seed_params(slot, host).items():
                torch.testing.assert_close(scaled.seed_params(slot, host)[name], value)
    torch.testing.assert_close(scaled.gate_params("r0c0"), plain.gate_params("r0c0"))
    assert scaled.executor.data.scaler.good_steps.tolist() == [6, 6]  # three batches per epoch


def test_an_episode_after_others_is_the_same_episode_alone():
    length, plan = 4, {1: action(LifecycleOp.GERMINATE, tempo=0, style=3)}
    trees = []
    for episodes in ([1, 2], [2]):
        engine = tiny.engine(2, length, amp="fp16")
        for episode in episodes:
            client = ToyClient(engine.spec, script(2, length, plan))
            engine.reset(client, episode)
            if episode < 2:
                engine.executor.data.scaler.scale[1] = torch.inf  # the first step of host 1 overflows
            engine.rollout(client)
        trees.append(engine.executor.state_dict())
    assert same_tree(*trees)
    assert trees[0]["loss_scale"].tolist() == [START, START]
    assert trees[0]["good_steps"].tolist() == [12, 12]  # three batches in each of four epochs


def test_an_overflow_leaves_out_the_step_of_its_host_and_seeds_alone():
    bench, calm = (grown(None, data=dataset(train=BATCH)) for _ in range(2))  # a single batch
    for one in (bench, calm):
        one.executor.data.scaler.enabled = True
        one.executor.data.scaler.scale.fill_(8.0)
    bench.executor.data.scaler.scale[0] = torch.inf  # whatever the gradient is, it overflows
    flats, calm_flats = ((of.population.host, of.population.seeds, of.population.gates) for of in (bench, calm))
    before = [flat.params.clone() for flat in flats]
    bench.train()
    calm.train()
    for flat, born, of_calm in zip(flats, before, calm_flats, strict=True):
        size = len(born) // 2
        assert bit_equal(flat.params[:size], born[:size])
        assert not flat.optimizer.momentum[:size].any()
        assert bit_equal(flat.params[size:], of_calm.params[size:])
    assert bench.executor.data.scaler.good_steps.tolist() == [0, 1]
    assert bench.executor.data.scaler.scale.tolist() == [MOST, 8.0]  # halved and brought back into its bounds
