"""The folder of a saved network: complete or not there, loaded to the bit, and refused if anything is wrong with it."""

import hashlib
import json
import shutil
from dataclasses import replace
from pathlib import Path

import networks_to_save as nets
import pytest
import torch
from safetensors.torch import load_file, save_file

import tiny
from esper.export.grown import Origin, state_of
from esper.export.network import GrownNetwork, load
from esper.leyline.errors import DataError, ExportError
from esper.leyline.tensor_dataclass import state_digest
from esper.tasks.datasets.images import Pixels
from esper.tasks.datasets.text import TokenizerFile

FILES = {"model.safetensors", "model.json", "model.py"}


@pytest.fixture(scope="session")
def saved_once(trained, tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("export") / "grown"
    network = GrownNetwork.of(trained.engine, tiny.task(), tiny.dataset(), trained.stats, host=0)
    assert network.save(folder).notes == ()
    return folder


@pytest.fixture
def saved(saved_once, tmp_path) -> Path:
    return Path(shutil.copytree(saved_once, tmp_path / "grown"))


def changed(folder: Path, *dropped: str, **values: object) -> None:
    """Write these values into model.json, without the keys `dropped`."""
    path = folder / "model.json"
    tree = json.loads(path.read_text()) | values
    path.write_text(json.dumps({key: value for key, value in tree.items() if key not in dropped}))


def test_a_network_is_loaded_as_it_was_saved_to_the_bit(network_of, saved):
    network, again = network_of(0), load(saved)
    assert {file.name for file in saved.iterdir()} == FILES
    assert again.description == replace(network.description, data=again.description.data)
    was, now = state_of(network.module), state_of(again.module)
    assert list(was) == list(now)
    assert all(torch.equal(was[name], now[name]) for name in was)
    x = tiny.dataset().test.x
    assert torch.equal(network.module(x), again.module(x))


def test_the_input_normalization_is_saved_and_loaded(network_of, tmp_path):
    pixels = Pixels(mean=(0.5,), std=(0.25,))
    network = network_of(0)
    described = replace(network.description, normalization={"class": "esper.tasks.datasets.images.Pixels",
                                                            "mean": [0.5], "std": [0.25]})  # fmt: skip
    replace(network, description=described, inputs=pixels).save(tmp_path / "grown")
    assert load(tmp_path / "grown").inputs == pixels
    names: dict[str, object] = {"__name__": "model", "__file__": str(tmp_path / "grown" / "model.py")}
    exec((tmp_path / "grown" / "model.py").read_text(), names)
    prepared = names["prepare"](torch.tensor([[[[255, 0]]]], dtype=torch.uint8))
    assert prepared.tolist() == [[[[2.0, -2.0]]]]  # (1 - 0.5) / 0.25 and (0 - 0.5) / 0.25


def test_an_argument_of_a_lambda_is_no_name_of_its_module(tmp_path):
    network = replace(nets.network_of(*nets.CASES["config"]), inputs=nets.PREPARE["halve"])
    network.save(tmp_path / "grown")
    names: dict[str, object] = {"__name__": "model", "__file__": str(tmp_path / "grown" / "model.py")}
    exec((tmp_path / "grown" / "model.py").read_text(), names)
    assert names["prepare"](torch.tensor([4.0])).tolist() == [2.0]
    assert "x" not in names


def test_a_folder_that_exists_is_replaced_only_if_asked_and_only_if_it_is_one_of_ours(network_of, saved):
    before = (saved / "model.safetensors").read_bytes()
    with pytest.raises(ExportError, match="exists already; name a new folder, or replace it with overwrite=True"):
        network_of(1).save(saved)
    assert (saved / "model.safetensors").read_bytes() == before
    network_of(1).save(saved, overwrite=True)
    assert load(saved).description.seeds[0].blueprint == "depthwise"
    assert [path.name for path in saved.parent.iterdir()] == [saved.name]
    (saved / "model.json").unlink()
    with pytest.raises(ExportError, match="is not a folder of an exported network, so it is not replaced"):
        network_of(1).save(saved, overwrite=True)


def test_a_save_that_fails_leaves_nothing_behind(network_of, tmp_path, on_disk):
    network = network_of(0)
    no_examples = replace(network.description, input_shape=(2, 6, 6))  # the host reads one channel
    with pytest.raises(ExportError, match=r"cannot be run on examples of its data"):
        replace(network, description=no_examples, examples=None).save(tmp_path / "grown")
    assert list(tmp_path.iterdir()) == []
    network.save(tmp_path / "grown")
    assert on_disk(tmp_path / "grown")


def truncate(folder: Path) -> None:
    path = folder / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-8])


def with_weights(change):
    """The same description, but other weights."""

    def act(folder: Path) -> None:
        path = folder / "model.safetensors"
        weights = load_file(path)
        change(weights)
        text = (folder / "model.json").read_text()
        save_file(weights, path, metadata={"description": json.dumps([state_digest(weights), text])})

    return act


