"""Small pipelines of every family with random weights and tokenizers that need no files."""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from diffusers import (
    AutoencoderKL,
    AutoencoderKLFlux2,
    AutoencoderKLHunyuanVideo15,
    AutoencoderKLQwenImage,
    AutoencoderKLWan,
    ClassifierFreeGuidance,
    Cosmos3OmniPipeline,
    Cosmos3OmniTransformer,
    DiffusionPipeline,
    FlowMatchEulerDiscreteScheduler,
    Flux2KleinPipeline,
    Flux2Transformer2DModel,
    FluxPipeline,
    FluxTransformer2DModel,
    HunyuanVideo15Pipeline,
    HunyuanVideo15Transformer3DModel,
    QwenImagePipeline,
    QwenImageTransformer2DModel,
    UniPCMultistepScheduler,
    WanPipeline,
    WanTransformer3DModel,
    ZImagePipeline,
    ZImageTransformer2DModel,
)
from transformers import (
    ByT5Tokenizer,
    CLIPTextConfig,
    CLIPTextModel,
    CLIPTokenizer,
    Qwen2_5_VLConfig,
    Qwen2_5_VLForConditionalGeneration,
    Qwen2_5_VLTextConfig,
    Qwen2_5_VLTextModel,
    Qwen2Tokenizer,
    Qwen3Config,
    Qwen3ForCausalLM,
    Qwen3Model,
    T5Config,
    T5EncoderModel,
    T5Tokenizer,
    UMT5Config,
    UMT5EncoderModel,
)

SEED = 0
PROMPT = "a cat on a mat"
_SPECIAL = ("<|endoftext|>", "<|im_start|>", "<|im_end|>", "<|vision_start|>", "<|vision_end|>")
_SPECIAL += ("<|image_pad|>", "<|video_pad|>", "<think>", "</think>")
_TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n"
    "{% if m.content is string %}{{ m.content }}"
    "{% else %}{% for part in m.content %}{{ part['text'] }}{% endfor %}{% endif %}<|im_end|>\n"
    "{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def _byte_characters() -> list[str]:
    """The 256 characters that byte-level tokenizers write bytes as."""
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = [byte for byte in range(256) if byte not in printable]
    numbers = {byte: byte for byte in printable}
    numbers |= {byte: 256 + index for index, byte in enumerate(others)}
    return [chr(numbers[byte]) for byte in range(256)]


def qwen_tokenizer() -> Qwen2Tokenizer:
    words = [*_byte_characters(), *_SPECIAL]
    return Qwen2Tokenizer(
        vocab={word: index for index, word in enumerate(words)},
        merges=[],
        additional_special_tokens=list(_SPECIAL[1:]),
        chat_template=_TEMPLATE,
        model_max_length=4096,
    )


def clip_tokenizer() -> CLIPTokenizer:
    letters = _byte_characters()
    words = ["<|startoftext|>", "<|endoftext|>", *letters, *(f"{x}</w>" for x in letters)]
    vocab = {word: index for index, word in enumerate(words)}
    return CLIPTokenizer(vocab=vocab, merges=[], model_max_length=77)


def t5_tokenizer() -> T5Tokenizer:
    pieces = [("<pad>", 0.0), ("</s>", 0.0), ("<unk>", 0.0), ("▁", -2.0)]
    pieces += [(chr(code), -3.0) for code in range(33, 127)]
    return T5Tokenizer(vocab=pieces, extra_ids=0, model_max_length=512)


_T5 = {
    "d_model": 32,
    "d_kv": 16,
    "d_ff": 64,
    "num_layers": 2,
    "num_heads": 2,
    "feed_forward_proj": "gated-gelu",
    "pad_token_id": 0,
    "eos_token_id": 1,
}
_QWEN3 = {
    "vocab_size": 512,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "head_dim": 16,
}
_MROPE = {"mrope_section": [2, 3, 3], "rope_type": "default", "type": "default"}
_QWEN_VL = {
    **{name: size for name, size in _QWEN3.items() if name != "head_dim"},
    "rope_scaling": _MROPE,
    "rope_theta": 1e6,
    "pad_token_id": 256,
}
_QWEN_VL_VISION = {
    "depth": 1,
    "hidden_size": 32,
    "intermediate_size": 32,
    "num_heads": 2,
    "out_hidden_size": 32,
}
_HEADS = {"attention_head_dim": 16, "num_attention_heads": 2}


