"""vLLM's flags for several GPUs, and the vLLM command to run in place of `octavo serve`."""

import re
import shlex
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

from octavo.integrations.transformers.encoder_options import VLLM_BACKEND

# Flags of vLLM for more than one GPU or machine.
PARALLEL = re.compile(
    r"--(?!max-).*parallel.*|--distributed-executor-backend|--nnodes|--node-rank"
    r"|--master-(addr|port)|--all2all-backend|--.*eplb.*|--enable-dbo"
    r"|-(tp|pp|dp|dcp|pcp|ep|dp[abehlnpr])"
)
SIZE = re.compile(
    r"--(tensor|pipeline|data|(decode|prefill)-context)-parallel-size|-(tp|pp|dp|dcp|pcp)"
)
# Flags of vLLM that take no value.
SWITCH = re.compile(r"--(enable|disable|no)-.*|--.*-lb|-(ep|dph|dpe)")
# Flags of octavo serve that `vllm serve` has too, with the same meaning.
_SHARED = """
    --api-key --chat-template --dtype --enable-prefix-caching --enforce-eager
    --gpu-memory-utilization --host --kv-cache-dtype --kv-cache-dtype-skip-layers --max-model-len
    --max-num-batched-tokens --max-num-seqs --mm-encoder-attn-dtype --mm-encoder-fp8-scale-path
    --mm-encoder-fp8-scale-save-margin --mm-encoder-fp8-scale-save-path --no-enable-prefix-caching
    --omni --port --quantization --served-model-name
"""
SHARED = frozenset(_SHARED.split())


class Word(NamedTuple):
    """A flag ("" for an argument) with its values, and both as they were typed."""

    flag: str
    values: tuple[str, ...]
    typed: tuple[str, ...]


def refuse_several_gpus(
    args: Sequence[str], own: Mapping[str, bool]
) -> tuple[str | None, list[str]]:
    """Why a command line needs vLLM, if it asks for several GPUs; and the line for one GPU.

    own: the flags of the command, and whether each of them has no value.
    """
    words = list(_split(args, own))
    # One GPU is what octavo runs on.
    others = [w for w in words if not (SIZE.fullmatch(w.flag) and w.values == ("1",))]
    kept = [text for word in others for text in word.typed]
    asked = [word.flag for word in others if PARALLEL.fullmatch(word.flag)]
    if not asked:
        return None, kept
    # vLLM's command has all of the flags that vLLM has, and says which ones it has not.
    model, flags, left_out = "MODEL", dict[str, list[str]](), []
    for word in words:
        if not word.flag:
            model = word.values[0]
        elif word.flag in own and word.flag not in SHARED and word.values != (VLLM_BACKEND,):
            left_out.append(word.flag)
        else:  # vLLM takes the values of a list after its flag, given once
            flags.setdefault(word.flag, []).extend(word.values)
    carried = [text for flag, values in flags.items() for text in (flag, *values)]
    command = shlex.join(["vllm", "serve", model, *carried])
    without = f" (vLLM has no {', '.join(left_out)})" if left_out else ""
    start = f"octavo runs on one GPU and has no {', '.join(asked)}; for several GPUs use vLLM"
    return f"{start}: {command}{without}", kept


def _split(args: Sequence[str], own: Mapping[str, bool]) -> Iterator[Word]:
    """The words of a command line."""
    rest = deque(args)
    while rest:
        text = rest.popleft()
        flag, has_value, value = text.partition("=")
        if not text.startswith("-"):
            yield Word("", (text,), (text,))
        elif has_value:
            yield Word(flag, (value,), (text,))
        else:
            is_switch = own[flag] if flag in own else SWITCH.fullmatch(flag)
            is_alone = is_switch or not rest or rest[0].startswith("-")
            values = () if is_alone else (rest.popleft(),)
            yield Word(flag, values, (text, *values))
