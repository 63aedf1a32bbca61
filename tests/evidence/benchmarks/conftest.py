"""What the tests of benchmarks share."""

import gc
from collections.abc import Iterator

import pytest


@pytest.fixture(scope="module", autouse=True)
def frozen_objects_stay_frozen() -> Iterator[None]:
    """Let a benchmark unfreeze nothing: all that pytest has loaded would be looked through again.

    A benchmark has a process of its own, where the few objects that were there before come back.
    """
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(gc, "unfreeze", lambda: None)
        yield
