"""Activations of latent attention, experts and other norms are those that autograd keeps."""

import pytest

from sim.models.activations import Activations
from sim.models.workload import Workload
from tests.sim.memory.test_need import saved_bytes
from tests.sim.models.small_configs import CONFIGS

BATCH, SEQUENCE = 2, 64
# Values as wide as queries: PyTorch's fused attention on a CPU knows no others.
LATENT = {"v_head_dim": 12}


@pytest.mark.parametrize(
    "kind",
    ["mistral", "qwen3", "smollm3", "exaone4", "starcoder2", "olmoe", "qwen3_moe", "granitemoe",
     "dots1", "minimax_m2", "deepseek_v3", "youtu", "gpt_neox", "nemotron", "lfm2"],
)  # fmt: skip
def test_layers_keep_what_autograd_keeps_of_transformers_modules(kind):
    torch = pytest.importorskip("torch")
    transformers = pytest.importorskip("transformers")
    config = dict(CONFIGS[kind][0])
    config |= LATENT if "v_head_dim" in config else {}
    made = transformers.AutoConfig.for_model(kind, **config)
    made._experts_implementation = "eager"  # each expert for its own tokens
    model = transformers.AutoModelForCausalLM.from_config(made, attn_implementation="sdpa")
    model = model.to(torch.bfloat16).train()
    ids = torch.arange(BATCH * SEQUENCE).reshape(BATCH, SEQUENCE) % 90
    kept = saved_bytes(model, ids, lambda: model(ids, use_cache=False))
    work = Workload.of_config(
        kind, {"model_type": kind, **config}, batch_size=BATCH, sequence=SEQUENCE
    )
    assert sum(Activations(work).kept_bytes()) == pytest.approx(kept, rel=0.17)
