import json
import os

import pytest

from esper.telemetry.report.page import PAYLOADS, POINTS, payload, rounds_of, segments, waterfall
from toy_record import ToyRecord, full_record


@pytest.fixture
def record() -> ToyRecord:
    return full_record()


@pytest.mark.parametrize("name", PAYLOADS)
def test_every_payload_is_json_without_nan_of_a_full_record_and_of_an_empty_run(name, record):
    json.dumps(payload(record, name), allow_nan=False)
    empty = ToyRecord()
    empty.add_run(rounds=0)
    json.dumps(payload(empty, name), allow_nan=False)


def test_curves_hold_the_mean_and_the_quartiles_of_the_hosts():
    record = ToyRecord()
    record.add_run()
    record.add("episodes", *({"round": 1, "host": i, "objective": value} for i, value in enumerate((0, 10, 20, 70))))
    found = payload(record, "curves")["a"]
    # sorted 0 10 20 70: mean 25; quartiles at positions 0.75 and 2.25 of 0..3
    assert found["round"] == [1]
    assert (found["objective"], found["objective_low"], found["objective_high"]) == ([25.0], [7.5], [32.5])


def test_long_curves_are_averaged_over_neighbouring_rounds():
    record = ToyRecord()
    record.add("runs", {"num_envs": 1})
    rounds = 2 * POINTS + 100  # three rounds share a point
    for table, host in (("rounds", ""), ("episodes", ", host")):
        numbers = f"select 'a', range, range{host and ', 0'} from range(1, {rounds + 1})"
        record.database.execute(f"insert into {table} (run, round, objective{host}) {numbers}")
    found = payload(record, "curves")["a"]
    assert len(found["round"]) == -(-rounds // 3) <= POINTS
    assert (found["round"][0], found["objective"][0]) == (3, 2.0)  # rounds 1, 2, 3


def test_the_best_round_is_the_one_with_the_highest_objective():
    record = ToyRecord()
    record.add("runs", {"num_envs": 2})
    record.add("rounds", *({"round": i, "objective": j} for i, j in ((1, 5.0), (2, 9.0), (3, 7.0))))
    assert rounds_of(record)["a"][:2] == (3, 2)
    assert [round["label"] for round in payload(record, "hosts")["a"]] == ["newest", "best 100·J"]


def test_runs_are_compared_in_the_last_rounds_that_both_have():
    record = ToyRecord()
    for run, rounds, gain in (("a", 12, 0.0), ("b", 11, 1.0)):
        record.add_run(run, rounds=rounds)
        record.add("episodes", *({"run": run, "round": r, "host": h, "objective": gain * (1 + 2 * h), "committed": 1.0,
                                  "growth": 1.0} for r in range(1, rounds + 1) for h in (0, 1)))  # fmt: skip
    (found,) = payload(record, "differences")
    # rounds 2 to 11: ten with differences 1 and ten with 3; their mean is 2 and their variance 20 / 19
    assert (found["reference"], found["run"], found["first"], found["last"], found["pairs"]) == ("a", "b", 2, 11, 20)
    assert found["objective"] == 2.0
    assert found["objective_half"] == pytest.approx(1.96 * (20 / 19 / 20) ** 0.5, rel=1e-5)


def test_evaluated_controllers_have_intervals_and_the_words_of_the_evaluation(tmp_path, record):
    record.database.execute("update runs set path = ?", [str(tmp_path)])
    difference = {"mean": -7.0, "low": -9.0, "high": -5.0}
    record.database.execute("update evaluations set file = 'evaluation.json'")
    document = {"verdict": "trained is better.", "controllers": [{"name": "fixed_schedule", "difference": difference}]}
    (tmp_path / "evaluation.json").write_text(json.dumps(document))
    (tmp_path / "evaluation2.json").write_text("{")  # damaged; the record says so
    (found,) = payload(record, "evaluation")
    trained, fixed = found["rows"]
    assert (trained["controller"], trained["kind"], trained["hosts"]) == ("trained", "trained", 2)
    assert trained["objective"] == 12.0
    assert trained["objective_half"] == pytest.approx(1.96 * 8**0.5 / 2**0.5, rel=1e-5)  # 10 and 14: variance 8
    assert (fixed["kind"], fixed["difference"]) == ("constant", difference)
    source = {"run": "a", "file": "evaluation.json", "older": [], "verdict": "trained is better."}
    assert (found["task"], found["sources"]) == ("digits", [source])


def test_an_evaluation_that_makes_no_sense_has_no_verdict(tmp_path, record):
    record.database.execute("update runs set path = ?", [str(tmp_path)])
    record.database.execute("update evaluations set file = 'evaluation.json'")
    (tmp_path / "evaluation.json").write_text('{"verdict": "trained is better.", "controllers": [null]}')
    (found,) = payload(record, "evaluation")
    assert len(found["rows"]) == 2
    assert found["sources"][0]["verdict"] is None


def test_a_file_of_several_tasks_has_a_verdict_for_each(tmp_path):
    record = ToyRecord()
    record.add_run(path=str(tmp_path))
    reports = [{"task": task, "verdict": f"on {task}", "controllers": []} for task in ("cifar", "digits")]
    (tmp_path / "evaluation.json").write_text(json.dumps(reports))
    for task in ("cifar", "digits"):
        record.add("evaluations", {"file": "evaluation.json", "task": task, "controller": "trained", "objective": 1.0})
    found = payload(record, "evaluation")
    assert [(one["task"], one["sources"][0]["verdict"]) for one in found] == [
        ("digits", "on digits"), ("cifar", "on cifar"),
    ]  # fmt: skip


def test_controllers_that_are_equal_are_in_the_order_of_their_names(tmp_path):
    names = list("edbgafc")
    record = ToyRecord()
    record.add_run(path=str(tmp_path))
    record.database.execute(
        "insert into evaluations by name select 'a' as run, 'evaluation.json' as file, 'digits' as task, controller, "
        "1.0 as objective, host from (select unnest(?) as controller), range(300) hosts(host)",
        [names],
    )
    (found,) = payload(record, "evaluation")
    assert [row["controller"] for row in found["rows"]] == sorted(names)


def test_each_task_has_the_newest_evaluation_of_a_run_and_names_the_older_ones(tmp_path):
    record = ToyRecord()
    record.add_run(path=str(tmp_path))  # of the task digits
    (tmp_path / "later").mkdir()
    files = {"evaluation2.json": "digits", "evaluation.json": "digits", "evaluation3.json": "cifar",
             "later/evaluation.json": "digits"}  # fmt: skip
    for age, (file, task) in enumerate(files.items()):
        (tmp_path / file).write_text(json.dumps({"task": task, "verdict": file, "controllers": []}))
        os.utime(tmp_path / file, (age, age))
        record.add("evaluations", {"file": file, "task": task, "controller": "trained", "objective": float(age)})
    digits, cifar = payload(record, "evaluation")
    assert (digits["task"], [row["objective"] for row in digits["rows"]]) == ("digits", [3.0])
    assert digits["sources"] == [{"run": "a", "file": "later/evaluation.json", "verdict": "later/evaluation.json",
                                  "older": ["evaluation2.json", "evaluation.json"]}]  # fmt: skip
    assert (cifar["task"], [row["objective"] for row in cifar["rows"]]) == ("cifar", [2.0])
    assert cifar["sources"][0]["older"] == []


def test_a_stretch_ends_where_the_stage_or_the_seed_changes_or_a_step_is_missing():
    rows = [{"slot": slot, "t": t, "stage": stage, "blueprint": "norm", "alpha": alpha} for slot, t, stage, alpha in
            (("s0", 1, "TRAINING", 0.0), ("s0", 2, "BLENDING", 0.5), ("s0", 3, "BLENDING", 1.0),
             ("s0", 5, "BLENDING", 0.25), ("s1", 6, "BLENDING", None))]  # fmt: skip
    found = [(s["slot"], s["stage"], s["t"], s["alpha"]) for s in segments(rows)]
    assert found == [
        ("s0", "TRAINING", 1, [0.0]),
        ("s0", "BLENDING", 2, [0.5, 1.0]),
        ("s0", "BLENDING", 5, [0.25]),
        ("s1", "BLENDING", 6, [None]),
    ]


def test_a_host_comes_with_its_steps_stretches_seeds_and_waterfall(record):
    newest = payload(record, "hosts")["a"][0]
    assert (newest["round"], newest["total"], len(newest["hosts"])) == (2, 2, 2)
    host = newest["hosts"][1]
    assert host["steps"]["val_acc"] == [11.0, 21.0, 31.0, 41.0]
    assert [(s["stage"], s["alpha"]) for s in host["segments"]] == [
        ("GERMINATED", [0.0]),
        ("BLENDING", [0.5]),
        ("FOSSILIZED", [1.0, 1.0]),
    ]
    assert host["waterfall"]["parts"] == [{"members": ["s0"], "value": 10.0}]


def test_operations_are_counted_by_step_seed_and_accuracy(record):
    found = payload(record, "behaviour")["a"]["phases"]
    assert set(found) == {"first", "last"}
    last = found["last"]
    assert [(r["t"], r["op"], r["times"]) for r in last["step"]] == [
        (1, "germinate", 2), (2, "wait", 2), (3, "fossilize", 2), (4, "wait", 2)]  # fmt: skip
    # before step 1 no seed; then germinated, blending, and a fossil alone
    assert [(r["rank"], r["op"], r["times"]) for r in last["stage"]] == [
        (-1, "germinate", 2), (0, "wait", 2), (1, "wait", 2), (3, "fossilize", 2)]  # fmt: skip
    # two hosts are the lowest and the second of each step
    assert {(r["quarter"], r["times"]) for r in last["accuracy"] if r["op"] == "wait"} == {(1, 2), (2, 2)}


def test_reward_terms_are_sums_of_an_episode_and_means_of_a_step_per_host(record):
    found = payload(record, "rewards")["a"]
    # four steps of 0.5 and -0.25 in each host
    assert [(r["round"], r["term"], r["value"]) for r in found["rounds"]] == [
        (1, "potential", 2.0), (1, "rent", -1.0), (2, "potential", 2.0), (2, "rent", -1.0)]  # fmt: skip
    assert {(r["term"], r["value"]) for r in found["steps"]} == {("potential", 0.5), ("rent", -0.25)}
    assert found["since"] == 2


def test_blueprints_are_ranked_by_what_was_fossilized(record):
    record.add("seeds", {"round": 2, "host": 1, "slot": "s1", "blueprint": "conv", "germinated_t": 1, "pruned_t": 4})
    norm, conv = payload(record, "seeds")["a"]["last"]
    assert (norm["blueprint"], norm["germinated"], norm["fossilized"]) == ("norm", 2, 2)
    assert (norm["contribution"], norm["age"]) == (5.0, 2.0)
    assert (conv["blueprint"], conv["fossilized"], conv["pruned"], conv["contribution"]) == ("conv", 0, 1, None)


def test_a_report_does_not_tell_the_home_folder_of_a_run(record, monkeypatch, tmp_path):
    monkeypatch.setenv("HOME", str(tmp_path))
    record.database.execute("update runs set path = ?", (str(tmp_path / "runs" / "a"),))
    assert payload(record, "runs")[0]["path"] == "~/runs/a"


NONE, A, B, AB = frozenset(), frozenset("a"), frozenset("b"), frozenset("ab")


def test_with_all_subsets_the_parts_are_seeds_alone_and_what_pairs_add():
    # host 30; a alone 40, b alone 35, together 55: the pair adds 55 - 40 - 35 + 30 = 10
    found = waterfall({NONE: 30.0, A: 40.0, B: 35.0, AB: 55.0})
    assert found["method"] == "subsets"
    assert [(p["members"], p["value"]) for p in found["parts"]] == [(["a"], 10.0), (["b"], 5.0), (["a", "b"], 10.0)]
    assert (found["base"], found["rest"], found["total"]) == (30.0, 0.0, 55.0)
    assert found["shapley"] == {"a": 15.0, "b": 10.0}  # each alone, and half of the pair


def test_without_all_subsets_each_seed_is_what_is_lost_without_it_and_the_rest_is_interaction():
    three = frozenset("abc")
    found = waterfall({NONE: 30.0, three: 60.0, three - A: 50.0, three - B: 55.0})
    assert found["method"] == "leave one out"
    assert [(p["members"], p["value"]) for p in found["parts"]] == [(["a"], 10.0), (["b"], 5.0)]
    assert (found["rest"], found["shapley"]) == (15.0, None)


def test_shapley_values_of_three_seeds_belong_to_their_names():
    # a and b are worth 6 together only, and c is worth 4 alone
    worth = {frozenset(s): 6.0 * ("a" in s and "b" in s) + 4.0 * ("c" in s) for s in
             ("", "a", "b", "c", "ab", "ac", "bc", "abc")}  # fmt: skip
    assert waterfall(worth)["shapley"] == pytest.approx({"a": 3.0, "b": 3.0, "c": 4.0})
