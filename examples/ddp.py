"""Train a small decoder on several GPUs that average gradients and share the host's work.

    torchrun --standalone --nproc-per-node 2 ddp.py --text book.txt --checkpoint saved

Started again, with as many ranks or with others, it goes on from the checkpoint. Without a GPU it
runs on CPUs. Take what you need: `process_group` and `release_from` are what is not plain DDP.
"""

import argparse
import os
from pathlib import Path

import torch
import torch.distributed.checkpoint as dcp
from torch import distributed, nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.nn import functional
from torch.nn.parallel import DistributedDataParallel

from zenflow import ZenFlowAdamW, ZenFlowConfig


class Decoder(nn.Module):
    """A decoder on bytes."""

    def __init__(self, width, num_layers):
        super().__init__()
        self.embed = nn.Embedding(256, width)
        layer = nn.TransformerEncoderLayer(
            width, nhead=4, dim_feedforward=4 * width, dropout=0.0, batch_first=True
        )
        self.layers = nn.TransformerEncoder(layer, num_layers, enable_nested_tensor=False)
        self.head = nn.Linear(width, 256)

    def forward(self, tokens):
        mask = nn.Transformer.generate_square_subsequent_mask(tokens.shape[1], tokens.device)
        return self.head(self.layers(self.embed(tokens), mask=mask, is_causal=True))


def batch_of(text, step, rank, args):
    """Return a rank's rows of a step, whatever the number of steps before."""
    generator = torch.Generator().manual_seed(1000 * step + rank)
    starts = torch.randint(len(text) - args.length - 1, (args.batch,), generator=generator)
    return torch.stack([text[start : start + args.length + 1] for start in starts])


def states(model, optimizer, step):
    """Return all that a checkpoint has to have."""
    model_state, optimizer_state = get_state_dict(model, optimizer)
    return {"model": model_state, "optimizer": optimizer_state, "step": step}


def resume(model, optimizer, folder):
    """Take a checkpoint up, and return the number of steps that it has taken."""
    loaded = states(model, optimizer, 0)
    dcp.load(loaded, checkpoint_id=folder)
    of_model, of_optimizer = loaded["model"], loaded["optimizer"]
    set_state_dict(model, optimizer, model_state_dict=of_model, optim_state_dict=of_optimizer)
    return loaded["step"]


def main(args):
    device = "cuda" if torch.cuda.is_available() else "cpu"
    distributed.init_process_group("nccl" if device == "cuda" else "gloo")
    rank = distributed.get_rank()
    if device == "cuda":
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    torch.manual_seed(0)
    model = DistributedDataParallel(
        Decoder(args.width, args.layers).to(device), gradient_as_bucket_view=True
    )
    optimizer = ZenFlowAdamW(
        model.parameters(),
        lr=args.lr,
        config=ZenFlowConfig(min_split_elements=args.min_split_elements),
        offload_gradients="release",
        max_grad_norm=1.0,
        process_group=model.process_group,
    )
    optimizer.release_from(model)
    text = torch.tensor(list(Path(args.text).read_bytes()))
    first = resume(model, optimizer, args.checkpoint) if args.checkpoint.exists() else 0
    for step in range(first, first + args.steps):
        tokens = batch_of(text, step, rank, args).to(device)
        logits = model(tokens[:, :-1])
        loss = functional.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten())
        loss.backward()
        optimizer.step()
        if rank == 0:
            print(f"step {step}: loss {loss.item():.3f}", flush=True)
    dcp.save(states(model, optimizer, first + args.steps), checkpoint_id=args.checkpoint)
    optimizer.close()
    distributed.destroy_process_group()


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--text", required=True, help="File to learn.")
    parser.add_argument("--checkpoint", type=Path, required=True, help="Folder to go on from.")
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--batch", type=int, default=8, help="Rows of a rank in a step.")
    parser.add_argument("--length", type=int, default=64, help="Bytes in a row.")
    parser.add_argument("--width", type=int, default=256)
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--lr", type=float, default=1e-3)
    parser.add_argument("--min_split_elements", type=int, default=65536)
    main(parser.parse_args())
