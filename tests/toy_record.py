"""A record in memory with the tables of a real one, filled by hand."""

from typing import Any

import duckdb

from esper.telemetry.record.reader import Record
from esper.telemetry.record.schema import TABLES


class ToyRecord(Record):
    warnings: Any = None  # set below: here it is no property

    def __init__(self) -> None:
        self.warnings, self._runs, self._searched = [], {}, True
        self.database = self._database = duckdb.connect(":memory:", config={"threads": 1})
        for table in TABLES:
            columns = "".join(f', "{name}" {kind}' for name, kind in table.types.items())
            self.database.execute(f"create table {table.name} (run varchar{columns})")

    def add(self, table: str, *rows: dict[str, object]) -> None:
        for row in rows:
            row = {"run": "a"} | row
            names, marks = ", ".join(f'"{name}"' for name in row), ", ".join("?" * len(row))
            self.database.execute(f"insert into {table} ({names}) values ({marks})", list(row.values()))

    def add_run(self, name: str = "a", *, rounds: int = 1, hosts: int = 2, path: str = "/nowhere") -> None:
        """A run with complete rounds whose 100·J is the number of the round."""
        config = '{"ppo": {"target_kl": 0.015, "max_grad_norm": 1.0}, "rounds": 4}'
        self.add("runs", {"run": name, "path": path, "task": "digits", "seed": 0, "num_envs": hosts,
                          "episode_length": 4, "slots": ["s0", "s1"], "finished": True, "rounds": rounds,
                          "config": config})  # fmt: skip
        self.add("rounds", *({"run": name, "round": i, "objective": float(i), "seconds": 2.0} for i in
                             range(1, rounds + 1)))  # fmt: skip


def full_record() -> ToyRecord:
    """One run with a row or more in every table."""
    record = ToyRecord()
    record.add_run(rounds=2)
    record.database.execute("alter table updates add column approx_kl double")
    for r in (1, 2):
        record.add("updates", {"round": r, "approx_kl": 0.01})
        for host in (0, 1):
            place = {"round": r, "host": host}
            results = {"committed": 50.0, "live": 60.0, "growth": 1.5, "shaped_return": 0.5, "rollbacks": 0}
            counts = {"germinated": 1.0, "fossilized": 1.0, "pruned": 0.0}
            record.add("episodes", place | results | counts | {"objective": 10.0 * r + host})
            record.add("seeds", place | {"slot": "s0", "blueprint": "norm", "germinated_t": 1, "fossilized_t": 3,
                                         "params": 100, "contribution": 5.0})  # fmt: skip
            for t, (op, stage, alpha) in enumerate((("GERMINATE", "GERMINATED", 0.0), ("WAIT", "BLENDING", 0.5),
                                                    ("FOSSILIZE", "FOSSILIZED", 1.0), ("WAIT", "FOSSILIZED", 1.0)),
                                                   start=1):  # fmt: skip
                step = place | {"t": t}
                record.add("steps", step | {"val_acc": 10.0 * t + host, "committed_acc": 9.0 * t, "reward": 0.1})
                record.add("decisions", step | {"op": op, "slot": "s0", "blueprint": "norm", "success": True})
                record.add("slots", step | {"slot": "s0", "stage": stage, "blueprint": "norm", "alpha": alpha})
                record.add(
                    "rewards", step | {"term": "potential", "value": 0.5}, step | {"term": "rent", "value": -0.25}
                )
            record.add(
                "coalitions", *(place | {"t": 4, "members": m, "accuracy": a} for m, a in (([], 30.0), (["s0"], 40.0)))
            )
    record.add("anomalies", {"round": 2, "t": 4, "host": -1, "kind": "approx_kl", "value": 0.6, "threshold": 0.1,
                             "message": "The divergence is large.", "advice": "Lower ppo.lr."})  # fmt: skip
    for host, (trained, fixed) in enumerate(((10.0, 4.0), (14.0, 6.0))):
        record.add("evaluations", *({"controller": c, "host": host, "objective": j, "committed": j + 1, "test": j,
                                     "growth": 2.0 + host, "training_flops": 1e9}
                                    for c, j in (("trained", trained), ("fixed_schedule", fixed))))  # fmt: skip
    return record
