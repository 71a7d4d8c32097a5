"""Small models of families beside the seven, with random weights, for docs/reference/support.md."""

from typing import Any

import torch
from diffusers import (
    AdaptiveProjectedMixGuidance,
    AutoencoderKL,
    AutoencoderKLHunyuanImage,
    FlowMatchEulerDiscreteScheduler,
    GlmImagePipeline,
    GlmImageTransformer2DModel,
    HunyuanImagePipeline,
    HunyuanImageTransformer2DModel,
    HunyuanVideo15ImageToVideoPipeline,
    HunyuanVideoTransformer3DModel,
)
from PIL import Image
from transformers import (
    ByT5Tokenizer,
    Qwen3OmniMoeConfig,
    Qwen3OmniMoeForConditionalGeneration,
    SiglipVisionConfig,
    SiglipVisionModel,
    T5Config,
    T5EncoderModel,
)
from transformers.models.siglip import SiglipImageProcessorPil

from octavo_testkit.models.tiny_pipelines import (
    _HEADS,
    _T5,
    make_hunyuan_video,
    make_qwen_image,
    qwen_tokenizer,
)


def bf16(pipe: Any) -> Any:
    """A pipeline as a user has it."""
    pipe.set_progress_bar_config(disable=True)
    return pipe.to(torch.bfloat16)


def make_hunyuan_image() -> HunyuanImagePipeline:
    """HunyuanImage-2.1."""
    torch.manual_seed(0)
    return bf16(
        HunyuanImagePipeline(
            scheduler=FlowMatchEulerDiscreteScheduler(shift=7.0),
            vae=AutoencoderKLHunyuanImage(
                in_channels=3,
                out_channels=3,
                latent_channels=4,
                block_out_channels=(32, 64, 64, 64),
                layers_per_block=1,
                spatial_compression_ratio=8,
                sample_size=32,
                scaling_factor=0.476986,
            ),
            text_encoder=make_qwen_image().text_encoder.eval(),
            tokenizer=qwen_tokenizer(),
            text_encoder_2=T5EncoderModel(T5Config(vocab_size=384, **_T5)).eval(),
            tokenizer_2=ByT5Tokenizer(),
            transformer=HunyuanImageTransformer2DModel(
                in_channels=4,
                out_channels=4,
                num_layers=1,
                num_single_layers=1,
                num_refiner_layers=1,
                mlp_ratio=2.0,
                text_embed_dim=32,
                text_embed_2_dim=32,
                rope_axes_dim=(8, 8),
                **_HEADS,
            ).eval(),
            guider=AdaptiveProjectedMixGuidance(enabled=False),
        )
    )


def run_hunyuan_image(pipe: Any) -> torch.Tensor:
    result = pipe(
        prompt="a cat",
        height=32,
        width=32,
        num_inference_steps=1,
        output_type="pt",
        generator=torch.Generator().manual_seed(0),
    )
    return result.images


def make_glm_image() -> GlmImagePipeline:
    """GLM-Image without the model that makes its prior tokens."""
    torch.manual_seed(0)
    return bf16(
        GlmImagePipeline(
            tokenizer=ByT5Tokenizer(),
            processor=None,
            text_encoder=T5EncoderModel(T5Config(vocab_size=384, **_T5)).eval(),
            vision_language_encoder=None,
            vae=AutoencoderKL(
                latent_channels=4,
                block_out_channels=(4, 4),
                down_block_types=("DownEncoderBlock2D",) * 2,
                up_block_types=("UpDecoderBlock2D",) * 2,
                norm_num_groups=1,
                latents_mean=[0.0] * 4,
                latents_std=[1.0] * 4,
            ),
            transformer=GlmImageTransformer2DModel(
                in_channels=4,
                out_channels=4,
                num_layers=1,
                text_embed_dim=32,
                time_embed_dim=32,
                condition_dim=16,
                prior_vq_quantizer_codebook_size=64,
                **_HEADS,
            ).eval(),
            scheduler=FlowMatchEulerDiscreteScheduler(use_dynamic_shifting=True),
        )
    )


def run_glm_image(pipe: Any) -> torch.Tensor:
    embeds = torch.randn(2, 8, 32, generator=torch.Generator().manual_seed(1)).bfloat16()
    result = pipe(
        prompt_embeds=embeds[:1],
        negative_prompt_embeds=embeds[1:],
        prior_token_ids=torch.arange(64).reshape(1, 64),
        height=32,
        width=32,
        num_inference_steps=1,
        output_type="pt",
        generator=torch.Generator().manual_seed(0),
    )
    return result.images


