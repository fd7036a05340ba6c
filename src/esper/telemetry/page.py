"""The live page of a run: at most 80 columns wide, and always lower than the terminal.

    round 12/100 step 23/40  ████▏                  12:41 eta 1:38:12  peak 1.20 GB
    round      100·J ± hosts  committed    live      growth  env-steps/s
    11/100      58.41 ± 2.10      58.90   61.32       1.20x          427
    12/100      51.02 ± 3.33      51.30   55.87  unfinished          431
    100·J      ▁▂▃▄▅▆▇█  41.20 to 58.41
    hosts      live accuracy; slots by stage letter; 8 of 64 hosts, and 56 more
      0 ▁▂▃▄▅▆▇█ 61.32 .tbhF     1 ▁▂▃▄▅▆▇█ 60.71 .tb.F         one point per step of the round
    slots      hosts by stage | by blueprint; 3 of 10 slots, and 7 more
      r0c0     training 9 blending 4 | norm 8 conv_light 5
    operations wait      █████ 510  germinate ▌     61  set_alpha ▏ 2
    reward     accuracy +0.120  rent -0.031                        sums over the round so far
    learner    KL 0.0118  clipped 0.115  explained variance 0.02
    entropy    slot 0.74  blueprint 1.00  style 0.99
    alarms     round 11: entropy_op 0.0120 (threshold 0.0500)

Each section says how many lines it needs at least, usually and at most. While there is room, sections get
their least lines in order of importance, then their usual number; then all grow in turn.
"""

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from esper.telemetry.figures import bar, duration, figure, size, sparkline, with_spread, wrapped

WIDTH = 80
"""Columns of the page at most."""
_LABEL = 11
"""Columns of the labels at the left."""
_HOST = 39
"""Columns of a host at least."""
_TREND = 40
"""Rounds in the sparkline of 100·J at most."""

Line = tuple[str, str]
"""Text and style."""
HEAD, PLAIN, BUSY, ALARM = "bold", "", "yellow", "bold red"


@dataclass(frozen=True, kw_only=True)
class Shown:
    """The displayed values of a record of kind "step" (a round in progress) or "round".

    `objective` (100·J, with its standard deviation over hosts `spread`) and `committed` (pp) are means over hosts for
    the committed networks, `live` (pp) with all live seeds. `ops` counts effective operations, `slots` slots by stage.
    """

    round: int
    step: int | None
    objective: float
    spread: float
    committed: float
    live: float
    growth: float
    speed: float
    ops: Mapping[str, int]
    slots: Mapping[str, int]

    @classmethod
    def of(cls, fields: Mapping[str, Any]) -> "Shown":
        """The values of a record."""
        return cls(
            round=fields["round"],
            step=fields.get("t"),
            objective=fields["objective_mean"],
            spread=fields["objective_std"],
            committed=fields["committed_accuracy_mean"],
            live=fields["live_accuracy_mean"],
            growth=fields.get("growth_ratio_mean", math.nan),
            speed=fields["env_steps"] / max(fields["seconds"], 1e-9),
            ops=fields["ops"],
            slots=fields["slots"],
        )


@dataclass(frozen=True, kw_only=True)
class HostsShown:
    """The hosts in the newest step.

    Attributes:
        accuracy: live accuracy (pp) in each step of the round so far [T, N]; NaN where it was not measured.
        stages: of each host one letter per slot, such as ".tF".
        slots: of each slot its name, seeds by stage, and seeds by blueprint.
        terms: sum of each reward term over the round so far, as a mean over hosts.
        first: global number of the first host.
    """

    accuracy: np.ndarray
    stages: Sequence[str]
    slots: Sequence[tuple[str, Mapping[str, int], Mapping[str, int]]]
    terms: Mapping[str, float]
    first: int = 0


@dataclass(frozen=True, kw_only=True)
class View:
    """All that the page shows.

    Attributes:
        rounds, steps: total rounds, and control steps per round. finished: control steps done.
        elapsed: seconds. eta: the time that is left, as text.
        history: finished rounds. now: the unfinished one.
        hosts: None where steps are not reported.
        learner: metrics of the newest update; empty for scripted controllers. alarms: sentences, newest last.
        memory: peak bytes; None if unknown.
    """

    rounds: int
    steps: int
    finished: int
    elapsed: float
    eta: str
    history: Sequence[Shown]
    now: Shown | None
    hosts: HostsShown | None
    learner: Mapping[str, float]
    alarms: Sequence[str]
    memory: int | None = None


@dataclass(frozen=True)
class _Section:
    """A part of the page: `render(n)` gives at most n lines, for `least` <= n <= `most`; it is complete at `usual`."""

    render: Callable[[int], list[Line]]
    least: int
    usual: int
    most: int


