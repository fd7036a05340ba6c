"""Detectors of learning that goes wrong: what they find becomes an event. Those of ten rounds are in `trend.py`."""

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


_NEVER = {"actions_outside_mask": 0.0, "nonfinite_logits": 0.0}
"""What should be impossible, and makes log-probabilities and with them losses NaN."""
_ABOVE = {"ratio_max": 5.0, "hidden_rms": 10.0, "cell_rms": 10.0, "nonfinite_minibatches": 0.0, **_NEVER}
_BELOW = {
    "ratio_min": 0.1,
    "explained_variance": -0.5,
    "hidden_rms": 1e-6,
    "cell_rms": 1e-6,
    **{f"entropy_{head.name}": head.alarm for head in HEADS},
}
"""Joint probability ratio, a critic worse than a constant, a dead or exploding recurrent state, heads that no longer
explore."""


def alarms(metrics: Mapping[str, float]) -> Iterator[Alarm]:
    """Every metric that is beyond its threshold; missing ones (NaN) are never."""
    for name, value in metrics.items():
        if value > _ABOVE.get(name, float("inf")):
            yield Alarm(name, value, _ABOVE[name])
        if value < _BELOW.get(name, float("-inf")):
            yield Alarm(name, value, _BELOW[name])


def flag_alarms(steps: Sequence[int]) -> Iterator[Alarm]:
    """A mark of the reward that one host had in at least one step of an episode; `steps` counts them by mark."""
    for name, count in zip(FLAGS, steps, strict=True):
        if count:
            yield Alarm(f"{name}_steps", float(count), 0.0)
