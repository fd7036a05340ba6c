"""What `esper search` prints."""

import math
from collections.abc import Iterator, Sequence
from pathlib import Path

from rich.table import Table

from esper.leyline.errors import command
from esper.runs.config import RunConfig
from esper.runs.heuristic_search import HEURISTIC_FILE, Tuned
from esper.runs.heuristic_search import REPORT_FILE as HEURISTIC_REPORT
from esper.runs.rule_search import PlannedRule
from esper.runs.search import REPORT_FILE, RULE_FILE, SCHEDULE_FILE, Confirmed, Found
from esper.runs.search_hosts import Result, standard_error
from esper.telemetry.progress import RunConsole

SHOWN = 10
LEGEND = (
    "100·J: mean over training hosts with its standard error; a seed is fossilized as soon as legal, or held longer."
)


def show(found: Found, folder: Path, console: RunConsole) -> None:
    """Print the best schedules, the rule in words, and where the files are."""
    console.print("", schedules(found), sep="\n")
    console.say("\n".join(("", LEGEND, *sentences(found))))
    names = [SCHEDULE_FILE, *([RULE_FILE] if found.rule else [])]
    console.say(f"written to {folder}: {', '.join((*names, REPORT_FILE))}")
    _say_how_to_compare([folder / name for name in names], found.config, console)


def show_heuristic(tuned: Tuned, folder: Path, console: RunConsole) -> None:
    """Print the finalists and where the files are."""
    page = _page("rules")
    for tried in tuned.finalists:
        error = standard_error(tried.values)
        page.add_row(tried.rules.words(tuned.spec), _number(tried.objective, error), str(tried.values.size))
    console.print("", page, sep="\n")
    console.say("\n100·J: mean over training hosts with its standard error.")
    console.say(f"written to {folder}: {HEURISTIC_FILE}, {HEURISTIC_REPORT}")
    _say_how_to_compare([folder / HEURISTIC_FILE], tuned.config, console)


def _say_how_to_compare(files: Sequence[Path], config: RunConfig, console: RunConsole) -> None:
    compared = command("evaluate", *files, "--task", config.task, plugins=config.plugins)
    console.say(f"compare on new hosts: {compared}")


def schedules(found: Found) -> Table:
    """The best schedules of the search, each by its measurement on most hosts."""
    page = _page("schedule")
    for result in best_schedules(found):
        page.add_row(result.plan.words(found.spec), _number(result.objective, result.error), str(result.hosts))
    return page


def _page(first: str) -> Table:
    page = Table(box=None, padding=(0, 2, 0, 0))
    page.add_column(first, overflow="fold")
    for column in ("100·J", "hosts"):
        page.add_column(column, justify="right", no_wrap=True)
    return page


def best_schedules(found: Found) -> list[Result]:
    """At most ten: the newest measurement of each, those of the last rung first."""
    newest: dict[object, Result] = {}
    for _, results in reversed(found.rungs):  # later rungs have more hosts, and only the best plans
        for result in results:
            newest.setdefault(result.plan, result)
    return list(newest.values())[:SHOWN]


def sentences(found: Found) -> Iterator[str]:
    """The winners in words, with J of the confirmation."""
    spec, schedule, rule = found.spec, found.schedule, found.rule
    yield f"wait_only: {found.waiting:.2f}"
    yield f"best schedule, {_confirmed(schedule)}: {schedule.policy.words(spec)}"
    if rule is None:
        yield "no rule: the hosts do not differ in any feature, or too few schedules were compared"
        return
    assert isinstance(rule.policy, PlannedRule)
    yield f"best rule, {_confirmed(rule)}: {rule.policy.words(spec)}"
    if rule.objective <= schedule.objective:
        yield "The rule is not better than the schedule on these hosts."


def _confirmed(winner: Confirmed) -> str:
    number = _number(winner.objective, standard_error(winner.values))
    return f"{number} on {winner.values.size} new training hosts"


def _number(mean: float, error: float) -> str:
    return f"{mean:.2f}" if math.isnan(error) else f"{mean:.2f} ± {error:.2f}"
