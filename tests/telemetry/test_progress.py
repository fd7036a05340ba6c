"""What a user sees, on a terminal and elsewhere."""

import io
import re
import threading
from itertools import pairwise
from typing import Any

import pytest

from esper.telemetry import progress as module
from esper.telemetry.page import Shown
from esper.telemetry.progress import FIRST_INTERVAL, PLAIN_INTERVAL, RunConsole, RunProgress, line

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


def plain() -> RunConsole:
    return RunConsole(file=io.StringIO(), width=200)


def written(console: RunConsole) -> list[str]:
    assert isinstance(console.file, io.StringIO)
    return console.file.getvalue().splitlines()


def test_a_round_is_one_line() -> None:
    assert line(Shown.of(ROUND), 10, 40, "8:12") == (
        "round 2/10  eta 8:12  427 env-steps/s  100·J 58.41 ± 2.10  committed 58.90  live 61.32  "
        "ops: wait 510 germinate 61 prune 20  slots: training 9 blending 4"
    )


def test_a_round_under_way_says_how_far_it_is() -> None:
    assert line(Shown.of(STEP), 10, 40, "8:12").startswith("round 2/10 step 10/40  eta 8:12")


def test_slow_runs_have_a_speed_too() -> None:
    assert "  0.4 env-steps/s" in line(Shown.of(ROUND | {"env_steps": 4, "seconds": 10.0}), 10, 40, "?")


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
    nothing = ROUND | dict.fromkeys(
        ("objective_mean", "objective_std", "committed_accuracy_mean", "live_accuracy_mean"), float("nan")
    )
    assert "  100·J -  committed -  live -  " in line(Shown.of(nothing), 10, 40, "?")


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
    return [text for text, _ in progress.page()]


def test_a_terminal_shows_finished_rounds_the_unfinished_one_and_the_learner() -> None:
    clock = Clock()
    progress = RunProgress(terminal(), rounds=10, steps=40, clock=clock)
    clock.now += 40.0
    progress.write("round", ROUND | {"round": 1, "growth_ratio_mean": 1.2, "approx_kl": 0.0118, "memory_bytes": PEAK})
    progress.write("step", STEP)
    progress.write("alarm", alarm())
    shown = screen(progress)
    assert re.search(r"^round 2/10 step 10/40 .* 0:40 eta 4:40  peak 330 MB$", shown[0])  # 50 steps in 40 s, 350 left
    assert re.search(r"^ +1/10 +58\.41 ± 2\.10 +58\.90 +61\.32 +1\.20x +427$", shown[2])
    assert re.search(r"^ +2/10 +58\.41 ± 2\.10 +58\.90 +61\.32 +unfinished +427$", shown[3])
    assert "learner    KL 0.0118" in shown
    assert shown[-1] == "alarms     round 1: objective_falls -2.31 (threshold -2)"


PEAK = {"allocated": None, "reserved": None, "peak": 329_584_640}


def test_a_round_that_is_done_replaces_the_unfinished_one() -> None:
    progress = RunProgress(terminal(), rounds=10, steps=40)
    progress.write("step", STEP)
    assert "unfinished" in "".join(screen(progress))
    progress.write("round", ROUND)
    assert "unfinished" not in "".join(screen(progress))


def test_only_the_alarms_of_the_newest_rounds_are_kept() -> None:
    progress = RunProgress(terminal(height=40), rounds=10, steps=40)
    for number in range(1, 6):
        progress.write("alarm", alarm(round=number))
    assert [text[11:19] for text in screen(progress)[-3:]] == ["round 5:", "round 4:", "round 3:"]


def test_a_live_terminal_ends_with_the_last_page() -> None:
    console = terminal()
    with RunProgress(console, rounds=1, steps=40) as progress:
        assert progress.is_live
        progress.write("step", STEP | {"round": 1})
        progress.write("round", ROUND | {"round": 1})
    last = "\n".join(written(console)).rpartition("1 round done")[2]
    assert "1/1" in last
    assert "unfinished" not in last


def test_a_quiet_console_has_no_page() -> None:
    assert not RunProgress(RunConsole(force_terminal=True, quiet=True), rounds=1, steps=1).is_live
    assert not RunProgress(plain(), rounds=1, steps=1).is_live


def test_drawing_takes_at_most_a_hundredth_of_the_time(monkeypatch: pytest.MonkeyPatch) -> None:
    drawn, now = [], [50.0]

    def costly(*arguments: object) -> list[tuple[str, str]]:
        drawn.append(now[0])
        now[0] += 0.02
        return []

    monkeypatch.setattr(module, "page", costly)
    monkeypatch.setattr(module.time, "perf_counter", lambda: now[0])
    progress = RunProgress(terminal(), rounds=1, steps=1)
    for _ in range(100):
        progress._drawing()
        now[0] += 0.25
    # a page of 20 ms is followed by two seconds without one; it is asked for every quarter of a second
    assert all(2.0 < b - a < 2.3 for a, b in pairwise(drawn))
    assert len(drawn) >= 11


def test_a_page_is_drawn_while_the_run_writes() -> None:
    progress = RunProgress(terminal(), rounds=2000, steps=2)
    stop = threading.Event()
    failures: list[Exception] = []

    def draw() -> None:
        while not stop.is_set():
            try:
                screen(progress)
            except Exception as error:  # shown by the assertion below
                failures.append(error)

    thread = threading.Thread(target=draw)
    thread.start()
    for number in range(1, 300):
        progress.write("step", STEP | {"round": number, "t": 1})
        progress.write("alarm", alarm(round=number, name=f"alarm_{number}"))
        progress.write("round", ROUND | {"round": number})
    stop.set()
    thread.join()
    assert failures == []
