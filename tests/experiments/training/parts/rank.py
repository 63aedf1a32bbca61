"""One of several ranks that run ``zenflow train``, each of which is a process that tests start."""

import faulthandler
import json
import os
import signal
import sys
import traceback
from datetime import timedelta

import pytest
from torch import distributed

from experiments.training.parts.ranks.launched import Launched
from experiments.training.run.loop import Training
from tests.experiments.conftest import leave_blank, look_up_once
from tests.experiments.runs import train
from tests.experiments.training.parts.test_checkpoint import file_size_limit
from tests.experiments.tuned import ByTheClock, decide_by
from tests.forks import send_output


def strike(patch, number, rank, step):
    """Let a signal reach one rank when it has taken so many steps."""
    if rank != Launched.here().rank:
        return
    take = Training._step

    def step_and_strike(self):
        take(self)
        if self.step == step:
            os.kill(os.getpid(), number)

    patch.setattr(Training, "_step", step_and_strike)


def limit_saves(patch, rank, step):
    """Let one rank find no room for its checkpoint of a step."""
    if rank != Launched.here().rank:
        return
    save = Training.save

    def without_room(self, **how):
        if self.step != step:
            return save(self, **how)
        with file_size_limit(10_000):
            return save(self, **how)

    patch.setattr(Training, "save", without_room)


def carry_out(command):
    """Run one command and return its exit code and what it said."""
    with pytest.MonkeyPatch.context() as patch:
        leave_blank(patch)
        if command.get("clock"):
            decide_by(patch, ByTheClock)
        if "full" in command:
            limit_saves(patch, *command["full"])
        for name in ("SIGINT", "SIGKILL"):
            if name in command:
                strike(patch, getattr(signal, name), *command[name])
        result = train(*command["flags"])
    if result.exception is not None and not isinstance(result.exception, SystemExit):
        traceback.print_exception(result.exception)
    return [result.exit_code, result.output]


def be_rank(folder, commands, environment):
    """Carry out commands, one after another, together with the other ranks.

    What came of them is left in FOLDER/ended-RANK.json, and errors in FOLDER/error-RANK.
    """
    os.environ.update(environment)
    place = Launched.here()
    send_output(errors=folder / f"error-{place.rank}")
    faulthandler.dump_traceback_later(150, exit=True)  # where a rank hangs
    ended = []
    distributed.init_process_group("gloo", timeout=timedelta(seconds=60))
    look_up_once(pytest.MonkeyPatch())
    for command in commands:
        ended.append(carry_out(command))
        (folder / f"ended-{place.rank}.json").write_text(json.dumps(ended))
        if ended[-1][0] == 1:
            sys.exit(1)  # the other ranks may not have failed: their connections do now
    distributed.destroy_process_group()
