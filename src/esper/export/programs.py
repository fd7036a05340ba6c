"""A network as a program for any batch size: model.pt2 of torch.export, and model.onnx. Both are run and compared."""

import logging
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path

import numpy as np
import torch
from torch import Tensor, nn

from esper.leyline.errors import ExportError

TOLERANCE = 1e-6
"""Largest difference of an output, relative to the largest output if that is above 1."""
_SHAPES = ({0: torch.export.Dim("batch")},)


@torch.no_grad()
def save_program(model: nn.Module, example: Tensor, path: Path) -> None:
    """Write model.pt2 for a model in eval mode, traced with at least two inputs [B, ...].

    Raises:
        ExportError: torch.export cannot trace the model, or the program computes something else.
    """
    with _quiet(), _explained("torch.export"):
        program = torch.export.export(model, (example,), dynamic_shapes=_SHAPES)
        torch.export.save(program, path)
        outputs = torch.export.load(path).module()(example[:1].repeat_interleave(3, dim=0))
    _compare(outputs, model(example[:1]).expand_as(outputs), path.name)


@torch.no_grad()
def save_onnx(model: nn.Module, example: Tensor, path: Path) -> list[str]:
    """Write model.onnx, checked with onnxruntime.

    Returns:
        A sentence if onnxruntime is not installed, so that the file was not run.

    Raises:
        ExportError: onnx and onnxscript are not installed, the model has no ONNX form, or it computes something else.
    """
    if missing := [name for name in ("onnx", "onnxscript") if find_spec(name) is None]:
        raise ExportError(f"ONNX needs {' and '.join(missing)}; install it with: pip install 'esper-growth[onnx]'.")
    with _quiet(), _explained("torch.onnx.export"):
        torch.onnx.export(
            model, (example,), path, dynamo=True, dynamic_shapes=_SHAPES, external_data=False, verbose=False,
            input_names=["x"], output_names=["outputs"],
        )  # fmt: skip
    if find_spec("onnxruntime") is None:
        return [f"{path.name} was not run, because onnxruntime is not installed."]
    import onnxruntime

    session = onnxruntime.InferenceSession(path, providers=["CPUExecutionProvider"])
    batch = example[:1].repeat_interleave(3, dim=0)
    (outputs,) = session.run(None, {"x": np.asarray(batch)})
    _compare(torch.from_numpy(outputs), model(batch), path.name)
    return []


def _compare(found: Tensor, expected: Tensor, name: str) -> None:
    difference = float((found - expected).abs().max())
    if not difference <= TOLERANCE * max(1.0, float(expected.abs().max())):
        raise ExportError(
            f"{name} differs from the network by {difference:.1e}, more than {TOLERANCE:.0e}; export without it."
        )


@contextmanager
def _explained(tool: str) -> Iterator[None]:
    """Whatever a tool raises about a user's network, with the way out."""
    try:
        yield
    except Exception as error:
        first = str(error).strip().splitlines()[0] if str(error).strip() else "no reason given"
        raise ExportError(
            f"{tool} cannot write this network ({type(error).__name__}: {first}); export without it: --format torch."
        ) from error


@contextmanager
def _quiet() -> Iterator[None]:
    """Without the warnings that the tools give about themselves."""
    log = logging.getLogger("torch.onnx")
    level = log.level
    log.setLevel(logging.ERROR)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        log.setLevel(level)
