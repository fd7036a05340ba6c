import pytest

pytest.importorskip("matplotlib")

from esper.telemetry.report.figures import picture, write_figures
from esper.telemetry.report.page import payloads_of
from toy_record import ToyRecord, full_record


def payloads(record):
    return payloads_of(record, lambda done, total, name: None)


def test_a_run_is_drawn_as_png_and_svg(tmp_path):
    written = write_figures(payloads(full_record()), tmp_path / "new")
    assert [path.name for path in written] == ["run.png", "run.svg"]
    assert written[0].read_bytes().startswith(b"\x89PNG")
    assert "</svg>" in written[1].read_text()


def test_the_lanes_are_filled_to_alpha():
    found = payloads(full_record())
    (run,) = found["runs"]
    figure = picture(run, *(found[name]["a"] for name in ("curves", "behaviour", "hosts")))
    heights = sorted({round(-patch.get_height(), 3) for patch in figure.axes[-1].patches if patch.get_height() <= 0})
    assert heights == pytest.approx([0.0, 0.39, 0.78])  # alpha 0, 0.5 and 1 of a lane of 0.78


def test_a_run_without_complete_rounds_has_no_picture(tmp_path):
    record = ToyRecord()
    record.add_run(rounds=0)
    assert write_figures(payloads(record), tmp_path) == []
