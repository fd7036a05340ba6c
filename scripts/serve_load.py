"""What `esper serve` costs with many runs, and with one that is large: times, CPU and memory of its process.

    python scripts/serve_load.py RUN [--runs 1000] [--rounds 1000] [--large 100] [--in FOLDER]

Copies of RUN with so many rounds are served (3 kB a round, so 3 GB as it stands), ten to a folder, and beside them one
whose metrics.jsonl has `--large` MB. All figures come from a process of its own, over HTTP and compressed, as for a
browser. Needs Linux, and the extra `serve`.
"""

import argparse
import gzip
import json
import os
import re
import shutil
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from tempfile import TemporaryDirectory
from urllib.request import Request, urlopen

from esper.telemetry.run_directory import METRICS, RECORD

AT_ONCE, UPDATES = 200, 10
TICK = os.sysconf("SC_CLK_TCK")


def main() -> int:
    """Print one figure a line."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("run", type=Path)
    parser.add_argument("--runs", type=int, default=1000)
    parser.add_argument("--rounds", type=int, default=1000)
    parser.add_argument("--large", type=int, default=100, help="MB of metrics.jsonl of the large run")
    parser.add_argument("--in", dest="place", type=Path, help="folder for the copies, which are kept there")
    given = parser.parse_args()
    with TemporaryDirectory() as temporary:
        folder = given.place or Path(temporary) / "runs"
        if not folder.exists():
            make(given.run, folder, given.runs, given.rounds, given.large)
        measure(folder)
    return 0


def make(run: Path, folder: Path, runs: int, rounds: int, large: int) -> None:
    """Write the copies."""
    line = json.loads((run / METRICS).read_text().splitlines()[-1])
    folder.mkdir(parents=True)
    for i in range(runs):
        copy(run, folder / name(i), line, rounds)
    copy(run, folder / "large", line, large * 1_000_000 // len(json.dumps(line)))


def name(i: int) -> str:
    """Of a copy."""
    return f"{i // 10:03}/run-{i:04}"


def copy(run: Path, path: Path, line: dict[str, object], rounds: int) -> None:
    """A run with as many rounds, all of which name the parts of the last one of `run`."""
    shutil.copytree(run, path, ignore=shutil.ignore_patterns("checkpoints", RECORD, METRICS, "summary.json"))
    (path / RECORD).mkdir()
    line = line | {"record": {}}
    with (path / METRICS).open("w") as file:
        file.writelines(
            json.dumps(line | {"round": n, "objective_mean": 50 + 0.01 * n}) + "\n" for n in range(1, rounds + 1)
        )


def add_round(path: Path) -> None:
    """One more round, as a training writes it."""
    last = (path / METRICS).read_bytes()[-20_000:].splitlines()[-1]
    line = json.loads(last)
    with (path / METRICS).open("a") as file:
        file.write(json.dumps(line | {"round": line["round"] + 1}) + "\n")


def measure(folder: Path) -> None:
    """Start the server and ask it."""
    environment = os.environ | {"PYTHONUNBUFFERED": "1", "COLUMNS": "300", "NO_COLOR": "1"}
    command = [sys.executable, "-m", "esper", "serve", str(folder), "--port", "0"]
    with subprocess.Popen(
        command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    ) as server:
        assert server.stdout
        found = re.search(r"http://\S+?:\d+", server.stdout.readline())
        assert found, "esper serve did not start"
        address = found[0]
        try:
            ask(address, server.pid, folder)
        finally:
            server.terminate()


def ask(address: str, pid: int, folder: Path) -> None:
    """All questions, in the order in which a person would cause them."""

    def get(path: str) -> tuple[float, bytes]:
        begin = time.perf_counter()
        with urlopen(Request(address + path, headers={"Accept-Encoding": "gzip"}), timeout=600) as answer:
            body = answer.read()
        return time.perf_counter() - begin, gzip.decompress(body) if body[:2] == b"\x1f\x8b" else body

    say("memory after the start", memory(pid))
    seconds, body = get("/api/overview")
    runs = json.loads(body)["runs"]
    say(f"first overview of {len(runs)} runs", f"{seconds:.2f} s, {len(body) / 1e6:.1f} MB")
    begin, used = time.perf_counter(), cpu(pid)
    while json.loads(get("/api/overview")[1]).get("reading"):
        pass
    say("until all of it was read", f"{time.perf_counter() - begin:.1f} s, {cpu(pid) - used:.1f} s of CPU")
    say("memory then, and at most", memory(pid))
    used = cpu(pid)
    for i in range(UPDATES):
        add_round(folder / name(i))
        get("/api/overview")
    say("an update of the overview", f"{1000 * (cpu(pid) - used) / UPDATES:.0f} ms of CPU")
    with urlopen(address + "/api/events", timeout=600) as stream:
        stream.readline()
        used = cpu(pid)
        time.sleep(10)
        say("a second of following all runs", f"{1000 * (cpu(pid) - used) / 10:.0f} ms of CPU")
    for path in ("/api/overview", f"/api/runs?run={name(1)}"):
        with ThreadPoolExecutor(AT_ONCE) as pool:
            times = sorted(seconds for seconds, _ in pool.map(get, [path] * AT_ONCE))
        say(f"{AT_ONCE} requests of {path} at once", f"median {times[AT_ONCE // 2]:.2f} s, slowest {times[-1]:.2f} s")
    with ThreadPoolExecutor(1) as pool:
        large = pool.submit(get, "/api/runs?run=large")
        others = []
        while not large.done():
            others.append(get(f"/api/runs?run={name(2)}")[0])
            time.sleep(0.05)
        say(
            "first page of the large run",
            f"{large.result()[0]:.1f} s; another page meanwhile {max(others):.2f} s at most",
        )
    add_round(folder / "large")
    used = cpu(pid)
    say("its page after a round", f"{get('/api/runs?run=large')[0]:.2f} s, {1000 * (cpu(pid) - used):.0f} ms of CPU")
    say("memory then, and at most", memory(pid))


def cpu(pid: int) -> float:
    """Seconds of CPU that a process has used."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / TICK


def memory(pid: int) -> str:
    """Resident memory of a process, and its highest."""
    status = dict(line.split(":") for line in Path(f"/proc/{pid}/status").read_text().splitlines())
    now, highest = (int(status[name].split()[0]) / 1024 for name in ("VmRSS", "VmHWM"))
    return f"{now:.0f} MiB, {highest:.0f} MiB"


def say(what: str, figure: str) -> None:
    """One line."""
    print(f"{what:45} {figure}", flush=True)


if __name__ == "__main__":
    sys.exit(main())