def make_flux() -> FluxPipeline:
    clip = CLIPTextConfig(
        vocab_size=514,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=2,
        bos_token_id=0,
        eos_token_id=1,
        pad_token_id=1,
    )
    return FluxPipeline(
        scheduler=FlowMatchEulerDiscreteScheduler(),
        text_encoder=CLIPTextModel(clip),
        tokenizer=clip_tokenizer(),
        text_encoder_2=T5EncoderModel(T5Config(vocab_size=128, **_T5)),
        tokenizer_2=t5_tokenizer(),
        transformer=FluxTransformer2DModel(
            in_channels=16,
            num_layers=1,
            num_single_layers=1,
            joint_attention_dim=32,
            pooled_projection_dim=32,
            axes_dims_rope=(4, 4, 8),
            guidance_embeds=True,
            **_HEADS,
        ),
        vae=AutoencoderKL(
            latent_channels=4,
            block_out_channels=(4,),
            norm_num_groups=1,
            use_quant_conv=False,
            use_post_quant_conv=False,
            shift_factor=0.0609,
            scaling_factor=1.5035,
        ),
    )


def make_qwen_image() -> QwenImagePipeline:
    config = Qwen2_5_VLConfig(
        text_config=_QWEN_VL,
        vision_config=_QWEN_VL_VISION,
        vision_start_token_id=259,
        vision_end_token_id=260,
        image_token_id=261,
        video_token_id=262,
    )
    return QwenImagePipeline(
        scheduler=FlowMatchEulerDiscreteScheduler(),
        text_encoder=Qwen2_5_VLForConditionalGeneration(config),
        tokenizer=qwen_tokenizer(),
        transformer=QwenImageTransformer2DModel(
            patch_size=2,
            in_channels=16,
            out_channels=4,
            num_layers=2,
            joint_attention_dim=32,
            axes_dims_rope=(8, 4, 4),
            **_HEADS,
        ),
        vae=AutoencoderKLQwenImage(
            base_dim=24,
            z_dim=4,
            dim_mult=[1, 2, 4],
            num_res_blocks=1,
            temperal_downsample=[False, True],
            latents_mean=[0.0] * 4,
            latents_std=[1.0] * 4,
        ),
    )


def make_z_image_transformer(num_layers: int) -> ZImageTransformer2DModel:
    transformer = ZImageTransformer2DModel(
        dim=32,
        n_layers=num_layers,
        n_refiner_layers=1,
        n_heads=2,
        n_kv_heads=2,
        cap_feat_dim=32,
        axes_dims=[8, 4, 4],
        axes_lens=[256, 32, 32],
    )
    with torch.no_grad():  # made by torch.empty
        transformer.x_pad_token.zero_()
        transformer.cap_pad_token.zero_()
    return transformer


def make_z_image() -> ZImagePipeline:
    return ZImagePipeline(
        scheduler=FlowMatchEulerDiscreteScheduler(),
        text_encoder=Qwen3Model(Qwen3Config(**_QWEN3)),
        tokenizer=qwen_tokenizer(),
        transformer=make_z_image_transformer(2),
        vae=AutoencoderKL(
            down_block_types=("DownEncoderBlock2D",) * 2,
            up_block_types=("UpDecoderBlock2D",) * 2,
            block_out_channels=(32, 64),
            latent_channels=16,
            norm_num_groups=32,
            use_quant_conv=False,
            use_post_quant_conv=False,
            shift_factor=0.1,
            scaling_factor=0.4,
        ),
    )


def make_flux2_klein() -> Flux2KleinPipeline:
    return Flux2KleinPipeline(
        scheduler=FlowMatchEulerDiscreteScheduler(),
        text_encoder=Qwen3ForCausalLM(Qwen3Config(**_QWEN3)),
        tokenizer=qwen_tokenizer(),
        transformer=Flux2Transformer2DModel(
            in_channels=16,
            num_layers=1,
            num_single_layers=1,
            joint_attention_dim=32,
            axes_dims_rope=(4, 4, 4, 4),
            guidance_embeds=False,
            **_HEADS,
        ),
        vae=AutoencoderKLFlux2(
            down_block_types=("DownEncoderBlock2D",),
            up_block_types=("UpDecoderBlock2D",),
            block_out_channels=(4,),
            norm_num_groups=1,
            latent_channels=4,
            use_quant_conv=False,
            use_post_quant_conv=False,
        ),
        is_distilled=False,
    )


def _wan_transformer() -> WanTransformer3DModel:
    return WanTransformer3DModel(
        patch_size=(1, 2, 2),
        in_channels=16,
        out_channels=16,
        text_dim=32,
        ffn_dim=64,
        num_layers=2,
        rope_max_seq_len=32,
        **_HEADS,
    )


def _wan_vae() -> AutoencoderKLWan:
    return AutoencoderKLWan(base_dim=3, z_dim=16, dim_mult=[1] * 4, num_res_blocks=1)


def _unipc() -> UniPCMultistepScheduler:
    return UniPCMultistepScheduler(
        prediction_type="flow_prediction", use_flow_sigmas=True, flow_shift=3.0
    )


def make_wan() -> WanPipeline:
    return WanPipeline(
        tokenizer=t5_tokenizer(),
        text_encoder=UMT5EncoderModel(UMT5Config(vocab_size=128, **_T5)),
        vae=_wan_vae(),
        scheduler=_unipc(),
        transformer=_wan_transformer(),
        transformer_2=_wan_transformer(),
        boundary_ratio=0.875,
    )


