"""Check the synergy bonus on pairs of seeds: by hand, in plain floats, and by the batched kernel.

    bonus   0.1 tanh(0.5 I)   if the target slot holds a seed, d >= 0.5, attribution > 0 and I > 0; else 0
    I_ij    f(R + i + j) - f(R + i) - f(R + j) + f(R)     f accuracy of a set of seeds (pp), R fossils in the background
    I       sum of I_ij over j

The first table has the bonus of one seed of a pair in mode `shaped` or `escrow`: by hand, by `reward_of_row` in plain
floats, and by `compute_reward_batched` for all cases at once. The second table derives the interactions of an additive
and of a superadditive model (v_i points each, and 0.5 v_i v_j for each pair) from the coalitions of the engine.

    python scripts/verify_synergy_bonus.py
    python scripts/verify_synergy_bonus.py --json synergy.json

Exit code 1 if a difference is above 1e-9 (float64) or 1e-5 (float32).
"""

import math
import sys
from collections.abc import Callable, Iterable, Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch
import tyro
from rich.console import Console
from rich.table import Table
from torch import Tensor

from esper.leyline.actions import LifecycleOp
from esper.leyline.errors import EsperError
from esper.leyline.stages import SeedStage
from esper.simic.rewards import REWARD_TERMS, RewardConfig, compute_reward_batched
from esper.tolaria.coalitions import derive, enumerate_coalitions
from esper.tolaria.runtime import choose_device
from script_report import write_result

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "tests"))  # the reference in plain floats lies there
from reference.rewards.golden import kernel_arguments
from reference.rewards.modes import reward_of_row
from reference.rewards.row import HostRow

FLOAT64, FLOAT32 = 1e-9, 1e-5
NAN = math.nan
SYNERGY = REWARD_TERMS.index("synergy")
BONUS = {0.5: 0.0244918662, 2.5: 0.0848283640, 10.0: 0.0999909204}
"""0.1 tanh(I / 2) of the interactions that are used here, from a table of tanh."""
BASE, STRENGTHS, PAIR = 40.0, (3.1, 4.3, -2.2), 0.5
"""The scripted models: f = 40 + sum v_i (+ 0.5 v_i v_j for each pair)."""
INTERACTIONS = {(0, 1): 6.665, (0, 2): -3.41, (1, 2): -4.73}
"""0.5 v_i v_j by hand."""


@dataclass(frozen=True, kw_only=True)
class Options:
    """Check the synergy bonus, in plain floats and batched."""

    device: str = "auto"
    """auto, cpu, cuda or cuda:N."""
    json: Path | None = None
    """Also write every number to this file."""
    quick: bool = False
    """Accepted as by all scripts, without effect; the check takes seconds."""


@dataclass(frozen=True)
class Case:
    """One seed of a pair: interaction sum, changed inputs, and the bonus by hand."""

    name: str
    interaction: float
    bonus: float
    mode: str = "shaped"
    changes: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True)
class Line:
    """One comparison: `expected` by hand, `scalar` in plain floats, `batched` and `single` by the kernel."""

    name: str
    expected: float
    scalar: float
    batched: float
    single: float

    @property
    def difference(self) -> float:
        """Largest difference in float64."""
        return max(abs(self.batched - self.scalar), abs(self.scalar - self.expected))

    @property
    def single_difference(self) -> float:
        """Difference in float32."""
        return abs(self.single - self.expected)

    @property
    def good(self) -> bool:
        """Whether both differences are within tolerance; NaN is not."""
        return self.difference <= FLOAT64 and self.single_difference <= FLOAT32


