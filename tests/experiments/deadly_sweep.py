"""A sweep for tests of killed workers; apart, so that a worker loads no test to know it."""

import os
import signal
import time

from experiments.sweeps.grid import Sweep


class DeadlySweep(Sweep):
    """Its second point kills the process that looks at it, and another one takes long."""

    SLOW = 40

    def case(self, index):
        if index == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        if index == self.SLOW:
            time.sleep(1.5)  # longer than a process keeps its results
        return super().case(index)
