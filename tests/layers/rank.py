"""One of two ranks, each with half of a layer's heads: python rank.py RANK FOLDER."""

import sys
from pathlib import Path

import torch
import torch.distributed as dist

from octavo.layers.encoder_attention import EncoderAttention
from octavo.recipe import AttentionSettings


def main(rank: int, folder: Path) -> None:
    dist.init_process_group("gloo", init_method=f"file://{folder}/group", rank=rank, world_size=2)
    qkv = torch.load(folder / "qkv.pt", weights_only=True)
    mine = slice(2 * rank, 2 * rank + 2)
    attend = EncoderAttention(2, 72, fp8=AttentionSettings(), group=dist.group.WORLD)
    out = attend(*(x[:, :, mine] for x in qkv))
    torch.save((out, attend.scaling.scales().q), folder / f"{rank}.pt")
    dist.destroy_process_group()


if __name__ == "__main__":
    main(int(sys.argv[1]), Path(sys.argv[2]))
