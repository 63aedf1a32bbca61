import copy
import json
import warnings
from dataclasses import replace
from pathlib import Path

import pytest

from zenflow import ConfigError, DeepSpeedSchedule, ZenFlowConfig, read_deepspeed
from zenflow.deepspeed.file import loaded

# The form that DeepSpeed's own ZenFlow example has.
EXAMPLE = {
    "train_batch_size": 8,
    "bf16": {"enabled": True},
    "zero_optimization": {
        "stage": 2,
        "offload_optimizer": {"device": "cpu"},
        "zenflow": {
            "topk_ratio": 0.05,
            "select_strategy": "step",
            "select_interval": 10,
            "update_interval": 4,
            "full_warm_up_rounds": 3,
            "overlap_step": True,
        },
    },
    "optimizer": {
        "type": "AdamW",
        "params": {"lr": 2e-5, "betas": [0.9, 0.95], "eps": 1e-6, "weight_decay": 0.01},
    },
    "gradient_accumulation_steps": 1,
    "gradient_clipping": 1.0,
}
REMOVED = object()


def example(changes):
    """Return the example with dotted keys set, or removed."""
    content = copy.deepcopy(EXAMPLE)
    for name, value in changes.items():
        *path, last = name.split(".")
        section = content
        for key in path:
            section = section.setdefault(key, {})
        if value is REMOVED:
            del section[last]
        else:
            section[last] = value
    return content


def read(**changes):
    return read_deepspeed(example(changes))


def rising(kind, **params):
    """Return a change of the example: a schedule whose rate rises linearly unless it says."""
    return {"scheduler": {"type": kind, "params": {"warmup_type": "linear", **params}}}


def test_the_example_is_the_papers_rule_with_the_files_values():
    settings = read()
    assert settings.config == ZenFlowConfig.preset(
        "zenflow_paper",
        topk_ratio=0.05,
        select_interval=10,
        update_interval=4,
        full_warm_up_rounds=3,
    )
    assert settings.config.effective_lag() == 4
    assert settings.optimizer == {
        "lr": 2e-5,
        "betas": (0.9, 0.95),
        "eps": 1e-6,
        "weight_decay": 0.01,
    }
    assert (settings.max_grad_norm, settings.dtype, settings.grad_scaler) == (1, "bf16", None)
    assert settings.train_batch_size == 8
    assert settings.gradient_accumulation_steps == 1
    assert settings.train_micro_batch_size_per_gpu is None
    assert settings.auto == ()


def test_the_published_example_becomes_a_config_by_one_call():
    path = Path(__file__).parent / "zf_config.json"
    with pytest.warns(UserWarning, match="every 100 steps"), pytest.warns(match="no effect here"):
        config = read_deepspeed(path).config
    assert config == ZenFlowConfig.preset(
        "zenflow_paper", topk_ratio=0.1, update_interval=4, select_interval=100
    )


def test_a_path_and_its_content_read_the_same(tmp_path):
    path = tmp_path / "zenflow.json"
    path.write_text(json.dumps(EXAMPLE))
    assert read_deepspeed(path) == read_deepspeed(str(path)) == read_deepspeed(EXAMPLE)


def test_reading_does_not_change_the_content():
    content = copy.deepcopy(EXAMPLE)
    read_deepspeed(content)
    assert content == EXAMPLE


@pytest.mark.parametrize("text", ["{", "[1]", "3", "[" * 50_000, '{"bf16": {}, "bf16": {}}'])
def test_a_file_that_holds_no_object_is_an_error_that_names_it(tmp_path, text):
    path = tmp_path / "broken.json"
    path.write_text(text)
    with pytest.raises(ConfigError, match=r"broken\.json must"):
        read_deepspeed(path)
    with pytest.raises(ConfigError, match="can't be read"):
        read_deepspeed(tmp_path / "absent.json")


def test_without_overlap_an_update_lands_in_its_own_step():
    settings = read(**{"zero_optimization.zenflow.overlap_step": False})
    assert settings.config.effective_lag() == 0
    # DeepSpeed's default is no overlap.
    assert read(**{"zero_optimization.zenflow.overlap_step": REMOVED}) == settings


