import pytest

pytest.importorskip("matplotlib")

from esper.telemetry.report.figures import BLUE, RED, growth_picture, picture, write_figures
from esper.telemetry.report.page import payloads_of
from toy_record import ToyRecord, full_record


def payloads(record):
    return payloads_of(record, lambda done, total, name: None)


@pytest.fixture(scope="module")
def found():
    """The payloads of a full record, not to be changed."""
    return payloads(full_record())


def drawn(found, **curves):
    """The picture of its run, with other curves."""
    (run,) = found["runs"]
    return picture(run, found["curves"]["a"] | curves, *(found[name]["a"] for name in ("behaviour", "hosts")))


def test_a_run_is_drawn_as_png_and_svg(found, tmp_path):
    written = write_figures(found, tmp_path / "new")
    assert [path.name for path in written] == ["run.png", "run.svg"]
    assert written[0].read_bytes().startswith(b"\x89PNG")
    assert "</svg>" in written[1].read_text()


def test_the_picture_has_the_lines_and_words_of_the_page_and_lanes_that_are_filled_to_alpha(found):
    figure = drawn(found)
    (accuracy,) = (axes for axes in figure.axes if axes.get_title(loc="left") == "Accuracy")
    kept, live = accuracy.get_lines()
    assert [(line.get_color(), line.get_linestyle()) for line in (kept, live)] == [(BLUE, "-"), (RED, ":")]
    assert [text.get_text() for text in accuracy.get_legend().get_texts()] == ["kept network", "with all seeds"]
    others = [axes for axes in figure.axes if axes.get_title(loc="left") in ("100·J", "Growth")]
    assert [line.get_color() for axes in others for line in axes.get_lines()] == [BLUE, BLUE]
    assert all(any("line: mean, band: quartiles" in text.get_text() for text in axes.texts) for axes in others)
    heights = sorted({round(-patch.get_height(), 3) for patch in figure.axes[-1].patches if patch.get_height() <= 0})
    assert heights == pytest.approx([0.0, 0.39, 0.78])  # alpha 0, 0.5 and 1 of a lane of 0.78


@pytest.mark.parametrize(("mean", "is_said"), [(1.5, False), (9.0, True)])
def test_a_mean_outside_the_quartiles_is_explained_and_no_text_leaves_the_picture(found, mean, is_said):
    figure = drawn(found, growth=[mean] * 2, growth_low=[1.0] * 2, growth_high=[2.0] * 2)
    figure.canvas.draw()
    notes = [text for axes in figure.axes for text in axes.texts if text.get_transform() == axes.transAxes]
    assert any("few hosts move the mean out" in note.get_text() for note in notes) == is_said
    for note in notes:
        box = note.get_window_extent()
        assert 0 <= box.x0 <= box.x1 <= figure.bbox.width


def test_what_is_measured_on_all_examples_is_a_circle_beside_the_line_of_a_candidate():
    courses = [("kept", [1.0, 2.0, 3.0], [50.0, 70.0, 60.0], (3.0, 60.0)), ("new", [], [], None)]
    figure = growth_picture({"this network": courses}, "accuracy")
    figure.canvas.draw()
    (axes,) = figure.axes
    line, circle, dot, *_ = axes.get_lines()
    assert [part.get_xydata().tolist() for part in (line, circle, dot)] == [[[1, 50], [2, 70]], [[3, 60]], [[3, 60]]]
    assert circle.get_markerfacecolor() == "white"
    (note,) = axes.texts
    assert "circles: on all of them" in note.get_text()
    assert note.get_window_extent().x1 <= figure.bbox.width


def test_a_run_without_complete_rounds_has_no_picture(tmp_path):
    record = ToyRecord()
    record.add_run(rounds=0)
    assert write_figures(payloads(record), tmp_path) == []
