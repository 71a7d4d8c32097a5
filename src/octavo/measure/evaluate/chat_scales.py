"""Static scales for rows of an evaluation, by generated chats that it does not ask about."""

from collections.abc import Sequence

import torch

from octavo.calibration.scale_file import ScaleSet
from octavo.integrations.transformers.text_model import TextModel
from octavo.integrations.transformers.tokenizer import chat_tokens
from octavo.measure.evaluate.mrcr_data import generated_questions
from octavo.measure.evaluate.perplexity_rows import Keys, RowName
from octavo.measure.evaluate.row_scales import Watch, calibrate_rows

LENGTH, NUM_CHATS = 2048, 4


def calibrate_on_chats(
    text_model: TextModel, rows: Sequence[RowName], *, margin: float, watch: Watch
) -> dict[Keys, ScaleSet]:
    """Scales for all kinds of keys that these rows have."""
    chats = generated_questions(NUM_CHATS, seed=-1)
    tokens = [chat_tokens(text_model.tokenizer, chat.messages) for chat in chats]
    windows = [torch.tensor(one[:LENGTH]) for one in tokens]
    return calibrate_rows(
        text_model,
        windows,
        rows,
        data=f"{len(windows)} generated chats of up to {LENGTH} tokens",
        margin=margin,
        watch=watch,
    )
