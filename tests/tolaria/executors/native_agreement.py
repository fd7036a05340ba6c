"""Whether a module as instructions agrees with PyTorch, in both types of numbers, whole and in chunks."""

import copy

import torch
from torch import nn

from esper.kasmina.parameters.layout import Template
from esper.tolaria.executors.native.compare import both_graphs, disagreement
from esper.tolaria.executors.native.trace import BATCH, trace

MAPS = (4, 6, 5)


class Of(nn.Module):
    """A function of a layer's output, so that gradients flow to the layer too."""

    def __init__(self, function, *layers):
        super().__init__()
        self.function, self.layers = function, nn.ModuleList(layers)

    def forward(self, x):
        return self.function(x * 1.0, *self.layers)


def agree(module, *features, batches=((7, None), (40, 16))):
    """Whether module and instructions agree in double precision, whole and in chunks, and in single precision."""
    if not isinstance(module, nn.Module):
        module = Of(module)
    graphs = both_graphs(Template(copy.deepcopy(module)), torch.randn(BATCH, *features))
    for examples, chunk in batches:
        assert disagreement(module, torch.randn(examples, *features), chunk=chunk, graphs=graphs) is None
    x = torch.randn(33, *features)
    assert disagreement(module, x, dtype=torch.float32, tolerance=1e-4, graphs=graphs) is None


def targets(module, *features):
    graph = trace(Template(copy.deepcopy(module)), torch.randn(BATCH, *features), training=True)
    return [node.target for node in graph.nodes]


def parts(x):
    return x.reshape(-1, *x.shape[2:])
