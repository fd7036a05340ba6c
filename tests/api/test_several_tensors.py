"""Networks that take and return several tensors: as tasks, in every executor, and grown."""

import pickle
from collections.abc import Callable
from functools import cache

import pytest
import torch
from own_tasks import SMALL
from torch import Tensor
from torch.utils.data import DataLoader, TensorDataset

import esper
from esper.api.grow import Grown
from esper.leyline.errors import EsperError
from networks_of_several import (
    BOXES,
    CLASSES,
    IMAGES,
    META,
    NUMBERS,
    SHORT,
    TEXT,
    TOKENS,
    VAE,
    Bert,
    Detector,
    JoinedBert,
    JoinedTowers,
    NanoGPT,
    Towers,
    WithAuxiliary,
    detector_loss,
    vae_loss,
)


def gpt(**changes: object) -> esper.Task:
    given = {"train": (TOKENS, TOKENS.roll(-1, dims=1)), "outputs": lambda out: out[0], **SHORT, **changes}
    return esper.Task(NanoGPT, ["mlp"], **given)


def bert(**changes: object) -> esper.Task:
    return esper.Task(
        Bert, ["layer"], **{"train": (TEXT, CLASSES), "outputs": lambda out: out.logits, **SHORT, **changes}
    )


def towers(**changes: object) -> esper.Task:
    return esper.Task(Towers, ["image"], **{"train": ((IMAGES, META), CLASSES), **SHORT, **changes})


def vae(**changes: object) -> esper.Task:
    return esper.Task(VAE, ["encoder"], (NUMBERS, NUMBERS), **{"loss": vae_loss, **SHORT, **changes})


def right(out: dict[str, Tensor], targets: dict[str, Tensor]) -> Tensor:
    return 100.0 * (out["class"].argmax(dim=1) == targets["class"])


def detector(**changes: object) -> esper.Task:
    given = {"train": (NUMBERS, BOXES), "loss": detector_loss, "metric": right, "unit": "accuracy", **SHORT}
    return esper.Task(Detector, ["body"], **{**given, **changes})


@cache
def grown_of(make: Callable[[], esper.Task], executor: str = "streamed") -> Grown:
    """What grows of a task as it is."""
    return grown(make(), executor)


def grown(task: esper.Task, executor: str = "streamed", **changes: object) -> Grown:
    settings = {**SMALL, "executor": executor, "best_of": 2, "steps": 12, "progress": False, **changes}
    return esper.grow(task, "fixed_schedule", **settings)


def test_the_targets_decide_for_the_output_that_is_chosen():
    assert (gpt().spec.objective.vocabulary, gpt().spec.objective.unit) == (17, "token accuracy")
    assert bert().spec.objective.num_classes == 3
    assert towers().spec.objective.num_classes == 3


@pytest.mark.parametrize("make", [gpt, bert, towers, vae, detector])
@pytest.mark.parametrize("executor", ["streamed", "fused"])
def test_each_kind_trains_and_what_grew_takes_and_returns_what_the_network_does(make, executor):
    task, found = make(), grown_of(make, executor)
    module, data, objective = found.module, task.spec.load(None, 0), task.spec.objective
    args, kwargs = found.network.host.arguments(data.test.x)
    with torch.no_grad():
        result = module(*args, **kwargs)
        plain = task.spec.host.model().eval()(*args, **kwargs)
    assert type(result) is type(plain)
    scores = objective.scores(found.network.host.collected(result), data.test.y)
    points = float(objective.points(scores.score.sum(), scores.weight.sum()))
    assert points == pytest.approx(found.test_points, rel=1e-5)
    assert len(found.network.description.seeds) > 0


def test_inputs_by_name_and_in_order_arrive_as_they_were_given():
    for task, of in ((bert(test=(TEXT, CLASSES)), TEXT), (towers(test=((IMAGES, META), CLASSES)), (IMAGES, META))):
        host = task.spec.host
        args, kwargs = host.interface.arguments(task.spec.load(None, 0).test.x)
        found, expected = (list(x.values()) if isinstance(x, dict) else list(x) for x in (kwargs or args, of))
        assert [(x.dtype, x.tolist()) for x in found] == [(x.dtype, x.tolist()) for x in expected]


@pytest.mark.parametrize("executor", ["streamed", "fused"])
def test_several_tensors_give_to_the_bit_what_the_same_network_gives_of_one(executor):
    joined = torch.cat((IMAGES.flatten(1), META), dim=1)
    one = esper.Task(JoinedTowers, ["image"], (joined, CLASSES), name="towers", **SHORT)
    text = esper.Task(JoinedBert, ["layer"], (torch.cat([*TEXT.values()], dim=1), CLASSES), name="bert", **SHORT)
    for several, alone in ((towers, one), (bert, text)):
        both = grown_of(several, executor), grown(alone, executor)
        weights = [dict(found.module.network.named_parameters()) for found in both]
        assert all(torch.equal(weights[0][name], weights[1][name]) for name in weights[1])


