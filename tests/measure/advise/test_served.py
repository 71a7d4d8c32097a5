"""`octavo advise` recommends to serve what the engine takes, and of the rest says why not."""

import pytest
import torch

pytest.importorskip("transformers")
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoModelForImageTextToText,
)

import octavo
from octavo.errors import UnsupportedError
from octavo.integrations.transformers.engine_model import EngineModel
from octavo.measure.advise import advice as words
from octavo.measure.advise.advise import advise
from octavo.measure.advise.gpus import find_gpu
from octavo.measure.advise.shape import Workload, find_model
from octavo_testkit.models.text_models import VOCABULARY, make_decoder

# So many keys that they fit in FP8 alone: a cache is in the recipe where there can be one.
LONG = Workload(context=2**17, concurrency=2**14)
SIZES = {
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 64,  # the smallest that all kernels have
    "vocab_size": VOCABULARY,
    "max_position_embeddings": 1024,
    "eos_token_id": None,
    "pad_token_id": 0,
    "bos_token_id": 1,
}
EXPERTS = {
    "num_local_experts": 4,
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 32,
    "shared_expert_intermediate_size": 32,
}
DELTA = {
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 2,
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 16,
}
LATENT = {
    "q_lora_rank": 16,
    "kv_lora_rank": 16,
    "qk_nope_head_dim": 8,
    "qk_rope_head_dim": 8,
    "v_head_dim": 16,
    "n_routed_experts": 4,
    "n_shared_experts": 1,
    "n_group": 1,
    "topk_group": 1,
    "head_dim": 8,
    "num_key_value_heads": 4,
    "first_k_dense_replace": 1,
}
MAMBA = {"hidden_size": 64, "num_hidden_layers": 2, "vocab_size": VOCABULARY, "state_size": 8}
PACKED = {
    "depth": 1,
    "hidden_size": 32,
    "intermediate_size": 32,
    "num_heads": 2,
    "patch_size": 4,
    "out_hidden_size": 64,
    "num_position_embeddings": 16,
    "deepstack_visual_indexes": [0],
}
SIGLIP = {
    "hidden_size": 32,
    "intermediate_size": 32,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "image_size": 28,
    "patch_size": 14,
}
ROPE = {"rope_type": "default", "mrope_section": [16, 8, 8], "rope_theta": 1e4}
FALCON_H1 = {"mamba_d_ssm": 64, "mamba_n_heads": 4, "mamba_d_head": 16, "mamba_d_state": 8}
SERVED = {
    "llama": SIZES,
    "qwen2": SIZES,
    "qwen3": SIZES,
    "qwen3_moe": {**SIZES, **EXPERTS},
    "gemma2": {**SIZES, "sliding_window": 8},
    "gemma3_text": {**SIZES, "sliding_window": 8},
    "gemma3": {
        "text_config": {**SIZES, "sliding_window": 8},
        "vision_config": SIGLIP,
        "mm_tokens_per_image": 4,
    },
    "gpt_oss": {**SIZES, **EXPERTS, "sliding_window": 8},
    "phi3": SIZES,
    "mistral": {**SIZES, "sliding_window": 8},
    "mixtral": {**SIZES, **EXPERTS},
    "glm4": SIZES,
    "qwen3_vl": {"vision_config": PACKED, "text_config": {**SIZES, "rope_parameters": ROPE}},
    "smolvlm": {"vision_config": SIGLIP, "text_config": {"model_type": "llama", **SIZES}},
}
# And a word of the reason.
REFUSED = {
    "qwen3_5": ({"vision_config": PACKED, "text_config": {**SIZES, **DELTA}}, "GatedDeltaNet"),
    "qwen3_next": ({**SIZES, **EXPERTS, **DELTA}, "GatedDeltaNet"),
    "gemma4_text": ({**SIZES, "vocab_size_per_layer_input": VOCABULARY}, "head_dim"),
    "deepseek_v3": ({**SIZES, **EXPERTS, **LATENT}, "DeepseekV3Attention"),
    "mamba": (MAMBA, "MambaMixer"),
    "falcon_h1": ({**SIZES, **FALCON_H1}, "FalconH1Mixer"),
    "llama4_text": ({**SIZES, **EXPERTS, "attention_chunk_size": 8}, "chunks"),
    "stablelm": ({**SIZES, "head_dim": None}, "drops keywords"),
    "diffllama": (SIZES, "got .* in call 2"),
    "gpt2": (
        {"n_embd": 64, "n_layer": 2, "n_head": 4, "vocab_size": VOCABULARY, "n_positions": 64},
        "GPT2Attention",
    ),
}


def make_config(family):
    sizes = SERVED[family] if family in SERVED else REFUSED[family][0]
    return AutoConfig.for_model(family, **sizes)


def make_model(family):
    torch.manual_seed(0)
    config = make_config(family)
    has_images = hasattr(config, "vision_config")
    kind = AutoModelForImageTextToText if has_images else AutoModelForCausalLM
    return kind.from_config(config, attn_implementation="eager", dtype=torch.bfloat16).eval()


def advice_of(family, folder):
    make_config(family).save_pretrained(folder)
    return advise(find_model(str(folder)), find_gpu("h200"), LONG, served="a/model")


