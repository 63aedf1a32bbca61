"""Lightning's Trainer: the plain loop's bits, and true weights in validation and checkpoints."""

import copy
import threading

import pytest
import torch

pytest.importorskip(
    "lightning", reason='needs the extra: pip install "zenflow-offload[lightning]"'
)

import lightning.pytorch as pl
from lightning.pytorch.callbacks import (
    GradientAccumulationScheduler,
    ModelCheckpoint,
    StochasticWeightAveraging,
    WeightAveraging,
)
from lightning.pytorch.loggers import CSVLogger
from torch.utils.data import DataLoader

from tests.models import weights_of
from tests.zenflow.integrations.tiny import (
    MAX_NORM,
    are_equal,
    both_modes,
    decoder,
    make_optimizer,
    plain_run,
    texts,
    told,
)
from zenflow.integrations.lightning import ZenFlowCallback

pytestmark = pytest.mark.filterwarnings("default")  # those of other packages are not ours

ACCUMULATION = 3
"""Micro-batches in a step; an epoch has seven, so that its last step has one."""


def batches(seed=0):
    rows = [torch.tensor(row["input_ids"]) for row in texts(seed=seed)]
    return DataLoader(rows, batch_size=2)


class Module(pl.LightningModule):
    def __init__(self, release=True, accumulation_steps=ACCUMULATION, manual=False):
        super().__init__()
        self.model = decoder().train()
        self.release, self.accumulation_steps = release, accumulation_steps
        self.losses, self.validated = [], []
        self.automatic_optimization = not manual

    def loss_of(self, tokens):
        return self.model(input_ids=tokens, labels=tokens).loss

    def training_step(self, tokens, _):
        loss = self.loss_of(tokens)
        self.losses.append(loss.item())
        if not self.automatic_optimization:
            self.manual_backward(loss)
            self.optimizers().step()
        return loss

    def validation_step(self, tokens, index):
        if index == 0:
            self.validated.append(weights_of(self.model))

    test_step = predict_step = validation_step

    def configure_optimizers(self):
        steps = self.accumulation_steps if self.release else 1
        return make_optimizer(self.model, self.release, steps)

    def configure_gradient_clipping(self, optimizer, *_, **__):
        if not self.release:
            optimizer.clip_grad_norm_(MAX_NORM)


def trainer_in(folder, callbacks=(), behind=(), **given):
    return pl.Trainer(
        default_root_dir=folder,
        accelerator="cpu",
        logger=given.pop("logger", False),
        enable_progress_bar=False,
        enable_model_summary=False,
        enable_checkpointing=any(isinstance(c, ModelCheckpoint) for c in callbacks),
        callbacks=[*callbacks, ZenFlowCallback(), *behind],
        **{"max_epochs": 2, "accumulate_grad_batches": ACCUMULATION, **given},
    )


@pytest.fixture(scope="module")
def plain():
    model, epoch = decoder().train(), list(batches())
    return plain_run(
        model,
        2 * [epoch[:3], epoch[3:6], epoch[6:]],
        lambda tokens: model(input_ids=tokens, labels=tokens).loss,
        accumulation_steps=ACCUMULATION,
        divisor=ACCUMULATION,
    )


@pytest.fixture(scope="module", params=[True, False], ids=["release", "keep"])
def fit(request, tmp_path_factory):
    """Return a module after two epochs, its trainer, and the folder with what was saved."""
    folder = tmp_path_factory.mktemp("fit")
    module = Module(request.param)
    saves = [
        ModelCheckpoint(folder / "whole", every_n_train_steps=1, save_top_k=-1),
        ModelCheckpoint(folder / "weights", every_n_train_steps=2, save_top_k=-1,
                        save_weights_only=True),
    ]  # fmt: skip
    trainer = trainer_in(
        folder, saves, logger=CSVLogger(folder, flush_logs_every_n_steps=1), log_every_n_steps=2
    )
    trainer.fit(module, batches(), batches(seed=1))
    return module, trainer, folder


def saved(folder, step):
    (file,) = folder.glob(f"*step={step}.ckpt")
    state = torch.load(file, weights_only=False)["state_dict"]
    names = [name for name, _ in decoder().named_parameters()]
    return [state[f"model.{name}"] for name in names]