def test_what_is_ignored_of_loaders_is_said_once():
    loader = DataLoader(TensorDataset(IMAGES, META, CLASSES), batch_size=8, shuffle=True)
    said = (
        r"train, val: of a DataLoader its data set and collate_fn are taken; .* batches are of 16 examples \(batch=\)"
    )
    with pytest.warns(UserWarning, match=said) as found:
        task = towers(train=loader, val=loader)
    assert len(found) == 1
    assert grown(task).points == grown(towers(val=((IMAGES, META), CLASSES))).points


def test_a_controller_trains_and_is_compared(tmp_path):
    run = esper.train(detector(), rounds=1, num_envs=2, out=tmp_path / "run", progress=False, **SMALL)
    assert len(run.evaluate("static_final", num_envs=2, progress=False).rows) == 3


def test_a_loss_of_several_tensors_has_the_value_of_plain_pytorch():
    for task, network, batch in ((vae(), VAE(), NUMBERS), (detector(), Detector(), BOXES)):
        out = network(NUMBERS)
        parts = list(out.values()) if isinstance(out, dict) else list(out)
        packed = torch.cat([part.flatten(1) for part in parts], dim=1)
        loss = task.spec.objective.loss
        y = batch if loss.targets is None else loss.targets.pack(batch)
        function = vae_loss if isinstance(network, VAE) else detector_loss
        assert torch.equal(loss(packed, y), function(out, batch))


def test_inputs_see_the_structure_and_may_make_another():
    by_name = bert(train=(TEXT["input_ids"], CLASSES), inputs=lambda x: {"input_ids": x, "attention_mask": x != 0})
    assert grown(by_name).points == grown_of(bert).points
    stored = {"pixels": (40 * IMAGES.abs()).byte(), "meta": META}
    from_bytes = towers(train=(stored, CLASSES), inputs=lambda of: (of["pixels"].float() / 40, of["meta"]))
    data = from_bytes.spec.load(None, 0)
    (image, meta), _ = from_bytes.spec.host.interface.arguments(data.inputs(data.train.x))
    assert torch.equal(image * 40, (image * 40).round())
    assert torch.equal(meta[0], META[next(i for i in range(60) if torch.equal(META[i], meta[0]))])


def test_an_augmentation_sees_the_structure():
    class Louder:
        """Multiplies the image of every second example by 2."""

        def draw(self, run_seed: int, hosts: Tensor, episode: int, t: int, count: int) -> Tensor:
            return (torch.arange(count) % 2).expand(len(hosts), count)[..., None]

        def __call__(self, x: tuple[Tensor, Tensor], drawn: Tensor) -> tuple[Tensor, Tensor]:
            return x[0] * (1 + drawn[..., None, None]), x[1]

    data = towers(augmentation=Louder()).spec.load(None, 0)
    x = data.train.x[:2][None]
    drawn = data.augmentation.draw(0, torch.zeros(1, dtype=torch.int64), 0, 1, 2)
    changed = data.augmentation(x, drawn)
    assert torch.equal(changed[0, 0], x[0, 0])
    assert torch.equal(changed[0, 1], torch.cat((2 * x[0, 1, :36], x[0, 1, 36:])))


