"""DeepSpeed's configuration keys, by their outcome: kept, changed, unused, refused.

What counts is whether leaving a key out changes the weights that come out of a run. Key names are
those of DeepSpeed 0.19.
"""

from __future__ import annotations

import math
import re
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Mapping


@dataclass(frozen=True, slots=True, kw_only=True)
class KnownKeys:
    """The keys of one section of the file."""

    kept: Mapping[str, str] = field(default_factory=dict)
    """Keys whose value is taken as it is, each with the setting that it becomes."""

    changed: Mapping[str, str] = field(default_factory=dict)
    """Keys that are followed in another way, each with that way."""

    unused: Mapping[str, str] = field(default_factory=dict)
    """Keys that change no result, each with the reason why it has no meaning here."""

    refused: Mapping[str, str] = field(default_factory=dict)
    """Keys that change results and can't be honoured, each with a remedy."""

    @property
    def names(self) -> list[str]:
        """All keys of the section, in alphabetical order."""
        return sorted({*self.kept, *self.changed, *self.unused, *self.refused})


def _all(reason: str, *names: str) -> dict[str, str]:
    return dict.fromkeys(names, reason)


COMMENT = "a comment"
"""Label of a key that is there for people, and for no program."""
_COMMENT_KEY = re.compile(
    r"(_|//|#|\$).*|(comment|note|todo|doc|description)s?[\W\d_]*", re.DOTALL
)


def is_comment(key: str) -> bool:
    """Return whether a key is there for people alone, as JSON has no comments.

    >>> [is_comment(key) for key in ("_comment", "//", "__doc__", "note_2", "notebook", "bf16")]
    [True, True, True, True, False, False]
    """
    return _COMMENT_KEY.fullmatch(key.casefold()) is not None


LEAST_AND_MOST: Mapping[str, tuple[float, float]] = MappingProxyType(
    {
        **dict.fromkeys(
            (
                f"zero_optimization.{name}"
                for name in (
                    "allgather_bucket_size", "max_live_parameters", "max_reuse_distance",
                    "model_persistence_threshold", "param_persistence_threshold",
                    "prefetch_bucket_size", "reduce_bucket_size", "stage3_max_live_parameters",
                    "stage3_max_reuse_distance", "stage3_model_persistence_threshold",
                    "stage3_param_persistence_threshold", "stage3_prefetch_bucket_size",
                    "sub_group_size", "zero_hpz_partition_size",
                    "offload_optimizer.buffer_count", "offload_param.buffer_count",
                    "offload_param.buffer_size", "offload_param.max_in_cpu",
                )
            ),
            (0.0, math.inf),
        ),
        "zero_optimization.offload_optimizer.cpuadam_cores_perc": (0.0, 1.0),
        "zero_optimization.offload_optimizer.ratio": (0.0, 1.0),
    }
)  # fmt: skip
"""Bounds of numbers that DeepSpeed checks and that have no meaning here (runtime/zero/config.py,
offload_config.py)."""


_LOGS = "logs and profiles"
_MESSAGES = "how GPUs exchange messages"
_PARTITIONS = "weights are whole on the GPU; nothing is partitioned or gathered"
_PERMISSION = "a permission that DeepSpeed asks for"
_BUFFERS = "the engine sizes and pins its own buffers"
_FILES = "where and how DeepSpeed writes its files"
_DATA = "order the data in your own loop"
_OVERFLOW = "torch's GradScaler decides which overflowing steps are skipped"
_RISE = "the schedule's"

