"""Refusals before torch loads: a name or path that no run could use."""

from __future__ import annotations

import importlib.util
from pathlib import Path

from experiments.training.parts.data.hub import is_saved_dataset
from experiments.training.parts.data.readable import check_readable
from experiments.training.parts.data.texts import has_labels
from experiments.training.settings.paths import check_named, missing_path
from experiments.training.settings.sizes import MODEL_SIZES
from experiments.training.settings.training import TrainSettings
from sim.models.positions import check_sequence
from sim.models.table import find_model
from zenflow.errors import ConfigError

_NAMES_WITHOUT_OWNER = frozenset({"openai-community", "google-bert"})
"""Owners of models that the hub still knows by their names alone, such as gpt2."""


def check_first(settings: TrainSettings) -> None:
    """Refuse what can be seen to be missing without loading anything.

    Raises:
        ConfigError: Torch, a file or a directory is missing, a model's name is not the hub's, or
            its learned positions are fewer than a sequence's tokens, or data is no text.
    """
    if importlib.util.find_spec("torch") is None:
        raise ConfigError(
            "training needs torch, which is not installed: pip install torch (for a machine "
            "without a GPU with --index-url https://download.pytorch.org/whl/cpu)"
        )
    check_named(settings.data, "--data")
    if settings.eval_data is not None and not Path(settings.eval_data).expanduser().exists():
        raise missing_path(settings.eval_data, "--eval-data")
    check_data(settings)
    _check_model(settings.model, settings.sequence)


def check_new_states(state_dir: str | None) -> None:
    """Refuse a folder that can't have the states of a new run.

    Raises:
        ConfigError: It is no folder of a drive, or has a run's checkpoint.
    """
    if state_dir is None:
        return
    from zenflow.drive.lock import check_folder
    from zenflow.drive.manifest import Manifest

    path = Path(state_dir)
    try:
        check_folder(path)
    except ValueError as error:
        raise ConfigError(f"--state-dir: {error}") from error
    found = Manifest.load(path)
    if found is not None and found.newest is not None:
        raise ConfigError(
            f"--state-dir {path} has the checkpoint of step {found.newest.step}, which a new run "
            "would overwrite: go on with its run by --resume, or give an empty folder"
        )


def _check_model(name: str, sequence: int) -> None:
    """Refuse a model's name that is neither a size, nor a path that is there, nor the hub's.

    Raises:
        ConfigError: It is none of these, or has too few learned positions.
    """
    model = name.removeprefix("own:")
    if model in MODEL_SIZES:
        return
    check_named(model, "--model")
    if not Path(model).expanduser().exists():
        _check_hub_model(model)
    _check_positions(model, sequence)


def _check_positions(model: str, sequence: int) -> None:
    """Refuse sequences beyond the learned positions of a model that the table has, or a file.

    Raises:
        ConfigError: They are longer.
    """
    try:
        found, config = find_model(model)
    except ConfigError:  # of a family that only transformers knows
        return
    check_sequence(found, config, sequence)


def check_data(settings: TrainSettings) -> None:
    """Refuse files that no run can read as they are, by their names and first bytes.

    Raises:
        ConfigError: One holds no text, or a column is named where there are none.
    """
    path = None if settings.data is None else Path(settings.data).expanduser()
    is_path = path is None or (path.exists() and not is_saved_dataset(path))
    for name in ("text_column", "label_column"):
        column = getattr(settings, name)
        if is_path and column is not None:
            raise ConfigError(
                f"--{name.replace('_', '-')} {column} names a column of a Hugging Face data set, "
                f"but --data is {'left out' if path is None else 'a path of plain text'}: leave "
                "it out, or give a data set's name or a directory of save_to_disk"
            )
    is_labelled = is_path and path is not None and has_labels(path, settings.task)
    if is_path and path is not None:
        check_readable(path, "--data", is_labelled=is_labelled)
    if settings.eval_data is not None:
        evaluation = Path(settings.eval_data).expanduser()
        check_readable(evaluation, "--eval-data", is_labelled=is_labelled)


def trainable_name(name: str) -> str:
    """Return the name in `zenflow train` of a model that the simulator knows by this name.

    Raises:
        ConfigError: The simulator does not know it.
    """
    if name in MODEL_SIZES:
        return name
    from sim.models.table import find_model, model_names  # reads the table, which few names need

    found, config = find_model(name)
    is_named = found in model_names() and config == find_model(found)[1]
    return config["_name_or_path"] if is_named else str(Path(name).resolve())


def _check_hub_model(name: str) -> None:
    """Refuse a name of the simulator's table that the hub does not know."""
    try:
        repository = trainable_name(name)
    except ConfigError:  # not one of the table
        return
    owner, _, own = repository.partition("/")
    if "/" not in name and not (own == name and owner in _NAMES_WITHOUT_OWNER):
        raise ConfigError(
            f"--model {name} is a name of the simulator's table; to train it, give its name on "
            f"the Hugging Face hub: --model {repository}"
        )
