"""esper.train and what a run can do afterwards."""

import json
import signal
import threading

import pytest
import torch
from own_tasks import SMALL, Looking, grow, own_task, points, train

import esper
from esper.cli import main
from esper.leyline.errors import ConfigError, RegistryError, RunDirectoryError
from small_runs import interrupted_at


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """Two rounds of two networks; only this module knows the task."""
    return train(own_task(), tmp_path_factory.mktemp("train"), rounds=2)


def test_a_run_has_its_settings_results_and_objective(run):
    assert run.config["task"] == "mynet"
    assert run.config["schedule_rounds"] == run.config["rounds"] == 2
    assert run.config["ppo"]["hidden_width"] == 8
    assert len(run.objective) == 2
    assert run.objective[-1] == pytest.approx(run.summary["final_objective_mean"])
    assert repr(run) == f"Run({str(run.directory)!r}: mynet, 2 rounds, 100·J {run.objective[-1]:.2f})"


def test_nothing_of_a_run_stays_in_the_process(tmp_path):
    before, state, handler = torch.get_num_threads(), torch.get_rng_state(), signal.getsignal(signal.SIGINT)
    torch.set_num_threads(3)
    try:
        run = train(own_task(), tmp_path, threads=1)
        assert torch.get_num_threads() == 3
        grow(run.task, run)
        assert torch.get_num_threads() == 3
    finally:
        torch.set_num_threads(before)
    assert torch.equal(torch.get_rng_state(), state)
    assert "mynet" not in esper.tasks.task_names()
    assert signal.getsignal(signal.SIGINT) is handler


def test_equal_arguments_give_equal_runs_and_a_run_can_be_made_longer(tmp_path, run):
    again = train(own_task(), tmp_path, rounds=1, schedule_rounds=2)
    assert again.objective == run.objective[:1]
    again.resume(rounds=2, progress=False)
    assert again.objective == run.objective
    assert again.summary["state_digest"] == run.summary["state_digest"]


def test_a_run_that_is_stopped_is_continued_by_load(tmp_path, run):
    with (
        interrupted_at(1, 3),
        pytest.raises(KeyboardInterrupt, match=r"^stopped; continue with: esper.load\(.*task=task"),
    ):
        train(own_task(), tmp_path, rounds=2)
    stopped = esper.load(tmp_path / "run", task=own_task())
    assert stopped.summary is None
    assert stopped.resume(progress=False).summary["state_digest"] == run.summary["state_digest"]


def test_a_run_works_in_another_thread(tmp_path):
    found = []
    thread = threading.Thread(target=lambda: found.append(train(own_task(), tmp_path)))
    thread.start()
    thread.join()
    assert found[0].summary is not None


def test_a_network_that_cannot_be_stacked_runs_one_by_one_with_the_reason(tmp_path):
    task = esper.Task(model=Looking, slots=["body"], train=points(), batch=16, episode_length=2)
    with (
        pytest.warns(UserWarning, match="a slower one will: the host fails for many hosts at once"),
        pytest.warns(UserWarning, match=r"compiled C\+\+ cannot run the host: it looks at values in Python"),
    ):
        run = train(task, tmp_path, executor="auto")
    assert run.config["executor"] == "streamed"
    assert run.summary is not None


@pytest.mark.parametrize(
    ("task", "settings", "error", "said"),
    [
        (None, {"ppo.lrr": 1e-3}, ConfigError, "unknown key ppo.lrr; did you mean 'lr'"),
        (None, {"reward": "objektive"}, ConfigError, "did you mean 'objective'"),
        ("digit", {}, RegistryError, "unknown task 'digit'; did you mean 'digits'"),
        ("nowhere.py:task", {}, ConfigError, "there is no file"),
    ],
)
def test_a_wrong_setting_is_named_before_anything_is_written(tmp_path, task, settings, error, said):
    with pytest.raises(error, match=said):
        train(own_task() if task is None else task, tmp_path, **settings)
    assert list(tmp_path.iterdir()) == []


