"""The benchmark of precision, with a host and few images: both executors in both precisions."""

import json

import precision
from esper.tolaria.amp import LossScaler
from grown_hosts import DIGITS_SHAPE, GrownHosts
from precision import Options, main


def test_both_executors_are_trained_and_measured_in_both_precisions(tmp_path, capsys, monkeypatch):
    used = []
    monkeypatch.setattr(precision, "WORK", ((DIGITS_SHAPE, 1, 16),))
    for name in ("train", "measure"):
        work = getattr(GrownHosts, name)
        monkeypatch.setattr(
            GrownHosts,
            name,
            lambda self, executor, work=work, name=name: (
                used.append((name, type(executor).__name__, self.streamed.data.scaler.dtype)),
                work(self, executor),
            ),
        )
    assert main(Options(repetitions=1, val=16, json=tmp_path / "precision.json")) == 0
    rows = json.loads((tmp_path / "precision.json").read_text())["rows"]
    assert len(rows) == 4
    assert all(row["first_ms"] > 0.0 and row["second_ms"] > 0.0 for row in rows)
    assert len(set(used)) == 8
    assert LossScaler(None, 1, precision.CPU).dtype is None  # float32 is the absence of a dtype
    assert "bf16" in capsys.readouterr().out
