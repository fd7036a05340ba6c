"""esper.grow: who decides, what is kept, and how it can be read."""

import copy
import functools
import importlib.util
import json
import math
import pickle
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from own_tasks import Zero, grow, images, own_task, points, train
from torch import Tensor, nn

import esper
from esper.kasmina.blueprints import registry
from esper.kasmina.parameters.initialization import deterministic_build
from esper.leyline.errors import ConfigError, ExportError, RunDirectoryError
from esper.leyline.lifecycle import LifecycleOp, Style
from esper.runs.growth import Growth
from esper.tamiyo.schedules import NoMemory, Schedule, canonical_action
from toys import ToyReward
from user_networks import ResNet8, Tagger, Tied

NORM, CONV_LIGHT, FAST = 3, 1, 0
WEIGHTED = "variance_weighted"


def keep(slot: int, blueprint: int) -> Schedule:
    """A seed in step 1, kept as soon as its ramp of three steps is over."""
    germinate = canonical_action(LifecycleOp.GERMINATE, slot=slot, blueprint=blueprint, tempo=FAST)
    return Schedule.from_rows("keep", 1, [(1, germinate), (2, canonical_action(LifecycleOp.FOSSILIZE, slot=slot))])


@pytest.fixture(scope="module")
def task():
    return own_task()


@pytest.fixture(scope="module")
def run(task, tmp_path_factory):
    return train(task, tmp_path_factory.mktemp("trained"))


@pytest.fixture(scope="module")
def grown(task):
    return grow(task, keep(slot=1, blueprint=CONV_LIGHT), seed=4)


def accuracy(module: nn.Module, x: Tensor, y: Tensor) -> float:
    return 100.0 * float((module(x).argmax(dim=1) == y).float().mean())


def test_the_module_is_plain_and_has_the_points_that_were_measured(grown):
    assert type(grown.module(images()[0])) is Tensor
    assert not grown.module.training
    assert grown.points == pytest.approx(accuracy(grown.module, *images(30)))
    assert grown.test_points == pytest.approx(accuracy(grown.module, *images(20)))
    assert grown.unit == "accuracy"
    assert grown.num_params == sum(p.numel() for p in grown.module.parameters())
    assert grown.flops > 0
    loss = F.cross_entropy(grown.module(images()[0]), images()[1])
    loss.backward()
    assert all(p.grad is not None for p in grown.module.parameters())


def test_the_timeline_tells_the_life_of_each_seed(grown):
    rows = [(row.step, row.slot, row.event, row.blueprint) for row in grown.timeline]
    seed = ("layer2.1", "conv_light")
    # one step of training, three of the ramp, one on hold
    events = [(1, "germinated"), (1, "training"), (2, "blending"), (5, "holding"), (6, "fossilized")]
    assert rows == [*((t, seed[0], event, seed[1]) for t, event in events), (10, "", "end", None)]
    assert grown.timeline[3].alpha == 1.0
    assert grown.timeline[-1].points == grown.points
    header, *lines = str(grown.timeline).splitlines()
    assert header.split() == ["step", "slot", "event", "blueprint", "alpha", "accuracy"]
    assert lines[4].split()[:4] == ["6", "layer2.1", "fossilized", "conv_light"]
    assert repr(grown.timeline) == str(grown.timeline)
    points = f"accuracy {grown.points:.2f}"
    assert repr(grown) == f"Grown('mynet': {grown.num_params:,} parameters, conv_light in layer2.1, {points})"
    assert str(grown).startswith("mynet\ngrown: conv_light in layer2.1 (ADD)\nparameters: ")


def test_what_a_slot_does_after_its_seed_was_pruned_is_not_told(task):
    events = {row.event for row in grow(task, "random", seed=1, steps=20).timeline}
    assert "pruned" in events
    assert events <= {"germinated", "training", "blending", "holding", "fossilized", "refused", "pruned", "end"}


