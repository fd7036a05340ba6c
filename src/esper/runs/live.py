"""The hosts of a run for its live display: keeps little while the run works, and counts only when the page is drawn."""

from collections.abc import Sequence
from typing import final

import numpy as np

from esper.leyline.messages import EngineSpec
from esper.leyline.stages import HAS_MODULE, NUM_STAGE_VALUES, SeedStage
from esper.telemetry.page import HostsShown
from esper.tolaria.state import StepReport

_LETTERS = np.full(NUM_STAGE_VALUES, "?")
_LETTERS[list(SeedStage)] = [stage.name[0].lower() for stage in SeedStage]
_LETTERS[[SeedStage.DORMANT, SeedStage.FOSSILIZED]] = [".", "F"]
_LIVE = tuple(HAS_MODULE)


class _Episode:
    """What is kept of the steps of an episode. Arrays are copied: those of a report are parts of one large array."""

    def __init__(self, first: StepReport) -> None:
        self.number, self.newest = first.episode, first
        self.accuracy: list[np.ndarray] = []
        self.rewards = np.zeros(first.breakdown.shape[1])

    def add(self, report: StepReport) -> None:
        self.newest = report
        self.accuracy.append(report.val_acc.copy())
        self.rewards = self.rewards + report.breakdown[report.panic_reason == 0].sum(axis=0, dtype=np.float64)


@final
class LiveHosts:
    """Collects the step reports of the newest round.

    The run adds reports; the thread that draws asks `shown`.

    Args:
        spec: of the engine. terms: names of the reward terms.
    """

    def __init__(self, spec: EngineSpec, terms: Sequence[str]) -> None:
        self._spec, self._terms = spec, tuple(terms)
        self._episode: _Episode | None = None

    def add(self, report: StepReport) -> None:
        """Take the report of a step."""
        episode = self._episode
        if episode is None or episode.number != report.episode:
            self._episode = episode = _Episode(report)  # replaced as a whole: the other thread may be reading
        episode.add(report)

    def shown(self) -> HostsShown | None:
        """The hosts as they are now; None before the first step."""
        episode = self._episode
        if episode is None or not episode.accuracy:
            return None
        newest = episode.newest
        sums = (episode.rewards / newest.val_acc.shape[0]).tolist()
        return HostsShown(
            accuracy=np.stack(episode.accuracy[:]),
            stages=["".join(row) for row in _LETTERS[newest.stage].tolist()],
            slots=[self._slot(newest, s) for s in range(self._spec.num_slots)],
            terms=dict(zip(self._terms, sums, strict=True)),
            first=self._spec.host_offset,
        )

    def _slot(self, report: StepReport, s: int) -> tuple[str, dict[str, int], dict[str, int]]:
        """Name, hosts by stage of their seed, and hosts by its blueprint."""
        names = self._spec.blueprint_names
        stages = np.bincount(report.stage[:, s], minlength=NUM_STAGE_VALUES).tolist()
        live = np.isin(report.stage[:, s], _LIVE)
        blueprints = np.bincount(report.blueprint[live, s], minlength=len(names)).tolist()
        return (
            self._spec.slot_ids[s],
            {stage.name: stages[stage] for stage in SeedStage if stage is not SeedStage.DORMANT and stages[stage]},
            {name: number for name, number in zip(names, blueprints, strict=True) if number},
        )
