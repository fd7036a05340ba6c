"""The columns of the run record; `docs/record.md` is generated from this file.

Stored tables are Parquet parts. The other tables are built by the reader from metrics.jsonl, events.jsonl and the files
of the run. Every table begins with the column `run`, which the reader adds. NULL means: not measured, or not
applicable.
"""

from collections.abc import Sequence
from math import factorial
from typing import NamedTuple

from esper.leyline.lifecycle import OP_NAMES


class Column(NamedTuple):
    """One column: its DuckDB type, meaning, and unit ("" for none)."""

    name: str
    type: str
    meaning: str
    unit: str = ""


class Table(NamedTuple):
    """One table. `stored`: as Parquet parts; else the reader makes it."""

    name: str
    meaning: str
    columns: tuple[Column, ...]
    stored: bool = False

    @property
    def types(self) -> dict[str, str]:
        """DuckDB type by column."""
        return {column.name: column.type for column in self.columns}


_ROUND = Column("round", "INTEGER", "round, from 1")
_T = Column("t", "INTEGER", "control step (epoch of the hosts), from 1")
_HOST = Column("host", "INTEGER", "global number of the host, from 0")
_PLACE = (_ROUND, _T, _HOST)
_SLOT = Column("slot", "VARCHAR", "slot, e.g. r0c0")

TERM, FLAG = "term_", "flag_"
"""Prefixes of the stored columns of reward terms and reward flags, whose names depend on the reward."""

STEPS = Table(
    "steps",
    "What was measured of each host in each step, before the operation of the step.",
    (
        *_PLACE,
        Column("val_acc", "FLOAT", "validation accuracy with all active seeds", "points"),
        Column("val_loss", "FLOAT", "validation loss with all active seeds"),
        Column("train_acc", "FLOAT", "accuracy on the training examples during the epoch", "points"),
        Column("train_loss", "FLOAT", "loss on the training examples during the epoch"),
        Column("committed_acc", "FLOAT", "validation accuracy with the fossilized seeds alone", "points"),
        Column("growth", "FLOAT", "(host + fossilized parameters) / host parameters of that network"),
        Column("total_params", "BIGINT", "parameters of the host and all its seeds after the step"),
        Column(
            "reward",
            "FLOAT",
            "reward of the step, none for a stopped host; a later rollback replaces it in training, not here",
        ),
        Column("rollback", "VARCHAR", "why the host was rolled back in this step; such a step has no decision"),
    ),
    stored=True,
)

DECISIONS = Table(
    "decisions",
    "The operation that the controller chose for each host in each step. A head that the operation does not read is "
    "NULL.",
    (
        *_PLACE,
        Column("op", "VARCHAR", f"operation: {', '.join(OP_NAMES)}"),
        _SLOT,
        Column("blueprint", "VARCHAR", "what grows"),
        Column("style", "VARCHAR", "how it enters the host, and the curve of its first ramp"),
        Column("tempo", "VARCHAR", "length of its first ramp"),
        Column("alpha_target", "VARCHAR", "blend weight that the ramp ends at"),
        Column("alpha_speed", "VARCHAR", "length of the ramp"),
        Column("alpha_curve", "VARCHAR", "curve of the ramp"),
        Column("success", "BOOLEAN", "whether the operation took effect"),
        *(Column(f"p_{op.lower()}", "FLOAT", f"probability of {op} under the policy") for op in OP_NAMES),
        Column(
            "constrained",
            "VARCHAR",
            "heads whose mask left out values of the operation, with + between them; '' for none, NULL for controllers "
            "that draw no operation",
        ),
        Column("value", "FLOAT", "the critic's value of the state before the operation", "scaled return"),
    ),
    stored=True,
)

SLOTS = Table(
    "slots",
    "Each slot with a seed after each step.",
    (
        *_PLACE,
        _SLOT,
        Column("serial", "INTEGER", "number of the seed among those of its host"),
        Column("stage", "VARCHAR", "stage of the seed"),
        Column("blueprint", "VARCHAR", "blueprint of the seed"),
        Column("alpha", "FLOAT", "blend weight"),
        Column("contribution", "FLOAT", "accuracy with the seed minus accuracy without it, as last measured", "points"),
        Column("params", "BIGINT", "parameters of the seed"),
    ),
    stored=True,
)

