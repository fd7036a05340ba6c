"""Run directories written by hand, with the files of real ones: every number can be computed from its place.

val_acc = 10 + t + host % 7, the kept network one point less; each step earns 0.5 - 0.25. A host germinates `norm` in
slot s0 in step 1 and fossilizes it in the middle; slot s1 stays empty. 100·J of a host is 10 * round + host.
"""

import json
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import duckdb
import numpy as np

from esper.leyline.lifecycle import LifecycleOp
from esper.telemetry.record.writer import Rows, write_part
from esper.telemetry.run_directory import ABOUT, FORMAT, RECORD
from esper.telemetry.serve.app import server_of
from esper.telemetry.serve.runs import Runs

OPS = [op.name for op in LifecycleOp]
STAGES = ["TRAINING", "BLENDING", "FOSSILIZED"]
SLOTS = ["s0", "s1"]


def write_run(path: Path, *, hosts: int = 3, steps: int = 8, rounds: int = 2, finished: bool = False,
              seed: int = 0) -> Path:  # fmt: skip
    """A run with so many complete rounds."""
    path.mkdir(parents=True)
    slots = ", ".join(f'"{slot}"' for slot in SLOTS)
    settings = {"rounds": 4, "num_envs": hosts, "episode_length": steps, "seed": seed}
    names = {"task": "digits", "preset": "quickstart"}
    text = [f'{name} = "{value}"' for name, value in names.items()] + [f"{n} = {v}" for n, v in settings.items()]
    (path / "config.toml").write_text("\n".join([*text, f"slots = [{slots}]", "[reward]", 'mode = "objective"\n']))
    started = {"kind": "run_started", "slots": SLOTS, "reward": "objective", "host_params": 100, "device": "cpu"}
    (path / "events.jsonl").write_text(json.dumps(started) + "\n")
    (path / "metrics.jsonl").touch()
    about = {"format": FORMAT, "version": "0.1.0", "terms": ["potential", "rent"]}
    (path / ABOUT).write_text(json.dumps(about))
    (path / RECORD).mkdir()
    for number in range(1, rounds + 1):
        add_round(path, number, hosts=hosts, steps=steps)
    if finished:
        (path / "summary.json").write_text("{}")
    return path


def add_round(path: Path, number: int, *, hosts: int = 3, steps: int = 8) -> None:
    """What a training writes at the end of a round."""
    digests = _add_parts(path, number, hosts, steps)
    results = {"objective": 10.0 * number, "committed_accuracy": 50.0, "growth_ratio": 1.5, "live_accuracy": 51.0}
    with (path / "events.jsonl").open("a") as file:
        for host in range(hosts):
            counts = {"germinated": 1, "pruned": 0, "fossilized": 1, "rollbacks": 0, "shaped_return": 0.25 * steps}
            place = {"kind": "episode", "round": number, "t": steps, "host": host}
            file.write(json.dumps(place | results | counts | {"objective": 10.0 * number + host}) + "\n")
    ops = {op: hosts for op in OPS}
    line = {"round": number, "objective_mean": 10.0 * number, "objective_std": 1.0, "committed_accuracy_mean": 50.0,
            "growth_ratio_mean": 1.5, "live_accuracy_mean": 51.0, "shaped_return": 2.0, "rollbacks": 0, "ops": ops,
            "env_steps": hosts * steps, "seconds": 2.0, "update_seconds": 0.5,
            "record": digests, "approx_kl": 0.2 if number == 2 else 0.01}  # fmt: skip
    with (path / "metrics.jsonl").open("a") as file:
        file.write(json.dumps(line) + "\n")


def _add_parts(path: Path, number: int, hosts: int, steps: int) -> dict[str, str]:
    t, host = (grid.ravel() for grid in np.meshgrid(np.arange(1, steps + 1), np.arange(hosts)))
    place = {"round": np.full_like(t, number), "t": t, "host": host}
    middle = steps // 2
    born, kept, acts = t == 1, t >= middle, (t == 1) | (t == middle)
    op = np.select([born, t == middle], [OPS.index("GERMINATE"), OPS.index("FOSSILIZE")], OPS.index("WAIT"))
    chances = {f"p_{name.lower()}": np.full(t.shape, 0.5 if name == "WAIT" else 0.1) for name in OPS}
    accuracy = 10.0 + t + host % 7
    columns = place | chances | {
        "val_acc": accuracy, "committed_acc": accuracy - 1.0, "train_acc": accuracy + 1.0, "growth": 1.0 + 0.5 * kept,
        "reward": np.full(t.shape, 0.25), "op": op, "slot": np.where(acts, 0, -1), "blueprint": np.where(born, 0, -1),
        "success": np.ones(t.shape, bool), "value": 0.1 * t, "term_potential": np.full(t.shape, 0.5),
        "term_rent": np.full(t.shape, -0.25),
    }  # fmt: skip
    stage = np.select([kept, t > middle // 2], [2, 1], 0)
    zeros = np.zeros(t.shape, int)
    alpha = np.clip((t - middle // 2) / (middle - middle // 2), 0.0, 1.0)
    seeds = place | {"slot": zeros, "serial": zeros, "stage": stage, "blueprint": zeros, "params": zeros + 50}
    seeds |= {"alpha": alpha, "contribution": 1.0 * t}
    last = t == steps
    sets = {name: np.tile(column[last], 2) for name, column in place.items()}
    sets |= {"members": np.repeat([0, 1], hosts), "accuracy": np.repeat([30.0, 45.0], hosts)}
    with duckdb.connect(":memory:", config={"threads": 1}) as database:
        kinds = (
            Rows("steps", columns, {"op": OPS, "slot": SLOTS, "blueprint": ["norm"]}),
            Rows("slots", seeds, {"slot": SLOTS, "stage": STAGES, "blueprint": ["norm"]}),
            Rows("coalitions", sets, {"members": ["", "s0"]}),
        )
        return {rows.kind: write_part(path / RECORD, rows, number, 1, database) for rows in kinds}


@contextmanager
def serving(path: Path, token: str | None = None, root: str = "", frames: bool = False) -> Iterator[str]:
    """A server in a thread of this process; gives its address, without `root`."""
    runs = Runs(path)
    server = server_of(runs, token=token, root=root, frames=frames)
    thread = threading.Thread(target=server.run)
    thread.start()
    try:
        while not server.started:
            assert thread.is_alive()
            time.sleep(0.01)
        yield f"http://127.0.0.1:{server.servers[0].sockets[0].getsockname()[1]}"
    finally:
        server.should_exit = True
        thread.join()
        runs.close()
