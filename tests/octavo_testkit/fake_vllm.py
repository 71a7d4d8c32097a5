"""A package `vllm` as small as can be: its engine runs the folder's model, one token a step.

Written into a folder, it stands where a bundle of the real one would. FAULT breaks it.
"""

CODE = """
import os, types, sys
from importlib.metadata import entry_points
import torch
from transformers import AutoModelForCausalLM

__version__ = "0.0.fake"
FAULT = {fault!r}
if FAULT == "dies":
    print("the fake is dying", flush=True)
    os._exit(3)


class EngineArgs:
    def __init__(self, **given):
        self.__dict__.update(given)


class SamplingParams:
    def __init__(self, **given):
        self.__dict__.update(given)


sampling_params = types.ModuleType("vllm.sampling_params")
sampling_params.RequestOutputKind = types.SimpleNamespace(DELTA="delta")
sys.modules["vllm.sampling_params"] = sampling_params


names = ["vllm.v1", "vllm.v1.attention", "vllm.v1.attention.backends"]
for name in [*names, names[-1] + ".registry"]:
    sys.modules[name] = types.ModuleType(name)
# A closed list of names, as that of vLLM 0.26.
sys.modules[name].AttentionBackendEnum = types.SimpleNamespace(CUSTOM=None)


class LLMEngine:
    @classmethod
    def from_engine_args(cls, args):
        global __version__
        if asked := os.environ["VLLM_PLUGINS"]:
            (found,) = entry_points(group="vllm.general_plugins", name=asked)
            __version__ += "+" + found.load().__module__ + ":" + args.attention_backend
        if FAULT == "refuses":
            raise ValueError("no such model")
        engine = cls()
        dtype = getattr(torch, args.dtype)
        engine.model = AutoModelForCausalLM.from_pretrained(args.model, dtype=dtype)
        print("chatter on stdout", args.kv_cache_dtype, args.quantization, args.max_num_seqs)
        space = types.SimpleNamespace
        engine.vllm_config = space(
            cache_config=space(block_size=16, num_gpu_blocks=8),
            scheduler_config=space(max_num_batched_tokens=args.max_model_len),
            compilation_config=space(mode=3, cudagraph_mode="CUDAGraphMode.FULL"),
        )
        engine.open = {{}}
        return engine

    def add_request(self, name, prompt, sampling):
        self.open[name] = [list(prompt["prompt_token_ids"]), 0, sampling]

    @torch.no_grad()
    def step(self):
        outputs = []
        for name, state in list(self.open.items()):
            tokens, count, sampling = state
            logits = self.model(torch.tensor([tokens])).logits[0, -1].float().log_softmax(-1)
            if FAULT == "is wrong":
                logits = logits.roll(1)
            token = int(logits.argmax())
            top = None
            if sampling.logprobs:
                values, places = logits.topk(sampling.logprobs)
                pairs = zip(places.tolist(), values.tolist())
                top = [{{t: types.SimpleNamespace(logprob=v) for t, v in pairs}}]
            state[0], state[1] = [*tokens, token], count + 1
            ended = state[1] == sampling.max_tokens
            reason = "length" if ended else None
            answer = types.SimpleNamespace(token_ids=[token], logprobs=top, finish_reason=reason)
            one = types.SimpleNamespace(request_id=name, outputs=[answer], finished=ended)
            outputs.append(one)
            if ended:
                del self.open[name]
        return outputs
"""


def write_fake_vllm(folder, fault=None):
    """Make `folder` an unpacked bundle of the fake; fault: "dies", "refuses" or "is wrong"."""
    package = folder / "site" / "vllm"
    package.mkdir(parents=True)
    (package / "__init__.py").write_text(CODE.format(fault=fault))
    return folder