COALITIONS = Table(
    "coalitions",
    "Each set of seeds that was measured.",
    (
        *_PLACE,
        Column("members", "VARCHAR[]", "slots whose seeds were on"),
        Column("accuracy", "FLOAT", "validation accuracy with these seeds", "points"),
    ),
    stored=True,
)

REWARDS = Table(
    "rewards",
    "The terms of each reward.",
    (*_PLACE, Column("term", "VARCHAR", "name of the term"), Column("value", "FLOAT", "weighted value")),
)

SEEDS = Table(
    "seeds",
    "The life of each seed.",
    (
        _ROUND,
        _HOST,
        _SLOT,
        Column("serial", "INTEGER", "number of the seed among those of its host"),
        Column("blueprint", "VARCHAR", "blueprint"),
        Column("germinated_t", "INTEGER", "step in which it germinated"),
        Column("fossilized_t", "INTEGER", "step in which it was fossilized"),
        Column("pruned_t", "INTEGER", "step in which it was pruned, by an operation, a rule or a rollback"),
        Column("last_stage", "VARCHAR", "its last stage"),
        Column("last_alpha", "FLOAT", "its last blend weight"),
        Column("params", "BIGINT", "parameters"),
        Column("contribution", "FLOAT", "its last measured contribution", "points"),
    ),
)


def _results(counts: str) -> tuple[Column, ...]:
    """Results of an episode, or means over those of a round; `counts` is the type of the counts."""
    return (
        Column("objective", "DOUBLE", "100·J of the network that is kept", "points"),
        Column("committed", "DOUBLE", "validation accuracy of the network that is kept", "points"),
        Column("live", "DOUBLE", "validation accuracy with all seeds in the last step", "points"),
        Column("growth", "DOUBLE", "(host + fossilized parameters) / host parameters"),
        Column("shaped_return", "DOUBLE", "sum of the rewards"),
        Column("germinated", counts, "seeds that germinated"),
        Column("pruned", counts, "seeds that were pruned; one that fades out when it is gone"),
        Column("fossilized", counts, "seeds that were fossilized"),
        Column("contributing", counts, "fossilized seeds that improve the network"),
        Column("refused", counts, "operations without effect"),
        Column("rollbacks", "INTEGER", "rollbacks"),
    )


_FADES = {"PRUNE": "; a seed that fades out counts when it begins to"}
_OPS = tuple(
    Column(f"ops_{op.lower()}", "INTEGER", f"{op} operations that took effect{_FADES.get(op, '')}") for op in OP_NAMES
)

ROUNDS = Table(
    "rounds",
    "Each round: means over its hosts, and sums of rollbacks and operations.",
    (
        _ROUND,
        Column("seconds", "DOUBLE", "wall time of the steps", "s"),
        Column("update_seconds", "DOUBLE", "wall time of the update", "s"),
        Column("env_steps", "INTEGER", "hosts x steps"),
        Column("env_steps_per_s", "DOUBLE", "hosts x steps per second of the whole round", "1/s"),
        Column("host_reads", "INTEGER", "reads of the device"),
        *_results("DOUBLE"),
        Column("objective_std", "DOUBLE", "standard deviation of 100·J over the hosts", "points"),
        Column("shapley", "DOUBLE", "mean Shapley value of the seeds at the end", "points"),
        Column("memory_peak", "BIGINT", "peak memory: of the GPU, else of the process", "bytes"),
        *_OPS,
    ),
)

EPISODES = Table(
    "episodes",
    "Each host at the end of each round.",
    (
        _ROUND,
        _HOST,
        *_results("INTEGER"),
        Column("params", "BIGINT", "parameters of the network that is kept"),
        Column("instance", "JSON", "how the host differs from the others, if the task says so"),
        *_OPS,
    ),
)

UPDATES = Table("updates", "Each update of the policy: one column per PPO metric.", (_ROUND,))

