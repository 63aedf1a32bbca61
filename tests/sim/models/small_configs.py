"""Small configurations of every family: odd numbers of heads, biases, tied tables, experts.

A family's first entry is its plainest. Fields that each leaves out have transformers' defaults.
"""

SIZES = {
    "hidden_size": 48, "num_hidden_layers": 5, "num_attention_heads": 6, "vocab_size": 101,
    "intermediate_size": 92,
}  # fmt: skip
GROUPED = {**SIZES, "num_key_value_heads": 3}
LATENT = {
    **SIZES, "num_key_value_heads": 6, "kv_lora_rank": 10, "qk_nope_head_dim": 8,
    "qk_rope_head_dim": 4, "v_head_dim": 6,
}  # fmt: skip
EXPERTS = {"num_experts_per_tok": 2, "moe_intermediate_size": 20}
DELTA = {
    "linear_num_key_heads": 2, "linear_num_value_heads": 4, "linear_key_head_dim": 6,
    "linear_value_head_dim": 8, "head_dim": 10,
}  # fmt: skip
CONFIGS = {
    "llama": [
        GROUPED,
        {
            **GROUPED,
            "head_dim": 10,
            "attention_bias": True,
            "mlp_bias": True,
            "tie_word_embeddings": True,
        },
    ],
    "mistral": [
        GROUPED,
        {**GROUPED, "head_dim": 12},
    ],
    "ministral": [
        {**GROUPED, "head_dim": 8},
    ],
    "ministral3": [
        GROUPED,
        {**GROUPED, "head_dim": 8},
    ],
    "qwen2": [
        GROUPED,
        {**GROUPED, "tie_word_embeddings": True},
    ],
    "qwen3": [
        GROUPED,
        {**GROUPED, "attention_bias": True, "head_dim": 10},
    ],
    "gemma": [
        GROUPED,
        {**GROUPED, "head_dim": 10, "attention_bias": True},
    ],
    "gemma2": [
        {**GROUPED, "head_dim": 10},
        GROUPED,
    ],
    "gemma3_text": [
        {**GROUPED, "head_dim": 10},
        GROUPED,
    ],
    "vaultgemma": [
        {**GROUPED, "head_dim": 10},
    ],
    "phi3": [
        {**GROUPED, "pad_token_id": 0},
        {**GROUPED, "pad_token_id": 0, "tie_word_embeddings": True},
    ],
    "phi": [
        GROUPED,
        {**GROUPED, "qk_layernorm": True},
    ],
    "olmo": [
        GROUPED,
        {**GROUPED, "attention_bias": True},
    ],
    "olmo2": [
        GROUPED,
        {**GROUPED, "attention_bias": True},
    ],
    "olmo3": [
        GROUPED,
    ],
    "cohere": [
        GROUPED,
        {**GROUPED, "use_qk_norm": True, "attention_bias": True},
    ],
    "cohere2": [
        GROUPED,
        {**GROUPED, "tie_word_embeddings": False},
    ],
    "granite": [
        GROUPED,
        {**GROUPED, "attention_bias": True, "mlp_bias": True},
    ],
    "glm": [
        {**GROUPED, "pad_token_id": 0},
        {**GROUPED, "pad_token_id": 0, "attention_bias": False, "head_dim": 10},
    ],
    "glm4": [
        {**GROUPED, "pad_token_id": 0},
        {**GROUPED, "pad_token_id": 0, "head_dim": 8},
    ],
    "smollm3": [
        {**GROUPED, "pad_token_id": 0},
        {**GROUPED, "pad_token_id": 0, "tie_word_embeddings": False},
    ],
    "exaone4": [
        GROUPED,
    ],
    "starcoder2": [
        GROUPED,
        {**GROUPED, "use_bias": False},
    ],
    "stablelm": [
        GROUPED,
        {**GROUPED, "qk_layernorm": True, "use_qkv_bias": True},
        {**GROUPED, "use_parallel_residual": True},
    ],
    "nemotron": [
        {**GROUPED, "head_dim": 10},
        {**GROUPED, "attention_bias": True, "mlp_bias": True},
    ],
    "seed_oss": [
        GROUPED,
        {**GROUPED, "attention_out_bias": True, "mlp_bias": True, "head_dim": 10},
    ],
    "ernie4_5": [
        GROUPED,
        {**GROUPED, "use_bias": True, "head_dim": 10},
    ],
    "hunyuan_v1_dense": [
        {**GROUPED, "head_dim": 8},
        {**GROUPED, "attention_bias": True, "head_dim": 8},
    ],
    "helium": [
        {**GROUPED, "head_dim": 8},
        {**GROUPED, "attention_bias": True, "mlp_bias": True, "head_dim": 8},
    ],
    "arcee": [
        GROUPED,
        {**GROUPED, "mlp_bias": True, "attention_bias": True},
    ],
    "apertus": [
        GROUPED,
        {**GROUPED, "attention_bias": True, "mlp_bias": True},
    ],
    "bitnet": [
        GROUPED,
    ],
    "cwm": [
        {**GROUPED, "head_dim": 8},
    ],
    "iquestcoder": [{**GROUPED, "head_dim": 8}],
    "jais2": [{**GROUPED, "head_dim": 8}, {**GROUPED, "head_dim": 10, "attention_bias": False}],
    "internlm3": [
        GROUPED,
    ],
    "nanochat": [
        GROUPED,
    ],
    "persimmon": [
        SIZES,
        {**SIZES, "qk_layernorm": False},
    ],
    "youtu": [
        LATENT,
        {**LATENT, "q_lora_rank": None},
    ],
    "minicpm3": [
        {**LATENT, "q_lora_rank": 14, "head_dim": 4},
    ],
    "mixtral": [
        {**GROUPED, "num_local_experts": 4, "num_experts_per_tok": 2},
        {**GROUPED, "num_local_experts": 3, "head_dim": 10, "num_experts_per_tok": 1},
    ],
    "qwen2_moe": [
        {
            **GROUPED,
            "num_experts": 4,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 32,
            "shared_expert_intermediate_size": 20,
            "decoder_sparse_step": 2,
            "mlp_only_layers": [3],
        },
        {
            **GROUPED,
            "num_experts": 4,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 32,
            "shared_expert_intermediate_size": 20,
            "qkv_bias": False,
        },
    ],
    "qwen3_moe": [
        {**GROUPED, "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32},
        {
            **GROUPED,
            "num_experts": 4,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 32,
            "decoder_sparse_step": 2,
            "attention_bias": True,
            "head_dim": 10,
            "mlp_only_layers": [1],
        },
    ],
    "olmoe": [
        {**GROUPED, "num_experts": 4, "num_experts_per_tok": 2},
    ],
    "flex_olmo": [
        {**GROUPED, "pad_token_id": 0, "num_experts": 4, "num_experts_per_tok": 2},
    ],
    "granitemoe": [
        {**GROUPED, "num_local_experts": 4, "num_experts_per_tok": 2},
    ],
    "granitemoeshared": [
        {
            **GROUPED,
            "num_local_experts": 4,
            "shared_intermediate_size": 20,
            "num_experts_per_tok": 2,
        },
        {**GROUPED, "num_local_experts": 4, "num_experts_per_tok": 1},
    ],
    "gpt_oss": [
        {**GROUPED, "num_local_experts": 4, "num_experts_per_tok": 2},
        {
            **GROUPED,
            "num_local_experts": 4,
            "head_dim": 10,
            "attention_bias": False,
            "num_experts_per_tok": 1,
        },
    ],
    "llama4_text": [
        {**GROUPED, "num_local_experts": 4, "intermediate_size_mlp": 70, "num_experts_per_tok": 1},
        {
            **GROUPED,
            "num_local_experts": 4,
            "intermediate_size_mlp": 70,
            "num_experts_per_tok": 1,
            "interleave_moe_layer_step": 2,
            "head_dim": 10,
        },
        {
            **GROUPED,
            "num_local_experts": 4,
            "intermediate_size_mlp": 70,
            "num_experts_per_tok": 1,
            "moe_layers": [0, 3],
            "attention_bias": True,
        },
    ],
    "phimoe": [
        {**GROUPED, "num_local_experts": 4, "num_experts_per_tok": 2},
        {
            **GROUPED,
            "num_local_experts": 4,
            "num_experts_per_tok": 2,
            "attention_bias": True,
            "lm_head_bias": True,
        },
    ],
    "deepseek_v2": [
        {
            **LATENT,
            **EXPERTS,
            "n_routed_experts": 4,
            "n_shared_experts": 2,
            "first_k_dense_replace": 1,
            "q_lora_rank": None,
        },
        {**LATENT, **EXPERTS, "n_routed_experts": 4, "attention_bias": True, "q_lora_rank": 14},
    ],
    "deepseek_v3": [
        {**LATENT, **EXPERTS, "n_routed_experts": 4, "n_group": 1, "topk_group": 1},
        {
            **LATENT,
            **EXPERTS,
            "n_routed_experts": 4,
            "attention_bias": True,
            "q_lora_rank": 14,
            "first_k_dense_replace": 1,
            "n_shared_experts": 2,
        },
    ],
    "deepseek_v32": [
        {
            **LATENT,
            **EXPERTS,
            "n_routed_experts": 4,
            "q_lora_rank": 14,
            "index_n_heads": 2,
            "index_head_dim": 8,
        },
    ],
    "glm_moe_dsa": [
        {
            **LATENT,
            **EXPERTS,
            "n_routed_experts": 4,
            "q_lora_rank": 14,
            "index_n_heads": 2,
            "index_head_dim": 8,
        },
    ],
    "glm4_moe": [
        {**GROUPED, **EXPERTS, "n_routed_experts": 4, "head_dim": 8},
        {
            **GROUPED,
            **EXPERTS,
            "n_routed_experts": 4,
            "use_qk_norm": True,
            "attention_bias": True,
            "first_k_dense_replace": 2,
            "head_dim": 10,
        },
    ],
    "glm4_moe_lite": [
        {**LATENT, **EXPERTS, "n_routed_experts": 4, "q_lora_rank": 14},
    ],
    "dots1": [
        {**GROUPED, **EXPERTS, "n_routed_experts": 4, "n_shared_experts": 1},
        {
            **GROUPED,
            **EXPERTS,
            "n_routed_experts": 4,
            "n_shared_experts": 2,
            "first_k_dense_replace": 1,
            "attention_bias": True,
        },
    ],
    "ernie4_5_moe": [
        {
            **GROUPED,
            "moe_num_experts": 4,
            "moe_k": 2,
            "moe_intermediate_size": 20,
            "moe_layer_start_index": 2,
            "moe_num_shared_experts": 1,
            "moe_layer_end_index": -1,
        },
        {
            **GROUPED,
            "moe_num_experts": 4,
            "moe_k": 2,
            "moe_intermediate_size": 20,
            "moe_layer_interval": 2,
            "moe_num_shared_experts": 2,
            "moe_layer_end_index": 4,
            "use_bias": True,
        },
    ],
    "exaone_moe": [
        {**GROUPED, **EXPERTS, "num_experts": 4, "num_shared_experts": 1},
    ],
    "minimax_m2": [
        {**GROUPED, "num_local_experts": 4, "num_experts_per_tok": 2, "head_dim": 10},
    ],
    "solar_open": [
        {**GROUPED, **EXPERTS, "n_routed_experts": 4, "n_shared_experts": 1},
    ],
    "gpt2": [
        {"n_embd": 48, "n_layer": 3, "n_head": 6, "vocab_size": 101, "n_positions": 30},
        {
            "n_embd": 48,
            "n_layer": 3,
            "n_head": 6,
            "vocab_size": 101,
            "n_positions": 30,
            "n_inner": 50,
            "tie_word_embeddings": False,
        },
    ],
    "gpt_bigcode": [
        {"n_embd": 48, "n_layer": 3, "n_head": 6, "vocab_size": 101, "n_positions": 30},
        {
            "n_embd": 48,
            "n_layer": 3,
            "n_head": 6,
            "vocab_size": 101,
            "n_positions": 30,
            "n_inner": 50,
            "multi_query": False,
        },
    ],
    "gpt_neo": [
        {
            "hidden_size": 48,
            "num_layers": 4,
            "num_heads": 6,
            "vocab_size": 101,
            "max_position_embeddings": 30,
            "attention_types": [[["global", "local"], 2]],
        },
    ],
    "gpt_neox": [
        SIZES,
        {**SIZES, "attention_bias": False, "tie_word_embeddings": True},
    ],
    "gptj": [
        {
            "n_embd": 48,
            "n_layer": 3,
            "n_head": 6,
            "vocab_size": 101,
            "n_positions": 30,
            "rotary_dim": 4,
        },
    ],
    "codegen": [
        {
            "n_embd": 48,
            "n_layer": 3,
            "n_head": 4,
            "vocab_size": 101,
            "n_positions": 30,
            "rotary_dim": 4,
        },
    ],
    "bloom": [
        {"hidden_size": 48, "n_layer": 3, "n_head": 6, "vocab_size": 101},
    ],
    "mpt": [
        {"d_model": 48, "n_layers": 3, "n_heads": 6, "vocab_size": 101},
    ],
    "falcon": [
        {**SIZES, "num_kv_heads": 6},
        {**SIZES, "new_decoder_architecture": True, "num_kv_heads": 3},
        {
            **SIZES,
            "new_decoder_architecture": True,
            "num_kv_heads": 3,
            "num_ln_in_parallel_attn": 1,
            "bias": True,
        },
        {**SIZES, "multi_query": False, "parallel_attn": False, "bias": True, "alibi": True},
        {**SIZES, "ffn_hidden_size": 50, "tie_word_embeddings": False},
    ],
    "opt": [
        {**SIZES, "ffn_dim": 96, "max_position_embeddings": 64},
        {
            **SIZES,
            "ffn_dim": 96,
            "max_position_embeddings": 64,
            "word_embed_proj_dim": 24,
            "do_layer_norm_before": False,
        },
    ],
    "xglm": [
        {"d_model": 48, "num_layers": 3, "attention_heads": 6, "ffn_dim": 50, "vocab_size": 101},
    ],
    "biogpt": [
        {**SIZES, "max_position_embeddings": 30},
    ],
    "qwen3_next": [
        {**GROUPED, **EXPERTS, **DELTA, "num_experts": 4, "shared_expert_intermediate_size": 12},
    ],
    "qwen3_5_text": [
        {**GROUPED, **DELTA, "attention_bias": True},
        GROUPED,
    ],
    "qwen3_5_moe_text": [
        {**GROUPED, **EXPERTS, **DELTA, "num_experts": 4, "shared_expert_intermediate_size": 12},
    ],
    "mamba": [
        {"hidden_size": 48, "num_hidden_layers": 3, "vocab_size": 101, "state_size": 8},
        {
            "hidden_size": 48,
            "num_hidden_layers": 3,
            "vocab_size": 101,
            "state_size": 8,
            "use_bias": True,
            "use_conv_bias": False,
            "time_step_rank": 5,
            "expand": 3,
        },
    ],
    "falcon_mamba": [
        {
            "hidden_size": 48,
            "num_hidden_layers": 3,
            "vocab_size": 101,
            "intermediate_size": 90,
            "expand": 16,
            "tie_word_embeddings": False,
        },
    ],
    "mamba2": [
        {
            "hidden_size": 48,
            "num_hidden_layers": 3,
            "vocab_size": 101,
            "state_size": 8,
            "num_heads": 6,
            "head_dim": 16,
            "n_groups": 2,
        },
    ],
    "jamba": [
        {
            "hidden_size": 48,
            "num_hidden_layers": 9,
            "num_attention_heads": 6,
            "vocab_size": 101,
            "intermediate_size": 92,
            "num_key_value_heads": 3,
            "num_experts": 4,
            "num_experts_per_tok": 2,
            "attn_layer_offset": 4,
        },
        {
            "hidden_size": 48,
            "num_hidden_layers": 9,
            "num_attention_heads": 6,
            "vocab_size": 101,
            "intermediate_size": 92,
            "num_key_value_heads": 3,
            "num_experts": 4,
            "num_experts_per_tok": 2,
            "mamba_proj_bias": True,
            "mamba_dt_rank": 3,
            "mamba_conv_bias": False,
            "expert_layer_period": 3,
        },
    ],
    "bamba": [
        {
            **GROUPED,
            "mamba_n_heads": 6,
            "mamba_d_head": 16,
            "mamba_d_state": 8,
            "attn_layer_indices": [2],
        },
        {
            **GROUPED,
            "mamba_n_heads": 6,
            "mamba_d_head": "auto",
            "mamba_d_state": 8,
            "attn_layer_indices": [2, 3],
            "attention_bias": True,
            "mlp_bias": True,
            "mamba_proj_bias": True,
            "mamba_n_groups": 2,
        },
    ],
    "falcon_h1": [
        {**GROUPED, "mamba_n_heads": 6, "mamba_d_head": 16, "mamba_d_state": 8, "mamba_d_ssm": 96},
        {
            **GROUPED,
            "mamba_n_heads": 6,
            "mamba_d_head": 8,
            "mamba_d_state": 8,
            "mamba_d_ssm": 48,
            "mamba_rms_norm": True,
        },
    ],
    "granitemoehybrid": [
        {
            **GROUPED,
            "num_local_experts": 4,
            "num_experts_per_tok": 2,
            "shared_intermediate_size": 20,
            "mamba_n_heads": 6,
            "mamba_d_head": 16,
            "mamba_d_state": 8,
            "layer_types": ["mamba", "attention", "mamba", "mamba", "attention"],
        },
        {
            **GROUPED,
            "num_local_experts": 0,
            "shared_intermediate_size": 20,
            "mamba_n_heads": 6,
            "mamba_d_head": 16,
            "mamba_d_state": 8,
            "layer_types": ["mamba", "attention", "mamba", "mamba", "attention"],
        },
    ],
    "nemotron_h": [
        {
            **EXPERTS,
            "hidden_size": 48,
            "num_attention_heads": 6,
            "num_key_value_heads": 3,
            "head_dim": 10,
            "vocab_size": 101,
            "intermediate_size": 90,
            "hybrid_override_pattern": "M-M*E-",
            "num_hidden_layers": 6,
            "mamba_num_heads": 6,
            "mamba_head_dim": 16,
            "n_groups": 2,
            "ssm_state_size": 8,
            "n_routed_experts": 4,
            "moe_shared_expert_intermediate_size": 12,
        },
    ],
    "lfm2": [
        {**GROUPED, "layer_types": ["conv", "full_attention", "conv", "conv", "full_attention"]},
        {
            **GROUPED,
            "layer_types": ["conv", "full_attention", "conv", "conv", "full_attention"],
            "block_auto_adjust_ff_dim": False,
            "conv_bias": True,
        },
    ],
    "gemma3n_text": [
        {
            **GROUPED,
            "head_dim": 8,
            "num_kv_shared_layers": 2,
            "layer_types": [
                "sliding_attention",
                "full_attention",
                "sliding_attention",
                "sliding_attention",
                "full_attention",
            ],
            "hidden_size_per_layer_input": 12,
            "vocab_size_per_layer_input": 90,
        },
        {
            **GROUPED,
            "head_dim": 8,
            "num_kv_shared_layers": 0,
            "intermediate_size": [92] * 5,
            "altup_num_inputs": 3,
            "laurel_rank": 5,
            "hidden_size_per_layer_input": 12,
            "vocab_size_per_layer_input": 90,
            "activation_sparsity_pattern": [0.0] * 5,
        },
    ],
    "gemma4_text": [
        {
            **GROUPED,
            "head_dim": 8,
            "global_head_dim": 16,
            "hidden_size_per_layer_input": 12,
            "vocab_size_per_layer_input": 90,
        },
        {
            **GROUPED,
            "head_dim": 8,
            "global_head_dim": 16,
            "hidden_size_per_layer_input": 0,
            "attention_k_eq_v": True,
            "num_global_key_value_heads": 2,
            "enable_moe_block": True,
            "num_experts": 4,
            "top_k_experts": 2,
            "moe_intermediate_size": 20,
        },
        {
            **GROUPED,
            "head_dim": 8,
            "global_head_dim": 16,
            "hidden_size_per_layer_input": 12,
            "vocab_size_per_layer_input": 90,
            "num_kv_shared_layers": 2,
            "use_double_wide_mlp": True,
            "layer_types": [
                "sliding_attention",
                "full_attention",
                "sliding_attention",
                "sliding_attention",
                "full_attention",
            ],
        },
    ],
    "mllama_text_model": [
        {**GROUPED, "cross_attention_layers": [1, 3], "pad_token_id": 0},
    ],
    "bert": [
        {**SIZES, "max_position_embeddings": 30},
        {
            **SIZES,
            "max_position_embeddings": 30,
            "type_vocab_size": 3,
        },
    ],
}