def make_image_to_video() -> HunyuanVideo15ImageToVideoPipeline:
    """HunyuanVideo-1.5, from a picture."""
    torch.manual_seed(0)
    parts = dict(make_hunyuan_video().components)
    vision = SiglipVisionConfig(
        hidden_size=16,
        intermediate_size=32,
        num_hidden_layers=1,
        num_attention_heads=2,
        image_size=216,
        patch_size=8,
        vision_use_head=False,
    )
    pipe = HunyuanVideo15ImageToVideoPipeline(
        **parts,
        image_encoder=SiglipVisionModel(vision).eval(),
        feature_extractor=SiglipImageProcessorPil(size={"height": 216, "width": 216}),
    )
    pipe.transformer.eval()
    return bf16(pipe)


def run_image_to_video(pipe: Any) -> torch.Tensor:
    result = pipe(
        image=Image.new("RGB", (16, 16), "red"),
        prompt="a cat",
        num_frames=5,
        num_inference_steps=1,
        output_type="pt",
        generator=torch.Generator().manual_seed(0),
    )
    return result.frames


def make_hunyuan_video_transformer(kind: str) -> HunyuanVideoTransformer3DModel:
    """HunyuanVideo, whose image-to-video models have another channel or token for the picture."""
    torch.manual_seed(0)
    made = HunyuanVideoTransformer3DModel(
        in_channels=9 if kind == "latent_concat" else 4,
        out_channels=4,
        num_layers=1,
        num_single_layers=1,
        num_refiner_layers=1,
        mlp_ratio=2.0,
        patch_size=1,
        guidance_embeds=False,
        text_embed_dim=32,
        pooled_projection_dim=16,
        rope_axes_dim=(4, 6, 6),
        image_condition_type=kind,
        **_HEADS,
    )
    return made.eval().bfloat16()


def run_hunyuan_video_transformer(model: Any) -> torch.Tensor:
    noise = torch.Generator().manual_seed(0)
    with torch.no_grad():
        return model(
            hidden_states=torch.randn(
                1, model.config.in_channels, 2, 4, 4, generator=noise
            ).bfloat16(),
            timestep=torch.tensor([500]),
            encoder_hidden_states=torch.randn(1, 8, 32, generator=noise).bfloat16(),
            encoder_attention_mask=torch.ones(1, 8),
            pooled_projections=torch.randn(1, 16, generator=noise).bfloat16(),
            return_dict=False,
        )[0]


_TEXT = {
    "vocab_size": 128,
    "hidden_size": 32,
    "intermediate_size": 64,
    "moe_intermediate_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "mlp_only_layers": [1],
    "rope_parameters": {
        "rope_type": "default",
        "rope_theta": 1e6,
        "mrope_section": [4, 2, 2],
        "mrope_interleaved": True,
    },
    "pad_token_id": 0,
}


def make_qwen3_omni() -> Qwen3OmniMoeForConditionalGeneration:
    """Qwen3-Omni with everything that it has: two encoders, thinker, talker and code2wav."""
    torch.manual_seed(0)
    config = Qwen3OmniMoeConfig(
        thinker_config={
            "text_config": _TEXT,
            "audio_config": {
                "num_mel_bins": 16,
                "encoder_layers": 1,
                "encoder_attention_heads": 2,
                "encoder_ffn_dim": 64,
                "d_model": 32,
                "output_dim": 32,
                "downsample_hidden_size": 16,
            },
            "vision_config": {
                "depth": 1,
                "hidden_size": 32,
                "intermediate_size": 64,
                "num_heads": 2,
                "out_hidden_size": 32,
                "num_position_embeddings": 16,
                "deepstack_visual_indexes": [0],
            },
        },
        talker_config={
            "text_config": {**_TEXT, "shared_expert_intermediate_size": 32},
            "code_predictor_config": {
                **{
                    k: v
                    for k, v in _TEXT.items()
                    if k not in ("rope_parameters", "mlp_only_layers")
                },
                "num_code_groups": 4,
            },
            "thinker_hidden_size": 32,
            "num_code_groups": 4,
            "accept_hidden_layer": 1,
            "spatial_merge_size": 2,
        },
        code2wav_config={
            "codebook_size": 32,
            "hidden_size": 32,
            "intermediate_size": 64,
            "num_attention_heads": 2,
            "num_key_value_heads": 2,
            "num_hidden_layers": 1,
            "num_quantizers": 4,
            "upsample_rates": [2],
            "upsampling_ratios": [2],
            "decoder_dim": 32,
        },
    )
    return Qwen3OmniMoeForConditionalGeneration(config).eval().bfloat16()


def run_thinker(model: Any) -> torch.Tensor:
    with torch.no_grad():
        return model.thinker(input_ids=torch.arange(1, 24).reshape(1, -1), use_cache=False).logits