def test_points_of_the_timeline_are_those_of_the_network_with_its_seeds(task):
    # fossilized in the last step at full weight, the seed was measured with the network that is kept
    short = grow(task, keep(slot=1, blueprint=CONV_LIGHT), seed=4, steps=6)
    *_, kept, end = short.timeline
    assert (kept.event, end.event) == ("fossilized", "end")
    assert kept.points == pytest.approx(end.points)
    assert kept.points > 0.0


def test_a_text_has_the_perplexity_of_its_tokens_without_padding(task, grown, tmp_path):
    def text(first: int, count: int) -> tuple[Tensor, Tensor]:
        x = torch.arange(first, first + 6 * count).reshape(count, 6) % 5
        y = x.roll(-1, dims=1)
        y[:, -1] = -1
        y[0, 2:] = -1
        return x, y

    (x, y), settings = text(1, 7), {"batch": 4, "episode_length": 2, "min_training_epochs": 1}
    words = esper.Task(model=Tied, slots=["mix"], train=text(0, 20), val=(x, y), test=text(2, 5), **settings)
    run = train(words, tmp_path, num_envs=1)
    found = grow(words, "wait_only")
    with torch.no_grad():
        loss = F.cross_entropy(found.module(x).flatten(0, 1), y.flatten(), ignore_index=-1)
    assert found.perplexity == pytest.approx(math.exp(float(loss)))
    assert f"; validation perplexity {found.perplexity:.2f}" in str(found)
    assert 1.0 < run.summary["final_perplexity"] == run.summary["best_host"]["perplexity"] < 10.0
    compared = esper.evaluate(run, "wait_only", num_envs=1, progress=False)
    assert compared.rows[1].perplexity == pytest.approx(math.exp(compared.rows[1].hosts["loss"][0]))
    assert "perplexity" in str(compared)
    assert grown.perplexity is None
    assert "perplexity" not in str(grown)


def test_a_network_is_saved_and_loaded_with_its_timeline(task, grown, tmp_path):
    grown.save(tmp_path / "grown")
    again = esper.load(tmp_path / "grown", task=task)
    x, _ = images()
    assert torch.equal(again.module(x), grown.module(x))
    assert again.timeline == grown.timeline
    assert [copy.deepcopy(grown).timeline.unit, pickle.loads(pickle.dumps(grown.timeline)).unit] == [
        task.spec.objective.unit
    ] * 2
    assert (again.points, again.test_points, again.num_params) == (grown.points, grown.test_points, grown.num_params)
    with pytest.raises(ExportError, match=r"esper.load its task"):
        esper.load(tmp_path / "grown")
    with pytest.raises(ExportError, match="exists already"):
        grown.save(tmp_path / "grown")
    (tmp_path / "grown" / "timeline.json").write_text("[{}]")
    with pytest.raises(ExportError, match=r"timeline\.json is damaged"):
        esper.load(tmp_path / "grown", task=task)


def test_the_best_of_several_has_the_most_points_of_validation(task):
    one = [grow(task, "wait_only", seed=6, best_of=count) for count in (1, 4)]
    # the first of the four is the single one, because a host does not depend on the others
    assert one[1].points > one[0].points
    assert one[1].points == pytest.approx(accuracy(one[1].module, *images(30)))
    assert one[1].test_points == pytest.approx(accuracy(one[1].module, *images(20)))


def test_a_trained_controller_draws_by_the_seed(task, run):
    first, again, other = (grow(task, run, seed=seed) for seed in (1, 1, 2))
    assert first.timeline == again.timeline
    assert torch.equal(first.module.network.head.weight, again.module.network.head.weight)
    assert not torch.equal(first.module.network.head.weight, other.module.network.head.weight)
    assert len(grow(task, run, steps=4).timeline) > 0


