"""Families: what a config.json says of its model, by the family that its `model_type` names.

Covered are decoders that transformers has, and BERT; of a model that reads pictures or sound too
its text part. Tensors are those of transformers' own classes, to the last parameter.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial

from sim.models.shapes.crossed import MLLAMA, mllama
from sim.models.shapes.decoder import decoder, mimo
from sim.models.shapes.dense import DENSE
from sim.models.shapes.gemma import STYLE as GEMMA
from sim.models.shapes.gemma import gemma3n, gemma4
from sim.models.shapes.gpt import OTHERS, STYLES
from sim.models.shapes.hybrid import hybrid
from sim.models.shapes.hybrids import HYBRIDS, lfm2
from sim.models.shapes.mixtures import MIXTURES
from sim.models.shapes.parts import Layer
from sim.models.shapes.reading import Config, Reading
from sim.models.shapes.style import Style
from sim.models.shapes.text_part import Part, text_part

_STYLES: Mapping[str, Style] = {
    **DENSE,
    **MIXTURES,
    **{kind: family.style for kind, family in HYBRIDS.items()},
    "gemma3n_text": GEMMA,
    "gemma4_text": GEMMA,
    "mimo": DENSE["qwen2"],
    "mllama_text_model": MLLAMA,
}
FAMILIES: Mapping[str, Callable[[Reading], list[Layer]]] = {
    **{kind: partial(decoder, style=style) for kind, style in {**DENSE, **MIXTURES}.items()},
    **OTHERS,
    **{kind: partial(hybrid, family=family) for kind, family in HYBRIDS.items()},
    "lfm2": lfm2,
    "gemma3n_text": gemma3n,
    "gemma4_text": gemma4,
    "mllama_text_model": mllama,
    "mimo": partial(mimo, style=DENSE["qwen2"]),
}
"""Layers of each `model_type` of a config.json, as a function of the file."""

LOGIT_SCALES = ("final_logit_softcapping", "logit_scale", "logits_scaling")
"""Fields of transformers' configurations by which a model changes its logits behind the layer."""
_USUAL_SCALES = {
    "gemma3n_text": {"final_logit_softcapping": 30.0},
    "gemma2": {"final_logit_softcapping": 30.0}, "vaultgemma": {"final_logit_softcapping": 30.0},
    "nanochat": {"final_logit_softcapping": 15.0}, "cohere": {"logit_scale": 0.0625},
    "cohere2": {"logit_scale": 0.0625},
}  # fmt: skip
"""Defaults of `LOGIT_SCALES` in transformers, by family."""
_LEARNED = {
    "opt": "max_position_embeddings", "bert": "max_position_embeddings",
    **{kind: style.positions for kind, style in STYLES.items() if style.positions},
}  # fmt: skip
"""Field with the number of learned positions, by family; a token beyond them stops the forward."""
_DROPOUTS: Mapping[str, Mapping[str, float]] = {
    "opt": {"dropout": 0.1, "attention_dropout": 0.0},
    "bert": {"hidden_dropout_prob": 0.1, "attention_probs_dropout_prob": 0.1},
    "falcon": {"hidden_dropout": 0.0, "attention_dropout": 0.0},
    **{
        kind: dict.fromkeys(style.dropouts[:2], style.dropouts[2])
        for kind, style in STYLES.items()
    },
}
"""Fields of a configuration that say how often outputs and scores are dropped, with defaults."""
_USUAL_DROPOUT = {"seed_oss": 0.1}


@dataclass(frozen=True, slots=True, kw_only=True)
class Model:
    """A config.json's model: its layers, and facts of it that its work depends on."""

    kind: str
    """Family whose shapes it has."""
    layers: tuple[Layer, ...]
    """Layers in the order of forward; a tied output layer has no tensor of its own."""
    is_causal: bool
    """Whether a token attends to earlier ones alone."""
    dropouts: tuple[bool, bool]
    """Whether a layer's outputs, and attention's scores, go through dropout."""
    scales_logits: bool
    """Whether the model changes its logits behind the output layer, as by a soft cap."""
    stored_as: str | None
    """Method by which the file's weights are quantised; None where they are not."""
    positions: int | None
    """Number of positions that it was made for; None where the file has none."""
    learned: str | None
    """Field with the number of learned positions; None where they are not learned."""
    notes: tuple[str, ...]
    """Sentences on what was left out or taken for granted."""


