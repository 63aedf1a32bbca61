"""Concentration of gradients' energy, and its duration, while a small model is fine-tuned.

Energy is squared norm. The published numbers are of Qwen2.5-0.5B on Alpaca; the model here is
hundreds of times smaller, and a smaller model concentrates less.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from experiments.lab.finding import Finding, Tolerance
from experiments.lab.study import Data, Job, computed
from experiments.paper import published as paper
from experiments.paper.canvas import canvas

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure
    from torch import Tensor

_STEPS = 240
_SAMPLES = 24
"""Steps whose entries are looked at."""
_SHIFTS = (1, 2, 4, 8, 16, 32, 64)
_NEXT = 4
"""Steps that the columns of one step are followed for where entries are counted."""
_DECAY = 0.9
_COLOURS = {"0.01": "#d95f02", "0.05": "#7570b3", "0.1": "#1b9e77"}
_NOTE = (
    "A 0.8 M parameter decoder, pretrained and fine-tuned on a CPU with the engine's own AdamW; "
    "mean over training. Models of the paper's size could not be trained here."
)


def _make(job: Job) -> Data:
    from evidence.paper.importance import gradient_shares as shares
    from evidence.paper.loss import small_runs as paper_training

    settings = paper_training.fine_tuning(job, _STEPS)
    settings = replace(settings, strategy="on_device", gradients="keep")
    steps = settings.steps or 0
    sampled = _spread(steps, min(_SAMPLES, steps - 1))
    history: dict[int, shares.Norms] = {}
    samples: list[dict[str, Any]] = []
    followed: dict[str, list[tuple[int, shares.Masks]]] = {"0.05": [], "0.1": []}
    entries: dict[str, list[float]] = {name: [] for name in followed}

    def look(step: int, gradients: Sequence[Tensor]) -> None:
        history[step] = shares.column_norms(gradients)
        for name, chosen in followed.items():
            due = [masks for since, masks in chosen if 0 < step - since <= _NEXT]
            if due:
                counts = shares.largest_by_column(gradients, 0.01)
                entries[name] += [shares.covered(counts, masks) for masks in due]
        if step in sampled:
            samples.append(
                {
                    "step": step,
                    "columns": shares.top_columns(history[step]),
                    "entries": shares.top_entries(gradients),
                }
            )
            for name, chosen in followed.items():
                chosen.append((step, shares.best(history[step], float(name))))
        job.progress(step / steps, f"step {step}")

    num_columns = _train(settings, look)
    starts = [s for s in sampled if s + max(_SHIFTS) <= steps] or sampled[:1]
    recent = {
        at: shares.averaged([history[s] for s in sorted(history) if s <= at], _DECAY)
        for at in starts
    }
    return {
        "training": paper_training.describe(settings),
        "num_columns": num_columns,
        "samples": samples,
        "persistence": {
            name: shares.persistence(history, starts, _SHIFTS, float(name)) for name in _COLOURS
        },
        "kept": {name: _kept(history, starts, float(name)) for name in _COLOURS},
        "kept_averaged": _kept(history, starts, 0.1, recent),
        "entries_kept": {name: sum(v) / len(v) if v else None for name, v in entries.items()},
    }


def _spread(steps: int, count: int) -> list[int]:
    """Return so many steps spread over a run, its first one among them."""
    return sorted({1 + round(place * (steps - 2) / max(1, count - 1)) for place in range(count)})


def _kept(history: Any, starts: Sequence[int], share: float, scores: Any = None) -> dict[str, Any]:
    """Return by steps later the energy share of columns that a step, or an average, chose."""
    from evidence.paper.importance import gradient_shares as shares

    found = {}
    for shift in _SHIFTS:
        values = [
            shares.kept(history[at + shift], shares.best((scores or history)[at], share))
            for at in starts
            if at + shift in history
        ]
        if values:
            found[str(shift)] = sum(values) / len(values)
    return found


def _train(settings: Any, look: Callable[[int, Sequence[Tensor]], None]) -> int:
    """Train with the engine and show it every step's gradients; return how many columns."""
    from experiments.training.parts.setup import build_setup, make_optimizer, make_schedule
    from experiments.training.run.evaluation import cross_entropy, forward

    setup = build_setup(settings)
    optimizer = make_optimizer(setup)
    schedule = make_schedule(optimizer, settings, setup.total_steps)
    matrices = [
        p
        for p in setup.model.parameters()
        if p.ndim == 2 and p.numel() >= setup.config.min_split_elements
    ]
    try:
        for step in range(1, setup.total_steps + 1):
            batch = setup.data.train.batch(step - 1)
            cross_entropy(forward(setup.model, batch), batch).backward()
            look(step, [p.grad for p in matrices if p.grad is not None])
            optimizer.step()
            optimizer.zero_grad()
            schedule.step()
    finally:
        optimizer.close()
    return sum(p.shape[1] for p in matrices)