def test_a_controller_grows_other_tasks_with_other_slots_of_another_family(run):
    resnet = esper.Task(
        model=ResNet8, slots=["stem", "layer3"], train=images(24, 10, (3, 16, 16)), batch=8, episode_length=2
    )
    found = grow(resnet, run)
    assert found.network.description.task == "resnet8"
    assert found.module(torch.randn(5, 3, 16, 16)).shape == (5, 10)
    for slots in (["body"], ["body", "out"]):
        sequences = esper.Task(model=Zero, slots=slots, train=points(), batch=16, episode_length=2)
        assert grow(sequences, run).network.description.task == "zero"


class Prompt:
    """Keeps what it can, else grows the first blueprint in the first slot."""

    def __init__(self, spec):
        grow = canonical_action(LifecycleOp.GERMINATE, blueprint=NORM, tempo=FAST)
        self.rows = torch.tensor([canonical_action(LifecycleOp.FOSSILIZE), grow, canonical_action(LifecycleOp.WAIT)])

    def begin(self, episode, hosts):
        return NoMemory()

    def decide(self, obs, memory):
        legal = obs.legal[:, [LifecycleOp.FOSSILIZE, LifecycleOp.GERMINATE], 0]
        return self.rows[torch.cat((legal, legal[:, :1] | True), dim=1).int().argmax(dim=1)]

    def remember(self, memory, step):
        return memory


def test_a_policy_of_the_users_grows_by_name_or_as_it_is(task):
    esper.register_policy("prompt")(Prompt)
    rows = [grow(task, controller).timeline for controller in ("prompt", Prompt)]
    assert rows[0] == rows[1]
    assert ("norm", "fossilized") in {(row.blueprint, row.event) for row in rows[0]}
    with pytest.raises(KeyError, match="a policy named 'prompt' is registered already"):
        esper.register_policy("prompt")(lambda spec: Prompt())


def test_a_blueprint_and_a_reward_of_the_users_are_used_by_name(tmp_path):
    @esper.register_blueprint(family="cnn", init={"weight": 0.0})
    def moss(channels: int) -> nn.Module:
        return nn.Conv2d(channels, channels, 1, bias=False)

    try:
        esper.register_reward("toy_of_the_user")(lambda config: ToyReward())
        task = own_task()
        assert "moss" in esper.blueprints.blueprint_names()
        run = train(task, tmp_path, reward="toy_of_the_user")
        assert run.summary["reward"] == "toy_of_the_user"
        found = grow(task, keep(slot=0, blueprint=registry.names().index("moss")))
        assert [seed.blueprint for seed in found.network.description.seeds] == ["moss"]
        assert found.num_params == task.spec.host.num_params() + 16  # 4 x 4 weights
    finally:
        registry.unregister("moss")


def test_losses_and_metrics_of_the_users_reach_the_end():
    task = esper.Task(
        model=Zero, slots=["body"], train=points(), batch=16, episode_length=2,
        loss=lambda out, y: (out - y).abs().mean(dim=1), metric=lambda out, y: torch.full((len(out),), 42.0),
    )  # fmt: skip
    found = grow(task, "wait_only")
    assert (found.points, found.test_points, found.unit) == (42.0, 42.0, "score")


def test_progress_is_printed_unless_it_is_switched_off(task, capsys):
    esper.grow(task, "wait_only", steps=2)
    said = capsys.readouterr().out
    assert said.startswith("esper: grow mynet by wait_only, 1 network x 2 steps, seed 0\n")
    assert said.count("an episode ends with step 2; use a larger steps, or a smaller lifecycle.min_training") == 1
    grow(task, "wait_only", steps=2)
    assert capsys.readouterr().out == ""


@pytest.mark.parametrize(
    ("method", "said"),
    [
        (
            lambda spec: None,
            r"the policy <lambda> is a NoneType without begin, decide, remember; see docs/extending.md",
        ),
        (int, "the policy int cannot be made from an EngineSpec: TypeError"),
    ],
)
def test_a_policy_of_the_user_that_cannot_be_made_is_named(task, method, said):
    with pytest.raises(ConfigError, match=said):
        grow(task, method, steps=2)


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_a_network_grows_without_gradients_around_the_call(task, mode):
    plain = grow(task, "plain", steps=2, executor="streamed")
    with mode():
        assert grow(task, "plain", steps=2, executor="streamed").points == plain.points
        assert not torch.is_grad_enabled()