NO_SEED = {"has_seed": False, "stage": int(SeedStage.DORMANT)}
HARMFUL = {"seed_contribution": -1.5, "counterfactual_improvement": 0.5}
ESCROW = {"stable_val_acc": 63.5, "val_acc": 64.0, "escrow_credit": 0.4}
CASES = (
    Case("I = -1", -1.0, 0.0),
    Case("I = 0", 0.0, 0.0),
    Case("I = 0.5", 0.5, BONUS[0.5]),
    Case("I = 2.5", 2.5, BONUS[2.5]),
    Case("I = 10", 10.0, BONUS[10.0]),
    Case("I = -1, no seed", -1.0, 0.0, changes=NO_SEED),
    Case("I = 0, no seed", 0.0, 0.0, changes=NO_SEED),
    Case("I = 0.5, no seed", 0.5, 0.0, changes=NO_SEED),
    Case("I = 2.5, no seed", 2.5, 0.0, changes=NO_SEED),
    Case("I = 10, no seed", 10.0, 0.0, changes=NO_SEED),
    Case("I not measured", NAN, 0.0),
    Case("c = -1.5: attribution < 0", 2.5, 0.0, changes=HARMFUL),
    Case("c = -1.5, PRUNE: attribution turns positive", 2.5, BONUS[2.5],
         changes=HARMFUL | {"action": int(LifecycleOp.PRUNE)}),
    Case("p = 0: attribution = 0", 2.5, 0.0, changes={"total_improvement": 0.0}),
    Case("fossil: attribution = 0", 2.5, 0.0, changes={"stage": int(SeedStage.FOSSILIZED)}),
    Case("g = -0.4: d = 0.23 < 0.5, attribution > 0", 2.5, 0.0, changes={"counterfactual_improvement": -0.4}),
    Case("g = 0: d = 0.5 is enough", 2.5, BONUS[2.5], changes={"counterfactual_improvement": 0.0}),
    Case("c not measured, stage gained nothing", 2.5, 0.0, changes={"seed_contribution": NAN}),
    Case("c not measured, stage gained 0.6", 2.5, BONUS[2.5],
         changes={"seed_contribution": NAN, "stage_improvement": 0.6}),
    Case("escrow, account rises", 2.5, BONUS[2.5], "escrow", ESCROW),
    Case("escrow, account falls", 2.5, 0.0, "escrow", ESCROW | {"escrow_credit": 3.0}),
    Case("escrow, g = -0.4: no discount there", 2.5, BONUS[2.5], "escrow",
         ESCROW | {"counterfactual_improvement": -0.4}),
    Case("escrow, PRUNE gives the account back", 2.5, 0.0, "escrow", ESCROW | {"action": int(LifecycleOp.PRUNE)}),
    Case("escrow, c not measured", 2.5, 0.0, "escrow", ESCROW | {"seed_contribution": NAN}),
)  # fmt: skip


def row_of(case: Case) -> HostRow:
    """The case as a row: a BLENDING seed with c 3, g 4 and p 2 unless the case says otherwise."""
    usual: dict[str, Any] = {
        "action": int(LifecycleOp.WAIT), "epoch": 40, "max_epochs": 150, "val_acc": 70.0, "has_seed": True,
        "stage": int(SeedStage.BLENDING), "epochs_in_stage": 3, "previous_stage": int(SeedStage.TRAINING),
        "previous_epochs": 10, "seed_age": 14, "seed_contribution": 3.0, "counterfactual_improvement": 4.0,
        "total_improvement": 2.0, "stage_improvement": 0.0, "host_params": 100_000.0, "num_active": 2,
    }  # fmt: skip
    return HostRow(**(usual | {"interaction_sum": case.interaction} | case.changes))


def pay(cases: Iterable[Case], mode: str, device: torch.device, dtype: torch.dtype) -> list[float]:
    """The bonus of all cases by the kernel, in one call."""
    config = RewardConfig(mode="escrow" if mode == "escrow" else "shaped")
    arguments = kernel_arguments([row_of(case) for case in cases], dtype)
    on_device = {name: value.to(device) for name, value in arguments.items()}
    out = compute_reward_batched(**on_device, config_weights=config.pack().to(device), mode=config.mode)
    bonus: list[float] = out.breakdown[:, SYNERGY].tolist()
    return bonus


def bonuses(device: torch.device) -> list[Line]:
    """One line per case."""
    lines = []
    for mode in ("shaped", "escrow"):
        cases = [case for case in CASES if case.mode == mode]
        config = RewardConfig(mode="escrow" if mode == "escrow" else "shaped")
        double, single = (pay(cases, mode, device, dtype) for dtype in (torch.float64, torch.float32))
        for case, in_double, in_single in zip(cases, double, single, strict=True):
            scalar = reward_of_row(row_of(case), config).terms.get("synergy", 0.0)
            lines.append(Line(name=case.name, expected=case.bonus, scalar=scalar, batched=in_double, single=in_single))
    return lines


# -- interactions -----------------------------------------------------------------------------------------------------


