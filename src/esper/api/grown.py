"""A network that was grown."""

from collections.abc import Collection
from pathlib import Path
from typing import final

from torch import nn

from esper.api.arguments import checked
from esper.api.timeline import FILE, Timeline
from esper.export.network import GrownNetwork, Saved
from esper.telemetry.progress import warn


@final
class Grown:
    """A network with what grew in it, and how it came to it.

    Attributes:
        network: the same with its description (`esper.export`). timeline: what happened.
    """

    def __init__(self, network: GrownNetwork, timeline: Timeline) -> None:
        self.network, self.timeline = network, timeline

    @property
    def module(self) -> nn.Module:
        """A plain module, inputs [B, ...] -> outputs [B, ...], in eval mode on the CPU; every weight is trainable.

        Where the task has `inputs`, it takes what they give. `module.network` is the user's own network, whose weights
        have their own names; hooks apply what grew, `module.grown`.
        """
        return self.network.module

    @property
    def points(self) -> float | None:
        """Figure of merit on the validation examples."""
        return self.network.description.val

    @property
    def test_points(self) -> float | None:
        """Figure of merit on the test examples; None if it was not measured."""
        return self.network.description.test

    @property
    def perplexity(self) -> float | None:
        """Exponential of the loss per token on the validation examples; None for what is no text."""
        return self.network.description.perplexity

    @property
    def unit(self) -> str:
        """Name of the figure of merit."""
        return self.network.description.unit

    @property
    def num_params(self) -> int:
        """Parameters of the network and of what grew."""
        return self.network.description.host_params + self.network.description.grown_params

    @property
    def flops(self) -> int:
        """Floating-point operations of one example; a multiply-add counts as two."""
        return self.network.description.flops

    @checked
    def save(self, folder: Path | str, *, formats: Collection[str] = (), overwrite: bool = False) -> Saved:
        """Write the files of `esper export` and the timeline; `esper.load` reads them.

        Prints a sentence for each thing that is not as usual, e.g. why there is no model.py.

        Args:
            folder: must not exist, unless `overwrite` and it was made by this method.
            formats: "pt2" for torch.export, "onnx".
            overwrite: replace the folder.

        Returns:
            The files, and how the network is loaded from them without esper.

        Raises:
            ExportError: the folder exists or cannot be written, a format is unknown, or what was written has other
                figures than the network that was measured.
        """
        texts = {FILE: self.timeline.text()}
        saved = self.network.save(folder, formats=formats, overwrite=overwrite, texts=texts)
        warn(saved.notes)
        return saved

    def __repr__(self) -> str:
        return f"{self.network.description.task}\n{self.network.summary}"
