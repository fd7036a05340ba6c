"""The programs in examples/ run as they are, without a warning, and the notebook from its first cell to its last."""

import subprocess
import sys
from pathlib import Path

import pytest

EXAMPLES = Path(__file__).parents[1] / "examples"
PROGRAMS = sorted(EXAMPLES.glob("*.py"))
ELSEWHERE = {"fsdp_host": "test_fsdp_host.py", "gym_ppo": "environments/test_gym_examples.py"}  # each runs in that test
RUN_NOTEBOOK = """
import sys, nbformat
from nbclient import NotebookClient
NotebookClient(nbformat.read(sys.argv[1], as_version=4), timeout=500, kernel_name="python3").execute()
"""


def test_the_page_of_examples_names_all_of_them():
    page = (EXAMPLES / "README.md").read_text()
    for file in [*PROGRAMS, *EXAMPLES.glob("*.ipynb")]:
        assert f"]({file.name})" in page


@pytest.mark.slow
@pytest.mark.parametrize(
    "program", [file for file in PROGRAMS if file.stem not in ELSEWHERE], ids=lambda file: file.stem
)
def test_a_program_runs(program, tmp_path):
    done = subprocess.run(
        [sys.executable, "-W", "error", str(program)], cwd=tmp_path, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]
    assert done.stdout


@pytest.mark.slow
def test_the_notebook_runs(tmp_path):
    done = subprocess.run(
        [sys.executable, "-c", RUN_NOTEBOOK, str(EXAMPLES / "quickstart.ipynb")],
        cwd=tmp_path, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]
    assert (tmp_path / "grown-mynet" / "model.py").is_file()
