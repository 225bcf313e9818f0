"""What must be set before any test imports torch or triton, a mark for each exercise, and a fixture
that all tests may use."""

import os

os.environ.setdefault("OMP_NUM_THREADS", "1")  # for work this small a second thread mostly waits

import pytest
import torch

from assignment.exercises import FUNCTIONS, TESTS, is_case_of

if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"  # Triton's kernels run on the CPU


def pytest_configure(config):
    for exercise in FUNCTIONS:
        config.addinivalue_line("markers", f"exercise{exercise}: its tests, as the table has them")


def pytest_collection_modifyitems(items):
    """Marks the tests of exercise 4, say, so that `pytest -m exercise4` runs them. In a report for
    programs (--junitxml), each case says which tests of the table it belongs to."""
    for item in items:
        for exercise, _, test in TESTS:
            if is_case_of(test, item):
                item.add_marker(f"exercise{exercise}")
                item.user_properties.append(("test", test))


@pytest.fixture
def here(tmp_path, monkeypatch):
    """An empty folder to work in."""
    monkeypatch.chdir(tmp_path)
