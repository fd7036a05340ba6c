"""What a user sees, on a terminal and elsewhere."""

import io
import re
from typing import Any

import pytest

from esper.telemetry.progress import (
    FIRST_INTERVAL,
    PLAIN_INTERVAL,
    RunConsole,
    RunProgress,
    Shown,
    counts,
    duration,
    line,
)

ROUND: dict[str, Any] = {
    "round": 2,
    "objective_mean": 58.412,
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


def plain() -> Console:
    return RunConsole(file=io.StringIO(), width=200)


def written(console: Console) -> list[str]:
    assert isinstance(console.file, io.StringIO)
    return console.file.getvalue().splitlines()


def test_a_round_is_one_line() -> None:
    assert line(Shown.of(ROUND), 10, 40, "8:12") == (
        "round 2/10  eta 8:12  427 env-steps/s  100·J 58.41  committed 58.90  live 61.32  "
        "ops: wait 510 germinate 61 prune 20  slots: training 9 blending 4"
    )


def test_a_round_under_way_says_how_far_it_is() -> None:
    assert line(Shown.of(STEP), 10, 40, "8:12").startswith("round 2/10 step 10/40  eta 8:12")


def test_slow_runs_have_a_speed_too() -> None:
    assert "  0.4 env-steps/s" in line(Shown.of(ROUND | {"env_steps": 4, "seconds": 10.0}), 10, 40, "?")


def test_nothing_is_said_in_a_word() -> None:
    assert counts({"WAIT": 0}) == counts({}) == "none"


@pytest.mark.parametrize(
    ("seconds", "said"), [(0.2, "0:00"), (59.6, "1:00"), (61.0, "1:01"), (3599.0, "59:59"), (3723.4, "1:02:03")]
)
def test_a_duration_is_hours_minutes_seconds(seconds: float, said: str) -> None:
    assert duration(seconds) == said


def test_without_a_terminal_each_round_is_a_line_with_the_time_that_is_left() -> None:
    console, clock = plain(), Clock()
    with RunProgress(console, rounds=4, steps=40, clock=clock) as progress:
        clock.now += 30.0
        progress.write("round", ROUND | {"round": 1})
        clock.now += 30.0
        progress.write("round", ROUND)
    first, second = written(console)
    assert first.startswith("round 1/4  eta 1:30")
    assert second.startswith("round 2/4  eta 1:00")


def test_a_resumed_run_reckons_with_its_own_speed() -> None:
    console, clock = plain(), Clock()
    progress = RunProgress(console, rounds=4, steps=40, done=70, clock=clock)
    clock.now += 10.0
    progress.write("round", ROUND)  # ten steps in ten seconds; eighty are left
    assert written(console)[0].startswith("round 2/4  eta 1:20")


def test_a_long_round_gives_a_line_soon_and_then_now_and_then() -> None:
    console, clock = plain(), Clock()
    progress = RunProgress(console, rounds=4, steps=40, clock=clock)
    for t, seconds in enumerate((FIRST_INTERVAL / 2, FIRST_INTERVAL / 2, *[PLAIN_INTERVAL / 2] * 4), start=1):
        clock.now += seconds
        progress.write("step", STEP | {"round": 1, "t": t})
    shown = [text[:21] for text in written(console)]
    assert shown == [f"round 1/4 step {t}/40  " for t in (2, 4, 6)]


def test_short_rounds_are_told_as_wholes_alone() -> None:
    console, clock = plain(), Clock()
    progress = RunProgress(console, rounds=4, steps=40, clock=clock)
    for number in (1, 2):
        clock.now += FIRST_INTERVAL / 2
        progress.write("round", ROUND | {"round": number})
        progress.write("step", STEP | {"round": number + 1, "t": 1})
    assert [text[:11] for text in written(console)] == ["round 1/4  ", "round 2/4  "]


def test_other_records_are_no_concern_of_the_display() -> None:
    console = plain()
    RunProgress(console, rounds=1, steps=1).write("stage_changed", {"host": 0})
    assert written(console) == []


def terminal(width: int = 150, height: int = 20) -> Console:
    return RunConsole(file=io.StringIO(), force_terminal=True, width=width, height=height, color_system=None)


def screen(progress: RunProgress, width: int = 150) -> str:
    page = RunConsole(file=io.StringIO(), width=width)
    page.print(progress.page())
    return "\n".join(written(page))


def test_a_terminal_shows_a_table_with_the_round_under_way_and_a_bar() -> None:
    console, clock = terminal(), Clock()
    with RunProgress(console, rounds=10, steps=40, clock=clock) as progress:
        clock.now += 40.0
        progress.write("round", ROUND | {"round": 1})
        progress.write("step", STEP)
        shown = screen(progress)
    assert re.search(r"^round +env-steps/s +100·J +committed +live +operations chosen +slots by stage", shown)
    assert re.search(r"1/10 +427 +58\.41 +58\.90 +61\.32 +wait 510 germinate 61 prune 20 +training 9 blending 4", shown)
    assert "2/10" in shown
    assert re.search(r"step +50/400 .*eta 4:40", shown)  # 50 steps in 40 s, 350 are left
    assert "50/400" in "".join(written(console))


@pytest.mark.parametrize(("width", "height"), [(150, 12), (110, 24), (80, 24)])
def test_the_bar_stays_in_sight_in_a_long_run(width: int, height: int) -> None:
    progress = RunProgress(terminal(width, height), rounds=500, steps=40)
    with progress:
        for number in range(1, 100):
            progress.write("round", ROUND | {"round": number})
        shown = screen(progress, width).splitlines()
    assert len(shown) <= height
    assert "99/500" in "".join(shown)
    assert shown[-1].startswith("step")


def test_a_console_whose_reader_left_goes_silent() -> None:
    class CloseOutput(io.StringIO):
        def write(self, text: str) -> int:
            raise BrokenPipeError

        def fileno(self) -> int:
            raise io.UnsupportedOperation

    console = RunConsole(file=CloseOutput())
    console._silence = lambda: None  # type: ignore[method-assign] -- the stream of the test itself stays open
    console.say("nobody reads this")
    assert console.quiet
    console.say("nor this")


def test_a_line_is_not_broken_or_marked_up() -> None:
    console = RunConsole(file=io.StringIO(), width=20)
    console.say("a [bold]long[/bold] line that is wider than the console")
    assert written(console) == ["a [bold]long[/bold] line that is wider than the console"]


def test_what_was_not_measured_is_a_dash_and_never_nan() -> None:
    nothing = ROUND | dict.fromkeys(("objective_mean", "committed_accuracy_mean", "live_accuracy_mean"), float("nan"))
    assert "  100·J -  committed -  live -  " in line(Shown.of(nothing), 10, 40, "?")
    progress = RunProgress(terminal(), rounds=10, steps=40)
    progress.write("round", nothing)
    assert re.search(r"2/10 +427 +- +- +-", screen(progress))


@pytest.mark.parametrize("width", [80, 120])
def test_a_narrow_terminal_shows_the_counts_of_the_newest_round_below_the_table(width: int) -> None:
    progress = RunProgress(terminal(width), rounds=10, steps=40)
    progress.write("round", ROUND | {"round": 1})
    progress.write("round", ROUND | {"ops": {"SET_ALPHA_TARGET": 1000}})
    header, first, second, operations, slots, bar = screen(progress, width).splitlines()
    assert header.split() == ["round", "env-steps/s", "100·J", "committed", "live"]
    assert (first.split()[0], second.split()[0]) == ("1/10", "2/10")
    assert operations.rstrip() == "operations chosen  set_alpha_target 1000"
    assert slots.rstrip() == "slots by stage     training 9 blending 4"
    assert bar.startswith("step")


@pytest.mark.parametrize(("width", "height"), [(140, 24), (150, 12), (110, 12), (80, 24), (60, 10)])
def test_the_bar_stays_in_sight_whatever_happens_in_a_round(width: int, height: int) -> None:
    everything = {name: 1000 for name in ("WAIT", "GERMINATE", "SET_ALPHA_TARGET", "PRUNE", "FOSSILIZE", "ADVANCE")}
    stages = {name: 100 for name in ("GERMINATED", "TRAINING", "BLENDING", "HOLDING", "FOSSILIZED", "EMBARGOED")}
    progress = RunProgress(terminal(width, height), rounds=500, steps=40)
    for number in range(1, 100):
        progress.write("round", ROUND | {"round": number, "ops": everything, "slots": stages})
    shown = screen(progress, width).splitlines()
    assert len(shown) < height
    assert "99/500" in "".join(shown)
    assert shown[-1].startswith("step")
    assert "…" not in "".join(shown)