def test_a_plain_function_as_augmentation_sees_the_structure():
    def louder(x: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
        image, meta = x
        return image * (1 + torch.rand(len(image), *[1] * (image.dim() - 1))), meta

    task = towers(augmentation=louder)
    data = task.spec.load(None, 0)
    x = data.train.x[:2][None]
    changed = data.augmentation(x, data.augmentation.draw(0, torch.zeros(1, dtype=torch.int64), 0, 1, 2))
    ratio = changed[0, :, :36] / x[0, :, :36]
    assert torch.allclose(ratio, ratio[:, :1].expand_as(ratio))
    assert (ratio[:, 0] > 1).all()
    assert torch.equal(changed[..., 36:], x[..., 36:])
    assert grown(task).points == grown(towers(augmentation=louder)).points


def test_few_examples_are_tried_whole_so_that_tokens_stay_tokens_and_masks_masks():
    few = ({name: x[:5] for name, x in TEXT.items()}, CLASSES[:5])
    assert bert(train=few, val=few, test=few).spec.host.facts.inputs == (16,)


def test_a_slot_beside_another_tower_does_not_share_prefixes():
    assert towers().spec.host.facts.shares_prefix == (False,)
    head = esper.Task(Bert, ["classifier"], (TEXT, CLASSES), outputs=lambda out: out.logits, **SHORT)
    assert head.spec.host.facts.shares_prefix == (True,)


def test_other_names_of_the_same_numbers_are_other_data():
    renamed = {"attention_mask": TEXT["input_ids"], "input_ids": TEXT["attention_mask"]}
    ours, theirs = (esper.Task(Detector, ["body"], (NUMBERS, y), loss=lambda out, y: out["box"].square().sum(dim=1),
                               **SHORT).spec.load(None, 0).identity for y in (TEXT, renamed))  # fmt: skip
    assert ours["sha256_train"] == theirs["sha256_train"]
    assert ours != theirs


def test_an_interface_can_be_sent_to_another_process():
    interface = towers().spec.host.interface
    assert pickle.loads(pickle.dumps(interface)) == interface


WRONG = [
    (gpt, {"outputs": None}, "NanoGPT gives a tuple with [0], but an "
     "objective takes one tensor: say which with outputs=lambda out: out[0], or give a loss"),
    (bert, {"outputs": None}, "Bert gives a ClassifierOutput with .logits, but an objective takes one tensor: "
     "say which with outputs=lambda out: out.logits"),
    (bert, {"outputs": lambda out: out.logit}, "outputs fails on a ClassifierOutput with .logits, which Bert returns: "
     "AttributeError: 'ClassifierOutput' object has no attribute 'logit'"),
    (gpt, {"outputs": lambda out: out}, "outputs gives a tuple with [0], but"),
    (detector, {"loss": None, "metric": None, "unit": None}, "say which with outputs=lambda out: out['class']"),
    (detector, {"loss": None, "metric": None, "unit": None, "outputs": lambda out: out["class"]},
     "targets of several tensors need a loss(outputs, targets) of your own"),
    (detector, {"loss": lambda out, y: out["klass"]}, "the loss fails on outputs {class: float32 [n, 3], box: "
     "float32 [n, 2]} and targets {class: int64 [n], box: float32 [n, 2]}: KeyError: 'klass'"),
    (detector, {"loss": lambda out, y: out["box"]}, "the loss gives a result of shape (60, 2) for outputs {class"),
    (bert, {"train": ({"ids": TOKENS, "attention_mask": TOKENS}, CLASSES)}, "Bert cannot process inputs {ids: int64 "
     "[n, 8], attention_mask: int64 [n, 8]}, which are like the example: TypeError: Bert.forward() got an"),
    (towers, {"val": ((IMAGES, META[:, :4]), CLASSES)}, "val.x is (float32 [n, 1, 6, 6], float32 [n, 4]), but that of "
     "train is (float32 [n, 1, 6, 6], float32 [n, 5]); make them equal"),
    (towers, {"inputs": lambda of: (of[0].numpy(), of[1])}, "inputs gives a tuple with [0] and [1]; it must give"),
    (towers, {"val": (IMAGES, CLASSES)}, "val.x is one tensor, but that of train is (float32"),
    (towers, {"train": ((IMAGES, META[:9]), CLASSES)}, "train: x has 60 and 9 examples but y has 60"),
    (towers, {"train": ({"image": IMAGES.byte(), "meta": META}, CLASSES)}, "train.x['image'] holds bytes (uint8)"),
    (towers, {"train": ((IMAGES, META * float("nan")), CLASSES)}, "train.x[1][0] is NaN or infinite"),
]  # fmt: skip


@pytest.mark.parametrize(("make", "changes", "said"), WRONG, ids=range(len(WRONG)))
def test_what_does_not_fit_is_refused_with_the_way_out(make, changes, said):
    with pytest.raises(EsperError) as error:
        make(**changes)
    assert said in str(error.value)


def test_what_a_loss_cannot_get_is_refused_with_the_hook():
    def build() -> Bert:
        return Bert(cache=object())

    given = {"loss": lambda out, y: out.logits.sum(dim=1), **SHORT}
    with pytest.raises(EsperError, match=r"ClassifierOutput with .logits and .past_key_values, but your loss can take "
                       r"tensors of floats \[B, ...\] alone; .* outputs=lambda out: out.logits"):  # fmt: skip
        esper.Task(build, ["layer"], (TEXT, CLASSES), **given)
    esper.Task(Bert, ["layer"], (TEXT, CLASSES), **given)


def test_outputs_that_training_alone_has_are_refused_with_the_hook_that_takes_what_both_have():
    with pytest.raises(EsperError) as error:
        esper.Task(WithAuxiliary, ["body"], (NUMBERS, CLASSES), **SHORT)
    hook = "lambda out: out if isinstance(out, torch.Tensor) else out[0]"
    assert (
        f"WithAuxiliary gives a tuple with [0] and [1] in "
        f"training, but an objective takes one tensor: say which with outputs={hook}," in str(error.value)
    )
    assert grown(esper.Task(WithAuxiliary, ["body"], (NUMBERS, CLASSES), outputs=eval(hook), **SHORT)).points >= 0.0
    with pytest.raises(EsperError, match=r"gives outputs \[4, 6\] in training and \[4, 3\] in evaluation"):
        esper.Task(WithAuxiliary, ["body"], (NUMBERS, CLASSES), loss=lambda out, y: out.sum(dim=1), **SHORT)
