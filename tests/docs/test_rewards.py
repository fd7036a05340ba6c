"""docs/rewards.md: its example as a user runs it, its picture, and that it leaves nothing out."""

import json
import re
import shlex

import pytest

from contracts import check_reward
from docs import ROOT, run_python
from esper.runs.assembly.plugins import load_plugins
from esper.simic.rewards import MODES, REWARD_TERMS, RewardConfig, make_reward

PAGE = ROOT / "docs" / "rewards.md"
BLOCK = re.compile(r"^```(\w+)\n(.*?)^```$", re.MULTILINE | re.DOTALL)


@pytest.mark.slow
def test_the_example_runs_from_the_command_line_as_it_stands(tmp_path):
    (language, plugin), (shell, commands) = BLOCK.findall(PAGE.read_text(encoding="utf-8"))
    assert (language, shell) == ("python", "bash")
    (tmp_path / "committed_gain.py").write_text(plugin, encoding="utf-8")
    train, evaluate = (shlex.split(line)[1:] for line in commands.splitlines())
    for words in ([*train, "--num-envs", "4"], [*evaluate, "--num-envs", "4"]):
        run_python(tmp_path, "-m", "esper", *words)
    summary = json.loads((tmp_path / "runs" / "committed" / "summary.json").read_text())
    assert summary["reward"] == "committed_gain"
    (line,) = (tmp_path / "runs" / "committed" / "metrics.jsonl").read_text().splitlines()
    # gains of the committed accuracy add up to it; the price of a seed is 0.05 a step
    assert 0.0 < json.loads(line)["shaped_return"] <= json.loads(line)["committed_accuracy_mean"]


def test_the_example_keeps_the_contract_of_rewards(tmp_path):
    path = tmp_path / "committed_gain.py"
    path.write_text(BLOCK.findall(PAGE.read_text(encoding="utf-8"))[0][1], encoding="utf-8")
    load_plugins([str(path)])
    check_reward(make_reward("committed_gain", RewardConfig(seed_occupancy_cost=0.05)))


def test_every_mode_and_every_term_is_explained():
    text = PAGE.read_text(encoding="utf-8")
    assert [mode for mode in MODES if f"| `{mode}` |" not in text] == []
    assert [term for term in REWARD_TERMS if f"`{term}`" not in text] == []


def test_links_of_the_page_lead_somewhere():
    links = re.findall(r"\]\((?!https?:)([^)#]+)\)", PAGE.read_text(encoding="utf-8"))
    assert links
    assert [link for link in links if not (PAGE.parent / link).exists()] == []


@pytest.mark.slow
def test_the_picture_is_drawn_by_the_command_that_the_page_names(tmp_path):
    run_python(tmp_path, str(ROOT / "scripts" / "plot_reward_terms.py"), "terms.png")
    picture = (tmp_path / "terms.png").read_bytes()
    assert picture[:8] == b"\x89PNG\r\n\x1a\n"
    assert len(picture) > 50_000