@pytest.mark.filterwarnings("ignore:the model brings no scales")
@pytest.mark.parametrize("family", SERVED)
def test_what_is_recommended_is_served(family, tmp_path):
    """From the config alone; with the recipe, the engine answers."""
    found = advice_of(family, tmp_path)
    assert found.model.refused is None and found.command.startswith("octavo serve a/model")
    assert words.how_to_run(found) == [found.command]
    has_windows = "sliding_window" in str(SERVED[family])  # those fit in any case
    assert found.recipe.kv_cache is not None or has_windows
    settings = octavo.EngineSettings(num_pages=8, max_num_seqs=1)
    with octavo.LLM(make_model(family), recipe=found.recipe, settings=settings) as llm:
        (answer,) = llm.generate([[3, 4, 5]], octavo.Sampling(max_tokens=2, temperature=0))
    assert len(answer.tokens) == 2


@pytest.mark.filterwarnings("ignore:the model brings no scales")
@pytest.mark.parametrize("family", REFUSED)
def test_what_the_engine_refuses_is_not_recommended(family, tmp_path):
    """The reason is the engine's own; what is recommended in its place, `apply_` does."""
    found, model = advice_of(family, tmp_path), make_model(family)
    with pytest.raises(UnsupportedError, match=REFUSED[family][1]) as error:
        EngineModel(model)
    assert found.command is None and found.model.refused == str(error.value)
    assert '"command": null' in found.to_json()
    told = "\n".join(words.how_to_run(found))
    assert "octavo serve a/model" not in told and found.model.refused in told
    assert "from_pretrained('a/model'" in told and "vllm serve a/model" in told
    assert ("octavo.apply_" in told) == bool(found.recipe.settings())
    if found.recipe.settings():
        octavo.apply_(model, found.recipe)
        model(input_ids=torch.tensor([[3, 4, 5]]))


def test_a_model_that_is_refused_stays_as_it_was():
    from octavo.integrations.transformers.engine_model import why_not_served

    model = make_model("stablelm")
    before = model(input_ids=torch.tensor([[3, 4, 5]])).logits
    assert "drops keywords" in why_not_served(model)
    assert model.config._attn_implementation == "eager"
    assert torch.equal(model(input_ids=torch.tensor([[3, 4, 5]])).logits, before)


def test_hybrids_keep_the_fp8_cache_of_the_layers_that_have_one(tmp_path):
    found = advice_of("qwen3_5", tmp_path)
    assert found.recipe.kv_cache is not None and found.recipe.vision_attention is not None
    assert "AutoModelForImageTextToText" in "\n".join(words.how_to_run(found))
    latent = advice_of("deepseek_v3", tmp_path)
    assert latent.recipe.kv_cache is None and latent.recipe.linear is not None
    assert latent.expectations == [] and latent.memory[0].after < latent.memory[0].before
    assert "Times are not predicted" in latent.reasons[0]
    chunked = advice_of("llama4_text", tmp_path)
    assert chunked.recipe.kv_cache is None and "no FP8 cache for the model" in chunked.reasons[0]


def test_a_checkpoint_in_fp8_is_not_quantized_again(tmp_path):
    config = make_config("llama")
    config.quantization_config = {"quant_method": "fp8", "weight_block_size": [128, 128]}
    config.save_pretrained(tmp_path)
    plain, fp8 = (find_model(str(tmp_path)) for _ in range(2))
    found = advise(fp8, find_gpu("h200"), LONG)
    assert plain.quantized == "fp8" and found.recipe.linear is None
    assert "Linear layers stay as the checkpoint has them: fp8." in found.reasons


def test_videos_are_made_and_not_served():
    pytest.importorskip("diffusers")
    found = advise(find_model("tiny-wan"), find_gpu("h200"), Workload(), served="a/model")
    assert "makes videos" in found.model.refused
    assert found.command.startswith("octavo image --model a/model --prompt PROMPT")
    pictures = advise(find_model("tiny-flux"), find_gpu("h200"), Workload(), served="a/model")
    assert pictures.command.startswith("octavo serve a/model --omni")


def test_the_engine_runs_every_named_model():
    """Their configs at full size, on the meta device."""
    from octavo.integrations.transformers.decoder import LANGUAGE_MODELS
    from octavo.integrations.transformers.model_work import language_of_config

    for name, sizes in LANGUAGE_MODELS.items():
        kind, sizes = sizes["model_type"], {k: v for k, v in sizes.items() if k != "model_type"}
        sizes["num_hidden_layers"] = 2
        config = AutoConfig.for_model(kind, **sizes)
        if name.startswith("qwen3-vl"):
            config = AutoConfig.for_model(f"{kind}_vl".replace("_moe_vl", "_vl_moe"))
            for key, value in sizes.items():
                setattr(config.text_config, key, value)
        assert language_of_config(config).refused is None, name


def test_the_engine_leaves_a_loaded_model_as_its_config_says():
    """The trial of one token is over before the engine takes the model."""
    model = make_decoder("llama")
    engine = EngineModel(model)
    assert model.config._attn_implementation == "octavo_engine"
    engine.close()
    assert model.config._attn_implementation == "eager"
