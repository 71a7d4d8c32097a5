"""Parts of transformers models whose linear layers stay as they are, and why: data.

Keys are classes of modules inside a model. A part that is given to octavo by itself is asked for,
and does not stay.
"""

from collections.abc import Mapping

ENCODER = "an encoder of an omni model: once for each input, and not validated in FP8"
TALKER = "makes speech codes one after the other: each error is in all that follow; not validated"
WAVEFORM = "makes the waveform: its errors are heard; not validated in FP8"

KEPT_PARTS: Mapping[str, str] = {
    "Qwen3OmniMoeAudioEncoder": ENCODER,
    "Qwen3OmniMoeVisionEncoder": ENCODER,
    "Qwen3OmniMoeTalkerForConditionalGeneration": TALKER,
    "Qwen3OmniMoeCode2Wav": WAVEFORM,
}