def flip_a_bit(folder: Path) -> None:
    path = folder / "model.safetensors"
    content = bytearray(path.read_bytes())
    content[-3] ^= 1
    path.write_bytes(content)


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (truncate, "model.safetensors is missing or damaged .*export the network again"),
        (flip_a_bit, "belongs to another network than the model.json beside it, or one of them was edited or damaged"),
        (lambda f: (f / "model.safetensors").unlink(), "model.safetensors is missing or damaged"),
        (lambda f: (f / "model.json").unlink(), "model.json cannot be read .*name a folder made by `esper export`"),
        (lambda f: (f / "model.json").write_text("{"), "is not JSON .*it was damaged; export the network again"),
        (lambda f: changed(f, format=2), "has format 2, but this version reads format 5; export the network again"),
        (lambda f: (f / "model.json").write_text("[]"), "has format None, but this version reads format 5"),
        (lambda f: changed(f, "unit"), "the key 'unit' is missing"),
        (lambda f: changed(f, colour="red"), "the key 'colour' is unknown"),
        (lambda f: changed(f, flops="many"), "(?s)is damaged .*flops"),
        (lambda f: changed(f, input_dtype="colour"), "is damaged"),
        (lambda f: changed(f, seeds=[]), "its seeds are not those of its architecture"),
        (lambda f: changed(f, host={"class": "os.path"}), "is not an architecture of esper.*load_model"),
        (lambda f: changed(f, host={"class": "esper.kasmina.hosts.cnn.CNNHostSpec", "base": 4}), "cannot be built"),
        (lambda f: changed(f, val=99.0), "belongs to another network than the model.json beside it"),
        (with_weights(lambda w: w.pop("head.bias")), r"has nothing for 'head.bias', but .*float32 \[3\]"),
        (with_weights(lambda w: w.update(extra=torch.ones(1))), r"float32 \[1\] for 'extra', but the network has noth"),
        (with_weights(lambda w: w.update({"head.bias": torch.ones(4)})), r"\[4\] for 'head.bias'"),
        (with_weights(lambda w: w.update({"head.bias": torch.ones(3).half()})), r"float16 \[3\] for 'head"),
    ],
)  # fmt: skip
def test_a_damaged_folder_is_refused_with_the_fits(saved, damage, message):
    damage(saved)
    with pytest.raises(ExportError, match=message):
        load(saved)


def test_the_names_of_classes_the_place_in_a_run_and_the_tokenizer_are_saved_and_loaded(trained, tmp_path):
    file = tmp_path / "words" / "mine.json"
    file.parent.mkdir()
    file.write_bytes(b'{"model": {}}')
    words = TokenizerFile(str(file), hashlib.sha256(file.read_bytes()).hexdigest(), 10, 9)
    named = replace(tiny.dataset(), class_names=("ant", "bee", "cat"), tokenizer=words)
    place = Origin(round=3, host=17, objective=61.25)
    network = GrownNetwork.of(trained.engine, tiny.task(), named, trained.stats, host=0, origin=place)
    network.save(tmp_path / "grown")
    tree = json.loads((tmp_path / "grown" / "model.json").read_text())
    assert tree["classes"] == ["ant", "bee", "cat"]
    assert {path.name for path in (tmp_path / "grown").iterdir()} == {*FILES, "tokenizer.json"}
    assert (tmp_path / "grown" / "tokenizer.json").read_bytes() == file.read_bytes()
    found = load(tmp_path / "grown").description
    assert found == replace(network.description, data=tree["data"])
    assert found.tokenizer == "tokenizer.json"
    assert network.summary.startswith("host 17 of round 3, 100·J 61.25\ngrown: ")
    (tmp_path / "grown" / "tokenizer.json").unlink()
    with pytest.raises(ExportError, match=r"tokenizer\.json cannot be read .*export the network again"):
        load(tmp_path / "grown")
    file.write_text("{}")
    with pytest.raises(DataError, match="changed since it was named as tokenizer"):
        GrownNetwork.of(trained.engine, tiny.task(), named, trained.stats, host=0)


def test_a_file_with_another_figure_than_the_network_is_kept_and_is_an_error(network_of, tmp_path):
    network = network_of(0)
    size, true = len(tiny.dataset().val), network.description.val
    off = replace(network.description, val=true - 250.0 / size)
    with pytest.raises(ExportError, match=rf"its accuracy on the val split is {true:.2f} instead of {off.val:.2f}"):
        replace(network, description=off).save(tmp_path / "grown")
    assert {file.name for file in (tmp_path / "grown").iterdir()} == FILES
    tested = replace(network.description, test=999.0)
    with pytest.raises(ExportError, match=r"on the test split is .* instead of 999\.00"):
        replace(network, description=tested).save(tmp_path / "tested")
