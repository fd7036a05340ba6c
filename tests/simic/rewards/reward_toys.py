"""Rows, hosts and records of steps for the tests of the rewards."""

import dataclasses
import functools

import torch

from esper.leyline.messages import HostState, RewardInputs, SlotState
from esper.leyline.tensor_dataclass import blank, tree_map
from reference.rewards.row import DeferredPool, HostRow, as_kind
from reference.rewards.step import HostMemory, HostStep, SlotMemory, SlotRow

NAN = float("nan")
STAGES = (1, 2, 3, 4, 6, 7, 8, 9, 10)
LIVE = (2, 3, 4, 6, 7)
ODD_NUMBERS = (0.0, 0.1, -0.2, 1.0, -0.5, 5.0)
"""Values at which formulas change; every random column holds some of them."""


def seed(stage, epochs, previous, previous_epochs, age):
    """The clocks of a live seed in the order (s, e, s-, e-, age)."""
    return {
        "has_seed": True,
        "stage": stage,
        "epochs_in_stage": epochs,
        "previous_stage": previous,
        "previous_epochs": previous_epochs,
        "seed_age": age,
    }


def host_row(**values) -> HostRow:
    """A row from whole or real numbers."""
    kinds = {field.name: field.type for field in dataclasses.fields(HostRow)}
    return HostRow(**{name: as_kind(value, kinds[name]) for name, value in values.items()})


@functools.lru_cache(maxsize=8)
def random_rows(count: int, key: int, *, legal: bool = False) -> tuple[HostRow, ...]:
    """Rows with missing values, boundary values and every stage; all columns are drawn as tensors.

    `legal` rows measure a gate signal wherever they measure a contribution and hold |contribution| <= 20.
    """
    draw = torch.Generator().manual_seed(key)

    def real(low, high, *, missing=0.0, odd=0.2):
        values = torch.rand(count, generator=draw, dtype=torch.float64) * (high - low) + low
        chosen = torch.tensor(ODD_NUMBERS, dtype=torch.float64)[torch.randint(6, (count,), generator=draw)]
        values = torch.where(torch.rand(count, generator=draw) < odd, chosen, values)
        return torch.where(torch.rand(count, generator=draw) < missing, NAN, values)

    def whole(low, high):
        return torch.randint(low, high, (count,), generator=draw)

    stage = torch.tensor(STAGES)[whole(0, len(STAGES))]
    live = torch.isin(stage, torch.tensor(LIVE))
    host = real(50, 10_000, odd=0.0).round()
    gate = real(-5, 8, missing=0.2)
    contribution = real(-8, 15, missing=0.3)
    if legal:
        contribution = torch.where(torch.isnan(gate), NAN, contribution)
    val = real(5, 95, odd=0.0)
    columns = {
        "action": whole(0, 6),
        "seed_contribution": contribution,
        "val_acc": val,
        "acc_delta": real(-3, 3),
        "has_seed": live,
        "stage": stage,
        "total_improvement": real(-5, 15, missing=0.2),
        "epochs_in_stage": whole(0, 12),
        "seed_age": whole(1 if legal else 0, 40),
        "previous_stage": torch.tensor(STAGES)[whole(0, len(STAGES))],
        "previous_epochs": whole(0, 12),
        "epoch": whole(1, 31),
        "max_epochs": torch.full((count,), 30),
        "counterfactual_improvement": gate,
        "stage_improvement": real(-3, 5, missing=0.2),
        "interaction_sum": real(-3, 3, missing=0.3),
        "stable_val_acc": torch.minimum(val, val - real(-1, 5, odd=0.0)) if legal else real(5, 95, missing=0.1),
        "escrow_credit": real(0, 6, missing=0.2, odd=0.0) if legal else real(-2, 6, missing=0.2),
        "total_params": host + real(0, 3_000, odd=0.0).round(),
        "host_params": torch.where(whole(0, 20) == 0, 0.0, host),
        "effective_seed_params": real(0, 3_000, missing=0.3, odd=0.1),
        "alpha_delta_sq_sum": real(0, 8, missing=0.3).abs(),
        "num_active": whole(0, 4),
        "num_fossilized": whole(0, 4),
        "num_contributing": whole(0, 3),
        "committed_acc": real(5, 95, missing=0.1, odd=0.0),
        "fossilized_params": real(0, 900_000, odd=0.0).round(),
        "val_loss": real(0.1, 6, missing=0.1),
        "loss_delta": real(-2, 2),
        "potential_prev": real(-0.5, 1),
    }
    scales, contributions = real(0, 0.2, odd=0.0), real(-12, 12, missing=0.2)
    lists = [column.tolist() for column in columns.values()]
    return tuple(
        HostRow(**dict(zip(columns, values, strict=True)), deferred_pools=(DeferredPool(scale=a, contribution=b),))
        for *values, a, b in zip(*lists, scales.tolist(), contributions.tolist(), strict=True)
    )