def page(view: View, width: int, height: int) -> list[Line]:
    """The lines of the page, at most `height` - 1 of them and `width` or 80 columns wide."""
    width = min(width, WIDTH)
    newest = view.now or (view.history[-1] if view.history else None)
    sections = {
        "progress": _fixed([(_progress(view, width), HEAD)]),
        "rounds": _rounds(view),
        "trend": _trend(view, width),
        "hosts": _hosts(view.hosts, width),
        "slots": _slots(view.hosts, width),
        "operations": _operations(newest.ops if newest else {}, width),
        "reward": _labelled("reward", _terms(view.hosts), width),
        "learner": _labelled("learner", _learner(view.learner), width),
        "entropy": _labelled("entropy", _entropies(view.learner), width),
        "alarms": _alarms(view.alarms, width),
    }
    lines: list[Line] = []
    for name, number in _allotted(sections, height - 1).items():
        lines += sections[name].render(number)
    return [(text[:width].rstrip(), style) for text, style in lines]


_IMPORTANCE = (
    *("progress", "rounds", "alarms", "hosts", "operations", "learner", "slots", "entropy", "reward", "trend"),
)


def _allotted(sections: Mapping[str, _Section], room: int) -> dict[str, int]:
    """Lines of each section, in the order of the page."""
    given: dict[str, int] = {}
    for name in _IMPORTANCE:
        least = sections[name].least
        if 0 < least <= room:
            given[name] = least
            room -= least
    for name in given:
        more = min(sections[name].usual - given[name], room)
        given[name] += more
        room -= more
    while room:
        growing = [name for name in _IMPORTANCE if name in given and given[name] < sections[name].most]
        if not growing:
            break
        for name in growing[:room]:
            given[name] += 1
        room -= min(room, len(growing))
    return {name: given[name] for name in sections if name in given}


def _fixed(lines: list[Line]) -> _Section:
    return _Section(lambda number: lines[:number], len(lines), len(lines), len(lines))


def _labelled(label: str, words: Iterable[str], width: int, style: str = PLAIN) -> _Section:
    """Words after a label, in as many lines as they need."""
    texts = wrapped(words, width - _LABEL)
    labels = [label] + [""] * (len(texts) - 1)
    return _fixed([(f"{name:<{_LABEL}}{text}", style) for name, text in zip(labels, texts, strict=False)])


def _progress(view: View, width: int) -> str:
    total = view.rounds * view.steps
    rounds, steps = divmod(view.finished, view.steps)
    if view.now is not None:  # a round is unfinished until its policy update, after the last step
        rounds, steps = view.now.round - 1, view.now.step or 0
    done = rounds == view.rounds
    plural = "s" * (rounds != 1)
    front = f"{rounds} round{plural} done" if done else f"round {rounds + 1}/{view.rounds} step {steps}/{view.steps}"
    memory = f"  peak {size(view.memory)}" if view.memory else ""
    back = f"{duration(view.elapsed)} eta {view.eta}{memory}"
    room = max(width - len(front) - len(back) - 4, 0)
    return f"{front}  {bar(view.finished / total, room):<{room}}  {back}"


def _rounds(view: View) -> _Section:
    shown = [*view.history, *([view.now] if view.now else [])]
    header = f"{'round':>9}  {'100·J ± hosts':>15}  {'committed':>9}  {'live':>6}  {'growth':>10}  {'env-steps/s':>11}"

    def render(number: int) -> list[Line]:
        return [(header, HEAD), *(_round(one, view) for one in shown[-(number - 1) :])]

    return _Section(render, 2 if shown else 0, 1 + min(len(shown), 3), 1 + len(shown))


def _round(shown: Shown, view: View) -> Line:
    growth = "unfinished" if shown.step is not None else f"{shown.growth:.2f}x"
    speed = f"{shown.speed:.0f}" if shown.speed >= 10.0 else f"{shown.speed:.1f}"
    text = (
        f"{f'{shown.round}/{view.rounds}':>9}  {with_spread(shown.objective, shown.spread):>15}  "
        f"{figure(shown.committed, '.2f'):>9}  {figure(shown.live, '.2f'):>6}  {growth:>10}  {speed:>11}"
    )
    return text, PLAIN if shown.step is None else BUSY


def _trend(view: View, width: int) -> _Section:
    values = [shown.objective for shown in view.history]
    known = [value for value in values if math.isfinite(value)]
    if len(known) < 2:
        return _fixed([])
    low, high = min(known), max(known)
    spark = sparkline(values, min(_TREND, width - _LABEL), low, high)
    return _fixed([(f"{'100·J':<{_LABEL}}{spark}  {low:.2f} to {high:.2f}", PLAIN)])


