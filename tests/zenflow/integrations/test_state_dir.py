"""States on a drive in transformers' Trainer, whose checkpoints refer to the folder."""

import pytest

pytest.importorskip("transformers", reason='needs the extra: pip install "zenflow-offload[hf]"')
pytest.importorskip("accelerate", reason='needs the extra: pip install "zenflow-offload[hf]"')

from accelerate.state import GradientState
from transformers import TrainerCallback, TrainingArguments

from tests.models import weights_of
from tests.zenflow.integrations.hf import Recorded, arguments
from tests.zenflow.integrations.tiny import are_equal, decoder, texts
from zenflow import ZenFlowConfig
from zenflow.integrations.transformers import ZenFlowTrainer

pytestmark = pytest.mark.filterwarnings("default")  # those of other packages are not ours

CONFIG = ZenFlowConfig(min_split_elements=1024, topk_ratio=0)


@pytest.fixture(autouse=True)
def _gradients_of_no_other_test():
    GradientState._reset_state()


class Recording(Recorded, ZenFlowTrainer):
    pass


class StopsAtThree(TrainerCallback):
    def on_step_end(self, args, state, control, **_):
        control.should_training_stop = state.global_step == 3


def trainer_in(folder, state_dir, **changes):
    given = {"save_strategy": "steps", "save_steps": 3, "max_steps": 6, **changes}
    return Recording(
        model=decoder(),
        args=arguments(TrainingArguments, folder, **given),
        train_dataset=texts(),
        eval_dataset=texts(4, seed=1),
        zenflow=CONFIG,
        state_dir=state_dir,
    )


def test_a_trainer_resumes_from_its_drive(tmp_path, state_dir):
    whole = trainer_in(tmp_path / "whole", None)
    whole.train()
    begun = trainer_in(tmp_path / "parts", state_dir)
    begun.add_callback(StopsAtThree())
    begun.train()
    begun.zenflow_optimizer.close()
    ended = trainer_in(tmp_path / "parts", state_dir)
    ended.train(resume_from_checkpoint=True)
    assert ended.losses == whole.losses[3:]
    assert are_equal(weights_of(ended.model), weights_of(whole.model))
    for trainer in (whole, ended):
        trainer.zenflow_optimizer.close()


def test_the_best_model_is_loaded_at_the_end(tmp_path, state_dir):
    found = []
    for folder in (None, state_dir):
        trainer = trainer_in(
            tmp_path / str(folder is None), folder, eval_strategy="steps", eval_steps=3,
            load_best_model_at_end=True,
        )  # fmt: skip
        trainer.train()
        found.append(weights_of(trainer.model))
        trainer.zenflow_optimizer.close()
    assert are_equal(*found)
