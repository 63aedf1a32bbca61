"""Writes `experiments/recorded/losses.json`, the accuracies of committed records."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict
from statistics import fmean
from typing import Any

from evidence.studies.language_model.design import RULES
from evidence.studies.language_model.study import STUDY as LANGUAGE_MODEL
from evidence.studies.regimes import BASELINE, FINE_TUNING, settings_of
from experiments.lab.intervals import compare
from experiments.lab.record import Record, needed
from experiments.output.files import write_text
from experiments.recorded.losses import FILE, RecordedLoss
from experiments.training.settings.sizes import MODEL_SIZES
from experiments.training.settings.training import TrainSettings
from sim.models.workload import Workload
from zenflow.config import ZenFlowConfig
from zenflow.errors import ConfigError

_RULES = {"exact": "zenflow", "published": "zenflow_paper"}
"""Preset of each update rule. Its settings but k and S are the recorded ones', or nothing is."""
_KNOBS = ("topk_ratio", "update_interval", "host_state", "gradient_link")
"""Settings that a line has."""
_KEPT = (*_KNOBS, "min_split_elements")


def recorded_losses() -> list[RecordedLoss]:
    """Return a line for each setting of the engine's rules that was trained and compared.

    Raises:
        ConfigError: This installation has no records.
    """
    studies = (_losses(needed("accuracy")), _losses(needed("update_rule")), _sst2(), _decoder())
    found = [row for rows in studies for row in rows]
    return sorted(found, key=lambda row: (row.from_scratch, row.rule, row.num_params, row.lr,
                                          *_values(asdict(row)), row.task))  # fmt: skip


def _losses(record: Record) -> Iterator[RecordedLoss]:
    """Yield held-out losses over those of the same seed's AdamW, less 1; not others' rows."""
    rows = [row for row in record.rows if row.get("source", "this study") == "this study"]
    rows = [row for row in rows if row["dtype"] == "float32" and "rule" not in row]
    base = {
        (row["regime"], row["lr"], row["seed"]): row["eval_loss"]
        for row in rows
        if row["variant"] == BASELINE
    }
    found: dict[tuple[Any, ...], list[float]] = {}
    for row in rows:
        rule = _rule_of(row["config"])
        if rule is not None:
            excess = row["eval_loss"] / base[row["regime"], row["lr"], row["seed"]] - 1
            knobs = _values(row["config"])
            found.setdefault((row["regime"], row["lr"], rule, knobs), []).append(excess)
    for (regime, lr, rule, knobs), values in found.items():
        yield RecordedLoss(
            record=record.folder.name,
            task=regime.split(",")[0],
            from_scratch=regime != FINE_TUNING,
            num_params=_num_params(settings_of(regime, smoke=False)),
            lr=lr,
            rule=rule,
            **dict(zip(_KNOBS, knobs, strict=True)),
            is_accuracy=False,
            **_spread(values),
        )


def _sst2() -> Iterator[RecordedLoss]:
    """Yield accuracies less those of the same seed's AdamW, on SST-2."""
    record = needed("sst2")
    rows = {row["variant"]: row for row in record.rows if row["tuning"] is None}
    for found in compare(record.rows, record.config["num_test"]):
        row = rows.get(found.variant)
        rule = None if row is None else _rule_of(row["config"])
        if row is not None and rule is not None:
            yield RecordedLoss(
                record=record.folder.name,
                task="fine-tuning an encoder on SST-2",
                from_scratch=False,
                num_params=row["num_params"],
                lr=record.config["lr"],
                rule=rule,
                **{name: row["config"][name] for name in _KNOBS},
                is_accuracy=True,
                **_spread(found.differences),
            )


def _decoder() -> Iterator[RecordedLoss]:
    """Yield held-out losses of a pretrained language model over those of the same seed's AdamW.

    Weights are float32: those of bfloat16 have one seed.
    """
    record = needed("language_model")
    for group in LANGUAGE_MODEL.summarise(record.rows, record.config)["groups"]:
        known = RULES[group["rule"]]
        if known.kind != "engine" or known.dtype != "float32":
            continue
        config = ZenFlowConfig.preset(known.preset, **known.knobs).to_dict()
        rule = _rule_of(config)
        if rule is not None:
            yield RecordedLoss(
                record=record.folder.name,
                task=f"fine-tuning a language model on {group['task']}",
                from_scratch=False,
                num_params=record.rows[0]["num_params"],
                lr=group["lr"],
                rule=rule,
                **{name: config[name] for name in _KNOBS},
                is_accuracy=False,
                **_spread([percent / 100 for percent in group["percent"]]),
            )


def _values(config: Mapping[str, Any]) -> tuple[Any, ...]:
    return tuple(config[name] for name in _KNOBS)


def _spread(values: Sequence[float]) -> dict[str, Any]:
    return {
        "seeds": len(values),
        "mean": round(fmean(values), 6),
        "least": round(min(values), 6),
        "most": round(max(values), 6),
    }


def _rule_of(config: Mapping[str, Any]) -> str | None:
    """Return the rule that a preset stands for with this k and S; None if it is another one."""
    rule = config["update_rule"]
    try:
        usual = ZenFlowConfig.preset(_RULES[rule], **{name: config[name] for name in _KEPT})
        recorded = ZenFlowConfig.from_dict(config)
    except (KeyError, ConfigError):
        return None
    return str(rule) if recorded.topk_ratio < 1 and recorded == usual else None


def _num_params(settings: TrainSettings) -> int:
    config = MODEL_SIZES[settings.model].config()
    return Workload.of_config(settings.model, config, batch_size=1).num_params


def text_of(rows: Sequence[RecordedLoss]) -> str:
    """Return the file's text."""
    lines = ",\n".join(json.dumps(asdict(row)) for row in rows)
    return f"[\n{lines}\n]\n"


if __name__ == "__main__":
    write_text(FILE, text_of(recorded_losses()))
