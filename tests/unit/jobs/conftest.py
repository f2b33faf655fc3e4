import importlib.util

import pytest

HAS_TORCH = importlib.util.find_spec("torch") is not None
collect_ignore_glob = [] if HAS_TORCH else ["test_[!d]*.py"]

if HAS_TORCH:
    import torch

    @pytest.fixture(autouse=True)
    def _one_thread():
        before = torch.get_num_threads()
        torch.set_num_threads(1)
        yield
        torch.set_num_threads(before)
