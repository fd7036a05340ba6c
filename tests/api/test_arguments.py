"""What the public functions say about arguments of a wrong name or type."""

import numpy as np
import pytest
import torch
from own_tasks import MyNet, images, own_task

import esper
from esper.leyline.errors import ConfigError

TASK = r"an esper.Task\(model=..., slots=..., train=...\), a specification of a task or text"
WRONG = [
    (lambda: own_task(batch=2.5), "esper.Task: batch is 2.5; it must be a whole number."),
    (lambda: own_task(batch=True), "esper.Task: batch is True; it must be a whole number."),
    (lambda: own_task(lr=torch.tensor(0.1)), r"esper.Task: lr is a Tensor; it must be a number or None."),
    (
        lambda: own_task(loss="mse"),
        r"esper.Task: loss is 'mse'; it must be a function or None.",
    ),
    (lambda: own_task(slots=[0, 1]), r"esper.Task: slots is \[0, 1\]; it must be list\[str\]."),
    (
        lambda: own_task(augmentation=4),
        r"augmentation is 4; it must be Augmentation or a function or None.",
    ),
    (lambda: own_task(batch_size=3), "esper.Task has no argument 'batch_size'; did you mean 'batch'?"),
    (lambda: esper.Task(), "esper.Task: missing a required argument: 'model'; its arguments are model, slots"),
    (lambda: esper.grow(MyNet), r"esper.grow: task is the class MyNet; it must be Task or TaskSpec or text."),
    (
        lambda: esper.grow("digits", method=None),
        r"method is None; it must be Run or Path or text or Schedule or a function",
    ),
    (lambda: esper.grow("digits", bestof=3), "esper.grow has no argument 'bestof'; did you mean 'best_of'?"),
    (lambda: esper.grow("digits", steps=-4), "steps is -4; it must be at least 1."),
    (lambda: esper.grow("digits", best_of=0), "best_of is 0; at least 1 network is needed."),
    (lambda: esper.train("digits", rounds="3"), "esper.train: rounds is '3'; it must be a whole number."),
    (lambda: esper.train("digits", devise="x"), "no argument 'devise'; did you mean 'device'?"),
    (lambda: esper.grow("digits", minutes=3), r"limits are given as budget=esper\.Budget\(minutes=\.\.\.\)"),
    (lambda: esper.train("digits", batch_size=3), r"unknown key batch_size; did you mean batch_train\?"),
    (lambda: esper.Budget(minute=1), "esper.Budget has no argument 'minute'; did you mean 'minutes'?"),
    (lambda: esper.Budget(3), "esper.Budget: .*; its arguments are minutes, flops, params."),
    (lambda: esper.Budget(minutes="3"), r"esper.Budget: minutes is '3'; it must be a number or None."),
    (lambda: esper.load(3), r"esper.load: path is 3; it must be Path or text."),
    (lambda: esper.evaluate("run", ["heuristic"]), r"baselines is \['heuristic'\]; it must be text."),
    (lambda: esper.evaluate([]), "run is an empty list; name at least one run."),
    (lambda: esper.register_policy(MyNet), "esper.register_policy: name is the class MyNet; it must be text."),
    (lambda: esper.register_task(5), "esper.register_task: task is 5; it must be Task"),
    (lambda: esper.register_blueprint(init=3), "init is 3; it must be Mapping"),
]


@pytest.mark.parametrize(("call", "said"), WRONG, ids=[said[:40] for _, said in WRONG])
def test_arguments_of_another_name_or_type_are_refused_at_the_border(call, said):
    with pytest.raises(ConfigError, match=said):
        call()


def test_numbers_of_numpy_are_numbers():
    task = own_task(batch=np.int64(16), lr=np.float32(0.5), seed=np.int32(1))
    assert (type(task.spec.batch_train), task.spec.optimizer.host_lr) == (int, 0.5)


def test_one_text_is_a_list_of_one():
    assert own_task(slots="layer2").spec.enabled == own_task(slots=["layer2"]).spec.enabled == ("layer2",)
    with pytest.raises(ConfigError, match="beside is 'plan'; it must be list"):
        esper.grow("digits", beside="plan")


def test_five_examples_are_a_task():
    x, y = images(5)
    found = own_task(train=(x, y), val=None, test=None).spec.load(None, 0)
    assert [len(found.split(part)) for part in ("train", "val", "test")] == [3, 1, 1]