def test_without_zenflow_offloading_is_zero_offload_and_nothing_is_on_device():
    zero_offload = read(**{"zero_optimization.zenflow": REMOVED})
    assert zero_offload.config == ZenFlowConfig.preset("zero_offload")
    assert read(zero_optimization={"cpu_offload": True}) == zero_offload
    assert read(zero_optimization=REMOVED).config == ZenFlowConfig.preset("on_device")
    nowhere = {"offload_optimizer": {"device": "none"}}
    assert read(zero_optimization=nowhere).config == ZenFlowConfig.preset("on_device")


def test_selection_is_by_epochs_unless_the_file_says_otherwise():
    by_default = example(
        {
            "zero_optimization.zenflow.select_strategy": REMOVED,
            "zero_optimization.zenflow.select_interval": REMOVED,
        }
    )
    config = read_deepspeed(by_default, steps_per_epoch=50).config
    assert config.select_interval_steps == 50
    with pytest.warns(UserWarning, match="steps_per_epoch is not known: .* every 100 steps"):
        assert read_deepspeed(by_default).config.select_interval_steps == 100
    two_epochs = example(
        {
            "zero_optimization.zenflow.select_strategy": "epoch",
            "zero_optimization.zenflow.select_interval": 2,
        }
    )
    assert read_deepspeed(two_epochs, steps_per_epoch=50).config.select_interval_steps == 100
    with pytest.raises(ConfigError, match="steps_per_epoch is not known"):
        read_deepspeed(two_epochs)


def test_selecting_once_needs_no_length_of_an_epoch():
    once = {
        "zero_optimization.zenflow.select_strategy": "epoch",
        "zero_optimization.zenflow.select_interval": 0,
    }
    assert read(**once).config.select_interval_steps == 0


def test_a_window_of_auto_starts_at_one_and_is_a_controllers():
    for value in ("auto", REMOVED):
        content = example({"zero_optimization.zenflow.update_interval": value})
        settings = read_deepspeed(content)
        assert settings.auto == ("zero_optimization.zenflow.update_interval",)
        assert settings.auto_knobs == ("update_interval",)
        assert settings.config == replace(read().config, update_interval=1)


def test_selections_of_auto_are_listed_with_what_they_mean():
    name = "zero_optimization.zenflow.select_"
    for value in ("auto", REMOVED):
        content = example({f"{name}strategy": value, f"{name}interval": value})
        settings = read_deepspeed(content, steps_per_epoch=50)
        assert settings.auto_knobs == ("select_strategy", "select_interval")
        assert settings.config.select_interval_steps == 50
    assert read().auto_knobs == ()


def test_values_left_to_the_program_are_listed():
    settings = read(
        **{
            "optimizer.params": {"lr": "auto", "weight_decay": "auto"},
            "gradient_clipping": "auto",
            "bf16.enabled": "auto",
            "train_batch_size": "auto",
            "gradient_accumulation_steps": "auto",
        }
    )
    assert settings.optimizer == {"betas": (0.9, 0.999), "eps": 1e-8}
    assert settings.max_grad_norm is None
    assert settings.dtype is None
    assert settings.train_batch_size is None
    assert set(settings.auto) == {
        "optimizer.params.lr",
        "optimizer.params.weight_decay",
        "gradient_clipping",
        "bf16.enabled",
        "train_batch_size",
        "gradient_accumulation_steps",
    }


def test_absent_values_are_deepspeeds_defaults():
    settings = read(**{"optimizer.params": REMOVED, "gradient_clipping": 0.0, "bf16": REMOVED})
    assert settings.optimizer == {
        "lr": 1e-3,
        "betas": (0.9, 0.999),
        "eps": 1e-8,
        "weight_decay": 0,
    }
    assert settings.max_grad_norm is None  # 0 is DeepSpeed's "no clipping"
    assert settings.dtype == "fp32"
    assert read(optimizer=REMOVED).optimizer == {}


def test_fp16_comes_with_its_loss_scaler():
    settings = read(bf16={"enabled": False}, fp16={"enabled": True, "initial_scale_power": 10})
    assert settings.dtype == "fp16"
    assert settings.grad_scaler == {"init_scale": 1024, "growth_interval": 1000}
    static = read(bf16=None, fp16={"enabled": True, "loss_scale": 128})
    assert static.grad_scaler["init_scale"] == 128