def test_two_tasks_of_one_name_and_a_second_run_in_a_folder_are_refused(tmp_path, run):
    with pytest.raises(RegistryError, match="a task 'digits' is registered already; choose another name"):
        train(own_task(name="digits"), tmp_path)
    with pytest.raises(RunDirectoryError, match="exists already"):
        train(own_task(), run.directory.parent)


def test_a_built_in_task_is_trained_by_name_and_progress_is_printed(tmp_path, capsys):
    run = esper.train("null", 1, 2, out=tmp_path / "run", episode_length=3, **SMALL)
    assert run.task is None
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == "esper: null, 2 hosts x 3 steps x 1 round, reward objective, seed 0"
    assert lines[-1].startswith("done: ")
    train(own_task(), tmp_path / "quiet")
    assert capsys.readouterr().out == ""


def test_a_comparison_has_rows_a_verdict_and_a_table(run):
    found = run.evaluate("heuristic", num_envs=2, progress=False)
    assert found.rows[0].name == "trained"
    assert {row.name for row in found.rows} == {"trained", "heuristic", "wait_only"}
    text = str(found)
    assert text.startswith("mynet, 2 hosts of seed 1000000, trained = ")
    assert text.endswith(found.verdict)
    assert repr(found) == text
    with pytest.raises(RegistryError, match="unknown baseline 'heuristik'; did you mean 'heuristic'"):
        esper.evaluate(run, "heuristik")


def test_baselines_are_evaluated_without_a_run():
    found = esper.evaluate("wait_only", task=own_task(), episode_length=2, num_envs=2, progress=False)
    assert [row.name for row in found.rows] == ["wait_only"]
    assert found.verdict.startswith("wait_only alone, on 2 hosts;")
    assert found.verdict in str(found)
    two = esper.evaluate("random", "heuristic", task=own_task(), episode_length=2, num_envs=1, progress=False)
    assert {row.name for row in two.rows} == {"random", "heuristic", "wait_only"}
    for wrong in ({}, {"task": own_task(), "best": True}):
        with pytest.raises(ConfigError, match="random and no run: give task, on which they are compared, and not best"):
            esper.evaluate("random", **wrong)


def test_commands_say_where_a_task_of_a_program_is_continued(run, capfd):
    for words in (["train", "--resume", str(run.directory), "--rounds", "3"], ["evaluate", str(run.directory)]):
        assert main(words) == 2
        said = capfd.readouterr().err
        assert "the task 'mynet' of the run is registered neither here nor by its plugins" in said
        assert "esper.load(RUN, task=task).resume(rounds=N)" in said
    assert json.loads((run.directory / "summary.json").read_text()) == run.summary
    with pytest.raises(ConfigError, match="made in a Python program"):
        esper.evaluate(run.directory)


# -- one policy for several tasks --------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def policy(tmp_path_factory):
    """That of two tasks that only this module knows; they differ in their slots."""
    tasks = [own_task(), own_task(name="stem_alone", slots=["stem"])]
    out = tmp_path_factory.mktemp("policy") / "mix"
    return esper.train_policy(tasks, out, rounds=2, num_envs=2, progress=False, **SMALL)


@pytest.mark.slow
def test_the_policy_of_several_tasks_grows_a_network_of_another_one_and_is_trained_further(policy, tmp_path):
    assert policy.name == "policy.safetensors"
    assert "mynet" not in esper.tasks.task_names()
    other = own_task(slots=["layer2.1"])
    assert grow(other, policy).network.description == grow(other, str(policy)).network.description
    assert train(other, tmp_path, policy=policy).config["policy"] == str(policy)


def test_a_policy_that_is_trained_on_one_task_is_that_of_a_run(tmp_path):
    with pytest.raises(ConfigError, match=r"tasks is \['digits'\]; give a list of at least two tasks, or train a run"):
        esper.train_policy(["digits"], tmp_path / "mix")
    assert not (tmp_path / "mix").exists()
