"""Static scales for rows of an evaluation, by generated chats that it does not ask about."""

from collections.abc import Callable, Sequence

import torch

from octavo.calibration.scale_file import ScaleSet
from octavo.integrations.transformers.text_model import TextModel
from octavo.measure.evaluate.chat_prompt import chat_tokens
from octavo.measure.evaluate.mrcr_data import generated_questions
from octavo.measure.evaluate.perplexity_rows import Keys, RowName, calibration_scales

LENGTH, NUM_CHATS = 2048, 4

Watch = Callable[[str, int, int], None]  # (what is done, how much of it so far, of how much)


def calibrate_on_chats(
    text_model: TextModel, rows: Sequence[RowName], *, margin: float, watch: Watch
) -> dict[Keys, ScaleSet]:
    """Scales for all kinds of keys that these rows have."""
    chats = generated_questions(NUM_CHATS, seed=-1)
    tokens = [chat_tokens(text_model.tokenizer, chat.messages) for chat in chats]
    windows = [torch.tensor(one[:LENGTH]) for one in tokens]
    scales = {}
    for keys in dict.fromkeys(row.keys for row in rows):
        total = len(windows) * keys.num_passes
        scales[keys] = calibration_scales(
            text_model,
            windows,
            keys,
            data=f"{len(windows)} generated chats of up to {LENGTH} tokens",
            margin=margin,
            on_window=lambda n, total=total: watch("calibrating", n, total),  # type: ignore[misc]
        )
    return scales