def replace_rows(rows, **changes):
    """The same rows with some fields exchanged in all of them."""
    return [dataclasses.replace(row, **changes) for row in rows]


def empty_record(kind, sizes, dtype):
    """A record with nothing measured: floats NaN, integers 0, booleans False."""
    zeros = blank(kind, sizes, torch.device("cpu"))
    return tree_map(lambda x: torch.full_like(x, NAN, dtype=dtype) if x.is_floating_point() else x, zeros)


def reward_inputs(hosts: list[HostStep], dtype=torch.float64) -> RewardInputs:
    """Hosts side by side. A contribution that was not measured now appears as an old one, as the lifecycle keeps it."""
    n, width = len(hosts), len(hosts[0].slots)
    epoch = hosts[0].epoch

    def slots(name, kind=torch.int64):
        return torch.tensor([[getattr(slot, name) for slot in host.slots] for host in hosts], dtype=kind)

    def column(name, kind=dtype):
        return torch.tensor([getattr(host, name) for host in hosts], dtype=kind)

    contribution = slots("contribution", dtype)
    measured = ~torch.isnan(contribution)
    whole = ("stage", "prev_stage", "epochs_in_stage", "prev_epochs", "age", "params")
    real = ("alpha", "acc_at_germination", "acc_at_stage_start", "interaction_sum")
    state = dataclasses.replace(
        empty_record(SlotState, {"N": n, "S": width}, dtype),
        **{name: slots(name) for name in whole},
        **{name: slots(name, dtype) for name in real},
        contribution=torch.where(measured, contribution, 9.0),
        contribution_step=torch.where(measured, epoch, epoch - 1),
    )
    hist = [(*[NAN] * (5 - len(host.acc_hist)), *host.acc_hist) for host in hosts]
    measured_hosts = ("val_acc", "prev_val_acc", "val_loss", "prev_val_loss", "committed_acc", "cf_total")
    host_state = dataclasses.replace(
        empty_record(HostState, {"N": n}, dtype),
        **{name: column(name) for name in measured_hosts},
        host_params=column("host_params", torch.int64),
        compute=epoch + column("compute_of_seeds"),
        n_contributing=column("n_contributing", torch.int64),
        acc_hist=torch.tensor(hist, dtype=dtype),
    )
    pairs = [[slot.interactions or (NAN,) * width for slot in host.slots] for host in hosts]
    return RewardInputs(
        epoch=epoch,
        max_epochs=hosts[0].max_epochs,
        slots=state,
        hosts=host_state,
        interactions=torch.tensor(pairs, dtype=dtype),
        ops=column("op", torch.int64),
        target=column("target", torch.int64),
        success=column("success", torch.bool),
        auto_pruned=column("auto_pruned", torch.int64),
    )


def fresh_memory(slots: int) -> HostMemory:
    """Memory at the start of an episode."""
    return HostMemory(slots=[SlotMemory() for _ in range(slots)])


def random_hosts(count: int, slots: int, epoch: int, max_epochs: int, key: int) -> list[HostStep]:
    """Hosts in arbitrary states; `random_rows` supplies what happens in each slot."""
    draw = torch.Generator().manual_seed(key)
    rows = iter(random_rows(count * slots, key))
    hosts = []
    for _ in range(count):
        drawn = [next(rows) for _ in range(slots)]
        first = drawn[0]
        pairs = torch.randn(slots, slots, generator=draw, dtype=torch.float64)
        pairs = torch.where(torch.rand(slots, slots, generator=draw) < 0.3, NAN, pairs).tolist()
        hosts.append(
            HostStep(
                epoch=epoch,
                max_epochs=max_epochs,
                op=first.action,
                target=int(torch.randint(slots, (1,), generator=draw)),
                success=bool(torch.rand(1, generator=draw) < 0.8),
                auto_pruned=int(torch.randint(2, (1,), generator=draw)),
                val_acc=first.val_acc,
                prev_val_acc=first.stable_val_acc,
                val_loss=first.val_loss,
                prev_val_loss=first.loss_delta,
                acc_hist=(first.stable_val_acc, first.committed_acc, first.val_acc),
                committed_acc=first.committed_acc,
                cf_total=first.counterfactual_improvement,
                host_params=int(first.host_params),
                compute_of_seeds=first.effective_seed_params if first.effective_seed_params >= 0 else 0.0,
                n_contributing=first.num_contributing,
                slots=tuple(
                    SlotRow(
                        stage=row.stage,
                        prev_stage=row.previous_stage,
                        epochs_in_stage=row.epochs_in_stage,
                        prev_epochs=row.previous_epochs,
                        age=row.seed_age,
                        alpha=abs(row.potential_prev),
                        params=int(row.fossilized_params) * row.has_seed,
                        acc_at_germination=row.total_improvement,
                        acc_at_stage_start=row.stage_improvement,
                        contribution=row.seed_contribution,
                        interaction_sum=row.interaction_sum,
                        interactions=tuple(pairs[index]),
                    )
                    for index, row in enumerate(drawn)
                ),
            )
        )
    return hosts