def test_losses_and_weights_are_the_plain_loops(fit, plain, record_property):
    module, *_ = fit
    told(record_property, "Lightning", module.release, "losses, weights", "lightning")
    assert module.losses == plain.losses
    assert are_equal(weights_of(module.model), plain.true[-1])
    assert not are_equal(plain.seen[-1], plain.true[-1])


def test_validation_sees_the_true_weights(fit, plain, record_property):
    module, *_ = fit
    told(record_property, "Lightning", module.release, "validation", "lightning")
    _, first, last = module.validated  # before training, and behind each epoch
    assert are_equal(first, plain.true[2])
    assert are_equal(last, plain.true[5])


def test_checkpoints_have_the_true_weights(fit, plain, record_property):
    module, _, folder = fit
    told(record_property, "Lightning", module.release, "saved weights", "lightning")
    for step in range(1, 7):
        assert are_equal(saved(folder / "whole", step), plain.true[step - 1])
    for step in (2, 4, 6):
        assert are_equal(saved(folder / "weights", step), plain.true[step - 1])


def test_testing_and_predicting_after_it_see_the_true_weights(fit, plain):
    module, trainer, _ = fit
    trainer.test(module, batches(), verbose=False)
    trainer.predict(module, batches())
    assert are_equal(module.validated[-2], plain.true[-1])
    assert are_equal(module.validated[-1], plain.true[-1])
    del module.validated[-2:]


@pytest.mark.parametrize(**both_modes)
def test_a_resumed_run_goes_on_bit_for_bit(plain, release, tmp_path, record_property):
    """From an epoch's end: Lightning starts the data of a broken-off epoch anew."""
    told(record_property, "Lightning", release, "resume", "lightning")
    save = ModelCheckpoint(tmp_path, save_on_train_epoch_end=True)
    trainer_in(tmp_path, [save], max_epochs=1).fit(Module(release), batches())
    (file,) = tmp_path.glob("*step=3.ckpt")  # in the middle of a window
    again = Module(release)
    trainer_in(tmp_path).fit(again, batches(), ckpt_path=str(file))
    assert are_equal(weights_of(again.model), plain.true[-1])


def test_a_copys_state_leaves_the_weights_of_training(plain, tmp_path):
    """As averages of weights are kept, in mid-run."""

    class Copying(pl.Callback):
        def on_train_batch_end(self, trainer, module, *_):
            copy.deepcopy(module).state_dict()
            seen.append(weights_of(module.model))

    seen, module = [], Module()
    trainer_in(tmp_path, [Copying()]).fit(module, batches())
    assert module.losses == plain.losses
    steps = [seen[batch] for batch in (2, 5, 6, 9, 12, 13)]  # an epoch has seven
    assert all(map(are_equal, steps, plain.seen))


def listed(place, callback):
    """Return callbacks to add before and behind one of ours, of which one is this."""
    return {"before": ([callback], []), "behind": ([], [callback])}[place]


@pytest.mark.parametrize("validates", [True, False], ids=["validation", "no validation"])
@pytest.mark.parametrize("place", ["before", "behind"])
@pytest.mark.parametrize(**both_modes)
def test_an_average_is_validated_and_left_in_the_module(
    plain, release, place, validates, tmp_path
):
    """By Lightning's own callback, wherever it stands in the list."""
    before, behind = listed(place, WeightAveraging())
    module = Module(release)
    trainer = trainer_in(tmp_path, before, behind)
    trainer.fit(module, batches(), batches(seed=1) if validates else None)
    assert module.losses == plain.losses
    for weights, count in zip(module.validated[1:], (3, 6), strict=False):
        assert_averages(weights, plain.seen[:count])
    assert_averages(weights_of(module.model), plain.seen)