def accuracy(on: Iterable[int], pair: float) -> float:
    """The scripted model: accuracy of a set of slots in pp."""
    v = [STRENGTHS[i] for i in on]
    return BASE + sum(v) + pair * (sum(v) ** 2 - sum(x * x for x in v)) / 2


def by_engine(stages: list[int], pair: float, device: torch.device, dtype: torch.dtype) -> Tensor:
    """The interactions [S, S] that the engine derives from the accuracies of its coalitions; NaN if it has none."""
    stage = torch.tensor([stages], device=device)
    coalitions = enumerate_coalitions(stage, torch.ones_like(stage, dtype=torch.bool))
    sets = [[s for s, on in enumerate(members) if on] for members in coalitions.sets[0].tolist()]
    accuracies = torch.tensor([[accuracy(members, pair) for members in sets]], dtype=dtype, device=device)
    return derive(coalitions, accuracies).interactions[0]


def interactions(device: torch.device) -> list[Line]:
    """Both models, with three seeds, and with two seeds and a fossil."""
    return [
        line
        for model, pair in (("additive", 0.0), ("superadditive", PAIR))
        for fossils in ((), (2,))
        for line in lines_of(model, pair, fossils, device)
    ]


def lines_of(model: str, pair: float, fossils: tuple[int, ...], device: torch.device) -> Iterator[Line]:
    """One line per pair of players, and one for the interaction sum of slot 0."""
    stages = [int(SeedStage.FOSSILIZED if s in fossils else SeedStage.BLENDING) for s in range(len(STRENGTHS))]
    double, single = (by_engine(stages, pair, device, dtype) for dtype in (torch.float64, torch.float32))
    assert double[list(fossils)].isnan().all()  # a fossil is no player
    name = f"{model}, slot 2 fossilized" if fossils else model
    expected_sum = scalar_sum = 0.0
    for (i, j), product in INTERACTIONS.items():
        if j in fossils:
            continue
        both, first, second, neither = (accuracy((*fossils, *s), pair) for s in ((i, j), (i,), (j,), ()))
        expected, scalar = product if pair else 0.0, both - first - second + neither
        yield Line(
            name=f"{name}: I_{i}{j}", expected=expected, scalar=scalar,
            batched=double[i, j].item(), single=single[i, j].item(),
        )  # fmt: skip
        expected_sum, scalar_sum = expected_sum + expected * (i == 0), scalar_sum + scalar * (i == 0)
    sums = [values.nansum(dim=1)[0].item() for values in (double, single)]
    yield Line(name=f"{name}: I of slot 0", expected=expected_sum, scalar=scalar_sum, batched=sums[0], single=sums[1])


def shown(title: str, lines: Iterable[Line]) -> Table:
    """The lines as a table."""
    page = Table(title=title)
    page.add_column("case")
    for column in ("by hand", "scalar", "batched", "difference", "float32"):
        page.add_column(column, justify="right")
    for line in lines:
        numbers = (f"{x:.7f}" for x in (line.expected, line.scalar, line.batched))
        differences = (f"{x:.1e}" for x in (line.difference, line.single_difference))
        page.add_row(line.name, *numbers, *differences, style=None if line.good else "bold red")
    return page


def main(options: Options) -> int:
    """Check, print and write the numbers; returns 1 if one is out of tolerance."""
    device = choose_device(options.device)
    tables: dict[str, Callable[[torch.device], list[Line]]] = {"synergy": bonuses, "interactions": interactions}
    found = {name: check(device) for name, check in tables.items()}
    console = Console(width=120)
    console.print(shown(f"synergy bonus, {len(found['synergy'])} cases", found["synergy"]))
    console.print(shown("interactions (pp)", found["interactions"]))
    wrong = [line.name for lines in found.values() for line in lines if not line.good]
    if options.json is not None:
        results = {name: [asdict(line) | {"good": line.good} for line in lines] for name, lines in found.items()}
        settings = {"float64": FLOAT64, "float32": FLOAT32, "quick": options.quick}
        write_result(options.json, "verify_synergy_bonus", device, settings, results)
    for name in wrong:
        console.print(f"off by more than {FLOAT64} (float64) or {FLOAT32} (float32): {name}", style="bold red")
    return 1 if wrong else 0


if __name__ == "__main__":
    try:
        sys.exit(main(tyro.cli(Options)))
    except EsperError as error:
        print(f"verify_synergy_bonus: {error}", file=sys.stderr)
        sys.exit(2)