def test_minutes_of_methods_beside_it_are_announced(task, capsys):
    grown = esper.grow(task, "plain", beside=["halving"], budget=esper.Budget(minutes=0.01), executor="streamed")
    said = "note: halving will spend as many FLOPs afterwards, so that all takes about 0.02 minutes\n"
    assert said in capsys.readouterr().out
    assert [*grown.beside] == ["halving"]


def test_ctrl_c_in_what_is_trained_beside_it_leaves_the_network_and_says_what_is_missing(task, monkeypatch, capsys):
    step = Growth.step

    def interrupted(self: Growth) -> None:
        if self._asked == "halving":
            raise KeyboardInterrupt
        step(self)

    monkeypatch.setattr(Growth, "step", interrupted)
    grown = esper.grow(task, "plain", beside=["halving"], steps=2, executor="streamed")
    assert (grown.beside, grown.leaderboard.is_over) == ({}, True)
    assert "note: the table leaves halving out, because the growth was stopped\n" in capsys.readouterr().out


def test_who_cannot_grow_is_refused(task, tmp_path):
    with pytest.raises(
        ConfigError, match="neither a run directory, nor a method, nor a baseline; did you mean 'heuristic'"
    ):
        grow(task, "heuristik")
    with pytest.raises(RunDirectoryError, match=r"has no config\.toml"):
        grow(task, tmp_path)
    with pytest.raises(ConfigError, match="static_final starts with an architecture that is given"):
        grow(task, "static_final")
    with pytest.raises(ConfigError, match="leave flops and beside out, or choose a method: auto, "):
        grow(task, "heuristic", budget=esper.Budget(flops=1e9, params=10**6), beside=["plain"])
    with pytest.raises(ConfigError, match="the number of networks is best_of here"):
        grow(task, num_envs=3)
    with pytest.raises(ExportError, match="'null' is scripted and has no networks"):
        grow("null")
    with pytest.raises(RunDirectoryError, match="holds neither a run"):
        esper.load(tmp_path)


@pytest.mark.slow
def test_networks_that_grew_too_large_to_be_kept_are_counted(task, capsys):
    said = {}
    for params in (500, 100_000):
        budget = esper.Budget(params=params)
        grown = esper.grow(task, "random", seed=1, best_of=3, steps=30, budget=budget, executor="streamed")
        said[params] = [line for line in capsys.readouterr().out.splitlines() if "parameters of the budget" in line]
        assert grown.num_params <= params
    note = "note: 1 of 3 networks grew to more than the 500 parameters of the budget and cannot be kept"
    assert said == {500: [note], 100_000: []}


@pytest.mark.parametrize("method", ["auto", "wait_only"])
def test_a_limit_below_the_network_alone_is_refused_before_data_are_loaded(task, method, monkeypatch):
    monkeypatch.setattr("esper.api.grow.dataset_of", lambda config, device: pytest.fail("data are loaded"))
    with pytest.raises(ConfigError, match="the budget allows 5 parameters, but the network alone has 379; allow"):
        grow(task, method, budget=esper.Budget(params=5))


def test_a_structure_that_is_given_grows_from_the_first_step(task):
    found = grow(task, "static_final", steps=2, architecture=["stem norm ADD"])
    assert [(seed.slot, seed.blueprint) for seed in found.network.description.seeds] == [("stem", "norm")]
    assert json.loads(found.timeline.text())[-1]["event"] == "end"


