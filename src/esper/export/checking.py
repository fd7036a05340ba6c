"""Loads a file of a network in a process without esper, where a crash is an answer, and compares its outputs.

It is executed as a script that imports torch alone. The job in its file are the arguments of `run`; the result, beside
it, is JSON: the error or null, and sentences about what is not as usual.
"""

import dataclasses
import importlib.util
import inspect
import json
import pickle
import re
import sys
import warnings
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from torch import Tensor, nn

TOLERANCE = 1e-4
"""Largest difference of an output, relative to the largest output; more for numbers of less than 32 bits."""


def leaves(value: object) -> list[Tensor]:
    """The tensors in what a network returns: in tuples, dictionaries and objects."""
    if isinstance(value, Tensor):
        return [value]
    if isinstance(value, dict):
        parts: Any = value.values()
    elif isinstance(value, tuple | list):
        parts = value
    elif dataclasses.is_dataclass(value) and not isinstance(value, type):
        parts = [getattr(value, field.name) for field in dataclasses.fields(value)]
    else:
        return []
    return [leaf for part in parts for leaf in leaves(part)]


@torch.no_grad()
def outputs(model: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any], seed: int = 0) -> list[Tensor]:
    """The tensors that a network returns; a network that draws random numbers draws the same ones in every call."""
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(seed)
        return leaves(model(*args, **kwargs))


def difference(found: list[Tensor], expected: list[Tensor]) -> str | None:
    """In which way outputs differ beyond rounding, None if they do not."""
    shapes = [[tuple(x.shape) for x in of] for of in (found, expected)]
    if shapes[0] != shapes[1]:
        return f"its outputs have the shapes {shapes[0]} instead of {shapes[1]}"
    for a, b in zip(found, expected, strict=True):
        a, b = a.detach().cpu(), b.detach().cpu()
        precise = max(TOLERANCE, 4 * torch.finfo(b.dtype).eps) if b.is_floating_point() else 0.0
        a, b = (x.to(torch.complex128 if x.is_complex() else torch.float64) for x in (a, b))
        size = float(torch.where(b.isfinite(), b, 0.0).abs().max()) if b.numel() else 0.0
        off = torch.where((a == b) | (a.isnan() & b.isnan()), 0.0, (a - b).abs())
        if off.numel() and not float(off.max()) <= precise * size:
            return f"its outputs differ by {float(off.max()):.1e}, where the largest is {size:.1e}"
    return None


def load(kind: str, folder: Path, path: Path) -> Any:  # noqa: ANN401 -- a module or a program
    """What is in a file: the network of model.py or model.pkl with the weights in `folder`, or a program."""
    if kind == "model.py":
        module = sys.modules["grown_model"] = ModuleType("grown_model")  # dataclasses look there
        module.__file__ = str(path)
        exec(compile(path.read_text(encoding="utf-8"), path, "exec"), vars(module))  # an import would leave __pycache__
        return module.load_model(folder)
    if kind == "model.pt2":
        return torch.export.load(path).module()
    with path.open("rb") as file:
        return pickle.load(file)


def check(model: Callable[..., Any], examples: list[tuple[Any, ...]]) -> None:
    """Raise ValueError if a network does not give the expected outputs for one of (args, kwargs, outputs)."""
    for args, kwargs, expected in examples:
        if (wrong := difference(outputs(model, args, kwargs), expected)) is not None:
            raise ValueError(wrong)


def save_program(model: nn.Module, examples: list[tuple[Any, ...]], path: Path, *, fixed: bool = True) -> list[str]:
    """Write model.pt2, for any batch size or, with `fixed`, for that of the first example where it must be."""
    args, kwargs, _ = examples[0]
    model = _with_names(model, args, kwargs)
    try:
        program = torch.export.export(model, args, kwargs, dynamic_shapes=_any_batch(model, args, kwargs))
        torch.export.save(program, path)
        check(load("model.pt2", path.parent, path), examples)
        return []
    except Exception:
        if not fixed:
            raise
    program = torch.export.export(model, args, kwargs)
    torch.export.save(program, path)
    check(load("model.pt2", path.parent, path), examples[:1])
    return [f"{path.name} takes {len(leaves((args, kwargs))[0])} examples at a time: torch.export found no program "
            "for every batch size."]  # fmt: skip


