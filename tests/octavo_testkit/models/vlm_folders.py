"""A folder with a tiny LLaVA, its processor and tokenizer, as transformers saves and loads them."""

import torch
from transformers import LlavaConfig, LlavaForConditionalGeneration, LlavaProcessor

TEMPLATE = (
    "{% for m in messages %}{{ m.role }}: {% for c in m.content %}{% if c.type == 'image' %}<image>"
    "{% else %}{{ c.text }}{% endif %}{% endfor %}{{ '\\n' }}{% endfor %}"
    "{% if add_generation_prompt %}assistant: {% endif %}"
)
SPECIAL = {"pad_token": "<pad>", "bos_token": "<s>", "eos_token": "</s>"}
IMAGE_SIZE, PATCH_SIZE = 32, 8
NUM_IMAGE_TOKENS = (IMAGE_SIZE // PATCH_SIZE) ** 2
VISION = {
    "model_type": "clip_vision_model",
    "hidden_size": 144,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "image_size": IMAGE_SIZE,
    "patch_size": PATCH_SIZE,
}
TEXT = {
    "model_type": "llama",
    "hidden_size": 32,
    "intermediate_size": 32,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
}


def make_tokenizer():
    """One token for each byte, and the special ones."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    tokens = [*sorted(pre_tokenizers.ByteLevel.alphabet()), *SPECIAL.values(), "<image>"]
    vocabulary = {token: index for index, token in enumerate(tokens)}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, additional_special_tokens=["<image>"], **SPECIAL
    )


def write_llava(folder):
    """The folder, with random weights in bfloat16."""
    from transformers.models.clip.image_processing_pil_clip import CLIPImageProcessorPil

    tokenizer = make_tokenizer()
    LlavaProcessor(
        image_processor=CLIPImageProcessorPil(
            size={"shortest_edge": IMAGE_SIZE},
            crop_size={"height": IMAGE_SIZE, "width": IMAGE_SIZE},
        ),
        tokenizer=tokenizer,
        chat_template=TEMPLATE,
        patch_size=PATCH_SIZE,
        vision_feature_select_strategy="default",
        num_additional_image_tokens=1,
    ).save_pretrained(folder)
    config = LlavaConfig(
        vision_config=dict(VISION),
        text_config={**TEXT, "vocab_size": len(tokenizer)},
        image_token_index=tokenizer.convert_tokens_to_ids("<image>"),
        vision_feature_layer=-1,
    )
    torch.manual_seed(0)
    LlavaForConditionalGeneration(config).bfloat16().save_pretrained(folder)
    return folder
