"""The live page, as text."""

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from esper.telemetry.page import BUSY, HostsShown, Shown, View, page

NAN = float("nan")
OPS = {"WAIT": 510, "GERMINATE": 61, "SET_ALPHA_TARGET": 12, "PRUNE": 20, "FOSSILIZE": 3, "ADVANCE": 0}
HEADS = ("slot", "blueprint", "style", "tempo", "alpha_target", "alpha_speed", "alpha_curve", "op")


def shown(number: int, step: int | None = None) -> Shown:
    return Shown(
        round=number,
        step=step,
        objective=40.0 + number,
        spread=2.1,
        committed=58.9,
        live=61.32,
        growth=1.2 if step is None else NAN,
        speed=427.0,
        ops=OPS,
        slots={"TRAINING": 9},
    )


def hosts(number: int, slots: int, steps: int = 23) -> HostsShown:
    """Host n rises from 0 to 2n in equal steps; its first slot trains, the others are dormant."""
    rise = np.linspace(0.0, 1.0, steps)[:, None] * 2.0 * np.arange(number)
    return HostsShown(
        accuracy=rise,
        stages=["t" + "." * (slots - 1)] * number,
        slots=[
            (f"r{s}c0", {"TRAINING": 9, "BLENDING": 4}, {"norm": 8, "conv_light": 5, "attention": 0})
            for s in range(slots)
        ],
        terms={"rent": -0.03, "accuracy": 0.12, "bonus": 0.0},
    )


LEARNER = {
    "approx_kl": 0.0118,
    "clip_fraction": 0.115,
    "explained_variance": 0.02,
    "grad_norm": 18.66,
    "entropy_loss": -1.0,
    **{f"entropy_{head}": 0.9 for head in HEADS},
}


def view(**changes: Any) -> View:
    given = View(
        rounds=100,
        steps=40,
        finished=11 * 40 + 23,
        elapsed=761.0,
        eta="1:38:12",
        history=[shown(i) for i in range(1, 12)],
        now=shown(12, step=23),
        hosts=hosts(64, 10),
        learner=LEARNER,
        alarms=["round 10: ratio_max 6 (threshold 5)", "round 11: objective_falls -2.31 (threshold -2)"],
        memory=1_200_000_000,
    )
    return replace(given, **changes)


def text(given: View, width: int = 80, height: int = 24) -> list[str]:
    return [line for line, _ in page(given, width, height)]


def test_a_run_of_64_hosts_with_ten_slots_fits_a_terminal_of_80_by_24() -> None:
    assert text(view()) == [
        "round 12/100 step 23/40  ██▋                     12:41 eta 1:38:12  peak 1.20 GB",
        "    round    100·J ± hosts  committed    live      growth  env-steps/s",
        "   10/100     50.00 ± 2.10      58.90   61.32       1.20x          427",
        "   11/100     51.00 ± 2.10      58.90   61.32       1.20x          427",
        "   12/100     52.00 ± 2.10      58.90   61.32  unfinished          427",
        "100·J      ▁▂▂▃▄▅▅▆▇▇█  41.00 to 51.00",
        "hosts      live accuracy; slots by stage letter; 8 of 64 hosts, and 56 more",
        "  0 ▁▁▁▁▁▁▁▁▁▁▁▁▁▁▁▁▁   0.00 t.........    1 ▁▁▁▁▁▁▁▁▁▁▁▁▁▁▁▁▁   2.00 t.........",
        "  2 ▁▁▁▁▁▁▁▁▁▁▁▁▁▁▁▁▁   4.00 t.........    3 ▁▁▁▁▁▁▁▁▁▁▁▁▁▁▁▁▁   6.00 t.........",
        "  4 ▁▁▁▁▁▁▁▁▁▁▁▁▁▁▁▁▁   8.00 t.........    5 ▁▁▁▁▁▁▁▁▁▁▁▁▁▁▁▂▂  10.00 t.........",
        "  6 ▁▁▁▁▁▁▁▁▁▁▁▁▁▂▂▂▂  12.00 t.........    7 ▁▁▁▁▁▁▁▁▁▁▁▂▂▂▂▂▂  14.00 t.........",
        "slots      hosts by stage | by blueprint; 3 of 10 slots, and 7 more",
        "  r0c0     training 9 blending 4 | norm 8 conv_light 5",
        "  r1c0     training 9 blending 4 | norm 8 conv_light 5",
        "  r2c0     training 9 blending 4 | norm 8 conv_light 5",
        "operations wait      █████ 510    germinate ▋     61     set_alpha ▏     12",
        "           prune     ▎     20     fossilize ▏     3      advance         0",
        "reward     accuracy +0.120  rent -0.030",
        "learner    KL 0.0118  clipped 0.115  explained variance 0.02",
        "           gradient norm 18.66",
        "entropy    slot 0.90  blueprint 0.90  style 0.90  tempo 0.90  alpha_target 0.90",
        "           alpha_speed 0.90  alpha_curve 0.90  op 0.90",
        "alarms     round 11: objective_falls -2.31 (threshold -2)",
    ]


