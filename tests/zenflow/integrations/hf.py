"""What the tests of transformers' and TRL's trainers share."""

import copy

from safetensors.torch import load_file

from tests.zenflow.integrations.tiny import LR, MAX_NORM, WEIGHT_DECAY, plain_run


def arguments(kind, folder, **changes):
    """Return training arguments of this class for runs of nine steps."""
    given = {
        "max_steps": 9,
        "per_device_train_batch_size": 2,
        "learning_rate": LR,
        "max_grad_norm": MAX_NORM,
        "weight_decay": WEIGHT_DECAY,
        "logging_steps": 3,
        "save_strategy": "no",
        "report_to": [],
        "use_cpu": True,
        "disable_tqdm": True,
        **changes,
    }
    return kind(str(folder), **given)


class Recorded:
    """Keeps what `compute_loss` was given in training, and the losses."""

    def compute_loss(self, model, inputs, *args, num_items_in_batch=None, **kwargs):
        if not hasattr(self, "batches"):
            self.batches, self.losses = [], []
        if model.training:
            self.batches.append((copy.deepcopy(inputs), num_items_in_batch))
        return super().compute_loss(
            model, inputs, *args, num_items_in_batch=num_items_in_batch, **kwargs
        )

    def training_step(self, *args, **kwargs):
        loss = super().training_step(*args, **kwargs)
        self.losses.append(loss.item())
        return loss


def saved(folder, model):
    """Return the weights in a folder, in the order of the parameters of this model.

    Of a model with an adapter these are the adapter's, under names without its own name.
    """
    (file,) = folder.glob("*.safetensors")
    state = load_file(file)
    names = [name.replace(".default", "") for name, _ in model.named_parameters()]
    return [state[name] for name in names if name in state]


def replayed(trainer, judge, *, accumulation_steps=1):
    """Train another trainer's model on the recorded batches in a plain loop.

    Args:
        trainer: The trainer that has run.
        judge: A trainer that has not, whose `compute_loss` is used; its model is trained.
        accumulation_steps: Micro-batches in a full step.
    """
    from transformers import get_scheduler

    per_epoch = len(trainer.get_train_dataloader())
    steps, rest = [], list(trainer.batches)
    while rest:  # an epoch's last group may be short
        for first in range(0, per_epoch, accumulation_steps):
            steps.append(rest[: min(accumulation_steps, per_epoch - first)])
            del rest[: len(steps[-1])]
    steps = steps[: trainer.args.max_steps]
    judge.model.train()
    return plain_run(
        judge.model,
        steps,
        lambda batch: judge.compute_loss(judge.model, batch[0], num_items_in_batch=batch[1]),
        accumulation_steps=accumulation_steps,
        schedule=lambda optimizer: get_scheduler("linear", optimizer, 0, len(steps)),
    )
