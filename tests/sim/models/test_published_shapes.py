"""Published files, by the fields that decide shapes, and their published numbers of parameters."""

import pytest

from sim.models.families import layers_of

MLA = {"kv_lora_rank": 512, "qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "v_head_dim": 128}


def sizes(width, inner, layers, heads, words, **more):
    return {
        "hidden_size": width, "intermediate_size": inner, "num_hidden_layers": layers,
        "num_attention_heads": heads, "vocab_size": words, **more,
    }  # fmt: skip


FILES = {
    # Safetensors' totals on the Hugging Face hub, and papers where noted.
    "Qwen/Qwen3-30B-A3B": ("qwen3_moe", sizes(
        2048, 6144, 48, 32, 151_936, num_key_value_heads=4, head_dim=128, num_experts=128,
        num_experts_per_tok=8, moe_intermediate_size=768), 30_532_122_624, 3.3),
    "deepseek-ai/DeepSeek-V3 (arXiv 2412.19437: 671B, 37B)": ("deepseek_v3", sizes(
        7168, 18_432, 61, 128, 129_280, **MLA, q_lora_rank=1536, n_routed_experts=256,
        n_shared_experts=1, num_experts_per_tok=8, moe_intermediate_size=2048,
        first_k_dense_replace=3), 671_026_404_352, 37.6),
    "deepseek-ai/DeepSeek-V2-Lite (arXiv 2405.04434: 15.7B, 2.4B)": ("deepseek_v2", sizes(
        2048, 10_944, 27, 16, 102_400, **MLA, q_lora_rank=None, n_routed_experts=64,
        n_shared_experts=2, num_experts_per_tok=6, moe_intermediate_size=1408,
        first_k_dense_replace=1), 15_706_484_224, 2.66),
    "openai/gpt-oss-20b (arXiv 2508.10925: 20.9B, 3.6B)": ("gpt_oss", sizes(
        2880, 2880, 24, 64, 201_088, num_key_value_heads=8, head_dim=64, num_local_experts=32,
        num_experts_per_tok=4), 20_914_757_184, 4.19),  # the embedding's table included
    "openai/gpt-oss-120b (arXiv 2508.10925: 116.8B, 5.1B)": ("gpt_oss", sizes(
        2880, 2880, 36, 64, 201_088, num_key_value_heads=8, head_dim=64, num_local_experts=128,
        num_experts_per_tok=4), 116_829_156_672, 5.71),
    "tiiuae/falcon-7b": ("falcon", {
        "hidden_size": 4544, "num_hidden_layers": 32, "num_attention_heads": 71,
        "num_kv_heads": 71, "multi_query": True, "vocab_size": 65_024}, 6_921_720_704, None),
    "tiiuae/falcon-mamba-7b": ("falcon_mamba", {
        "hidden_size": 4096, "num_hidden_layers": 64, "intermediate_size": 8192,
        "state_size": 16, "time_step_rank": 256, "expand": 16, "vocab_size": 65_024,
        "tie_word_embeddings": False}, 7_272_665_088, None),
    "EleutherAI/pythia-1b (arXiv 2304.01373, table 1)": ("gpt_neox", sizes(
        2048, 8192, 16, 8, 50_304), 1_011_781_632, None),
    "EleutherAI/pythia-6.9b (arXiv 2304.01373, table 1)": ("gpt_neox", sizes(
        4096, 16_384, 32, 32, 50_432), 6_857_302_016, None),
    "EleutherAI/gpt-neox-20b": ("gpt_neox", sizes(
        6144, 24_576, 44, 64, 50_432), 20_554_567_680, None),
    "EleutherAI/gpt-j-6b": ("gptj", {
        "n_embd": 4096, "n_layer": 28, "n_head": 16, "n_positions": 2048, "vocab_size": 50_400,
        }, 6_050_882_784, None),
    "bigscience/bloom-560m": ("bloom", {
        "hidden_size": 1024, "n_layer": 24, "n_head": 16, "vocab_size": 250_880},
        559_214_592, None),
    "bigscience/bloom-7b1": ("bloom", {
        "hidden_size": 4096, "n_layer": 30, "n_head": 32, "vocab_size": 250_880},
        7_069_016_064, None),
    "microsoft/phi-1_5": ("phi", sizes(2048, 8192, 24, 32, 51_200), 1_418_270_720, None),
    "microsoft/phi-2": ("phi", sizes(2560, 10_240, 32, 32, 51_200), 2_779_683_840, None),
    "google/gemma-3-4b-it, its 4,300,079,472 without SigLIP and the projection": (
        "gemma3_text", sizes(2560, 10_240, 34, 8, 262_208, num_key_value_heads=4, head_dim=256),
        4_300_079_472 - 416_866_032 - 2_950_272, None),
    "HuggingFaceTB/SmolLM3-3B": ("smollm3", sizes(
        2048, 11_008, 36, 16, 128_256, num_key_value_heads=4), 3_075_098_624, None),
    "bigcode/starcoder2-3b": ("starcoder2", sizes(
        3072, 12_288, 30, 24, 49_152, num_key_value_heads=2), 3_030_371_328, None),
    "stabilityai/stablelm-3b-4e1t": ("stablelm", sizes(
        2560, 6912, 32, 32, 50_304), 2_795_443_200, None),
    "CohereForAI/c4ai-command-r-v01": ("cohere", sizes(
        8192, 22_528, 40, 64, 256_000), 34_980_831_232, None),
    "ai21labs/Jamba-v0.1 (arXiv 2403.19887: 52B, 12B)": ("jamba", sizes(
        4096, 14_336, 32, 32, 65_536, num_key_value_heads=8, num_experts=16,
        num_experts_per_tok=2), 51_570_323_328, 12.1),
    "LGAI-EXAONE/EXAONE-3.5-7.8B-Instruct": ("exaone", {
        "hidden_size": 4096, "intermediate_size": 14_336, "num_layers": 32, "vocab_size": 102_400,
        "num_attention_heads": 32, "num_key_value_heads": 8}, 7_818_448_896, None),
    "internlm/internlm2-7b": ("internlm2", sizes(
        4096, 14_336, 32, 32, 92_544, num_key_value_heads=8, bias=False), 7_737_708_544, None),
    "baichuan-inc/Baichuan2-7B-Base": ("baichuan", sizes(
        4096, 11_008, 32, 32, 125_696), 7_505_973_248, None),
    "THUDM/chatglm3-6b": ("chatglm", {
        "hidden_size": 4096, "ffn_hidden_size": 13_696, "num_layers": 28,
        "num_attention_heads": 32, "multi_query_group_num": 2, "kv_channels": 128,
        "padded_vocab_size": 65_024, "add_qkv_bias": True}, 6_243_584_000, None),
    "Qwen/Qwen-7B": ("qwen", sizes(
        4096, 22_016, 32, 32, 151_936, kv_channels=128), 7_721_324_544, None),
    "deepseek-ai/deepseek-moe-16b-base (arXiv 2401.06066: 16.4B, 2.8B)": ("deepseek", sizes(
        2048, 10_944, 28, 16, 102_400, num_key_value_heads=16, n_routed_experts=64,
        n_shared_experts=2, num_experts_per_tok=6, moe_intermediate_size=1408,
        first_k_dense_replace=1), 16_375_728_128, 2.83),
    "XiaomiMiMo/MiMo-7B-Base": ("mimo", sizes(
        4096, 11_008, 36, 32, 151_680, num_key_value_heads=8, head_dim=128,
        num_nextn_predict_layers=1), 7_833_409_536, None),
}  # fmt: skip


@pytest.mark.parametrize("name", FILES)
def test_a_published_file_has_its_published_parameters(name):
    kind, fields, total, active = FILES[name]
    tensors = [p for layer in layers_of({"model_type": kind, **fields}) for p in layer.parameters]
    assert sum(p.numel for p in tensors) == total
    if active is not None:
        billions = sum(p.active * p.numel for p in tensors) / 1e9
        assert billions == pytest.approx(active, rel=0.02)
