"""What the tests of sweeps share."""

from click.testing import CliRunner

from experiments.cli import main
from experiments.request.request import Request
from experiments.sweeps.axes.parsing import parse_axes
from experiments.sweeps.columns import Batch
from experiments.sweeps.grid import Sweep
from experiments.sweeps.points import batches_of, rows_of
from experiments.sweeps.table import table_of

MODEL = {"model": "tiny", "batch_size": 2, "sequence": 128}
BASE = ["sweep", "--model", "tiny", "--batch-size", "2", "--sequence", "128"]
CARD = ["--gpu", "rtx4090"]
GRID = ["--vary", "S=1,2,4", "--vary", "dram=20:80:x2"]
PROCESSES = 2


def sweep_of(*axes, knobs=None, **more):
    named = {**MODEL, "gpu": "rtx4090"}
    varied = parse_axes(axes)
    if "model" in {axis.name for axis in varied}:
        del named["model"]
    if {"gpu", "machine"} & {axis.name for axis in varied}:
        del named["gpu"]
    return Sweep(axes=varied, request=Request(**named), knobs=knobs or {}, **more)


def run(*arguments):
    return CliRunner().invoke(main, list(arguments))


def all_rows(sweep):
    return dict(rows_of(sweep, range(sweep.num_points)))


def all_points(sweep):
    return Batch.joined(list(batches_of(sweep, range(sweep.num_points))))


def table_of_all(sweep):
    return table_of(sweep, all_points(sweep))
