"""The timing of single operations, with few repetitions."""

import json

import pytest

from esper.simic import client as learner
from profile_hot_path_operations import (
    OF_EVERY_TASK,
    OF_NETWORKS,
    SINGLE_ADD,
    Operation,
    Options,
    calls_again,
    kept_arguments,
    main,
)

TINY = {"hosts": (2,), "steps": 4, "repetitions": 2, "device": "cpu"}


@pytest.mark.slow
def test_every_operation_is_timed(tmp_path, capsys):
    path = tmp_path / "operations.json"
    assert main(Options(**TINY, phases=True, operators=3, functions=3, json=path)) == 0
    rows = {row["operation"]: row for row in json.loads(path.read_text())["results"]}
    names = {operation.name for operation in (*OF_EVERY_TASK, *OF_NETWORKS)}
    assert rows.keys() == names | {"control step", SINGLE_ADD}
    for name, row in rows.items():
        assert row["us"] > 0.0, name
        assert row["us_per_host"] == row["us"] / 2, name
        assert row["operators"] > 0, name
    assert rows["policy act"]["operators"] > rows["sampling"]["operators"]
    assert 0.0 < rows["policy act"]["share"] < 1.0
    assert rows["GAE"]["share"] is None
    shown = capsys.readouterr().out
    assert "phases of a control step" in shown
    assert "aten::" in shown


def test_operations_work_as_before_when_their_arguments_were_kept():
    before, operation = learner.observe, Operation("observation", learner, "observe")

    def fail_inside():
        with kept_arguments([operation]):
            assert learner.observe is not before
            raise RuntimeError

    with pytest.raises(RuntimeError):
        fail_inside()
    assert learner.observe is before


def test_an_operation_that_was_never_called_is_an_error():
    operation = Operation("observation", learner, "observe")
    with kept_arguments([operation]) as last:
        pass
    with pytest.raises(AssertionError, match="observation was never called"):
        calls_again([operation], last)


def test_settings_that_cannot_be_are_refused(capsys):
    assert main(Options(**{**TINY, "hosts": (0,)})) == 2
    assert "num_envs" in capsys.readouterr().err
