"""The public face: its names, and what it costs to import them."""

import subprocess
import sys

import pytest

import esper

IMPORT = """
import sys, time
began = time.process_time()
import esper
seconds = time.process_time() - began
print(seconds, "torch" in sys.modules, "numpy" in sys.modules)
"""


def test_the_import_takes_no_time_and_no_torch():
    done = subprocess.run([sys.executable, "-c", IMPORT], capture_output=True, text=True, check=True)
    seconds, *heavy = done.stdout.split()
    assert float(seconds) < 0.2
    assert heavy == ["False", "False"]


def test_every_name_is_there_and_others_are_not():
    names = {"Budget", "ConfigError", "EsperError", "Task", "train", "train_policy", "evaluate", "grow", "load"}
    names |= {"tasks", "blueprints", "__version__"}
    names |= {"register_blueprint", "register_policy", "register_reward", "register_task"}
    assert set(esper.__all__) == names
    assert dir(esper) == sorted(names)
    assert all(getattr(esper, name) is not None for name in names)
    with pytest.raises(AttributeError, match="module 'esper' has no attribute 'trian'"):
        _ = esper.trian


def test_what_exists_is_listed_by_name():
    assert {"digits", "cifar_baseline", "tinyshakespeare"} <= set(esper.tasks.task_names())
    assert "conv_light" in esper.blueprints.blueprint_names("cnn")
    assert "lora" in esper.blueprints.blueprint_names("transformer")
