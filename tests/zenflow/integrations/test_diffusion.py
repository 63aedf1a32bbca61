"""The script that fine-tunes an image transformer: its loss, and layers that are streamed."""

import re
import runpy
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

pytest.importorskip("diffusers", reason='needs diffusers: pip install -e ".[dev-all]"')

import diffusers
from PIL import Image
from safetensors.torch import load_file
from transformers import CLIPTextConfig, CLIPTextModel, T5Config, T5EncoderModel

from tests.zenflow.integrations.tiny import VOCAB, word_tokenizer

pytestmark = pytest.mark.filterwarnings("default")  # those of other packages are not ours

SCRIPT = Path(__file__).resolve().parents[3] / "examples" / "finetune_diffusion.py"
COLORS = ("red", "green", "blue")


def tokenizer(length):
    made = word_tokenizer()
    made.model_max_length = length
    return made


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Return a folder with a tiny pipeline of Flux, and three pictures with captions."""
    folder = tmp_path_factory.mktemp("diffusion")
    torch.manual_seed(0)
    diffusers.FluxPipeline(
        scheduler=diffusers.FlowMatchEulerDiscreteScheduler(),
        vae=diffusers.AutoencoderKL(
            block_out_channels=(8, 8), latent_channels=4, norm_num_groups=4,
            down_block_types=("DownEncoderBlock2D",) * 2, up_block_types=("UpDecoderBlock2D",) * 2,
            shift_factor=0.1, use_quant_conv=False, use_post_quant_conv=False,
        ),
        text_encoder=CLIPTextModel(
            CLIPTextConfig(
                vocab_size=VOCAB, hidden_size=16, intermediate_size=16, num_hidden_layers=1,
                num_attention_heads=2, projection_dim=16, eos_token_id=2,
            )
        ),
        text_encoder_2=T5EncoderModel(
            T5Config(vocab_size=VOCAB, d_model=16, d_kv=8, d_ff=16, num_layers=1, num_heads=2)
        ),
        tokenizer=tokenizer(8),
        tokenizer_2=tokenizer(8),
        transformer=diffusers.FluxTransformer2DModel(
            in_channels=16, num_layers=2, num_single_layers=3, attention_head_dim=32,
            num_attention_heads=4, joint_attention_dim=16, pooled_projection_dim=16,
            guidance_embeds=True, axes_dims_rope=(8, 12, 12),
        ),
    ).save_pretrained(folder / "model")  # fmt: skip
    (folder / "pictures").mkdir()
    for number, color in enumerate(COLORS):
        Image.new("RGB", (40, 32), color).save(folder / "pictures" / f"{color}.png")
        (folder / "pictures" / f"{color}.txt").write_text(f"w{3 + number} w9")
    return folder


def run(folder, out, monkeypatch, *flags):
    command = [
        *[str(SCRIPT), "--model", str(folder / "model"), "--data", str(folder / "pictures")],
        *["--out", str(out), "--size", "32", "--device", "cpu", *flags],
    ]
    monkeypatch.setattr(sys, "argv", command)
    runpy.run_path(str(SCRIPT), run_name="__main__")
    return load_file(out / "transformer" / "diffusion_pytorch_model.safetensors")


def test_streamed_layers_and_a_second_run_change_no_bit(folder, tmp_path, monkeypatch, capsys):
    flags = ["--steps", "4", "--batch-size", "3", "--lr", "2e-3"]
    away = run(folder, tmp_path, monkeypatch, *flags)
    said = capsys.readouterr().out
    assert "encoding 3 of 3" in said
    assert re.search(r"step 4 of 4, loss \d", said)
    here = run(folder, tmp_path, monkeypatch, *flags, "--stay")
    assert "encoding" not in capsys.readouterr().out  # the first run's rows serve
    assert all(torch.equal(away[name], here[name]) for name in here)
    before = load_file(folder / "model" / "transformer" / "diffusion_pytorch_model.safetensors")
    assert all(not torch.equal(away[name].float(), before[name]) for name in before)


class Knowing:
    """Knows the images, and so the flow from each to the noise that it was mixed with."""

    config = SimpleNamespace(guidance_embeds=False)

    def __init__(self, images):
        self.images = images

    def __call__(self, hidden_states, timestep, **_):
        at = timestep[:, None, None]
        noise = (hidden_states - (1 - at) * self.images) / at
        return SimpleNamespace(sample=noise - self.images)


def test_the_flow_from_image_to_noise_has_no_loss():
    images = torch.randn(4, 6, 8)
    batch = {
        "latents": images,
        "text": torch.zeros(4, 2, 3),
        "pooled": None,
        "positions": torch.zeros(4, 6, 3),
    }
    flow_loss = runpy.run_path(str(SCRIPT))["flow_loss"]
    assert flow_loss(Knowing(images), batch) < 1e-8
    assert flow_loss(Knowing(images + 1), batch) > 0.5


def test_patches_and_positions_are_the_pipeline_s():
    script = runpy.run_path(str(SCRIPT))
    latents = torch.randn(4, 6, 10)
    expected = diffusers.FluxPipeline._pack_latents(latents[None], 1, 4, 6, 10)[0]
    assert torch.equal(script["packed"](latents), expected)
    expected = diffusers.FluxPipeline._prepare_latent_image_ids(1, 3, 5, "cpu", torch.float32)
    assert torch.equal(script["positions"](3, 5), expected)


def test_an_image_without_a_caption_is_named(folder, tmp_path, monkeypatch):
    (tmp_path / "pictures").mkdir()
    Image.new("RGB", (32, 32)).save(tmp_path / "pictures" / "lonely.png")
    (tmp_path / "model").symlink_to(folder / "model")
    with pytest.raises(SystemExit, match=r"lonely\.png has no caption"):
        run(tmp_path, tmp_path / "out", monkeypatch)
