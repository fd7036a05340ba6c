"""Grows the published networks of tests/published, one process each, and writes docs/networks.md.

    python scripts/write_networks.py                      all of them, about ten minutes on two cores
    python scripts/write_networks.py --only ResNet nanoGPT     those whose names hold a word; prints, writes no page

A network that crashes or hangs is a row, and not the end.
"""

import json
import os
import subprocess
import sys
import tempfile
import warnings
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import tyro

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT / "tests"))  # the networks lie there

from write_benchmarks import between_markers  # noqa: E402

if TYPE_CHECKING:
    from published.entry import Published

MARKERS = ("<!-- write_networks: begin -->", "<!-- write_networks: end -->")
STEPS = ("trains", "agrees", "saves", "loads")
Row = dict[str, Any]


@dataclass(frozen=True, kw_only=True)
class Options:
    """Write docs/networks.md."""

    only: tuple[str, ...] = ()
    """Words of names; then nothing is written."""
    jobs: int = 2
    """Networks at the same time."""
    limit: float = 90.0
    """Seconds for one network."""
    page: Path = ROOT / "docs/networks.md"
    """The page with the markers."""
    one: int | None = None
    """The number of a network to check in this process."""


class Named(NamedTuple):
    """What the page says of a network before anything is checked."""

    number: int
    name: str
    style: str
    shows: str
    refused: str | None


def main(options: Options) -> int:
    """Check the networks, print a line of each, and write the page; 1 if one of them does not what it should."""
    from published import every

    if options.one is not None:
        warnings.simplefilter("ignore")
        check(every()[options.one], lambda outcome: print(json.dumps(outcome), flush=True))
        return 0

    found = [Named(i, of.name, of.style, of.shows, of.refused) for i, of in enumerate(every())]
    chosen = [of for of in found if not options.only or any(word in of.name for word in options.only)]
    with ThreadPoolExecutor(options.jobs) as pool:
        rows = list(pool.map(lambda of: checked(of, options.limit), chosen))
    print(summary(rows))
    if not options.only:
        page = options.page.read_text(encoding="utf-8")
        options.page.write_text(between_markers(page, table(rows), MARKERS), encoding="utf-8")
    return int(any(failed(row) for row in rows))


def checked(of: Named, limit: float) -> Row:
    """The row of a network, from a process of its own."""
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    row: Row = of._asdict()
    with subprocess.Popen(
        command_of(of.number), stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment
    ) as child:
        try:
            out, errors = child.communicate(timeout=limit)
            end = None if child.returncode == 0 else f"the process ended with {child.returncode}"
        except subprocess.TimeoutExpired:
            child.kill()
            out, errors = child.communicate()
            end = f"longer than {limit:.0f} s"
    for line in out.splitlines():
        row |= json.loads(line)
    if end is not None:
        step = next((step for step in STEPS if step not in row), STEPS[-1])
        lines = errors.strip().splitlines()
        row |= {step: False, "sentence": f"{step}: {end}{': ' + lines[-1] if lines else ''}"}
    print(line_of(row), flush=True)
    return row


def command_of(number: int) -> list[str]:
    """What checks a network and prints its outcomes."""
    return [sys.executable, str(Path(__file__)), "--one", str(number)]


def check(of: "Published", say: Callable[[Row], None]) -> None:
    """Check a network in this process; each outcome is said at once."""
    from esper.leyline.errors import EsperError
    from published import checks

    failures: list[str] = []  # the sentence is that of the first

    def step(name: str, do: Callable[[], Any]) -> Any:
        try:
            result = do()
        except Exception as error:  # a row says what happened
            sentence = str(error).strip() if isinstance(error, EsperError) else f"{type(error).__name__}: {error}"
            refused = of.refused is not None and isinstance(error, EsperError) and of.refused in sentence
            outcome = "refused" if refused else False
            say({name: outcome} if failures else {name: outcome, "sentence": f"{name}: {sentence}"})
            failures.append(name)
            return None
        say({name: result if isinstance(result, str) else True})
        return result

    def trained() -> Any:
        checks.trained(of, "streamed")
        return checks.trained(of, "auto")

    def agrees() -> str:
        how, taken = checks.agreement(of, "auto")
        if taken != "streamed":
            checks.agreement(of, "streamed")
        say({"executor": taken})
        return how

    grown = step("trains", trained)
    if grown is None and of.refused is not None:
        return
    step("agrees", agrees)
    if grown is None:
        return
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "grown"
        if step("saves", lambda: checks.saved(grown, path)) is not None:
            step("loads", lambda: checks.loaded(of, grown, path))


def failed(row: Row) -> bool:
    """Whether something is not as it should be; a network that is refused as expected is."""
    return row.get("trains") != "refused" and not all(row.get(step) for step in STEPS)


def word(value: object) -> str:
    """How an outcome is written."""
    return {True: "yes", False: "no", None: "–"}.get(value, str(value))  # type: ignore[call-overload]


def line_of(row: Row) -> str:
    """One line for the terminal."""
    outcomes = "  ".join(f"{step} {word(row.get(step))}" for step in STEPS)
    return f"{row['name']:<28} {row.get('executor', '–'):<9} {outcomes}  {row.get('sentence', '')}"


def summary(rows: Sequence[Row]) -> str:
    """How many networks pass each step."""
    refused = sum(row.get("trains") == "refused" for row in rows)
    counts = ", ".join(
        f"{step} {sum(bool(row.get(step)) for row in rows) - (step == 'trains') * refused}" for step in STEPS
    )
    return f"{len(rows)} networks, of which {refused} are refused: {counts}."


def table(rows: Sequence[Row]) -> str:
    """The page between the markers: counts, the table, and the sentences of refusals and failures."""
    lines = [
        summary(rows),
        "",
        "| network | style | peculiar | executor | trains | agrees | saves | loads |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for row in rows:
        shown = [row["name"], row["style"], row["shows"], row.get("executor", "–"), *(word(row.get(s)) for s in STEPS)]
        lines.append("| " + " | ".join(cell.replace("|", "\\|") for cell in shown) + " |")
    sentences = [row for row in rows if "sentence" in row]
    if sentences:
        lines += ["", "| network | why |", "|---|---|"]
        lines += [f"| {row['name']} | {told(row)} |" for row in sentences]
    return "\n".join(lines)


def told(row: Row) -> str:
    """The sentence of a row, in one line, without what Markdown would take for marks."""
    sentence = str(row["sentence"]).split(": ", 1)[1] if row.get("trains") == "refused" else str(row["sentence"])
    text = " ".join(sentence.split()).replace("|", "\\|").replace("<", "&lt;")
    return text if len(text) <= 600 else text[:600] + " …"


if __name__ == "__main__":
    sys.exit(main(tyro.cli(Options)))
