"""model.pt2 and model.onnx compute the same for any batch size."""

from importlib.util import find_spec

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import tiny
from esper.export import programs
from esper.leyline.errors import ExportError

HAS_ONNX = all(find_spec(name) for name in ("onnx", "onnxscript", "onnxruntime"))
needs_onnx = pytest.mark.skipif(not HAS_ONNX, reason="the extra `onnx` is not installed")


class Affine(nn.Module):
    """2 x + 1, but 3 x + 1 where torch.export traces it."""

    honest = True

    def forward(self, x: Tensor) -> Tensor:
        return (2.0 if self.honest or not torch.compiler.is_exporting() else 3.0) * x + 1.0


@pytest.mark.parametrize("unshuffle", [False, True])
def test_the_program_runs_with_any_batch_size(network_of, unshuffled, unshuffle, tmp_path):
    network = unshuffled if unshuffle else network_of(2)
    network.save(tmp_path / "grown", formats=("pt2",))
    program = torch.export.load(tmp_path / "grown" / "model.pt2").module()
    for x in (tiny.dataset().val.x, tiny.dataset().val.x[:1]):
        torch.testing.assert_close(program(x), network.module(x), rtol=1e-6, atol=1e-6)


def test_a_program_that_computes_something_else_is_not_kept(tmp_path):
    model = Affine()
    programs.save_program(model, torch.ones(2, 3), tmp_path / "model.pt2")
    model.honest = False
    with pytest.raises(ExportError, match=r"model.pt2 differs from the network by 1.0e\+00, more than 1e-06"):
        programs.save_program(model, torch.ones(2, 3), tmp_path / "model.pt2")


@needs_onnx
@pytest.mark.parametrize("unshuffle", [False, True])
def test_onnxruntime_computes_the_same_as_the_network(network_of, unshuffled, unshuffle, tmp_path):
    import onnxruntime

    network = unshuffled if unshuffle else network_of(1)
    assert network.save(tmp_path / "grown", formats=("onnx",)) == []
    session = onnxruntime.InferenceSession(tmp_path / "grown" / "model.onnx", providers=["CPUExecutionProvider"])
    x = tiny.dataset().val.x
    (found,) = session.run(["outputs"], {"x": np.asarray(x)})
    with torch.no_grad():
        torch.testing.assert_close(torch.from_numpy(found), network.module(x), rtol=1e-6, atol=1e-6)


@pytest.mark.skipif(HAS_ONNX, reason="the extra `onnx` is installed")
def test_without_onnx_the_error_says_what_to_install(network_of, tmp_path):
    with pytest.raises(ExportError, match=r"ONNX needs .*pip install 'esper-growth\[onnx\]'"):
        network_of(0).save(tmp_path / "grown", formats=("onnx",))
    assert list(tmp_path.iterdir()) == []