_TOP_LEVEL = KnownKeys(
    kept={
        "gradient_accumulation_steps": "accumulation_steps, and --grad-accum in `zenflow train`",
        "gradient_clipping": "max_grad_norm; 0 is no clipping",
        "train_micro_batch_size_per_gpu": "batch_size",
    },
    changed={
        "bfloat16": "read as bf16, its newer name",
        "train_batch_size": "batch_size x gradient_accumulation_steps, on one GPU",
    },
    unused={
        **_all(
            _LOGS,
            "comet", "comms_logger", "csv_monitor", "dump_state", "flops_profiler", "log_level",
            "memory_breakdown", "steps_per_print", "tensorboard", "timers",
            "wall_clock_breakdown", "wandb",
        ),
        **_all(
            _MESSAGES,
            "communication_data_type", "disable_allgather", "gradient_predivide_factor",
            "prescale_gradients", "seq_parallel_communication_data_type", "sparse_gradients",
        ),
        **_all(_FILES, "aio", "checkpoint", "datastates_ckpt", "nebula", "use_node_local_storage"),
        **_all(_PERMISSION, "zero_allow_untested_optimizer", "zero_force_ds_cpu_optimizer"),
        **_all("torch does it by itself", "compile", "graph_harvesting"),
        **_all("DeepSpeed does not read it either: remove it", "comms_config", "monitor_config"),
        "activation_checkpointing": "the model's own; `zenflow train` has --checkpointing",
        "autotuning": "`zenflow plan` and --auto tune here",
        "data_parallel_size": "the number of GPUs",
        "data_types": "gradients are added up in the parameters' dtype, and masters are float32",
        "gradient_allreduce_op": "gradients are averaged",
        "managed_gradient_accumulation": "your own loop says when step() is called",
        "pipeline": "the model is whole on each GPU",
        "use_data_before_expert_parallelism": "the order of GPUs",
        "vocabulary_size": "a check of shapes",
    },
    refused={
        "amp": "use bf16 or fp16",
        "compression_training": "remove it",
        "curriculum_learning": _DATA,
        "data_efficiency": _DATA,
        "dataloader_drop_last": "set drop_last on your own DataLoader",
        "eigenvalue": "remove it",
        "elasticity": "give the batch size itself",
        "expert_parallel": "remove it: the engine updates whole matrices",
        "hybrid_engine": "remove it",
        "progressive_layer_drop": "remove it",
        "quantize_training": "remove it",
        "sequence_parallel_size": "remove it: each sequence is on one GPU",
        "sparse_attention": "remove it",
        "tensor_parallel": "remove it: the engine updates whole matrices",
        "torch_autocast": "use torch.autocast in your own loop",
        "weight_quantization": "remove it: weights are kept exactly",
    },
)  # fmt: skip
_ZERO = KnownKeys(
    changed={"cpu_offload": "read as offload_optimizer, its newer name"},
    unused={
        "stage": "weights are whole on the GPU, and optimizer states on the host",
        "cpu_offload_use_pin_memory": _BUFFERS,
        "ignore_unused_parameters": "a parameter without a gradient is left alone",
        "save_muon_momentum_buffer_in_memory": "Muon is not offered",
        **_all(
            _MESSAGES,
            "allgather_bucket_size", "allgather_partitions", "contiguous_gradients",
            "overlap_comm", "reduce_bucket_size", "reduce_scatter", "round_robin_gradients",
            "use_multi_rank_bucket_allreduce",
        ),
        **_all(
            _FILES,
            "elastic_checkpoint", "load_from_fp32_weights", "pipeline_loading_checkpoint",
            "gather_16bit_weights_on_model_save", "stage3_gather_16bit_weights_on_model_save",
            "stage3_gather_fp16_weights_on_model_save",
        ),
        **_all(
            _PARTITIONS,
            "allgather_sequential", "enable_sanity_checks", "leaf_module", "legacy_stage1",
            "log_trace_cache_warnings", "max_live_parameters", "max_reuse_distance",
            "memory_efficient_linear", "mics_hierarchical_params_gather", "mics_shard_size",
            "model_persistence_threshold", "module_granularity_threshold",
            "override_module_apply", "param_persistence_threshold", "prefetch_bucket_size",
            "stage3_allgather_sequential", "stage3_max_live_parameters",
            "stage3_max_reuse_distance", "stage3_model_persistence_threshold",
            "stage3_module_granularity_threshold", "stage3_param_persistence_threshold",
            "stage3_prefetch_bucket_size", "stage3_use_all_reduce_for_fetch_params",
            "sub_group_size", "use_all_reduce_for_fetch_params", "zero_hpz_partition_size",
        ),
    },
    refused={
        **_all(
            "remove it: parameters stay on the device", "cpu_offload_param", "cpu_offload_params"
        ),
        **_all(
            "remove it: gradients are copied exactly",
            "zero_quantized_gradients", "zeropp_loco_param",
        ),
        **_all(
            "remove it: weights are kept exactly",
            "zero_quantized_nontrainable_weights", "zero_quantized_weights",
        ),
    },
)  # fmt: skip
_OFFLOAD_OPTIMIZER = KnownKeys(
    changed={"device": "preset: zenflow_paper or zero_offload with cpu, on_device with none"},
    unused={
        **_all(_BUFFERS, "buffer_count", "buffer_size", "fast_init", "max_in_cpu", "pin_memory"),
        "nvme_path": "state_dir is a folder for states on a drive, with topk_ratio=0",
        **_all("states are read ahead and written behind", "pipeline_read", "pipeline_write"),
        "cpuadam_cores_perc": "host_threads says how many threads the host's update has",
        "ratio": "topk_ratio says how much is updated on the GPU",
        "super_offload": "the engine overlaps the host's update by itself",
    },
)
_OFFLOAD_PARAM = KnownKeys(
    unused=_all(
        "parameters stay on the device",
        "device", "buffer_count", "buffer_size", "max_in_cpu", "nvme_path", "pin_memory",
    )
)  # fmt: skip
_ZENFLOW = KnownKeys(
    kept={
        name: name
        for name in (
            "full_warm_up_rounds", "overlap_step", "select_interval", "select_strategy",
            "topk_ratio", "update_interval",
        )
    },
    changed={"steps_per_epoch": "counted from the data by `zenflow train`, or an argument"},
    unused={
        "auto_ratio": "a controller chooses windows by the gradients' norms",
        "offload": "the selected columns' states stay on the device",
        "pt_reserved_cores_perc": "host_threads says how many threads the host's update has",
    },
)  # fmt: skip
_OPTIMIZER = KnownKeys(
    changed={"type": "ZenFlowAdamW, whose decay is decoupled, as DeepSpeed's is"},
    unused={"legacy_fusion": "an implementation of the same update"},
)
_ADAM = KnownKeys(
    kept={name: name for name in ("lr", "betas", "eps", "weight_decay")},
    unused={
        **_all("an implementation of the same update", "fused", "set_grad_none", "torch_adam"),
        **_all("the update is AdamW's", "adam_w_mode", "amsgrad", "bias_correction"),
    },
)
_SCHEDULER = KnownKeys(kept={"type": "deepspeed_lr_scheduler: the same rates step for step"})
_SCHEDULE = KnownKeys(
    kept=_all(
        _RISE,
        "cos_min_ratio", "total_num_steps", "warmup_max_lr", "warmup_min_lr", "warmup_min_ratio",
        "warmup_num_steps", "warmup_type",
    ),
    unused={"last_batch_iteration": "a run's place is its checkpoint's"},
)  # fmt: skip
_BF16 = KnownKeys(
    kept={"enabled": "dtype of the model's weights; masters on the host are float32"},
    unused=_all(
        "gradients are checked in every step", "check_grad_overflow", "immediate_grad_update"
    ),
    refused={
        "bf16_master_weights_and_grads": "remove it: masters are float32",
        "bf16_optimizer_states": "remove it: moments are float32",
    },
)
_FP16 = KnownKeys(
    kept={"enabled": "dtype of the model's weights; masters on the host are float32"},
    changed={
        "initial_scale_power": "GradScaler's init_scale is 2 to its power",
        "loss_scale": "GradScaler's init_scale, which never grows; 0: the scale is dynamic",
        "loss_scale_window": "GradScaler's growth_interval",
    },
    unused={
        **_all(_OVERFLOW, "consecutive_hysteresis", "hysteresis", "min_loss_scale"),
        "auto_cast": "cast inputs in your own loop",
    },
    refused={"fp16_master_weights_and_grads": "remove it: masters are float32"},
)

SECTIONS: Mapping[str, KnownKeys] = MappingProxyType(
    {
        "": _TOP_LEVEL,
        "bf16.": _BF16,
        "fp16.": _FP16,
        "optimizer.": _OPTIMIZER,
        "optimizer.params.": _ADAM,
        "scheduler.": _SCHEDULER,
        "scheduler.params.": _SCHEDULE,
        "zero_optimization.": _ZERO,
        "zero_optimization.offload_optimizer.": _OFFLOAD_OPTIMIZER,
        "zero_optimization.offload_param.": _OFFLOAD_PARAM,
        "zero_optimization.zenflow.": _ZENFLOW,
    }
)
"""Keys of each section, by the section's name and a dot; the top level's name is empty."""


def known_names(prefix: str) -> list[str]:
    """Return all keys of a section, sections below it included."""
    below = {
        name.removeprefix(prefix).split(".")[0] for name in SECTIONS if name.startswith(prefix)
    }
    return sorted({*SECTIONS[prefix].names, *below} - {""})