def test_an_unfinished_round_says_so_and_stands_out() -> None:
    (line,) = [(text, style) for text, style in page(view(), 80, 24) if text.lstrip().startswith("12/100")]
    assert "unfinished" in line[0]
    assert line[1] == BUSY
    assert not any("unfinished" in line for line in text(view(now=None, finished=440)))


def test_a_round_whose_steps_are_done_is_unfinished_until_its_update() -> None:
    given = view(rounds=12, now=shown(12, step=40), finished=480)
    assert text(given)[0].startswith("round 12/12 step 40/40  ")
    assert "unfinished" in "".join(text(given))
    over = view(rounds=12, now=None, history=[shown(i) for i in range(1, 13)], finished=480)
    assert text(over)[0].startswith("12 rounds done  █")


def test_before_the_first_step_there_is_only_the_bar() -> None:
    empty = view(finished=0, history=[], now=None, hosts=None, learner={}, alarms=[], memory=None, eta="...")
    assert text(empty) == [f"round 1/100 step 0/40{'12:41 eta ...':>59}", "alarms     none"]


def test_a_scripted_controller_has_no_section_of_a_learner() -> None:
    assert not any(line.startswith(("learner", "entropy")) for line in text(view(learner={})))


def test_a_high_terminal_shows_more_of_everything() -> None:
    lines = text(view(), height=60)
    assert len(lines) == 59
    assert sum("/100 " in line for line in lines[1:]) == 12
    assert "slots      hosts by stage | by blueprint" in lines
    assert lines[-1].strip() == "round 10: ratio_max 6 (threshold 5)"


def test_few_hosts_are_all_shown_and_nothing_is_said_of_more() -> None:
    lines = text(view(hosts=hosts(3, 2)))
    assert "hosts      live accuracy; slots by stage letter" in lines
    assert not any("more" in line for line in lines)


@pytest.mark.parametrize("num_hosts", [1, 7, 64, 1024])
@pytest.mark.parametrize("slots", [1, 10, 30])
@pytest.mark.parametrize(("width", "height"), [(80, 24), (200, 60), (60, 12), (40, 8), (20, 3), (10, 2)])
def test_the_page_is_never_wider_than_80_columns_and_lower_than_the_terminal(
    num_hosts: int, slots: int, width: int, height: int
) -> None:
    lines = text(view(hosts=hosts(num_hosts, slots)), width, height)
    assert 1 <= len(lines) < height
    assert max(map(len, lines)) <= min(width, 80)
    assert lines[0].startswith("round 12/1")


def test_a_short_terminal_keeps_the_round_and_the_alarms() -> None:
    lines = text(view(), height=5)
    assert [line.split()[0] for line in lines] == ["round", "round", "12/100", "alarms"]


def test_what_was_not_measured_is_a_dash_or_a_blank_and_never_nan() -> None:
    unknown = hosts(2, 1, steps=3)
    unknown.accuracy[1] = NAN
    unknown.accuracy[2, 1] = NAN
    nothing = replace(shown(12, step=3), objective=NAN, spread=NAN, committed=NAN, live=NAN)
    lines = text(view(now=nothing, hosts=unknown, learner={"entropy_tempo": NAN, "approx_kl": NAN}))
    assert "nan" not in "".join(lines)
    assert "   12/100                -          -       -  unfinished          427" in lines
    assert any(line.startswith("  1 ▁") and " - t" in line for line in [part[41:] for part in lines])


def test_kinds_that_do_not_fit_are_counted() -> None:
    many = {f"blueprint_{i}": 10 - i for i in range(10)}
    lines = text(view(hosts=replace(hosts(2, 1), slots=[("r0c0", {"TRAINING": 60}, many)])))
    (slot,) = [line for line in lines if line.startswith("  r0c0")]
    assert slot == "  r0c0     training 60 | blueprint_0 10 blueprint_1 9 blueprint_2 8 +7"