def mean_share(data: Data, kind: str, share: str) -> float:
    """Return the mean over training of what the best columns, or entries, hold."""
    values = [sample[kind][share] for sample in data["samples"]]
    return float(sum(values) / len(values))


def _findings(data: Data) -> Sequence[Finding]:
    first = min(int(shift) for shift in data["kept"]["0.1"])
    entries = data["entries_kept"]
    later = f"over the next {_NEXT} steps"
    return [
        _finding("The top 1 % of gradient entries hold 88.9 % of the squared norm",
                 paper.CONCENTRATION_ENTRIES, mean_share(data, "entries", "0.01")),
        _finding("The top 1 % of channels hold more than 85 % of it",
                 paper.CONCENTRATION_COLUMNS, mean_share(data, "columns", "0.01")),
        _finding(f"The top 10 % of channels keep 95 % of the top 1 % of entries {later}",
                 paper.LOCALITY_10, entries["0.1"]),
        _finding(f"The top 5 % of channels keep 90 % of them {later}",
                 paper.LOCALITY_5, entries["0.05"]),
        Finding(
            claim="Important columns stay important: a step later a choice of 10 % keeps nearly "
            "the energy of a new one",
            source="ZenFlow paper (arXiv 2505.12242): temporal locality, no number readable",
            unit="of the best choice's energy", tolerance=Tolerance.at_least(),
            published=None, measured=data["persistence"]["0.1"].get(str(first)),
            note=f"{_NOTE} By {max(map(int, data['kept']['0.1']))} steps later the chosen keep "
            f"{list(data['persistence']['0.1'].values())[-1]:.0%} of the best choice's energy.",
        ),
    ]  # fmt: skip


def _finding(claim: str, published: paper.Published, measured: float | None) -> Finding:
    return Finding(
        claim=claim, source=published.source, published=published.value, unit="of the whole",
        measured=measured, tolerance=Tolerance.at_least(0.05), note=_NOTE,
    )  # fmt: skip


def _draw(data: Data) -> Figure:
    figure, (left, middle, right) = canvas(
        (13.5, 4.4),
        f"Measured on a CPU: squared norm of gradients, {data['training']['steps']} steps of "
        "fine-tuning a 0.8 M parameter decoder",
        columns=3,
        title_size=12,
    )
    for axes, kind in ((left, "entries"), (middle, "columns")):
        _draw_shares(axes, data, kind)
    _draw_kept(right, data)
    return figure


def _draw_shares(axes: Axes, data: Data, kind: str) -> None:
    steps = [sample["step"] for sample in data["samples"]]
    for share, colour in _COLOURS.items():
        values = [100 * sample[kind][share] for sample in data["samples"]]
        axes.plot(steps, values, color=colour, marker="o", markersize=3,
                  label=f"top {float(share):.0%}")  # fmt: skip
    published = paper.CONCENTRATION_ENTRIES if kind == "entries" else paper.CONCENTRATION_COLUMNS
    assert isinstance(published.value, float)
    axes.axhline(100 * published.value, color=_COLOURS["0.01"], linestyle="--", linewidth=1,
                 label=f"published, top 1 %: {published.value:.1%}")  # fmt: skip
    axes.set_ylim(0, 100)
    axes.set_xlabel("step of fine-tuning")
    axes.set_ylabel("% of the squared norm")
    axes.set_title(f"Held by the largest {kind}", fontsize=11)
    axes.legend(fontsize=8, frameon=False, loc="center right")


def _draw_kept(axes: Axes, data: Data) -> None:
    for share, colour in _COLOURS.items():
        kept = data["kept"][share]
        axes.plot([int(shift) for shift in kept], [100 * value for value in kept.values()],
                  color=colour, marker="o", markersize=3,
                  label=f"top {float(share):.0%} of one step")  # fmt: skip
        axes.axhline(100 * float(share), color=colour, linestyle=":", linewidth=1)
    averaged = data["kept_averaged"]
    axes.plot([int(shift) for shift in averaged], [100 * value for value in averaged.values()],
              color="#444444", marker="s", markersize=3,
              label=f"top 10 % of the moving average ({_DECAY})")  # fmt: skip
    axes.set_xscale("log", base=2)
    shifts = [int(shift) for shift in averaged]
    axes.set_xticks(shifts, [str(shift) for shift in shifts])
    axes.set_ylim(0, 1.45 * axes.get_ylim()[1])  # room for the legend
    axes.set_xlabel("steps later (dotted: columns chosen at random)")
    axes.set_ylabel("% of that step's squared norm")
    axes.set_title("Kept by columns that were chosen before", fontsize=11)
    axes.legend(fontsize=8, frameon=False, loc="upper right")


STUDY = computed(
    group="paper",
    name="concentration",
    number=9,
    title="Concentration of gradients, in space and time",
    make=_make,
    findings=_findings,
    draw=_draw,
    minutes=0.8,
    tolerance=0.15,
)
