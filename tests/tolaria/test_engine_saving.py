"""What is saved of an engine and its learner in the middle of an episode: everything, by name, and to the bit."""

import dataclasses

import pytest
import torch
from test_engine_reads import learner

import tiny
from esper.leyline.errors import CheckpointError
from esper.leyline.lifecycle import LifecycleOp
from esper.leyline.messages import HostState, SlotState
from esper.leyline.tensor_dataclass import named_tensors
from esper.tasks.instances import MixedImages
from esper.tasks.null import Fault, NullSpec
from esper.tasks.presets import NULL
from esper.tolaria.governor import PanicReason
from esper.tolaria.state import Tally
from hosts_to_export import ARCHITECTURES
from tiny import same_tree
from toys import ToyClient, action, script

Op = LifecycleOp
LENGTH, AT = 4, 3


def names_of(record):
    return {field.name for field in dataclasses.fields(record)}


def stopped(**settings):
    """An engine and a learner that has learned once, in the middle of the second episode."""
    engine = tiny.engine(2, LENGTH, **settings)
    client = learner(engine.spec)
    engine.reset(client, 0)
    engine.rollout(client)
    client.update()
    engine.reset(client, 1)
    for _ in range(AT):
        engine.step(client)
    return engine, client


@pytest.mark.parametrize("optimizer", ["sgd", "adamw"])
def test_the_state_of_a_run_holds_both_states_weights_optimizers_governor_reward_statistics_and_policy(optimizer):
    of = tiny.task(optimizer=tiny.SGD if optimizer == "sgd" else tiny.adamw())
    engine, client = stopped(of=of)
    tree, policy = engine.state_dict(), client.state_dict()
    carried = client.initial_state(2, 3, LENGTH, tiny.CPU)
    control = {
        "slots": names_of(SlotState),
        "hosts": names_of(HostState),
        "governor": {"window", "count", "strikes"},
        "memory": {"contribution", "contribution_step", "contribution_velocity", "interaction_sum", "boost_received"},
        "reward": {name for name, _ in named_tensors(carried)},
        "tally": names_of(Tally),
    }
    assert control["reward"]
    moments = {"momentum"} if optimizer == "sgd" else {"exp_avg", "exp_avg_sq", "steps"}
    flats = {f"{part}.{name}" for part in ("host", "seeds", "gates") for name in ({"params", "buffers"} | moments)}
    snapshots = {f"{part}_snapshot.{name}" for part in ("host", "seeds", "gates") for name in ("params", "buffers")}
    want = {f"control.{part}.{name}" for part, names in control.items() for name in names} | {"control.stopped"}
    want |= {f"executor.population.{name}" for name in flats | snapshots}
    of_executor = {f"executor.{name}" for name in ("episode", "loss_scale", "good_steps", "born")}
    assert tree.keys() == want | {"place"} | of_executor
    weights = {f"network.{name}" for name in client.agent.network.state_dict()}
    statistics = {name for name in policy if name.startswith(("observations.", "returns."))}
    assert {name.split(".")[0] for name in statistics} == {"observations", "returns"}
    assert policy.keys() >= weights | {f"optimizer.{name}" for name in ("exp_avg", "exp_avg_sq", "step")}
    assert policy.keys() >= {"rollout.h", "rollout.c", "rollout.reset", "counters"}
    # and it is that of a run in full swing
    assert bool(policy["rollout.h"].any() & policy["rollout.c"].any() & policy["optimizer.exp_avg"].any())
    assert bool(policy["observations.host.mean"].any())
    assert bool(tree["executor.population.host.params"].any())
    assert any(bool(tree[f"executor.population.host.{name}"].any()) for name in moments)
    assert bool(tree["control.governor.count"].eq(AT).all())


def test_a_state_in_which_one_name_is_missing_is_refused_whichever_it_is():
    engine, client = stopped(of=NULL)
    tree, policy = engine.state_dict(), client.state_dict()
    for name in tree:
        with pytest.raises(CheckpointError):
            engine.load_state_dict({other: x for other, x in tree.items() if other != name}, client)
    for name in policy:
        with pytest.raises(CheckpointError):
            client.load_state_dict({other: x for other, x in policy.items() if other != name})


@pytest.mark.parametrize("at", [12, 13, 14, 15])
def test_a_host_under_suspicion_goes_on_to_its_panic_after_it_was_taken_up_again(at):
    # strikes in 12, 13 and 14, where the third one takes the host back; a fossil of step 12 joins the older snapshot
    faults = tuple(Fault(host=1, t=t, loss=12.0) for t in (12, 13, 14))
    of = dataclasses.replace(NULL, script=NullSpec(faults=faults))
    plan = {
        1: action(Op.GERMINATE, slot=0, tempo=0, blueprint=5, style=0, alpha_target=2),
        8: action(Op.GERMINATE, slot=1, tempo=2, blueprint=5, style=3),
        12: action(Op.FOSSILIZE, slot=0),
        16: action(Op.GERMINATE, slot=2, blueprint=4),
    }

    def fresh():
        reports = []
        engine = tiny.engine(2, 18, of=of, on_step=reports.append)
        return engine, ToyClient(engine.spec, script(2, 18, plan)), reports

    whole, client, reports = fresh()
    whole.reset(client, 3)
    for _ in range(at):
        whole.step(client)
    tree, policy = whole.state_dict(), client.state_dict()
    assert tree["control.governor.strikes"].tolist() == [0, {12: 1, 13: 2, 14: 0, 15: 0}[at]]
    whole.rollout(client)
    other, heir, resumed = fresh()
    other.load_state_dict(tree, heir)
    heir.load_state_dict(policy)
    other.rollout(heir)
    assert same_tree(other.state_dict(), whole.state_dict())
    assert [r.panic_reason[1] for r in reports][13] == PanicReason.DIVERGENCE
    for mine, theirs in zip(resumed, reports[at:], strict=True):
        assert same_tree(*({k: torch.tensor(v) for k, v in vars(r).items()} for r in (mine, theirs))), mine.t


def test_the_state_of_one_host_is_continued_by_an_engine_of_that_host_alone():
    mixed = MixedImages(num_classes=tiny.CLASSES, classes=(2, 3), fractions=(0.5, 1.0))
    of = tiny.task(instances=mixed, batches_per_step=2)
    engine = tiny.engine(4, LENGTH, of=of, distinct_hosts=2)  # hosts 2 and 3 have the data of 0 and 1
    client = ToyClient(engine.spec)
    engine.reset(client, 1)
    engine.add_fossils([*ARCHITECTURES, ARCHITECTURES[0]])
    stats = engine.rollout(client)
    tested = engine.test()
    for host in (0, 3):
        alone = tiny.engine(1, LENGTH, of=of, distinct_hosts=2, host_offset=host)
        alone.load_state_dict(engine.state_of([host]), ToyClient(alone.spec))
        again = alone.outcome()
        assert again.committed_acc[0] == stats.committed_acc[host]
        assert alone.test()[0] == tested[host]
        assert (again.stage[0] == stats.stage[host]).all()
