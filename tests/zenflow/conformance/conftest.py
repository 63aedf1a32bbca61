"""The optimizer under each configuration, closed at a test's end."""

import pytest

from tests.zenflow.conformance.subjects import LIMITS, SUBJECTS
from zenflow import ZenFlowAdamW


def _making(request):
    optimizers = []

    def make(params, **settings):
        optimizers.append(ZenFlowAdamW(params, **SUBJECTS[request.param], **settings))
        return optimizers[-1]

    yield make
    for optimizer in optimizers:
        optimizer.close()


make = pytest.fixture(params=SUBJECTS)(_making)
make_limit = pytest.fixture(params=LIMITS)(_making)
make_late = pytest.fixture(params=[name for name in SUBJECTS if name not in LIMITS])(_making)