@pytest.mark.parametrize(("both", "executor"), [(False, "streamed"), (True, "fused")])
def test_a_gate_sees_all_positions_in_a_host_that_does_and_the_exported_network_agrees(both, executor):
    from sklearn.metrics import r2_score

    germinate = canonical_action(LifecycleOp.GERMINATE, slot=0, blueprint=NORM, tempo=FAST, style=Style.GATED_GATE)
    fossilize = canonical_action(LifecycleOp.FOSSILIZE, slot=0)
    x = torch.randn(60, 6, 4, generator=torch.Generator().manual_seed(1))
    targets = x.cumsum(dim=1)[..., :3]
    task = esper.Task(
        model=functools.partial(Tagger, both), slots=["into"], train=(x, targets), val=(x, targets), batch=20, lr=0.02,
        episode_length=10, min_training_epochs=1,
    )  # fmt: skip
    controller = Schedule.from_rows("gated", 1, [(1, germinate), (2, fossilize)])
    grown = grow(task, controller, executor=executor)
    assert [row.event for row in grown.timeline][-2] == "fossilized"
    outputs = grown.module(x).detach()
    assert grown.points == pytest.approx(
        100.0 * r2_score(targets.flatten(1), outputs.flatten(1), multioutput=WEIGHTED), abs=1e-3
    )
    changed = torch.cat((x[:, :5], x[:, 5:] + 1.0), dim=1)
    assert torch.allclose(grown.module(changed)[:, :5], outputs[:, :5], atol=1e-6) is not both


@pytest.fixture
def imported(monkeypatch):
    """Imports a file as a module of this name, which is not to be found again unless it is `known`."""

    def by(file: Path, name: str, *, known: bool = True) -> Any:
        spec = importlib.util.spec_from_file_location(name, file)
        module = importlib.util.module_from_spec(spec)
        if known:
            monkeypatch.setitem(sys.modules, name, module)
        spec.loader.exec_module(module)
        return module

    return by


@pytest.mark.parametrize("both", [False, True])
@pytest.mark.parametrize("blueprint", ["attention", "depthwise"])
def test_a_seed_sees_later_positions_where_its_host_does_and_the_source_has_the_same_seed(
    both, blueprint, imported, tmp_path
):
    index = registry.names().index(blueprint)
    germinate = canonical_action(LifecycleOp.GERMINATE, slot=0, blueprint=index, tempo=FAST)
    x = torch.randn(60, 6, 4, generator=torch.Generator().manual_seed(1))
    data = {part: (x, x[..., :3]) for part in ("train", "val")}
    task = esper.Task(functools.partial(Tagger, both), ["into"], batch=20, min_training_epochs=1, lr=0.02, **data)
    fossilize = canonical_action(LifecycleOp.FOSSILIZE, slot=0)
    grown = grow(task, Schedule.from_rows("seed", 1, [(1, germinate), (2, fossilize)]), steps=10)
    seed = grown.module.get_submodule("grown.into.seed")
    h = torch.randn(2, 6, 6, generator=torch.Generator().manual_seed(2))
    changed = torch.cat((h[:, :4], h[:, 4:].flip(-1)), dim=1)
    assert torch.allclose(seed(changed)[:, 3], seed(h)[:, 3], atol=1e-7) is not both
    grown.save(tmp_path / "grown")
    saved = imported(tmp_path / "grown" / "model.py", "with_seed").load_model()
    assert torch.allclose(saved(x), grown.module(x), atol=1e-6)


@pytest.mark.parametrize(
    "known",
    [pytest.param(True, id="known", marks=pytest.mark.slow), pytest.param(False, id="loaded by its path alone")],
)
def test_a_grown_network_grows_again_outside_of_its_seeds_and_is_saved_as_source(imported, tmp_path, known):
    x, y = torch.randn(60, 6, generator=torch.Generator().manual_seed(0)), torch.arange(60) % 3

    def again(model: Any) -> Any:
        task = esper.Task(model, train=(x, y), val=(x, y), batch=20, min_training_epochs=1)
        return task.spec.enabled, grow(task, "fixed_schedule_fill", steps=12)

    slots, first = again(lambda: nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 8), nn.Linear(8, 3)))
    assert {seed.slot for seed in first.network.description.seeds} == set(slots)
    again_slots, _ = again(first.module)
    assert again_slots
    assert set(again_slots) <= {f"network.{path}" for path, _ in first.module.network.named_modules()}

    first.save(tmp_path / "first")
    _, second = again(imported(tmp_path / "first" / "model.py", "first_model", known=known).load_model)
    assert second.network.description.seeds
    assert "model.py" in {file.name for file in second.save(tmp_path / "second").files}
    network = imported(tmp_path / "second" / "model.py", "second_model").load_model()
    assert torch.allclose(network(x), second.module(x), atol=1e-5)


