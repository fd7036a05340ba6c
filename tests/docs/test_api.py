"""docs/api.md: its programs run, and it names everything that is public."""

import inspect
import re
from pathlib import Path

import pytest
import torch
from torch.utils.data import DataLoader, default_collate

import esper
import networks_of_several as several
from esper.kasmina.blueprints import registry

PAGE = (Path(__file__).parents[2] / "docs" / "api.md").read_text(encoding="utf-8")
TEN_LINES, WEIGHTS, SEVERAL, _TORCHVISION, PAIRS, BLUEPRINT = re.findall(
    r"^```python\n(.*?)^```$", PAGE, re.MULTILINE | re.DOTALL
)
SMALL = "rounds=1, num_envs=2, executor='streamed', progress=False, **{'ppo.update_epochs': 1}"


class MyNet(torch.nn.Module):
    """[B, 1, 6, 6] -> logits [B, 3]."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = torch.nn.Sequential(torch.nn.Conv2d(1, 4, 3, padding=1), torch.nn.ReLU())
        self.layer2 = torch.nn.Sequential(torch.nn.Conv2d(4, 8, 3, stride=2), torch.nn.BatchNorm2d(8))
        self.head = torch.nn.Linear(8, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.layer2(self.stem(x)).mean(dim=(2, 3)))


def run(program: str, **given: object) -> dict[str, object]:
    """The variables of the program, which is given a network and data."""
    data = {name: torch.randn(60, 1, 6, 6) for name in ("x", "xv", "xt")}
    data |= {name: torch.randint(3, (60,)) for name in ("y", "yv", "yt")}
    variables: dict[str, object] = {"MyNet": MyNet, **data, **given}
    exec(program, variables)
    return variables


@pytest.mark.filterwarnings("ignore:train. of a DataLoader")
def test_networks_with_several_inputs_and_outputs_become_tasks():
    texts = [({name: values[i] for name, values in several.TEXT.items()}, several.CLASSES[i]) for i in range(60)]
    variables = vars(several) | {"esper": esper, "DataLoader": DataLoader, "texts": texts, "pad": default_collate}
    variables |= {"tokens": several.TOKENS, "next_tokens": several.TOKENS.roll(-1, dims=1), "x": several.NUMBERS}
    variables["squared_error"] = lambda found, x: (found - x).square().sum(dim=1)
    variables["divergence"] = lambda mean, spread: 0.5 * (mean.square() + spread.exp() - 1 - spread).sum(dim=1)
    exec(SEVERAL, variables)
    units = [variables[name].spec.objective.unit for name in ("next_token", "sentiment", "vae")]
    assert units == ["token accuracy", "accuracy", "loss reduction"]


def test_pictures_and_masks_are_mirrored_together():
    augmentation = run(PAIRS, torch=torch)["augmentation"]
    x = torch.rand(64, 3, 4, 4)
    pictures, masks = augmentation(x.clone(), x[:, 0].clone())
    assert torch.equal(pictures[:, 0], masks)
    assert 0 < (pictures != x).flatten(1).any(1).sum() < 64


def test_the_ways_to_give_trained_weights_are_one(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    net, found = MyNet(), []
    torch.save(net.state_dict(), "mine.pt")
    for line in WEIGHTS.splitlines():
        made = run(f"import esper\n{line.replace('MyNet', 'type(net)')}", net=net)
        found.append(made["task"].spec.load(None, 0).identity["sha256_weights"])
    assert len(found) == 3
    assert len(set(found)) == 1


@pytest.mark.slow
def test_the_ten_lines_grow_a_network_of_the_users(tmp_path, monkeypatch):
    assert len(TEN_LINES.splitlines()) <= 10
    assert "rounds=30, num_envs=8" in TEN_LINES
    assert "minutes=10, params=50_000)" in TEN_LINES
    program = (
        TEN_LINES.replace("rounds=30, num_envs=8", SMALL)
        .replace("batch=128", "batch=128, episode_length=10")
        .replace("minutes=10, params=50_000)", "minutes=0.02, params=50_000), progress=False")
    )
    monkeypatch.chdir(tmp_path)
    found = run(program)
    assert found["grown"].module(found["x"]).shape == (60, 3)
    assert len(found["run"].objective) == 1
    assert found["grown"].timeline[-1].event == "end"
    assert sorted(path.name for path in (tmp_path / "grown").iterdir()) == [
        *("model.json", "model.py", "model.safetensors", "timeline.json")
    ]
    assert (tmp_path / "runs" / "mynet-quickstart-s0").is_dir()


def test_the_blueprint_can_be_chosen():
    run(BLUEPRINT)
    try:
        assert "relu_mix" in esper.blueprints.blueprint_names("cnn")
    finally:
        registry.unregister("relu_mix")


def test_every_public_name_and_argument_is_documented():
    words = set(re.findall(r"\w+", " ".join(re.findall(r"`([^`\n]+)`", PAGE))))
    assert set(esper.__all__) <= words
    for function in (esper.Task, esper.train, esper.evaluate, esper.grow, esper.load):
        names = set(inspect.signature(function).parameters) - {"settings"}
        assert names <= words, function
    for kind in ("esper.api.run.Run", "esper.api.grow.Grown"):
        module, _, name = kind.rpartition(".")
        members = vars(getattr(__import__(module, fromlist=[name]), name))
        public = {m for m in members if not m.startswith("_")} - {"resolved", "policy_values"}
        assert public <= words, kind