def test_what_has_no_effect_is_named_in_one_warning():
    content = example(
        {
            "steps_per_print": 10,
            "zero_optimization.overlap_comm": True,
            "zero_optimization.reduce_bucket_size": "auto",
            "zero_optimization.offload_optimizer.pin_memory": True,
            "zero_optimization.zenflow.pt_reserved_cores_perc": 0.5,
            "optimizer.params.torch_adam": True,
        }
    )
    with pytest.warns(UserWarning, match="have no effect here") as caught:
        settings = read_deepspeed(content)
    (warning,) = caught
    for name in (
        "steps_per_print",
        "zero_optimization.overlap_comm",
        "zero_optimization.reduce_bucket_size",
        "zero_optimization.offload_optimizer.pin_memory",
        "zero_optimization.zenflow.pt_reserved_cores_perc",
        "optimizer.params.torch_adam",
    ):
        assert name in str(warning.message)
    assert settings == read()


def test_features_that_are_switched_off_are_no_reason_to_speak():
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        settings = read(
            amp={"enabled": False},
            scheduler=None,
            elasticity={},
            **{
                "zero_optimization.zero_quantized_weights": False,
                "zero_optimization.offload_param": {"device": "none"},
                "optimizer.params.adam_w_mode": True,
                "optimizer.params.amsgrad": False,
            },
        )
    assert settings == read()


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"optimizer.type": "Lamb"}, "optimizer.type would change results"),
        ({"optimizer.params.adam_w_mode": False}, "adam_w_mode would change results"),
        ({"optimizer.params.bias_correction": False}, "bias_correction would change results"),
        ({"optimizer.params.amsgrad": True}, "amsgrad would change results"),
        ({"optimizer.params.lr": -1}, "lr must be a finite number >= 0, got -1"),
        ({"optimizer.params.betas": [0.9]}, r"betas must be two numbers in \[0, 1\)"),
        ({"optimizer.params.betas": [0.9, 1]}, r"betas must be two numbers in \[0, 1\)"),
        ({"optimizer.params.max_grad_norm": 1}, "'max_grad_norm' is unknown"),
        ({"gradient_clipping": "1"}, "gradient_clipping must be a number >= 0, got '1'"),
        ({"gradient_allreduce_op": "sum"}, "gradients are averaged"),
        ({"gradient_cliping": 1}, "'gradient_cliping' is unknown; did you mean 'gradient_clipp"),
        ({"train_batch_size": 0}, "train_batch_size must be an integer >= 1"),
        ({"train_micro_batch_size_per_gpu": 3}, r"got 8 and 3 \* 1: correct one"),
        (
            {"gradient_accumulation_steps": 3},
            "multiple of gradient_accumulation_steps, .* 8 and 3",
        ),
        (
            {"train_micro_batch_size_per_gpu": 5, "gradient_accumulation_steps": REMOVED},
            "multiple of train_micro_batch_size_per_gpu, .* 8 and 5",
        ),
        ({"fp16": {"enabled": True}}, "bf16 and fp16 can't both be enabled"),
        ({"bf16.bf16_optimizer_states": True}, "moments are float32"),
        ({"scheduler": {"type": "OneCycle"}}, "torch.optim.lr_scheduler.OneCycleLR in your own"),
        ({"scheduler": 3}, "scheduler must be an object"),
        (
            {"scheduler": {"type": "LRRangeTest"}},
            "put the rate that it found into optimizer.param",
        ),
        ({"scheduler": {"type": "StepLR"}}, "torch.optim.lr_scheduler"),
        (rising("WarmupLR", warmup_min_lr=-1), "warmup_min_lr must be a number >= 0"),
        (rising("WarmupLR", warmup_max_lr=0), "warmup_max_lr must be above 0, got 0"),
        (rising("WarmupLR", total_num_steps=9), "total_num_steps is no parameter of WarmupLR"),
        (rising("WarmupLR", last_batch_iteration=3), "place is its checkpoint's"),
        (rising("WarmupLR", warmup_num_steps=0), "must be an integer >= 1"),
        (rising("WarmupLR", warmup_max_lr="fast"), "warmup_max_lr must be a number"),
        (rising("WarmupLR", warmup_steps=5), "'warmup_steps' is unknown"),
        (rising("WarmupLR", warmup_type="square"), "must be log or linear"),
        (rising("WarmupDecayLR"), "total_num_steps must be an integer >= 1 or 'auto', got None"),
        (
            rising("WarmupCosineLR", total_num_steps=9, warmup_max_lr=1),
            "no parameter of WarmupCos",
        ),
        (
            rising("WarmupCosineLR", total_num_steps=9, cos_min_ratio="low"),
            "must be a number >= 0",
        ),
        ({"torch_autocast": {"enabled": True}}, "torch.autocast in your own loop"),
        ({"zero_optimization": []}, r"zero_optimization must be an object, got \[\]"),
        ({"zero_optimization.stage": 4}, "stage must be 0..3, got 4"),
        ({"zero_optimization.reduce_bucket": 1}, "did you mean 'reduce_bucket_size'"),
        ({"zero_optimization.zero_quantized_weights": True}, "weights are kept exactly"),
        ({"zero_optimization.offload_param": {"device": "cpu"}}, "parameters stay on the device"),
        ({"zero_optimization.offload_param": {"devise": "cpu"}}, "did you mean 'device'"),
        ({"zero_optimization.cpu_offload_param": True}, "parameters stay on the device"),
        ({"zero_optimization.offload_optimizer.device": "nvme"}, "must be cpu or none"),
        ({"zero_optimization.offload_optimizer": REMOVED}, "must go with offload_optimizer"),
        ({"zero_optimization.zenflow.topk": 0.1}, "did you mean 'topk_ratio'"),
        ({"zero_optimization.zenflow.rolling": True}, "'rolling' is unknown"),
        ({"zero_optimization.zenflow.topk_ratio": 2}, r"topk_ratio must be a number in \[0, 1\]"),
        ({"zero_optimization.zenflow.select_strategy": "auto"}, "must be 'auto' with"),
        ({"zero_optimization.zenflow.select_strategy": "custom"}, "must be one of step, epoch"),
        ({"zero_optimization.zenflow.select_interval": "auto"}, "must be a number with"),
    ],
)
def test_what_would_change_results_is_refused(changes, message):
    with pytest.raises(ConfigError, match=message):
        read(**changes)


