"""Give a module of your own FP8 attention and FP8 linear layers."""

import torch

import octavo


class Attention(torch.nn.Module):
    """Causal self-attention over tokens [batch, length, width]."""

    def __init__(self, width: int, num_heads: int) -> None:
        super().__init__()
        self.num_heads = num_heads
        self.qkv, self.out = torch.nn.Linear(width, 3 * width), torch.nn.Linear(width, width)
        # In place of torch.nn.functional.scaled_dot_product_attention: it keeps its scales.
        self.attend = octavo.ScaledDotProductAttention()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        qkv = self.qkv(x).unflatten(-1, (3, self.num_heads, -1)).permute(2, 0, 3, 1, 4)
        return self.out(self.attend(*qkv, is_causal=True).transpose(1, 2).flatten(2))


torch.manual_seed(0)
module = Attention(256, num_heads=4).eval()
print(octavo.quantize_(module, "fp8"))
with torch.inference_mode():
    for _ in range(4):
        module(torch.randn(2, 100, 256))  # dynamic scales follow the data
    module.attend = octavo.ScaledDotProductAttention(scales=module.attend.scales(margin=1.5))
    print(module(torch.randn(2, 100, 256)).shape, "with static scales")
print(sorted(name for name in module.state_dict() if "attend" in name))
