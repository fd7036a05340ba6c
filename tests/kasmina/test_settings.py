"""Settings that cannot be are refused at birth, by the name of the value."""

from math import inf, nan

import pytest

from esper.kasmina.hosts.cnn import CNNHostSpec
from esper.kasmina.hosts.transformer import TransformerHostSpec
from esper.kasmina.parameters.optimizers import OptimizerSpec
from esper.kasmina.rules.conditions import LifecycleConfig
from esper.leyline.errors import ConfigError

OF_CNN = {"in_channels": 1, "base": 8, "blocks": 2, "kernel": 1, "pools": 1, "classes": 10}
OF_TRANSFORMER = {"vocabulary": 11, "width": 8, "heads": 2, "layers": 4, "segments": 2, "context": 9}
IMPOSSIBLE = (
    (CNNHostSpec, OF_CNN, {
        "in_channels": (0,), "base": (0,), "blocks": (1,), "kernel": (2,), "pools": (3, -1), "classes": (1,),
        "unshuffle": (0,),
    }),
    (TransformerHostSpec, OF_TRANSFORMER, {
        "vocabulary": (1,), "width": (1,), "heads": (0, 3), "layers": (0,), "segments": (0, 3), "context": (0,),
        "dropout": (1.0, -0.1, nan),
    }),
    (OptimizerSpec, {}, {
        "host_lr": (nan, 0.0), "seed_lr": (inf,), "grad_clip": (-1.0,), "eps": (0.0,), "momentum": (1.0, nan),
        "betas": ((0.9, 1.0),), "sgd_weight_decay": (-1e-4,), "adamw_weight_decay": (nan,), "schedule": ("cosin",),
        "warmup": (-1,),
    }),
    (LifecycleConfig, {}, {
        "min_prune_age": (-1,), "embargo_epochs": (-1,), "min_training_epochs": (0,), "min_blending_epochs": (0,),
        "max_seeds": (-1,), "g2_health": (nan,), "g5_contribution": (inf,), "interaction_limit": (5,),
        "shapley_limit": (7,),
    }),
)  # fmt: skip
CASES = [
    (of, usual, name, bad) for of, usual, fields in IMPOSSIBLE for name, values in fields.items() for bad in values
]


@pytest.mark.parametrize(("of", "usual", "name", "bad"), CASES)
def test_a_setting_that_cannot_be_is_refused_by_its_name(of, usual, name, bad):
    of(**usual)
    with pytest.raises(ConfigError, match=name):
        of(**(usual | {name: bad}))


@pytest.mark.parametrize(("name", "whole", "size"), [("heads", "width", 8), ("segments", "layers", 4)])
def test_what_must_divide_something_says_what(name, whole, size):
    with pytest.raises(ConfigError, match=f"host.{name} is 3; it must divide host.{whole}, which is {size}"):
        TransformerHostSpec(**(OF_TRANSFORMER | {name: 3}))