def test_a_schedule_keeps_deepspeeds_defaults():
    for kind, changes in (
        ("WarmupLR", {}),
        ("WarmupDecayLR", {"max_lr": 1e-3, "total_steps": 90}),
        ("WarmupCosineLR", {"total_steps": 90}),
    ):
        params = {} if kind == "WarmupLR" else {"total_num_steps": 90}
        found = read(scheduler={"type": kind, "params": params}).schedule
        assert found == DeepSpeedSchedule(kind=kind, **changes)
    assert read().schedule is None


def test_a_schedules_values_of_auto_are_the_programs():
    names = ("warmup_min_lr", "warmup_max_lr", "warmup_num_steps", "total_num_steps")
    settings = read(scheduler={"type": "WarmupDecayLR", "params": dict.fromkeys(names, "auto")})
    assert settings.schedule == DeepSpeedSchedule(kind="WarmupDecayLR", warmup_steps=None)
    assert set(settings.auto) == {f"scheduler.params.{name}" for name in names}


def test_everything_that_is_refused_is_told_at_once():
    with pytest.raises(ConfigError, match="breaks 3 rules"):
        read(amp={"enabled": True}, gradient_clipping=-1, tensor_parallel={"autotp_size": 2})


@pytest.mark.parametrize(
    ("total", "micro", "steps", "num_gpus", "expected"),
    [
        (32, 4, 2, 4, (4, 2)),
        (32, 4, None, 2, (4, 4)),
        (32, None, 2, 4, (4, 2)),
        (32, None, None, 4, (8, None)),
        (None, 4, 2, 4, (4, 2)),
        (None, 4, None, 4, (4, None)),
        (None, None, 2, 4, (None, 2)),
        (32, 4, "auto", 2, (4, None)),
        (32, 4, 2, 1, "must be train_micro.* got 32 on 1 GPU: train on as many"),
        (32, 4, 2, 8, "must be train_micro.* got 32 on 8 GPUs"),
        (32, 4, None, 3, "must be a multiple of train_micro.* the number of GPUs"),
        (32, None, 2, 3, "must be a multiple of gradient_acc.* the number of GPUs"),
        (2, None, None, 4, "must be a multiple of the number of GPUs"),
    ],
)
def test_two_of_the_batch_keys_give_the_third(total, micro, steps, num_gpus, expected):
    keys = ("train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps")
    given = dict(zip(keys, (total, micro, steps), strict=True))
    settings = read_deepspeed({key: value for key, value in given.items() if value is not None})
    if isinstance(expected, tuple):
        assert settings.batch_on(num_gpus) == expected
    else:
        with pytest.raises(ConfigError, match=expected):
            settings.batch_on(num_gpus)


