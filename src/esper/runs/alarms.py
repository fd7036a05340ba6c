"""Thresholds on training metrics; a crossed one becomes an alarm event. Alarms over ten rounds are in `trend.py`."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from esper.leyline.actions import HEADS
from esper.simic.rewards.credit import FLAGS


@dataclass(frozen=True)
class Alarm:
    """A metric beyond its threshold."""

    name: str
    value: float
    threshold: float


_ABOVE = {
    "ratio_max": 5.0,
    "hidden_rms": 10.0,
    "cell_rms": 10.0,
    "nonfinite_minibatches": 0.0,
    "actions_outside_mask": 0.0,
    "nonfinite_logits": 0.0,
}
_BELOW = {
    "ratio_min": 0.1,
    "explained_variance": -0.5,
    "hidden_rms": 1e-6,
    "cell_rms": 1e-6,
    **{f"entropy_{head.name}": head.alarm for head in HEADS},
}
"""Collapsed probability ratios, a critic worse than a constant, a dead recurrent state, heads that stopped exploring."""


def alarms(metrics: Mapping[str, float]) -> Iterator[Alarm]:
    """Every metric beyond its threshold. A missing metric (NaN) raises no alarm."""
    for name, value in metrics.items():
        if value > _ABOVE.get(name, float("inf")):
            yield Alarm(name, value, _ABOVE[name])
        if value < _BELOW.get(name, float("-inf")):
            yield Alarm(name, value, _BELOW[name])


def flag_alarms(steps: Sequence[int]) -> Iterator[Alarm]:
    """The reward flags that a host raised in an episode; `steps` counts the steps of each flag."""
    for name, count in zip(FLAGS, steps, strict=True):
        if count:
            yield Alarm(f"{name}_steps", float(count), 0.0)
