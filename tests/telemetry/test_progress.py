"""What a user sees of a run, a search or a comparison, on a terminal and elsewhere."""

import io
import re
from pathlib import Path
from typing import Any

import pytest

from esper.telemetry.progress import (
    FIRST_INTERVAL,
    PLAIN_INTERVAL,
    PassProgress,
    RunConsole,
    RunProgress,
    counts,
    duration,
    line,
    size,
    with_spread,
)

NAN = float("nan")

ROUND: dict[str, Any] = {
    "round": 2,
    "objective_mean": 58.412,
    "objective_std": 2.1,
    "committed_accuracy_mean": 58.9,
    "live_accuracy_mean": 61.318,
    "env_steps": 640,
    "seconds": 1.5,
    "ops": {"WAIT": 510, "GERMINATE": 61, "SET_ALPHA_TARGET": 0, "PRUNE": 20},
    "slots": {"TRAINING": 9, "BLENDING": 4},
}
STEP = ROUND | {"t": 10}


class Clock:
    """Seconds that pass when a test says so."""

    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


def plain(width: int = 200) -> RunConsole:
    return RunConsole(file=io.StringIO(), width=width)


def written(console: RunConsole) -> list[str]:
    assert isinstance(console.file, io.StringIO)
    return console.file.getvalue().splitlines()


def test_a_round_is_one_line() -> None:
    assert line(ROUND, 10, 40, "8:12") == (
        "round 2/10  eta 8:12  427 env-steps/s  100·J 58.41 ± 2.10  committed 58.90  live 61.32  "
        "ops: wait 510 germinate 61 prune 20  slots: training 9 blending 4"
    )


@pytest.mark.parametrize(
    ("done", "seconds", "left"),
    [
        (0, 60.0, "1:00"),  # eighty steps took a minute, and eighty are left
        (70, 10.0, "1:20"),  # a resumed run reckons with its own speed: ten steps in ten seconds
    ],
)
def test_without_a_terminal_each_round_is_a_line_with_the_time_that_is_left(
    done: int, seconds: float, left: str
) -> None:
    console, clock = plain(), Clock()
    with RunProgress(console, rounds=4, steps=40, done=done, clock=clock) as progress:
        clock.now += seconds
        progress.write("round", ROUND)
    (shown,) = written(console)
    assert shown.startswith(f"round 2/4  eta {left}")


def test_a_long_round_gives_a_line_soon_and_then_now_and_then() -> None:
    console, clock = plain(), Clock()
    progress = RunProgress(console, rounds=4, steps=40, clock=clock)
    for t, seconds in enumerate((FIRST_INTERVAL / 2, FIRST_INTERVAL / 2, *[PLAIN_INTERVAL / 2] * 4), start=1):
        clock.now += seconds
        progress.write("step", STEP | {"round": 1, "t": t})
    shown = [text[:21] for text in written(console)]
    assert shown == [f"round 1/4 step {t}/40  " for t in (2, 4, 6)]


