"""Imported first by the tests of notebooks and pages: where their tools are not installed, as on a machine that only
measures, the file is skipped and says which is missing, instead of breaking the collection of all the others.
"""

import pytest

_TOOLS = ("nbformat", "nbclient", "nbconvert", "papermill", "jupytext", "ipykernel", "jinja2", "mistune", "matplotlib")
for _tool in _TOOLS:
    pytest.importorskip(_tool)
