"""What a record of a validation shows: its table, and predicted over measured step times."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from matplotlib.figure import Figure
from matplotlib.ticker import LogLocator, NullFormatter, ScalarFormatter

from experiments.output.files import write_text
from experiments.output.plots import STRATEGY_COLOURS, save_figure
from experiments.studies.validation.study import (
    PICTURE,
    PROFILE,
    TABLE,
    Validated,
    errors_of,
    read_record,
    table,
    validate,
)
from sim.hardware.file import read_profile
from sim.hardware.profile import HardwareProfile

_BAND = 0.1
_OTHER_COLOUR = "#888888"


def write_shown(folder: Path) -> str:
    """Predict a record's runs and write its table and picture; return the table.

    Raises:
        ConfigError: The folder holds no profile, or no record.
    """
    profile = read_profile(folder / PROFILE)
    runs = validate(profile, read_record(folder))
    shown = table(runs)
    write_text(folder / TABLE, shown + "\n")
    write_picture(runs, profile, folder / PICTURE)
    return shown


def write_picture(runs: Sequence[Validated], profile: HardwareProfile, path: Path) -> None:
    """Draw runs, with their errors in words in the file, so that a test can read them there."""
    link = ", emulated links" if profile.device.is_cpu else ""
    figure = draw_validation(runs, f"{profile.name}{link}")
    save_figure(figure, path, note=str(errors_of(runs)))


def draw_validation(runs: Sequence[Validated], where: str) -> Figure:
    """Return measured against predicted step times, and the error of each run with its spread."""
    figure = Figure(figsize=(12, 5), layout="constrained")
    left, right = figure.subplots(1, 2, width_ratios=[1, 1.4])
    measured = [run.observation.step_seconds * 1e3 for run in runs]
    predicted = [run.prediction.step_seconds * 1e3 for run in runs]
    colours = [STRATEGY_COLOURS.get(run.observation.strategy.name, _OTHER_COLOUR) for run in runs]
    ends = [0.9 * min(measured + predicted), 1.1 * max(measured + predicted)]
    left.fill_between(
        ends, [e * (1 - _BAND) for e in ends], [e * (1 + _BAND) for e in ends],
        color="#dddddd", label=f"within {_BAND:.0%}",
    )  # fmt: skip
    left.plot(ends, ends, color="#555555", linewidth=0.8)
    left.scatter(measured, predicted, c=colours, s=36, zorder=3)
    left.set(xscale="log", yscale="log", xlim=ends, ylim=ends)
    for axis in (left.xaxis, left.yaxis):
        axis.set_major_locator(LogLocator(subs=(1, 2, 4, 6)))
        axis.set_major_formatter(ScalarFormatter())
        axis.set_minor_formatter(NullFormatter())
    left.set_xlabel("measured step, ms")
    left.set_ylabel("predicted step, ms")
    left.legend(loc="upper left", frameon=False)
    places = range(len(runs))
    right.barh(
        places, [100 * run.error for run in runs], color=colours, height=0.7,
        xerr=[50 * run.spread for run in runs], error_kw={"linewidth": 0.8, "capsize": 2},
    )  # fmt: skip
    right.axvline(0, color="#555555", linewidth=0.8)
    right.set_yticks(places, [run.observation.label for run in runs], fontsize=7)
    right.invert_yaxis()
    right.set_xlabel("error, %; lines: the measurement's quartile range")
    found = errors_of(runs)
    figure.suptitle(
        f"{where}: step time off by {found.median:.1%} (median), {found.p90:.1%} (90th "
        f"percentile); rank correlation {found.rank_correlation:.3f}",
        fontsize=11,
    )
    return figure