def assert_averages(weights, steps):
    means = [torch.stack(values).mean(dim=0) for values in zip(*steps, strict=True)]
    torch.testing.assert_close(weights, means, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("has_norm", [False, True], ids=["", "batch norm"])
@pytest.mark.parametrize(**both_modes)
def test_stochastic_averages_are_of_the_epochs_true_weights(release, has_norm, tmp_path):
    """With a batch norm they are run once more over the data, without any step."""
    ends = []
    for place in ("before", "behind"):
        averaging = StochasticWeightAveraging(swa_lrs=1e-3, swa_epoch_start=1)
        before, behind = listed(place, averaging)
        module, told = Module(release), Told()
        module.norm = torch.nn.BatchNorm1d(2) if has_norm else None
        trainer_in(tmp_path, before, [*behind, told], max_epochs=3).fit(module, batches())
        start = weights_of(decoder())
        assert_averages(weights_of(module.model), [start, *told.true[:2]])
        ends.append(weights_of(module.model))
    assert are_equal(*ends)


class Told(pl.Callback):
    """Keeps the true weights of every epoch's end."""

    def __init__(self):
        self.true = []

    def on_train_epoch_end(self, trainer, module):
        with trainer.optimizers[0].true_weights():
            self.true.append(weights_of(module.model))


def test_loggers_get_the_rows(fit):
    *_, folder = fit
    (file,) = folder.rglob("metrics.csv")
    header, *rows = file.read_text().splitlines()
    assert {"zenflow/stall_seconds", "zenflow/captured_energy", "step"} <= set(header.split(","))
    assert len(rows) == 3


def test_no_thread_stays(fit):
    assert not [t for t in threading.enumerate() if "zenflow" in t.name.lower()]


def test_manual_optimization_is_the_plain_loop_too(tmp_path):
    module, model = Module(accumulation_steps=1, manual=True), decoder().train()
    trainer_in(tmp_path, accumulate_grad_batches=1, max_epochs=1).fit(module, batches())
    plain = plain_run(
        model,
        [[tokens] for tokens in batches()],
        lambda tokens: model(input_ids=tokens, labels=tokens).loss,
    )
    assert module.losses == plain.losses
    assert are_equal(weights_of(module.model), plain.true[-1])


REFUSED = {
    "clipping": ({"gradient_clip_val": 1.0}, "make the optimizer with max_grad_norm=1.0"),
    "accumulation": ({"accumulate_grad_batches": 2}, "give it accumulation_steps=2"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_release_mode_can_not_do_is_refused_at_once(case, tmp_path):
    changes, message = REFUSED[case]
    with pytest.raises(ValueError, match=message):
        trainer_in(tmp_path, **changes).fit(Module(), batches())


class Changing(pl.Callback):
    """Sets the number of micro-batches in a step before some batches, from the second one on."""

    def __init__(self, numbers):
        self.numbers, self.batch = numbers, 0

    def on_train_batch_start(self, trainer, *_):
        trainer.accumulate_grad_batches = self.numbers.get(
            self.batch, trainer.accumulate_grad_batches
        )
        self.batch += 1


CHANGES = {
    "fewer": (2, lambda: GradientAccumulationScheduler({0: 2, 2: 1})),
    "more": (1, lambda: GradientAccumulationScheduler({0: 1, 1: 2, 2: 3})),
    "as many": (2, lambda: GradientAccumulationScheduler({0: 2})),
    "not the optimizer's": (3, lambda: GradientAccumulationScheduler({1: 4})),
    "by a callback": (1, lambda: Changing({3: 3, 8: 2, 13: 4, 17: 1})),
}
"""Micro-batches that the optimizer is made for, and what changes their number in mid-run."""


@pytest.mark.parametrize("case", CHANGES)
def test_micro_batches_may_change_in_number_while_a_run_goes_on(case, tmp_path):
    accumulation_steps, change = CHANGES[case]
    ends = []
    for release in (True, False):
        module = Module(release, accumulation_steps)
        trainer = trainer_in(tmp_path, [change()], accumulate_grad_batches=1, max_epochs=3)
        trainer.fit(module, batches())
        ends.append((trainer.global_step, module.losses, weights_of(module.model)))
    (released, losses, weights), (kept, *_), *_ = ends
    assert released == kept
    assert losses == ends[1][1]
    assert are_equal(weights, ends[1][2])


def test_another_optimizer_is_refused(tmp_path):
    module = Module()
    module.configure_optimizers = lambda: torch.optim.AdamW(module.parameters())
    with pytest.raises(ValueError, match="configure_optimizers"):
        trainer_in(tmp_path).fit(module, batches())
