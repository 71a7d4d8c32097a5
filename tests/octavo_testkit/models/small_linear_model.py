"""A model of linear layers that `quantize_` takes, and of some that it leaves."""

import torch
from torch import nn

from octavo.layers.linear import Fp8Linear
from octavo.testing.asserts import assert_same_bits


class Block(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.img_mlp = nn.Sequential(nn.Linear(width, 70), nn.GELU(), nn.Linear(70, width))
        self.gate = nn.Linear(width, 32)
        self.scale = nn.Linear(width, 1)

    def forward(self, x):
        return x + self.img_mlp(x) * self.scale(x) + self.gate(x).mean(-1, keepdim=True)


class Model(nn.Module):
    """Odd sizes, a router, a small layer, and a head."""

    def __init__(self, width=63, num_blocks=4):
        super().__init__()
        self.blocks = nn.ModuleList(Block(width) for _ in range(num_blocks))
        self.head = nn.Linear(width, 40)

    def forward(self, x):
        for block in self.blocks:
            x = block(x)
        return self.head(x)

    def get_output_embeddings(self):
        return self.head


CHOSEN = [f"blocks.{block}.img_mlp.{layer}" for block in range(4) for layer in (0, 2)]


def make(**options):
    torch.manual_seed(0)
    return Model(**options).requires_grad_(False)


def fp8_layers(model):
    return [name for name, module in model.named_modules() if isinstance(module, Fp8Linear)]


def state(model):
    return {name: x.clone() for name, x in model.state_dict().items()}


def assert_untouched(model, before):
    assert not fp8_layers(model)
    after = model.state_dict()
    assert after.keys() == before.keys()
    for name, x in after.items():
        assert_same_bits(x, before[name])
