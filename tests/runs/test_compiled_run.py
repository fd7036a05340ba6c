"""A compiled run from the command line: what it says, that it repeats itself, and that it can be interrupted."""

import pytest

from small_runs import interrupted_at, records, resume, summary, train

pytestmark = [
    pytest.mark.compiled,
    pytest.mark.filterwarnings("ignore:.*deprecated:DeprecationWarning"),  # the compiler's own imports
]
COMPILED = ("--compile", "on")


def test_a_compiled_run_is_that_of_an_eager_one_up_to_rounding_and_can_be_interrupted(tmp_path, capfd):
    eager, whole, path = (tmp_path / name for name in ("eager", "whole", "run"))
    assert train(eager) == 0
    assert "compiling" not in capfd.readouterr().out
    assert train(whole, "null", 3, *COMPILED) == 0
    assert "compiling (a minute or more" in capfd.readouterr().out
    first, expected = (records(run)["metrics.jsonl"][0] for run in (whole, eager))
    for name in ("objective_mean", "live_accuracy_mean", "committed_accuracy_mean", "shaped_return"):
        assert first[name] == pytest.approx(expected[name], rel=1e-5), name
    assert records(whole)["events.jsonl"][1]["kind"] == records(eager)["events.jsonl"][1]["kind"]

    with interrupted_at(2, 5):
        assert train(path, "null", 3, *COMPILED) == 130
    assert resume(path) == 0
    assert summary(path)["state_digest"] == summary(whole)["state_digest"]
