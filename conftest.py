"""What must be set before any test imports torch or triton, and a mark for each exercise."""

import os

os.environ.setdefault("OMP_NUM_THREADS", "1")  # for work this small a second thread mostly waits

import torch

from assignment.exercises import EXERCISES, is_case_of

if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"  # Triton's kernels run on the CPU


def pytest_configure(config):
    for number in EXERCISES:
        config.addinivalue_line("markers", f"exercise{number}: its tests, as the table has them")


def pytest_collection_modifyitems(items):
    """Marks the tests of exercise 4, say, so that `pytest -m exercise4` runs them."""
    for item in items:
        for number, exercise in EXERCISES.items():
            if any(is_case_of(key, item) for key in exercise.tests):
                item.add_marker(f"exercise{number}")
