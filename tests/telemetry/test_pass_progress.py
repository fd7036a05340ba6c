"""What a user sees of a search."""

import io

from esper.telemetry.progress import PassProgress, RunConsole


class Clock:
    """Seconds that pass when a test says so."""

    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


def test_without_a_terminal_a_line_comes_soon_and_then_now_and_then() -> None:
    console, clock = RunConsole(file=io.StringIO(), width=200), Clock()
    with PassProgress(console, 4, clock) as progress:
        for stage in ("grid", "grid", "rules", "confirmation"):
            progress.stage(stage)
            clock.now += 20.0
            progress.advance()
    assert isinstance(console.file, io.StringIO)
    # after 20 s the first line, and the next one 30 s later at the earliest; each pass took 20 s
    assert console.file.getvalue().splitlines() == ["grid  pass 1/4  eta 1:00", "rules  pass 3/4  eta 0:20"]


def test_the_time_that_is_left_is_known_from_the_first_step_on() -> None:
    console, clock = RunConsole(file=io.StringIO(), width=200), Clock()
    with PassProgress(console, 4, clock) as progress:
        progress.stage("grid")
        clock.now += 10.0
        progress.advance(0.25)  # 10 s of 4 x 40 s
    assert isinstance(console.file, io.StringIO)
    assert console.file.getvalue() == "grid  pass 0/4  eta 2:30\n"


def test_passes_with_lines_of_their_own_are_counted_with_those_that_are_skipped() -> None:
    console, clock = RunConsole(file=io.StringIO(), width=200), Clock()
    with PassProgress(console, 4, clock) as progress:
        progress.skip()
        progress.begin("random, 2 hosts")
        for _ in range(3):
            progress.advance(1 / 3)
        clock.now += 0.5
        progress.begin("heuristic, 2 hosts")
    assert isinstance(console.file, io.StringIO)
    assert console.file.getvalue().splitlines() == [
        "esper: random, 2 hosts (2 of 4, eta ...)",
        "esper: heuristic, 2 hosts (3 of 4, eta 0:01)",  # two more of half a second
    ]


def test_on_a_terminal_a_bar_shows_the_stage_and_the_time_that_is_left() -> None:
    clock = Clock()
    console = RunConsole(file=io.StringIO(), width=100, force_terminal=True, color_system=None)
    with PassProgress(console, 4, clock) as progress:
        progress.stage("grid")
        clock.now += 20.0
        progress.advance()
    assert isinstance(console.file, io.StringIO)
    shown = console.file.getvalue()
    assert "grid  pass 1/4" in shown
    assert "eta 1:00" in shown
