"""What people call the models whose sizes octavo knows: names on the hub, and short ones."""

from collections.abc import Mapping, Sequence
from difflib import get_close_matches

# Our name: repositories on the hub with a model of these sizes. The list is not all there are.
HUB_NAMES: Mapping[str, Sequence[str]] = {
    "llama-3.1-8b": (
        "meta-llama/Llama-3.1-8B-Instruct",
        "meta-llama/Llama-3.1-8B",
        "meta-llama/Meta-Llama-3.1-8B-Instruct",
        "meta-llama/Meta-Llama-3.1-8B",
    ),
    "gpt-oss-20b": ("openai/gpt-oss-20b",),
    "gpt-oss-120b": ("openai/gpt-oss-120b",),
    "qwen3-vl-8b": ("Qwen/Qwen3-VL-8B-Instruct", "Qwen/Qwen3-VL-8B-Thinking"),
    "qwen3-vl-30b-a3b": ("Qwen/Qwen3-VL-30B-A3B-Instruct", "Qwen/Qwen3-VL-30B-A3B-Thinking"),
    "flux.1-dev": ("black-forest-labs/FLUX.1-dev",),
    "qwen-image": ("Qwen/Qwen-Image",),
    "wan2.2-14b": ("Wan-AI/Wan2.2-T2V-A14B-Diffusers",),
}
# Names of families, and the size that is meant.
SHORT_NAMES: Mapping[str, str] = {
    "llama-3.1": "llama-3.1-8b",
    "gpt-oss": "gpt-oss-20b",
    "gemma-3": "gemma-3-4b",
    "qwen3-vl": "qwen3-vl-8b",
    "flux.1": "flux.1-dev",
    "wan2.2": "wan2.2-14b",
}


def known_name(name: str, known: Sequence[str]) -> str | None:
    """Our name for a name in any case, with or without its owner on the hub; None if unknown."""
    found = {**_spellings(known), **SHORT_NAMES}.get(name.lower())
    return found if found in known else None


def other_sizes(name: str, known: Sequence[str]) -> list[str]:
    """For the name of a family: the other sizes that were not chosen."""
    wanted = name.lower()
    if wanted not in SHORT_NAMES:
        return []
    return [n for n in known if n.startswith(f"{wanted}-") and n != SHORT_NAMES[wanted]]


def near_names(name: str, known: Sequence[str]) -> list[str]:
    """Up to three known names that are spelt like this one, as one would write them."""
    spellings = _spellings(known)
    shown = {hub.lower(): hub for hubs in HUB_NAMES.values() for hub in hubs}
    words = dict.fromkeys([name.lower(), name.lower().rpartition("/")[2]])
    close = [near for word in words for near in get_close_matches(word, spellings, 3, 0.7)]
    return list(dict.fromkeys(shown.get(near, spellings[near]) for near in close))[:3]


def _spellings(known: Sequence[str]) -> dict[str, str]:
    """Every way to write a known name, in lower case: our name."""
    found = {name: name for name in known}
    for name in known:
        for hub in HUB_NAMES.get(name, ()):
            found |= {hub.lower(): name, hub.lower().rpartition("/")[2]: name}
    return found
