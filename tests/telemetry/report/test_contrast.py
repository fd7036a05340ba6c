"""The colours of the pages: contrast by WCAG 2.2 AA, and distances for people with a colour vision deficiency."""

import math
import re
from itertools import combinations

import pytest

from esper.telemetry.report.page import asset, colors
from esper.telemetry.serve.app import _text

SCHEMES = ("light", "dark")
BACKGROUNDS = ("paper", "panel")
TEXT, GRAPHICS = 4.5, 3.0
"""Least contrast (WCAG 1.4.3 and 1.4.11)."""
APART = 10.0
"""Least distance of two colours of one chart in CIELAB; about 2 is just noticeable side by side."""
DEFICIENCIES = {
    "none": ((1, 0, 0), (0, 1, 0), (0, 0, 1)),
    "protanopia": ((0.152286, 1.052583, -0.204868), (0.114503, 0.786281, 0.099216), (-0.003882, -0.048116, 1.051998)),
    "deuteranopia": ((0.367322, 0.860646, -0.227968), (0.280085, 0.672501, 0.047413), (-0.01182, 0.04294, 0.968881)),
}
"""Of linear RGB: Machado, Oliveira and Fernandes (2009), severity 1."""
CHARTS = asset("charts.js")

RGB = tuple[float, ...]


def rgb(color: str) -> RGB:
    return tuple(int(color[i : i + 2], 16) / 255 for i in (1, 3, 5))


def linear(color: RGB) -> RGB:
    return tuple(c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for c in color)


def times(matrix: tuple[RGB, ...], vector: RGB) -> RGB:
    return tuple(sum(a * b for a, b in zip(row, vector, strict=True)) for row in matrix)


def luminance(color: RGB) -> float:
    return sum(weight * c for weight, c in zip((0.2126, 0.7152, 0.0722), linear(color), strict=True))


def contrast(a: RGB, b: RGB) -> float:
    low, high = sorted((luminance(a), luminance(b)))
    return (high + 0.05) / (low + 0.05)


def over(color: RGB, opacity: float, below: RGB) -> RGB:
    return tuple(opacity * a + (1 - opacity) * b for a, b in zip(color, below, strict=True))


def lab(color: RGB) -> RGB:
    """CIELAB of linear RGB."""
    to_xyz = ((0.4124564, 0.3575761, 0.1804375), (0.2126729, 0.7151522, 0.072175), (0.0193339, 0.119192, 0.9503041))
    x, y, z = (value / white for value, white in zip(times(to_xyz, color), (0.95047, 1.0, 1.08883), strict=True))
    x, y, z = (t ** (1 / 3) if t > 216 / 24389 else (24389 / 27 * t + 16) / 116 for t in (x, y, z))
    return 116 * y - 16, 500 * (x - y), 200 * (y - z)


def seen(color: str, deficiency: str) -> RGB:
    shown = times(DEFICIENCIES[deficiency], linear(rgb(color)))
    return lab(tuple(min(max(c, 0.0), 1.0) for c in shown))


def sets() -> dict[str, list[str]]:
    """The colours that a chart can hold at once, as charts.js names them."""
    named = {
        name: re.search(rf"const {name} = [{{\[](.*?)[}}\]];", CHARTS) for name in ("SERIES", "STAGES", "OPERATIONS")
    }
    return {name: re.findall(r"C\.(\w+)", found[1]) for name, found in named.items() if found}


def test_the_measures_are_those_of_known_colours():
    assert contrast(rgb("#000000"), rgb("#ffffff")) == pytest.approx(21.0)
    assert contrast(rgb("#777777"), rgb("#ffffff")) == pytest.approx(4.48, abs=0.01)  # just too pale for text
    assert lab(linear(rgb("#ff0000"))) == pytest.approx((53.24, 80.09, 67.2), abs=0.05)
    green, red = (seen(color, "deuteranopia") for color in ("#8ab000", "#d49a00"))
    assert math.dist(green, red) < APART < math.dist(*(seen(color, "none") for color in ("#8ab000", "#d49a00")))


@pytest.mark.parametrize("scheme", SCHEMES)
@pytest.mark.parametrize("ground", BACKGROUNDS)
def test_text_can_be_read(scheme, ground):
    found = colors(scheme)
    for name in ("ink", "faint", "link", "bad"):
        assert contrast(rgb(found[name]), rgb(found[ground])) >= TEXT, name


@pytest.mark.parametrize("scheme", SCHEMES)
@pytest.mark.parametrize("ground", BACKGROUNDS)
def test_lines_bars_and_marks_stand_out_from_the_page(scheme, ground):
    found = colors(scheme)
    names = re.search(r"const C = Object.fromEntries\(\[(.*?)\]", CHARTS)
    assert names
    used = [*re.findall(r"\w+", names[1]), "bad", "link"]
    assert len(used) == 10
    assert {name: contrast(rgb(found[name]), rgb(found[ground])) for name in used
            if contrast(rgb(found[name]), rgb(found[ground])) < GRAPHICS} == {}  # fmt: skip


@pytest.mark.parametrize("scheme", SCHEMES)
def test_numbers_can_be_read_on_the_darkest_shade(scheme):
    found, shade = colors(scheme), re.search(r"const SHADE = ([\d.]+);", CHARTS)
    assert shade
    ground = over(rgb(found["blue"]), float(shade[1]), rgb(found["paper"]))
    assert contrast(rgb(found["ink"]), ground) >= TEXT


@pytest.mark.parametrize("scheme", SCHEMES)
@pytest.mark.parametrize("deficiency", DEFICIENCIES)
@pytest.mark.parametrize("name", ["SERIES", "STAGES", "OPERATIONS"])
def test_colours_of_one_chart_can_be_told_apart(scheme, deficiency, name):
    found, used = colors(scheme), sets()[name]
    assert len(used) >= 5
    near = {pair: math.dist(*(seen(found[color], deficiency) for color in pair)) for pair in combinations(used, 2)}
    assert min(near.values()) >= APART, min(near, key=near.__getitem__)


def test_no_colour_of_a_chart_is_written_past_the_style_sheet():
    for name in ("charts.js", "app.js", "dom.js", "glance.js", "views.js", "live.js", "live.css"):
        text = _text(name)
        assert re.findall(r"#[0-9a-fA-F]{3,6}\b", text) == [], name
