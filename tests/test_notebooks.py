"""The notebooks in colab/ run, and are committed as they ran."""

from pathlib import Path

import nbformat
import pytest
from nbclient import NotebookClient

ROOT = Path(__file__).resolve().parent.parent
NOTEBOOKS = sorted((ROOT / "colab").glob("*.ipynb"))


def code_cells(notebook):
    return [cell for cell in notebook.cells if cell.cell_type == "code"]


def errors(notebook):
    """What went wrong in the notebook's outputs, as one line per error."""
    return [
        f"{output.ename}: {output.evalue}"
        for cell in code_cells(notebook)
        for output in cell.outputs
        if output.output_type == "error"
    ]


def test_there_are_notebooks():
    # Without one, the tests below would pass by having nothing to do.
    assert NOTEBOOKS


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.name)
def test_notebook_is_committed_with_its_outputs(path):
    notebook = nbformat.read(path, as_version=4)
    nbformat.validate(notebook)
    counts = [cell.execution_count for cell in code_cells(notebook)]
    assert counts == list(range(1, len(counts) + 1)), "run all cells from the top, then save"
    assert all(cell.outputs for cell in code_cells(notebook))
    assert not errors(notebook)


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.name)
def test_notebook_runs(path):
    notebook = nbformat.read(path, as_version=4)
    # From the repository root, so that it is this tree's hcompile which the kernel imports.
    client = NotebookClient(
        notebook,
        timeout=300,
        kernel_name="python3",
        resources={"metadata": {"path": str(ROOT)}},
    )
    client.execute()
    # execute() does not raise for a cell tagged as one which may raise.
    assert not errors(notebook)