# -- what is printed, and what is never chosen ------------------------------------------------------------------------


@pytest.mark.filterwarnings("ignore:training targets are")
@pytest.mark.parametrize("outputs", [1, 2])
def test_the_r2_that_is_printed_is_that_of_scikit_learn_on_the_split_that_it_is_named_after(outputs):
    from sklearn.datasets import load_diabetes
    from sklearn.metrics import r2_score

    x, y = (torch.from_numpy(values).float() for values in load_diabetes(return_X_y=True))
    y = torch.stack((y, 1000.0 - 3.0 * y + y.roll(1)), dim=1)[:, :outputs]
    parts = {"train": slice(0, 354), "val": slice(354, 398), "test": slice(398, 442)}

    def model() -> nn.Module:
        return nn.Sequential(nn.Linear(10, 8), nn.ReLU(), nn.Linear(8, outputs))

    task = esper.Task(
        model=model, slots=["0"], batch=64, lr=0.1, **{name: (x[at], y[at]) for name, at in parts.items()}
    )
    grown = grow(task, "wait_only")
    for name, found in (("val", grown.points), ("test", grown.test_points)):
        targets, answers = y[parts[name]].numpy(), grown.module(x[parts[name]]).detach().numpy()
        assert found == pytest.approx(100.0 * r2_score(targets, answers, multioutput=WEIGHTED), abs=1e-3), name


class Broken(nn.Module):
    """[B, 6] -> [B, 2]; NaN where the first weight is outside `sound`."""

    sound = (-math.inf, math.inf)

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Linear(6, 4)
        self.out = nn.Linear(4, 2)

    def forward(self, x: Tensor) -> Tensor:
        low, high = self.sound
        weight = self.body.weight[0, 0]
        return self.out(torch.tanh(self.body(x))) * torch.where((low <= weight) & (weight <= high), 1.0, torch.nan)


def test_a_network_whose_outputs_are_nan_has_no_points_and_is_never_the_best(monkeypatch):
    def unbalanced(n: int) -> tuple[Tensor, Tensor]:  # nine of ten examples are of class 0
        return torch.randn(n, 6, generator=torch.Generator().manual_seed(n)), (torch.arange(n) % 10 == 9).long()

    parts = {"train": unbalanced(40), "val": unbalanced(20), "test": unbalanced(10)}
    task = esper.Task(model=Broken, slots=["body"], batch=20, episode_length=3, min_training_epochs=1, **parts)
    of_trial = float(deterministic_build(Broken).body.weight[0, 0].detach())
    monkeypatch.setattr(Broken, "sound", (-math.inf, of_trial))
    grown = grow(task, "wait_only", best_of=6)
    assert grown.module(parts["val"][0]).isfinite().all()
    assert grown.points > 0.0
    monkeypatch.setattr(Broken, "sound", (of_trial, of_trial))  # no host has it
    with pytest.raises(ExportError, match="NaN or infinite on the validation split, so it is not saved"):
        grow(task, "wait_only", best_of=2, steps=2)
    with pytest.raises(ConfigError, match="nothing has been learned in the first 3 steps"):
        grow(task, "wait_only", best_of=2)
    monkeypatch.setattr(Broken, "sound", (math.inf, math.inf))
    with pytest.raises(ConfigError, match="loss of objective Classification is NaN or infinite"):
        grow(task, "wait_only")
