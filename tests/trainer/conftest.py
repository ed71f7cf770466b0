"""Inputs are made once; in-process tests share a process group of one rank."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.trainer.support import Inputs, make_inputs


@pytest.fixture(scope="session")
def inputs(tmp_path_factory: pytest.TempPathFactory) -> Inputs:
    return make_inputs(tmp_path_factory.mktemp("inputs"))


@pytest.fixture(scope="session")
def alone() -> Iterator[None]:
    """A process group of one, for what is collective."""
    import torch.distributed as dist
    from torch._C._distributed_c10d import HashStore

    dist.init_process_group("gloo", store=HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()