def _hosts(hosts: HostsShown | None, width: int) -> _Section:
    """One line for as many hosts as fit beside each other."""
    if hosts is None or not len(hosts.accuracy):
        return _fixed([])
    num_hosts, slots = hosts.accuracy.shape[1], len(hosts.stages[0])
    columns = max(width // max(_HOST, slots + 22), 1)
    room = width // columns - 1
    known = hosts.accuracy[np.isfinite(hosts.accuracy)]
    low, high = (float(known.min()), float(known.max())) if known.size else (0.0, 1.0)

    def render(number: int) -> list[Line]:
        count = min((number - 1) * columns, num_hosts)
        texts = [_host(hosts, n, room, low, high) for n in range(count)]
        rows = ["  ".join(texts[i : i + columns]) for i in range(0, count, columns)]
        more = f"; {count} of {num_hosts} hosts, and {num_hosts - count} more" if count < num_hosts else ""
        header = f"{'hosts':<{_LABEL}}live accuracy; slots by stage letter{more}"
        return [(header, HEAD), *((row, PLAIN) for row in rows)]

    rows = -(-num_hosts // columns)
    return _Section(render, 2, 1 + min(rows, 4), 1 + rows)


def _host(hosts: HostsShown, n: int, width: int, low: float, high: float) -> str:
    values = hosts.accuracy[:, n].tolist()
    room = max(width - 12 - len(hosts.stages[n]), 8)
    spark = sparkline(values, room, low, high)
    return f"{hosts.first + n:>3} {spark:<{room}} {figure(values[-1], '.2f'):>6} {hosts.stages[n]}"[:width].ljust(width)


def _slots(hosts: HostsShown | None, width: int) -> _Section:
    if hosts is None or not hosts.slots:
        return _fixed([])

    def render(number: int) -> list[Line]:
        shown = hosts.slots[: number - 1]
        left = len(hosts.slots) - len(shown)
        more = f"; {len(shown)} of {len(hosts.slots)} slots, and {left} more" if left else ""
        lines: list[Line] = [(f"{'slots':<{_LABEL}}hosts by stage | by blueprint{more}", HEAD)]
        for name, stages, blueprints in shown:
            lines.append((_slot(name, stages, blueprints, width), PLAIN))
        return lines

    return _Section(render, 2, 1 + min(len(hosts.slots), 3), 1 + len(hosts.slots))


def _slot(name: str, stages: Mapping[str, int], blueprints: Mapping[str, int], width: int) -> str:
    """One line; what does not fit is counted, largest numbers first."""
    room = width - _LABEL - 3
    left = _fitting(stages, max(room // 2, room - len(_fitting(blueprints, room))))
    return f"  {name:<{_LABEL - 2}}{left} | {_fitting(blueprints, room - len(left))}"


def _fitting(numbers: Mapping[str, int], width: int) -> str:
    largest_first = sorted(numbers.items(), key=lambda item: -item[1])
    words = [f"{name.lower()} {number}" for name, number in largest_first if number]
    for kept in range(len(words), 0, -1):
        text = " ".join(words[:kept]) + (f" +{len(words) - kept}" if kept < len(words) else "")
        if len(text) <= width:
            return text
    return f"{len(words)} kinds"[:width] if words else "-"


def _operations(ops: Mapping[str, int], width: int) -> _Section:
    """The histogram of the effective operations of the newest round."""
    largest = max(ops.values(), default=0)
    if not largest:
        return _fixed([])
    cells = [
        f"{name.lower().removesuffix('_target'):<9} {bar(number / largest, 5):<5} {number:<6}"
        for name, number in ops.items()
    ]
    return _labelled("operations", [cell[:21] for cell in cells], width)


def _terms(hosts: HostsShown | None) -> list[str]:
    """The terms that are not zero, largest first."""
    terms = {name: value for name, value in hosts.terms.items() if value} if hosts else {}
    return [f"{name} {value:+.3f}" for name, value in sorted(terms.items(), key=lambda item: -abs(item[1]))]


_LEARNER = {
    "approx_kl": ("KL", ".4f"),
    "clip_fraction": ("clipped", ".3f"),
    "explained_variance": ("explained variance", ".2f"),
    "grad_norm": ("gradient norm", ".2f"),
    "ratio_max": ("largest ratio", ".2f"),
    "return_mean": ("return", ".3f"),
}


def _learner(metrics: Mapping[str, float]) -> list[str]:
    known = {name: value for name, value in metrics.items() if name in _LEARNER}
    return [f"{word} {figure(known[name], form)}" for name, (word, form) in _LEARNER.items() if name in known]


def _entropies(metrics: Mapping[str, float]) -> list[str]:
    """Entropy of each head as a share of the largest possible one."""
    heads = {name.removeprefix("entropy_"): value for name, value in metrics.items() if name.startswith("entropy_")}
    return [f"{head} {figure(value, '.2f')}" for head, value in heads.items() if head != "loss"]


def _alarms(alarms: Sequence[str], width: int) -> _Section:
    """The newest alarms, newest first."""
    if not alarms:
        return _fixed([(f"{'alarms':<{_LABEL}}none", PLAIN)])
    lines = [(f"{'' if i else 'alarms':<{_LABEL}}{text}", ALARM) for i, text in enumerate(reversed(alarms))]
    return _Section(lambda number: lines[:number], 1, 1, min(len(lines), 3))
