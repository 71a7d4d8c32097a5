"""Tiny mixtures of experts of transformers: whole models, and the modules of rarer kinds alone."""

import torch
import transformers

from octavo.testing.inputs import Draw

HIDDEN, INNER, NUM_EXPERTS, TOP_K = 128, 144, 6, 2
SIZES = {
    "vocab_size": 97,
    "hidden_size": HIDDEN,
    "intermediate_size": INNER,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "num_experts_per_tok": TOP_K,
    "max_position_embeddings": 128,
    "pad_token_id": 0,
}
MLP = {"moe_intermediate_size": INNER}
GROUPS = {"n_group": 1, "topk_group": 1, "first_k_dense_replace": 0, "n_shared_experts": 1}
MLA = {"q_lora_rank": None, "kv_lora_rank": 32, "qk_rope_head_dim": 16, "v_head_dim": 32}
MLA |= {"qk_nope_head_dim": 16, "num_key_value_heads": 4, "head_dim": 16}
QWEN = {"num_experts": NUM_EXPERTS, "decoder_sparse_step": 1, **MLP}
VISION = {"depth": 1, "hidden_size": 32, "num_heads": 2, "intermediate_size": 32}
VISION |= {"out_hidden_size": HIDDEN, "deepstack_visual_indexes": [0]}
# Family -> what its class and its config are called, and what its config has beside SIZES.
FAMILIES = {
    "qwen3_moe": ("Qwen3Moe", QWEN),
    "mixtral": ("Mixtral", {"num_local_experts": NUM_EXPERTS}),
    "olmoe": ("Olmoe", {"num_experts": NUM_EXPERTS}),
    "gpt_oss": ("GptOss", {"num_local_experts": NUM_EXPERTS}),
    "glm4_moe": ("Glm4Moe", {"n_routed_experts": NUM_EXPERTS, **GROUPS, **MLP}),
    "deepseek_v3": ("DeepseekV3", {"n_routed_experts": NUM_EXPERTS, **GROUPS, **MLP, **MLA}),
    "hunyuan_v1_moe": ("HunYuanMoEV1", {"num_experts": NUM_EXPERTS, "moe_topk": TOP_K}),
    "qwen3_vl_moe": ("Qwen3VLMoe", QWEN),
}


def make_mixture(family, top_k=TOP_K, inner=INNER):
    """A tiny model with two layers of experts, in bfloat16; some experts never have a token."""
    torch.manual_seed(0)
    name, own = FAMILIES[family]
    kind = "ForCausalLM"
    values = {**SIZES, **own, "num_experts_per_tok": top_k}
    values |= {name: inner for name in values if name.endswith("intermediate_size")}
    if "moe_topk" in values:
        values["moe_topk"] = top_k
    if family == "qwen3_vl_moe":
        rope = {"rope_type": "default", "mrope_section": [4, 6, 6], "rope_theta": 1e4}
        values = {
            "text_config": {**values, "rope_parameters": rope},
            "vision_config": VISION,
        }
        kind = "ForConditionalGeneration"
    config = getattr(transformers, f"{name}Config")(**values)
    model = getattr(transformers, f"{name}{kind}")(config).eval().bfloat16()
    with torch.no_grad():
        for module in mixtures(model).values():
            for x in module.parameters():
                x.normal_(std=x.shape[-1] ** -0.5)
    return model


def mixtures(model):
    """The mixtures of a model by name, plain or in FP8."""
    return {n: m for n, m in model.named_modules() if hasattr(m, "has_gate")}


def draw_ids():
    """Some random tokens."""
    return torch.randint(1, 97, (2, 19), generator=torch.Generator().manual_seed(1))


def run_model(model):
    """The logits of some random tokens."""
    with torch.no_grad():
        return model(input_ids=draw_ids()).logits


def mixture_inputs(num_tokens, top_k=TOP_K, hidden=HIDDEN, dtype=torch.bfloat16):
    """What a mixture takes: uneven, and the last expert has no token."""
    draw = Draw(5)
    scores = draw.normal(num_tokens, NUM_EXPERTS) + torch.arange(NUM_EXPERTS).flip(0)
    scores[:, -1] = -torch.inf
    weights, index = scores.softmax(-1).topk(top_k)
    return draw.normal(num_tokens, hidden, dtype=dtype), index, weights.to(dtype)