def test_a_console_whose_reader_left_goes_silent(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    class CloseOutput(io.StringIO):
        def write(self, text: str) -> int:
            raise BrokenPipeError

        def fileno(self) -> int:
            raise io.UnsupportedOperation

    console = RunConsole(file=CloseOutput())
    with (tmp_path / "stdout").open("w") as stdout, monkeypatch.context() as patch:
        patch.setattr("sys.stdout", stdout)  # it is replaced by /dev/null: that of the tests must not be
        console.say("nobody reads this")
        assert console.quiet
        console.say("nor this")
        stdout.write("nor what Python holds back")
    assert (tmp_path / "stdout").read_text() == ""


def test_a_line_is_not_broken_or_marked_up() -> None:
    console, text = plain(20), "a [bold]long[/bold] line that is wider than the console"
    console.say(text)
    assert written(console) == [text]


def test_what_was_not_measured_is_a_dash_and_never_nan() -> None:
    nothing = ROUND | dict.fromkeys(
        ("objective_mean", "objective_std", "committed_accuracy_mean", "live_accuracy_mean"), float("nan")
    )
    assert "  100·J -  committed -  live -  " in line(nothing, 10, 40, "?")


def test_alarms_of_a_round_stand_in_its_line() -> None:
    console = plain()
    progress = RunProgress(console, rounds=4, steps=40)
    progress.write("alarm", alarm(round=2))
    for host in (3, 5, 5):
        progress.write("alarm", alarm(round=2, host=host, name="gaming_steps", value=1.0, threshold=0.0))
        progress.write("rollback", {"kind": "rollback", "round": 2, "host": host, "reason": "loss"})
    progress.write("round", ROUND)
    progress.write("round", ROUND | {"round": 3})
    second, third = written(console)
    assert second.endswith(
        "  alarms: objective_falls -2.31 (threshold -2), gaming_steps of 2 hosts, rollback of 2 hosts"
    )
    assert "alarms" not in third


def alarm(**changes: Any) -> dict[str, Any]:
    return {
        "kind": "alarm", "round": 1, "t": 40, "host": -1, "name": "objective_falls", "value": -2.309, "threshold": -2.0
    } | changes  # fmt: skip


def terminal(width: int = 80, height: int = 24) -> RunConsole:
    return RunConsole(file=io.StringIO(), force_terminal=True, width=width, height=height, color_system=None)


def screen(progress: RunProgress) -> list[str]:
    """The table as it is now, without what the terminal has no room for."""
    console = progress._console
    drawn = console.render_lines(progress._drawing(), pad=False)
    return ["".join(segment.text for segment in one).rstrip() for one in drawn]


def test_a_terminal_shows_finished_rounds_the_unfinished_one_and_the_learner() -> None:
    clock = Clock()
    progress = RunProgress(terminal(), rounds=10, steps=40, clock=clock)
    clock.now += 40.0
    peak = {"allocated": None, "reserved": None, "peak": 329_584_640}
    update = {"approx_kl": 0.0118, "entropy_op": 0.9, "entropy_tempo": NAN, "entropy_loss": -1.0}
    progress.write("round", ROUND | update | {"round": 1, "growth_ratio_mean": 1.2, "memory_bytes": peak})
    progress.write("step", STEP)
    progress.write("alarm", alarm())
    shown = screen(progress)
    assert re.search(r"^round 2/10 step 10/40 .* 0:40 eta 4:40  peak 330 MB$", shown[0])  # 50 steps in 40 s, 350 left
    assert re.search(r"^ +1 +58\.41 ± 2\.10 +58\.90 +61\.32 +1\.20x +427$", shown[2])
    assert re.search(r"^ +2 +58\.41 ± 2\.10 +58\.90 +61\.32 +unfinished +427$", shown[3])
    assert [re.split("  +", text, maxsplit=1) for text in shown[4:]] == [
        ["alarms", "round 1: objective_falls -2.31 (threshold -2)"],
        ["seeds", "training 9 blending 4"],
        ["operations", "wait 510 germinate 61 prune 20"],
        ["learner", "KL 0.0118"],
        ["entropy", "op 0.90  tempo -"],
    ]


@pytest.mark.parametrize(("width", "height"), [(200, 60), (80, 24), (60, 12), (40, 8), (20, 4), (10, 2), (3, 1)])
def test_a_terminal_of_any_size_shows_as_much_as_it_holds_and_never_more(width: int, height: int) -> None:
    console = terminal(width, height)
    progress = RunProgress(console, rounds=100, steps=40)
    for number in range(1, 60):
        progress.write("round", ROUND | {"round": number, "growth_ratio_mean": 1.2, "approx_kl": 0.0118})
        progress.write("alarm", alarm(round=number, name="a_long_name_of_an_alarm_in_a_narrow_terminal"))
    progress.write("step", STEP | {"round": 60})
    lines = screen(progress)
    assert max(map(len, lines)) <= width
    if width >= 40:
        assert lines[0].startswith("round 60/1")
    if width >= 80:
        assert len(lines) <= height
    with progress:  # what does not fit is cut by rich
        pass


def test_a_quiet_console_has_no_table() -> None:
    assert not RunProgress(RunConsole(force_terminal=True, quiet=True), rounds=1, steps=1).is_live
    assert not RunProgress(plain(), rounds=1, steps=1).is_live


def test_passes_give_a_line_soon_and_then_now_and_then() -> None:
    console, clock = plain(), Clock()
    with PassProgress(console, 4, clock) as progress:
        for stage in ("grid", "grid", "rules", "confirmation"):
            progress.stage(stage)
            clock.now += 20.0
            progress.advance()
    # after 20 s the first line, and the next one 30 s later at the earliest; each pass took 20 s
    assert written(console) == ["grid  pass 1/4  eta 1:00", "rules  pass 3/4  eta 0:20"]


def test_the_work_of_a_growth_is_in_percent() -> None:
    console, clock = plain(), Clock()
    with PassProgress(console, 100, clock, percent=True) as progress:
        progress.stage("step 1/9")
        progress.advance(12.5)
        clock.now += PLAIN_INTERVAL
        progress.advance(12.5)
    assert [line.partition("  eta")[0] for line in written(console)][-1] == "step 1/9  25 %"


def test_passes_with_lines_of_their_own_are_counted_with_those_that_are_skipped() -> None:
    console, clock = plain(), Clock()
    with PassProgress(console, 4, clock) as progress:
        progress.skip()
        progress.begin("random, 2 hosts")
        for _ in range(3):
            progress.advance(1 / 3)
        clock.now += 0.5
        progress.begin("heuristic, 2 hosts")
    assert written(console) == [
        "esper: random, 2 hosts (2 of 4, eta ...)",
        "esper: heuristic, 2 hosts (3 of 4, eta 0:02)",  # two thirds took half a second, and two passes are left
    ]


def test_the_time_of_building_and_compiling_is_not_taken_for_that_of_a_step() -> None:
    console, clock = plain(), Clock()
    with PassProgress(console, 2, clock) as progress:
        for seconds in (60.0, 2.0, PLAIN_INTERVAL):  # the first step waits for a compiler
            clock.now += seconds
            progress.advance(0.25)
    # 32 seconds for half a pass, and 1.25 passes are left
    assert written(console) == ["  pass 0/2  eta ...", "  pass 0/2  eta 1:20"]


def test_numbers_are_short_texts() -> None:
    times = {0.2: "0:00", 59.6: "1:00", 61.0: "1:01", 3599.0: "59:59", 3723.4: "1:02:03"}
    assert {seconds: duration(seconds) for seconds in times} == times
    assert counts({"WAIT": 0}) == counts({}) == "none"
    found = [with_spread(*values) for values in ((58.412, 2.1), (58.412, NAN), (NAN, NAN))]
    assert found == ["58.41 ± 2.10", "58.41", "-"]
    sizes = {12_300: "12 kB", 329_584_640: "330 MB", 1_250_000_000: "1.25 GB"}
    assert {number: size(number) for number in sizes} == sizes