def save_onnx(model: nn.Module, examples: list[tuple[Any, ...]], path: Path) -> list[str]:
    """Write model.onnx, and compare it if onnxruntime is installed; the inputs are named x where there is one."""
    args, kwargs, _ = examples[0]
    model = _with_names(model, args, kwargs)
    names: dict[str, Any] = {"input_names": ["x"], "output_names": ["outputs"]} if len(args) == 1 and not kwargs else {}
    torch.onnx.export(
        model, args, path, kwargs=kwargs, dynamo=True, dynamic_shapes=_any_batch(model, args, kwargs),
        external_data=False, verbose=False, **names,
    )  # fmt: skip
    if importlib.util.find_spec("onnxruntime") is None:
        return [f"{path.name} was not run, because onnxruntime is not installed."]
    import onnxruntime

    session = onnxruntime.InferenceSession(path, providers=["CPUExecutionProvider"])
    for args, kwargs, expected in examples:
        given = [x.numpy() for x in leaves((args, kwargs))]
        named = {of.name: x for of, x in zip(session.get_inputs(), given, strict=True)}
        found = [torch.from_numpy(x) for x in session.run(None, named)]
        if (wrong := difference(found, expected)) is not None:
            raise ValueError(wrong)
    return []


def _with_names(model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> nn.Module:
    """The model with a signature that names its keyword arguments: `**kwargs` cannot have axes that are free."""
    if not kwargs or not all(name.isidentifier() for name in kwargs):
        return model

    def forward(self: Any, *args: Any, **kwargs: Any) -> Any:  # noqa: ANN401
        return self.model(*args, **kwargs)

    names = ["self", *(f"x{i}" for i in range(len(args))), *kwargs]
    parameters = [inspect.Parameter(name, inspect.Parameter.POSITIONAL_OR_KEYWORD) for name in names]
    forward.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    named: nn.Module = type("Named", (nn.Module,), {"forward": forward})()
    named.model = model
    return named.eval()


def _any_batch(model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:  # noqa: ANN401
    """The first axis of every tensor as one free number."""
    batch, shapes = torch.export.Dim("batch"), torch.export.ShapesCollection()
    for x in leaves((args, kwargs)):
        shapes[x] = {0: batch}
    return shapes.dynamic_shapes(model, args, kwargs)


def run(
    kind: str, source: Path, folder: Path, examples: list[tuple[Any, ...]], target: Path | None, fixed: bool
) -> list[str]:
    """Load a file and compare it, or write another format from it; sentences about what is not as usual."""
    model = load(kind, folder, source)
    if target is None:
        check(model, examples)
        return []
    if target.suffix == ".onnx":
        return save_onnx(model.eval(), examples, target)
    return save_program(model.eval(), examples, target, fixed=fixed)


def _in_words(error: BaseException) -> str:
    """The first line of the first cause, and what a colon at its end announces; PyTorch colours some."""
    while error.__cause__ is not None:
        error = error.__cause__
    lines = [line.strip() for line in re.sub(r"\x1b\[[0-9;]*m", "", str(error)).splitlines() if line.strip()]
    said = " ".join(lines[: 1 + lines[0].endswith(":")]) if lines else ""
    return f"{type(error).__name__}: {said}" if said else type(error).__name__


def main(job_file: str) -> None:
    """Do a job; see the top of the file."""
    sys.modules["esper"] = None  # type: ignore[assignment]  # importing it fails
    with open(job_file, "rb") as file:
        job = pickle.load(file)
    warnings.simplefilter("ignore")
    try:
        notes, error = run(**job), None
    except BaseException as raised:
        notes, error = [], _in_words(raised)
    Path(f"{job_file}.result").write_text(json.dumps([error, notes]), encoding="utf-8")


if __name__ == "__main__":
    main(sys.argv[1])
