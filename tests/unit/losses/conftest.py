"""Makes this directory importable, so that its tests share `loss_cases`; one thread, as tests run side by side."""

import pytest
import torch


@pytest.fixture(autouse=True, scope="session")
def one_thread():
    torch.set_num_threads(1)