RUNS = Table(
    "runs",
    "Each run.",
    (
        Column("path", "VARCHAR", "the run directory"),
        Column("task", "VARCHAR", "task"),
        Column("data", "VARCHAR", "data set"),
        Column("preset", "VARCHAR", "preset"),
        Column("reward", "VARCHAR", "reward"),
        Column("seed", "INTEGER", "seed of the run"),
        Column("num_envs", "INTEGER", "hosts"),
        Column("episode_length", "INTEGER", "steps of a round"),
        Column("slots", "VARCHAR[]", "slots in action order"),
        Column("blueprints", "VARCHAR[]", "blueprints by number"),
        Column("reward_terms", "VARCHAR[]", "terms of the reward"),
        Column("device", "VARCHAR", "device"),
        Column("version", "VARCHAR", "version of esper"),
        Column("commit", "VARCHAR", "commit of esper, where it is a git checkout"),
        Column("started", "VARCHAR", "time of the start, ISO 8601, UTC"),
        Column("finished", "BOOLEAN", "whether the run is complete"),
        Column("rounds", "INTEGER", "complete rounds"),
        Column("host_params", "BIGINT", "parameters of a host without seeds"),
        Column("config", "JSON", "config.toml"),
        Column("environment", "JSON", "machine and versions"),
        Column("summary", "JSON", "summary.json"),
    ),
)

ANOMALIES = Table(
    "anomalies",
    "What looks wrong, with advice; found when the table is read.",
    (
        *_PLACE,
        Column("kind", "VARCHAR", "kind of anomaly"),
        Column("value", "DOUBLE", "what was found"),
        Column("threshold", "DOUBLE", "limit that it crosses"),
        Column("message", "VARCHAR", "what it means"),
        Column("advice", "VARCHAR", "what to do"),
    ),
)

EVALUATIONS = Table(
    "evaluations",
    "Results of `esper evaluate` in the run directory: evaluation*.json, and evaluation.json in a folder of `--out`. "
    "Where the best schedule is known, `esper train` writes one too, evaluation_after_training.json.",
    (
        Column("file", "VARCHAR", "the file in the run directory"),
        Column("task", "VARCHAR", "task of the hosts"),
        Column("controller", "VARCHAR", "controller"),
        Column("host", "INTEGER", "host, NULL for the means of all hosts"),
        Column("objective", "DOUBLE", "100·J", "points"),
        Column("committed", "DOUBLE", "validation accuracy of the network that is kept", "points"),
        Column("test", "DOUBLE", "its test accuracy", "points"),
        Column("growth", "DOUBLE", "(host + fossilized parameters) / host parameters"),
        Column("training_flops", "DOUBLE", "floating point operations of the training"),
    ),
)

TRAINED, CONSTANT = "trained", ("fixed_schedule", "fixed_schedule_fill", "best_schedule")
"""Controllers of an evaluation: the one of the run, and those that do the same in every episode."""

TABLES: tuple[Table, ...] = (
    RUNS, ROUNDS, EPISODES, STEPS, DECISIONS, SLOTS, SEEDS, REWARDS, COALITIONS, UPDATES, ANOMALIES, EVALUATIONS,
)  # fmt: skip
"""All tables, in the order of the documentation."""

STORED = {
    "steps": (*STEPS.columns, *DECISIONS.columns[len(_PLACE) :]),
    "slots": SLOTS.columns,
    "coalitions": COALITIONS.columns,
}
"""Columns by kind of part. A part of steps also holds decisions, reward terms and reward flags."""


def shapley_values(worth: Sequence[float]) -> list[float]:
    """What each of n players adds, averaged over all orders in which they could join; they sum to the whole gain.

        phi_i = sum over A without i of |A|! (n - |A| - 1)! / n! * (f(A + i) - f(A))

    Args:
        worth: f of all 2^n coalitions; bit i of the index says whether player i is a member. NaN where one was not
            measured, which makes values NaN.
    """
    n = len(worth).bit_length() - 1
    assert len(worth) == 2**n, f"{len(worth)} numbers are not the worth of all coalitions of any number of players"
    share = [factorial(size) * factorial(n - size - 1) / factorial(n) for size in range(n)]
    return [
        sum(share[a.bit_count()] * (worth[a | 1 << i] - worth[a]) for a in range(2**n) if not a >> i & 1)
        for i in range(n)
    ]
