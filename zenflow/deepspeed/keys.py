"""DeepSpeed's configuration keys, by what becomes of them here.

What counts is whether leaving a key out changes the weights that come out of a run. Keys that
``zenflow.deepspeed`` reads by name are not repeated here. Key names are those of DeepSpeed 0.19.
"""

from __future__ import annotations

UNUSED_TOP_LEVEL = frozenset(
    {
        # Logs and profiles.
        "comet", "comms_logger", "csv_monitor", "dump_state", "flops_profiler", "memory_breakdown",
        "steps_per_print", "tensorboard", "timers", "wall_clock_breakdown", "wandb",
        # Communication, storage and memory; the arithmetic stays the same.
        "activation_checkpointing", "aio", "autotuning", "checkpoint", "communication_data_type",
        "compile", "data_types", "disable_allgather", "gradient_predivide_factor",
        "graph_harvesting", "nebula", "pipeline", "prescale_gradients",
        "seq_parallel_communication_data_type", "sparse_gradients", "use_node_local_storage",
        # Permissions that DeepSpeed asks for.
        "zero_allow_untested_optimizer", "zero_force_ds_cpu_optimizer",
    }
)  # fmt: skip
"""Top-level keys that change no result; one warning names those that a file has."""

REFUSED_TOP_LEVEL = {
    "amp": "use bf16 or fp16",
    "compression_training": "remove it",
    "curriculum_learning": "order the data in your own loop",
    "data_efficiency": "order the data in your own loop",
    "dataloader_drop_last": "set drop_last on your own DataLoader",
    "eigenvalue": "remove it",
    "elasticity": "give the batch size itself",
    "hybrid_engine": "remove it",
    "progressive_layer_drop": "remove it",
    "quantize_training": "remove it",
    "sparse_attention": "remove it",
    "tensor_parallel": "remove it: the engine updates whole matrices",
    "torch_autocast": "use torch.autocast in your own loop",
}
"""Top-level keys that change results, and what to do instead."""

UNUSED_ZERO = frozenset(
    {
        "allgather_bucket_size", "allgather_partitions", "contiguous_gradients",
        "cpu_offload_use_pin_memory", "elastic_checkpoint", "enable_sanity_checks",
        "gather_16bit_weights_on_model_save", "ignore_unused_parameters", "leaf_module",
        "legacy_stage1", "load_from_fp32_weights", "log_trace_cache_warnings",
        "max_live_parameters", "max_reuse_distance", "memory_efficient_linear",
        "mics_hierarchical_params_gather", "mics_shard_size", "model_persistence_threshold",
        "module_granularity_threshold", "overlap_comm", "override_module_apply",
        "param_persistence_threshold", "pipeline_loading_checkpoint", "prefetch_bucket_size",
        "reduce_bucket_size", "reduce_scatter", "round_robin_gradients",
        "stage3_allgather_sequential", "stage3_gather_16bit_weights_on_model_save",
        "stage3_gather_fp16_weights_on_model_save", "stage3_max_live_parameters",
        "stage3_max_reuse_distance", "stage3_model_persistence_threshold",
        "stage3_module_granularity_threshold", "stage3_param_persistence_threshold",
        "stage3_prefetch_bucket_size", "stage3_use_all_reduce_for_fetch_params", "sub_group_size",
        "use_all_reduce_for_fetch_params", "use_multi_rank_bucket_allreduce",
        "zero_hpz_partition_size",
    }
)  # fmt: skip
"""Keys of ``zero_optimization`` that say how memory and messages are cut up."""

REFUSED_ZERO = {
    "cpu_offload_params": "remove it: parameters stay on the device",
    "zero_quantized_gradients": "remove it: gradients are copied exactly",
    "zero_quantized_nontrainable_weights": "remove it: weights are kept exactly",
    "zero_quantized_weights": "remove it: weights are kept exactly",
}
"""Keys of ``zero_optimization`` that change results, and what to do instead."""

UNUSED_OFFLOAD = frozenset(
    {
        "buffer_count", "buffer_size", "cpuadam_cores_perc", "fast_init", "max_in_cpu",
        "nvme_path", "pin_memory", "pipeline_read", "pipeline_write", "ratio", "super_offload",
    }
)  # fmt: skip
"""Keys of ``offload_optimizer`` that say where states lie and how they get there."""

UNUSED_ZENFLOW = frozenset({"auto_ratio", "offload", "pt_reserved_cores_perc"})
"""Keys of ``zenflow`` for votes, memory and cores that this engine arranges otherwise."""

UNUSED_OPTIMIZER = frozenset({"fused", "set_grad_none", "torch_adam"})
"""Keys of ``optimizer.params`` that choose an implementation of the same update."""

UNUSED_PRECISION = frozenset(
    {
        "auto_cast", "check_grad_overflow", "consecutive_hysteresis", "hysteresis",
        "immediate_grad_update", "min_loss_scale",
    }
)  # fmt: skip
"""Keys of ``fp16`` and ``bf16`` that only decide which overflowing steps are skipped."""

REFUSED_PRECISION = {
    "bf16_master_weights_and_grads": "remove it: masters are float32",
    "bf16_optimizer_states": "remove it: moments are float32",
    "fp16_master_weights_and_grads": "remove it: masters are float32",
}
"""Keys of ``fp16`` and ``bf16`` that round the optimizer's own state."""