def make_hunyuan_video() -> HunyuanVideo15Pipeline:
    text = Qwen2_5_VLTextConfig(**{**_QWEN_VL, "num_hidden_layers": 3})
    return HunyuanVideo15Pipeline(
        text_encoder=Qwen2_5_VLTextModel(text),
        tokenizer=qwen_tokenizer(),
        transformer=HunyuanVideo15Transformer3DModel(
            in_channels=9,
            out_channels=4,
            num_layers=1,
            num_refiner_layers=1,
            mlp_ratio=2.0,
            text_embed_dim=32,
            text_embed_2_dim=32,
            image_embed_dim=16,
            rope_axes_dim=(4, 4, 8),
            target_size=16,
            task_type="t2v",
            **_HEADS,
        ),
        vae=AutoencoderKLHunyuanVideo15(
            latent_channels=4,
            block_out_channels=(16, 16),
            layers_per_block=1,
            spatial_compression_ratio=4,
            temporal_compression_ratio=2,
            downsample_match_channel=False,
            upsample_match_channel=False,
        ),
        scheduler=FlowMatchEulerDiscreteScheduler(shift=7.0),
        text_encoder_2=T5EncoderModel(T5Config(vocab_size=384, **_T5)),
        tokenizer_2=ByT5Tokenizer(),
        guider=ClassifierFreeGuidance(guidance_scale=1.0),
    )


def make_cosmos3() -> Cosmos3OmniPipeline:
    return Cosmos3OmniPipeline(
        transformer=Cosmos3OmniTransformer(
            head_dim=16,
            hidden_size=32,
            intermediate_size=64,
            num_attention_heads=4,
            num_key_value_heads=2,
            num_hidden_layers=2,
            latent_channel=16,
            patch_latent_dim=16,
            latent_patch_size=1,
            rope_axes_dim=[3, 3, 2],
            vocab_size=512,
        ),
        text_tokenizer=qwen_tokenizer(),
        vae=_wan_vae(),
        scheduler=_unipc(),
        enable_safety_checker=False,
    )


@dataclass(frozen=True)
class Family:
    """How to make a pipeline, what to call it with, and what its result is called."""

    make: Callable[[], DiffusionPipeline]
    call: dict[str, Any]
    result: str


_IMAGE = {"height": 32, "width": 32}
_VIDEO = {"height": 16, "width": 16, "num_frames": 9}
FAMILIES = {
    "flux": Family(make_flux, {**_IMAGE, "max_sequence_length": 48}, "images"),
    "qwen_image": Family(
        make_qwen_image,
        {**_IMAGE, "negative_prompt": "x", "true_cfg_scale": 4.0, "max_sequence_length": 64},
        "images",
    ),
    "z_image": Family(
        make_z_image, {**_IMAGE, "guidance_scale": 3.0, "max_sequence_length": 64}, "images"
    ),
    "flux2_klein": Family(
        make_flux2_klein,
        {
            **_IMAGE,
            "guidance_scale": 4.0,
            "max_sequence_length": 48,
            "text_encoder_out_layers": (1,),
        },
        "images",
    ),
    "wan": Family(make_wan, {**_VIDEO, "guidance_scale": 6.0, "max_sequence_length": 32}, "frames"),
    "hunyuan_video": Family(make_hunyuan_video, _VIDEO, "frames"),
    "cosmos3": Family(
        make_cosmos3,
        {
            "height": 16,
            "width": 16,
            "num_frames": 1,
            "guidance_scale": 1.0,
            "use_system_prompt": False,
            "add_resolution_template": False,
            "add_duration_template": False,
        },
        "video",
    ),
}


def write_pipeline(family: str, folder: Path) -> None:
    """Save a pipeline in float32, with the same weights each time."""
    torch.manual_seed(SEED)
    FAMILIES[family].make().save_pretrained(folder)


def load_pipeline(folder: Path, **options: Any) -> DiffusionPipeline:
    """A saved pipeline in BF16, as a user has it: in evaluation mode, some parts in float32."""
    pipe = DiffusionPipeline.from_pretrained(folder, **{"dtype": torch.bfloat16, **options})
    pipe.set_progress_bar_config(disable=True)
    return pipe


def run_pipeline(pipe: DiffusionPipeline, family: str, *, num_steps: int = 1) -> torch.Tensor:
    """What a pipeline makes of the prompt, before and without rounding to a picture's bytes."""
    result = pipe(
        prompt=PROMPT,
        num_inference_steps=num_steps,
        output_type="pt",
        generator=torch.Generator().manual_seed(SEED),
        **FAMILIES[family].call,
    )
    return getattr(result, FAMILIES[family].result)


def few(*quick):
    """All families as parameters; those that are not named here are for `make test-slow`."""
    assert set(quick) <= FAMILIES.keys()
    return [pytest.param(f, marks=[] if f in quick else pytest.mark.slow) for f in FAMILIES]
