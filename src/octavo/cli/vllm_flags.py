"""vLLM's flags for several GPUs, which octavo serve answers with the vLLM command to run."""

import re
import shlex
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from typer.core import TyperCommand

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
SHARED = frozenset(
    {
        *("--api-key", "--chat-template", "--dtype", "--enable-prefix-caching", "--enforce-eager"),
        *("--gpu-memory-utilization", "--host", "--kv-cache-dtype", "--kv-cache-dtype-skip-layers"),
        *("--max-model-len", "--max-num-batched-tokens", "--max-num-seqs"),
        *("--mm-encoder-attn-dtype", "--mm-encoder-fp8-scale-path"),
        *("--mm-encoder-fp8-scale-save-margin", "--mm-encoder-fp8-scale-save-path"),
        *("--no-enable-prefix-caching", "--omni", "--port", "--quantization"),
        "--served-model-name",
    }
)


@dataclass(frozen=True)
class Word:
    """A flag with its values, or an argument by itself; words: as they were typed."""

    flag: str  # "" for an argument
    values: tuple[str, ...]
    words: tuple[str, ...]

    @property
    def is_parallel(self) -> bool:
        return PARALLEL.fullmatch(self.flag) is not None

    @property
    def is_one(self) -> bool:
        """Whether it asks for one GPU, which is what octavo runs on."""
        return SIZE.fullmatch(self.flag) is not None and self.values == ("1",)


class OneGpuCommand(TyperCommand):
    """A command for one GPU: flags that ask for several end it with the way to vLLM."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        words = self._split(args)
        if asked := [word.flag for word in words if word.is_parallel and not word.is_one]:
            ctx.fail(self._refusal(words, asked))
        kept = [text for word in words if not word.is_one for text in word.words]
        return super().parse_args(ctx, kept)

    def _split(self, args: Sequence[str]) -> list[Word]:
        own = {
            flag: getattr(p, "is_flag", False)
            for p in self.params
            for flag in (*p.opts, *p.secondary_opts)
        }
        rest, words = deque(args), []
        while rest:
            text = rest.popleft()
            flag, has_value, value = text.partition("=")
            if not text.startswith("-"):
                words.append(Word("", (text,), (text,)))
            elif has_value:
                words.append(Word(flag, (value,), (text,)))
            else:
                is_switch = own[flag] if flag in own else SWITCH.fullmatch(flag)
                is_alone = is_switch or not rest or rest[0].startswith("-")
                values = () if is_alone else (rest.popleft(),)
                words.append(Word(flag, values, (text, *values)))
        return words

    def _refusal(self, words: Sequence[Word], asked: Sequence[str]) -> str:
        """The sentence with the vLLM command that has all of the flags that vLLM has."""
        own = {flag for p in self.params for flag in (*p.opts, *p.secondary_opts)}
        model, flags, left_out = "MODEL", dict[str, list[str]](), []
        for word in words:
            if not word.flag:
                model = word.values[0]
            elif word.flag in own - SHARED and word.values != (VLLM_BACKEND,):
                left_out.append(word.flag)
            else:  # vLLM takes the values of a list after its flag, given once
                flags.setdefault(word.flag, []).extend(word.values)
        carried = [text for flag, values in flags.items() for text in (flag, *values)]
        command = shlex.join(["vllm", "serve", model, *carried])
        without = f" (vLLM has no {', '.join(left_out)})" if left_out else ""
        return (
            f"octavo runs on one GPU and has no {', '.join(asked)}; for several GPUs use vLLM: "
            f"{command}{without}"
        )
