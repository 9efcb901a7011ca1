"""The byte-level GPT on several processes with FSDP2: ``torchrun --nproc-per-node 2 examples/fsdp2.py``.

Every process holds a part of the parameters, masters and moments, reads its own part of each batch, and takes the same
decision about every step. On CUDA start it with one process a GPU; nothing else changes.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

import torch
from torch import distributed

sys.path.insert(0, str(Path(__file__).parents[1]))  # torchrun puts this file's folder there, not the repository

from examples.quickstart.corpus import load
from examples.quickstart.model import ByteGPT, Size, next_byte_loss
from mp_torch import AmpEngine, LossScale


def arguments() -> argparse.Namespace:
    """What the user may say."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--steps", type=int, default=100, help="updates (default %(default)s)")
    parser.add_argument("--precision", default="fp16-mixed", help="as AmpEngine takes it (default %(default)s)")
    parser.add_argument("--save", type=Path, help="folder for a checkpoint that any number of ranks can load")
    return parser.parse_args()


def main() -> None:
    """Train, and let the first rank print."""
    options = arguments()
    distributed.init_process_group()
    torch.set_num_threads(1)
    rank, ranks = distributed.get_rank(), distributed.get_world_size()
    size = Size()
    torch.manual_seed(0)
    model = ByteGPT(size)
    if torch.accelerator.is_available():
        torch.accelerator.set_device_index(rank % torch.accelerator.device_count())
        model.to(torch.accelerator.current_accelerator())
    device = next(model.parameters()).device
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3, betas=(0.9, 0.95), weight_decay=0.1)
    scale = LossScale(init_scale=2.0**18, growth_interval=50)
    engine = AmpEngine(model, optimizer, options.precision, loss_scale=scale, max_grad_norm=1.0)
    engine.shard()
    generator, corpus = torch.Generator().manual_seed(0), load(None)
    for step in range(options.steps):
        batch = corpus.batch(generator, size.batch_size, size.context)
        tokens, targets = (part.chunk(ranks)[rank].to(device) for part in batch)
        with engine.autocast():
            loss = next_byte_loss(model(tokens), targets)
        engine.backward(loss)
        report = engine.step()
        if rank == 0 and (report.skipped or step % 10 == 9):
            print(f"step {step + 1:4d}  loss {loss.item():.3f}  loss scale {report.loss_scale:g}  {report.reason}")
    held = sum(part.weight.held.numel() for part in engine.assembly.parts)
    total = sum(parameter.numel() for parameter in model.parameters())
    print(f"rank {rank} of {ranks} holds {held:,} of {total:,} parameters")
    if options.save is not None:
        engine.save_sharded(options.save)
    distributed.destroy_process_group()


if __name__ == "__main__":
    main()
