"""Makes this directory importable, so that its tests share `loss_cases`."""

import pytest
import torch


@pytest.fixture(autouse=True, scope="session")
def one_thread():
    """Tests run side by side, and their tensors are small."""
    torch.set_num_threads(1)
