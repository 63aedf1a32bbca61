"""A sweep for tests of killed workers; apart, so that a worker loads no test to know it."""

import os
import signal

from experiments.sweeps.grid import Sweep


class DeadlySweep(Sweep):
    """Its second point kills the process that looks at it."""

    def case(self, index):
        if index == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        return super().case(index)