COMMENTS = {"_comment": "why", "//": 1, "#": [], "__doc__": {"a": {}}, "note": None, "_lr": 1e-3}


def test_comments_have_no_meaning_at_any_level():
    commented = {
        **example({}),
        **COMMENTS,
        "zero_optimization": {
            **EXAMPLE["zero_optimization"],
            **COMMENTS,
            "offload_optimizer": {"device": "cpu", **COMMENTS},
            "zenflow": {**EXAMPLE["zero_optimization"]["zenflow"], **COMMENTS},
        },
        "optimizer": {
            "type": "AdamW",
            **COMMENTS,
            "params": {**EXAMPLE["optimizer"]["params"], **COMMENTS},
        },
        "scheduler": {"type": "WarmupLR", **COMMENTS, "params": {**COMMENTS}},
    }
    plain = example({"scheduler": {"type": "WarmupLR", "params": {}}})
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert read_deepspeed(commented, steps_per_epoch=9) == read_deepspeed(
            plain, steps_per_epoch=9
        )


def test_a_comment_may_stand_there_twice(tmp_path):
    path = tmp_path / "ds.json"
    path.write_text('{"//": "a", "//": "b", "train_batch_size": 8}')
    assert read_deepspeed(path).train_batch_size == 8


# ---- files as DeepSpeed reads them ---------------------------------------------------------


def test_comments_and_a_last_comma_are_passed_over_as_deepspeeds_reader_does(tmp_path):
    file = tmp_path / "ds.json"
    text = """\ufeff// of our cluster, 8 GPUs
{
  "bf16": {"enabled": true}, # Ampere
  /* was 16,
     before */
  "train_micro_batch_size_per_gpu": 4,
  "zero_optimization": {"stage": 2, "offload_optimizer": {"device": "cpu",},},
  "optimizer": {"type": "AdamW", "params": {"lr": 1e-5, "betas": [0.9, 0.95,]}},
  "tensorboard": {"output_path": "s3://runs/#1/*a*/, ]"},
}
"""
    file.write_text(text, encoding="utf-8")
    with pytest.warns(UserWarning, match="tensorboard"):
        found = read_deepspeed(file)
    assert found.train_micro_batch_size_per_gpu == 4
    assert dict(found.optimizer)["betas"] == (0.9, 0.95)
    assert found.dtype == "bf16"
    content = loaded(file)
    assert content["tensorboard"]["output_path"] == "s3://runs/#1/*a*/, ]"
    file.write_text('{\n// a\n/* b\n*/ "bf16": }')
    with pytest.raises(ConfigError, match="line 4"):  # comments leave lines where they were
        loaded(file)


@pytest.mark.parametrize(
    ("key", "value", "words"),
    [
        ("reduce_bucket_size", -1, "must be a number from 0 on, as DeepSpeed checks, got -1"),
        ("stage3_max_live_parameters", "many", "must be a number from 0 on"),
        ("offload_optimizer", {"device": "cpu", "ratio": 1.5}, "must be a number from 0 to 1"),
        ("offload_optimizer", {"device": "cpu", "ratio": 0.3}, "must go with stage 3"),
        ("offload_optimizer", {"device": "cpu", "cpuadam_cores_perc": 2}, "from 0 to 1"),
    ],
)
def test_numbers_that_deepspeed_refuses_are_refused(key, value, words):
    content = {"zero_optimization": {"stage": 2, key: value}}
    with pytest.raises(ConfigError, match=words):
        read_deepspeed(content)
    sound = {"reduce_bucket_size": 5e8, "offload_optimizer": {"device": "cpu", "ratio": 0.3}}
    with pytest.warns(UserWarning, match="ratio"):
        read_deepspeed({"zero_optimization": {"stage": 3, **sound}})
