"""Fine-tune all weights of Flux on pictures of yours, with AdamW's state on the host.

    python finetune_diffusion.py --model black-forest-labs/FLUX.1-dev --data pictures --out out

In pictures/ each image has its caption beside it: cat.jpg and cat.txt. The first run encodes both
into out/encoded, so that neither the text encoders nor the autoencoder take memory in training.
The loss is rectified flow's (arXiv 2403.03206). Flux has 12B parameters: its layers' weights live
on the host and visit the GPU. Copy this file and make it yours.
"""

import argparse
from pathlib import Path

import numpy as np
import torch
from diffusers import FluxPipeline, FluxTransformer2DModel
from diffusers.training_utils import compute_density_for_timestep_sampling
from PIL import Image, ImageOps
from safetensors.torch import load_file, save_file

from zenflow import ZenFlowAdamW, ZenFlowConfig, stream_weights

IMAGES = {".jpg", ".jpeg", ".png", ".webp"}


def arguments():
    """Return the command line's arguments."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", required=True, help="Name on the hub, or folder, of a Flux.")
    parser.add_argument("--data", required=True, type=Path, help="Folder of images and captions.")
    parser.add_argument(
        "--out", required=True, type=Path, help="Folder of the fine-tuned weights."
    )
    parser.add_argument("--size", type=int, default=1024, help="Pixels of an image's side.")
    parser.add_argument("--steps", type=int, default=1000, help="Optimizer steps.")
    parser.add_argument("--batch-size", type=int, default=1, help="Images in a step.")
    parser.add_argument("--lr", type=float, default=1e-5, help="Learning rate.")
    parser.add_argument("--update-interval", type=int, default=4, help="Steps in a window, S.")
    parser.add_argument("--host-state", default="compact", choices=["float32", "compact"])
    parser.add_argument("--stay", action="store_true", help="Leave all weights on the GPU.")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--seed", type=int, default=0)
    return parser.parse_args()


def packed(latents):
    """Return (channels, height, width) as (height * width / 4, channels * 4): patches of 2 x 2."""
    channels, height, width = latents.shape
    patches = latents.reshape(channels, height // 2, 2, width // 2, 2)
    return patches.permute(1, 3, 0, 2, 4).reshape(-1, channels * 4)


def positions(height, width):
    """Return (height * width, 3): of each patch 0, its row, and its column."""
    rows, columns = torch.meshgrid(torch.arange(height), torch.arange(width), indexing="ij")
    return torch.stack((torch.zeros_like(rows), rows, columns), -1).reshape(-1, 3).float()


@torch.no_grad()
def encode(args, folder):
    """Write each image's latents and its caption's embeddings into the folder, once."""
    images = sorted(path for path in args.data.iterdir() if path.suffix.lower() in IMAGES)
    if not images:
        raise SystemExit(f"{args.data} has no image: it needs .jpg, .png or .webp files")
    if lonely := [path.name for path in images if not path.with_suffix(".txt").exists()]:
        raise SystemExit(f"{lonely[0]} has no caption: put the text into a .txt of its name")
    waiting = [path for path in images if not (folder / f"{path.name}.safetensors").exists()]
    if not waiting:
        return
    pipeline = FluxPipeline.from_pretrained(
        args.model, transformer=None, torch_dtype=torch.bfloat16
    ).to(args.device)
    vae = pipeline.vae
    for i, path in enumerate(waiting):
        print(f"encoding {i + 1} of {len(waiting)}: {path.name}")
        image = ImageOps.fit(Image.open(path).convert("RGB"), (args.size, args.size))
        pixels = torch.from_numpy(np.array(image)).permute(2, 0, 1)[None] / 127.5 - 1
        latents = vae.encode(pixels.to(vae.device, vae.dtype)).latent_dist.mode()[0]
        latents = (latents - vae.config.shift_factor) * vae.config.scaling_factor
        caption = path.with_suffix(".txt").read_text().strip()
        text, pooled, _ = pipeline.encode_prompt(prompt=caption, prompt_2=None)
        row = {
            "latents": packed(latents),
            "positions": positions(latents.shape[1] // 2, latents.shape[2] // 2),
            "text": text[0],
            "pooled": pooled[0],
        }
        row = {name: value.cpu().contiguous() for name, value in row.items()}
        unfinished = folder / f"{path.name}.part"
        save_file(row, unfinished)
        unfinished.rename(folder / f"{path.name}.safetensors")


def flow_loss(transformer, batch):
    """Return the squared error of the flow from image to noise, at a random time of each image."""
    images = batch["latents"]
    noise = torch.randn_like(images)
    times = compute_density_for_timestep_sampling("logit_normal", len(images), 0.0, 1.0)
    times = times.to(images)
    at = times[:, None, None]
    guided = transformer.config.guidance_embeds
    flow = transformer(
        hidden_states=(1 - at) * images + at * noise,
        timestep=times,
        guidance=torch.ones_like(times) if guided else None,
        encoder_hidden_states=batch["text"],
        pooled_projections=batch["pooled"],
        img_ids=batch["positions"][0],
        txt_ids=torch.zeros(batch["text"].shape[1], 3, device=images.device),
    ).sample
    return (flow.float() - (noise - images).float()).square().mean()


def main():
    """Encode what is not encoded yet, train, and save."""
    args = arguments()
    folder = args.out / "encoded"
    folder.mkdir(parents=True, exist_ok=True)
    encode(args, folder)
    rows = [load_file(path) for path in sorted(folder.glob("*.safetensors"))]
    torch.manual_seed(args.seed)
    transformer = FluxTransformer2DModel.from_pretrained(
        args.model, subfolder="transformer", torch_dtype=torch.bfloat16
    )
    transformer.enable_gradient_checkpointing()
    stream = None
    if args.stay:
        transformer.to(args.device)
    else:
        stream = stream_weights(transformer, args.device)
    optimizer = ZenFlowAdamW(
        transformer.parameters(),
        lr=args.lr,
        config=ZenFlowConfig(
            topk_ratio=0.0, update_interval=args.update_interval, host_state=args.host_state
        ),
        offload_gradients="release",
        max_grad_norm=1.0,
    )
    print(optimizer.memory)
    for step in range(1, args.steps + 1):
        chosen = [rows[i] for i in torch.randint(len(rows), (args.batch_size,))]
        batch = {
            name: torch.stack([row[name] for row in chosen]).to(args.device) for name in chosen[0]
        }
        loss = flow_loss(transformer, batch)
        loss.backward()
        optimizer.step()
        if step % 10 == 0 or step == args.steps:
            print(f"step {step} of {args.steps}, loss {loss.item():.4f}")
    with optimizer.true_weights():
        transformer.save_pretrained(args.out / "transformer")
    optimizer.close()
    if stream is not None:
        stream.close()


if __name__ == "__main__":
    main()
