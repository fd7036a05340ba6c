"""Numbers as short texts."""

import pytest

from esper.telemetry.figures import bar, counts, duration, figure, size, sparkline, with_spread, wrapped

NAN = float("nan")


def test_nothing_is_said_in_a_word() -> None:
    assert counts({"WAIT": 0}) == counts({}) == "none"
    assert figure(NAN, ".2f") == "-"


@pytest.mark.parametrize(
    ("seconds", "said"), [(0.2, "0:00"), (59.6, "1:00"), (61.0, "1:01"), (3599.0, "59:59"), (3723.4, "1:02:03")]
)
def test_a_duration_is_hours_minutes_seconds(seconds: float, said: str) -> None:
    assert duration(seconds) == said


def test_a_mean_comes_with_its_spread_over_hosts_unless_there_is_one_host() -> None:
    assert with_spread(58.412, 2.1) == "58.41 ± 2.10"
    assert with_spread(58.412, NAN) == "58.41"
    assert with_spread(NAN, NAN) == "-"


def test_memory_is_in_megabytes_or_gigabytes() -> None:
    assert (size(329_584_640), size(1_250_000_000)) == ("330 MB", "1.25 GB")


def test_a_sparkline_runs_from_the_lowest_to_the_highest_level() -> None:
    assert sparkline([0.0, 1.0, 2.0, 3.0, 4.0, 5.0, 6.0, 7.0], 8, 0.0, 7.0) == "▁▂▃▄▅▆▇█"
    assert sparkline([0.0, NAN, 7.0], 8, 0.0, 7.0) == "▁ █"
    assert sparkline([5.0, 5.0], 8, 5.0, 5.0) == "▁▁"


def test_a_long_series_shows_the_last_value_of_each_part() -> None:
    assert sparkline([7.0, 0.0, 7.0, 7.0, 0.0, 7.0], 3, 0.0, 7.0) == "▁██"
    assert len(sparkline([float(i) for i in range(101)], 17, 0.0, 100.0)) == 17


def test_a_bar_has_eighths_and_is_empty_only_for_nothing() -> None:
    assert [bar(share, 4) for share in (0.0, 0.001, 0.25, 0.53125, 1.0)] == ["", "▏", "█", "██▏", "████"]


def test_words_are_wrapped_whole_and_cut_only_where_one_is_too_long() -> None:
    assert wrapped(["one", "two", "three"], 8) == ["one  two", "three"]
    assert wrapped(["incomprehensible"], 8) == ["incompre"]
    assert wrapped([], 8) == []