def read_model(config: Config) -> Model:
    """Return the model of a config.json.

    Raises:
        ConfigError: The family is not known, or a field that is read is missing or can't be.

    Examples:
        >>> from sim.models.table import find_model
        >>> model = read_model(find_model("gpt2")[1])
        >>> model.learned, model.positions
        ('n_positions', 1024)
    """
    part = text_part(config, FAMILIES)
    kind, usual = part.kind, _usual(part)
    reading = Reading(part.config, usual)
    layers = FAMILIES[kind](reading)
    learned = _LEARNED.get(kind)
    positions = reading.maybe(learned or "max_position_embeddings")
    dropouts = _dropouts(reading, kind)
    quantised = reading.section("quantization_config")
    for name in LOGIT_SCALES:
        reading.number(name)
    reading.finish(kind)
    stored = None
    if quantised:
        stored = str(quantised.get("quant_method", "a method of its own"))
    return Model(
        kind=kind, layers=tuple(layers), is_causal=kind != "bert", dropouts=dropouts,
        scales_logits=scales_logits(part.config, kind), stored_as=stored, positions=positions,
        learned=learned, notes=tuple(_notes(part, reading)),
    )  # fmt: skip


def layers_of(config: Config) -> list[Layer]:
    """Return a model's layers, first to last; a tied output layer has no tensor of its own.

    Raises:
        ConfigError: The family is not known, or a field that is read is missing or can't be.

    Examples:
        >>> from sim.models.table import find_model
        >>> [layer.name for layer in layers_of(find_model("gpt2")[1])][:2]
        ['embedding', 'h.0']
    """
    return list(read_model(config).layers)


def num_params(config: Config) -> int:
    """Return the number of parameters of the model, tied ones counted once."""
    return sum(layer.numel for layer in layers_of(config))


def scales_logits(config: Config, kind: str | None = None) -> bool:
    """Return whether a model changes its logits behind the output layer."""
    known = {**_USUAL_SCALES.get(kind or config["model_type"], {}), **config}
    return any(known.get(name) not in (None, 1.0) for name in LOGIT_SCALES)


def _usual(part: Part) -> Mapping[str, int] | None:
    """Return the sizes that a nested part may leave out."""
    style = _STYLES.get(part.kind)
    return style.usual if style is not None and part.is_nested else None


def _dropouts(reading: Reading, kind: str) -> tuple[bool, bool]:
    """Return whether a layer's outputs, and attention's scores, go through dropout.

    What a configuration does not say is transformers' default for its family.
    """
    known = _DROPOUTS.get(kind)
    if known is None:
        style = _STYLES[kind]
        known = dict.fromkeys(filter(None, style.dropouts), _USUAL_DROPOUT.get(kind, 0.0))
    found = [reading.share(name, usual) > 0 for name, usual in known.items()]
    return (False, found[0]) if len(found) < 2 else (found[0], found[1])


def _notes(part: Part, reading: Reading) -> list[str]:
    """Return sentences on parts of a file that were left out or taken for granted."""
    notes = list(part.notes)
    if reading.assumed:
        fields = ", ".join(dict.fromkeys(reading.assumed))
        notes.append(
            f"the file leaves out {fields}: taken as transformers has them for {part.kind}"
        )
    for name in ("num_nextn_predict_layers", "mtp_num_hidden_layers"):
        if part.config.get(name) and part.kind != "mimo":
            notes.append(
                f"layers that predict further tokens ({name}) are left out, as in transformers"
            )
    return notes
