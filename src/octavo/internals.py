"""Every internal name of torch, Triton, transformers and diffusers that octavo uses, in one list.

Internal are names with a leading underscore, and modules that their library does not document. Any
release may rename them, so they are imported inside `with internals(library):` and attributes of
other libraries' objects are checked with `require`. If a name is gone, the user reads one sentence:
what does not work, which version is installed, and which one to install.
"""

import inspect
import re
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from importlib import import_module
from typing import Any

from octavo.errors import UnsupportedError

# The first version that works, and the first that nobody has tried; as in pyproject.toml.
SUPPORTED = {
    "torch": ("2.11", "2.16"),
    "triton": ("3.6", "3.10"),
    "transformers": ("5.17", "5.23"),
    "diffusers": ("0.42", "0.43"),
}


_HOPPER = "triton.experimental.gluon.language.nvidia.hopper"
# Part of octavo -> module or class -> its members that this part uses. "new|old" is a member that
# has one of two names, depending on the version.
_USED: dict[str, dict[str, str]] = {
    "octavo's FP8 matrix product (impl='torch')": {"torch": "_scaled_mm"},
    "octavo's linear_gelu": {"torch": "_addmm_activation"},
    "octavo's check of values on the GPU": {"torch": "_assert_async"},
    "octavo.ops": {
        "torch._C": "DispatchKey DispatchKeySet _AutoDispatchBelowAutograd _DisableAutocast "
        "_dispatch_keys _dispatch_tls_local_include_set _len_torch_function_stack",
        "torch": "_scaled_mm",
        "torch.UntypedStorage": "_cdata",
        "torch._ops.OpOverload": "_schema",
        "torch.utils._python_dispatch": "TorchDispatchMode",
        "torch.ops.aten": "_scaled_mm",
        "torch.utils._pytree": "tree_leaves tree_map",
        "torch._C.DispatchKey": "Conjugate FuncTorchDynamicLayerBackMode Functionalize Negative "
        "Python ZeroTensor",
        "torch._dynamo.decorators.assume_constant_result": "_dynamo_marked_constant",
    },
    "octavo's compiled steps over a paged cache": {"torch._dynamo": "mark_static_address"},
    "octavo's step caches": {
        "torch._dynamo.eval_frame.OptimizedModule": "_orig_mod",
        "diffusers.HookRegistry": "_diffusers_hook _hook_order",
        "diffusers.hooks.group_offloading": "_GROUP_OFFLOADING",
        "diffusers.hooks.hooks": "BaseState CacheContext ModelHook StateManager",
        "diffusers.hooks.hooks.ModelHook": "_is_stateful",
        "diffusers.hooks.hooks.StateManager": "_context",
    },
    "octavo advise": {
        "torch._ops.OpOverload": "_schema",
        "torch.utils._python_dispatch": "TorchDispatchMode",
    },
    "octavo's layers": {
        "torch.nn.Module": "_apply _backward_hooks _backward_pre_hooks _buffers _parameters "
        "_compiled_call_impl _forward_hooks _forward_pre_hooks _load_from_state_dict "
        "_save_to_state_dict",
    },
    "octavo's FP8 linear layers": {"torch.nn.modules.conv": "_ConvNd"},
    "FP8 attention in diffusers": {
        "torch.overrides": "_get_current_function_mode_stack",
        "diffusers.hooks.layer_skip": "AttentionScoreSkipFunctionMode",
        "diffusers.models.attention.AttentionModuleMixin": "_attention_backend",
        "diffusers.models.attention_dispatch": "_AttentionBackendRegistry dispatch_attention_fn",
        "diffusers.models.attention_dispatch._AttentionBackendRegistry": "_backends "
        "_supported_arg_names register",
    },
    "octavo's CUDA graphs and octavo advise": {
        "torch.utils._pytree": "tree_flatten tree_leaves tree_map tree_map_only tree_unflatten",
    },
    "octavo's kernels": {
        "triton": "knobs",
        "triton.compiler.CompiledKernel": "function packed_metadata run",
        "triton.experimental.gluon.nvidia.hopper": "TensorDescriptor",
        "triton.experimental.gluon.nvidia.hopper.TensorDescriptor": "base block_shape from_tensor",
        "triton.language.extra.cuda": "gdc_launch_dependents gdc_wait",
        "triton.runtime": "driver",
        "triton.runtime.jit.JITFunction": "arg_names",
    },
    "octavo's Gluon kernels": {
        "triton.experimental.gluon": "constexpr_function jit language",
        "triton.experimental.gluon.language": "BlockedLayout DistributedLinearLayout "
        "DotOperandLayout NVMMADistributedLayout NVMMASharedLayout SliceLayout abs "
        "allocate_shared_memory arange atomic_add barrier|thread_barrier constexpr convert_layout "
        "exp2 expand_dims float16 float32 float8e4nv float8e5 full inline_asm_elementwise int16 "
        "int32 int64 int8 join load log2 max maximum minimum num_programs num_warps program_id "
        "shared_memory_descriptor static_range store sum tensor warp_specialize where zeros",
        "triton.language.core": "_aggregate",
    },
    "octavo's decode attention": {"triton.experimental.gluon.language.nvidia.ampere": "mma_v2"},
    "octavo's Hopper attention": {
        _HOPPER: "fence_async_shared mbarrier tma warpgroup_mma warpgroup_mma_wait",
        f"{_HOPPER}.mbarrier": "MBarrierLayout arrive expect init wait",
        f"{_HOPPER}.tma": "async_load|async_copy_global_to_shared",
    },
    "octavo's FP8 matrix product": {"triton.tools.tensor_descriptor": "TensorDescriptor"},
    "FP8 attention in transformers": {
        "transformers.PreTrainedConfig": "_attn_implementation",
        "transformers.masking_utils": "ALL_MASK_ATTENTION_FUNCTIONS flash_attention_mask",
    },
    "loading of FP8 checkpoints": {
        "transformers.PreTrainedModel": "_keep_in_fp32_modules _keep_in_fp32_modules_strict "
        "_keys_to_ignore_on_load_unexpected",
        "transformers.utils.hub.cached_files": "_raise_exceptions_for_missing_entries",
    },
    "octavo's quantizer": {
        "transformers.conversion_mapping": "get_model_conversion_mapping",
        "transformers.core_model_loading": "ConversionOps WeightConverter WeightRenaming "
        "rename_source_key",
        "transformers.quantizers.base.HfQuantizer": "_process_model_after_weight_loading "
        "_process_model_before_weight_loading",
    },
    "octavo's check of BOS tokens": {
        "transformers.models.auto.tokenization_auto": "get_tokenizer_config",
    },
    "training of the chart reader": {"transformers.Qwen3VLTextModel": "_deepstack_process"},
    "CUDA graphs of vision towers": {
        "transformers.vision_utils": "get_vision_interpolation_indices_and_weights "
        "get_vision_position_ids",
    },
    "FP8 in diffusers": {"diffusers.ModelMixin": "_parallel_config _repeated_blocks"},
    "first_block_cache": {
        "diffusers.hooks._common": "_ALL_TRANSFORMER_BLOCK_IDENTIFIERS",
        "diffusers.hooks._helpers": "TransformerBlockRegistry",
        "diffusers.hooks.first_block_cache": "_FBC_LEADER_BLOCK_HOOK",
    },
    "fused FP8 attention in diffusers": {
        "diffusers.hooks._helpers": "AttentionProcessorRegistry",
        "diffusers.models.transformers.transformer_flux": "FluxAttnProcessor",
        "diffusers.models.transformers.transformer_flux2": "Flux2AttnProcessor "
        "Flux2ParallelSelfAttnProcessor",
        "diffusers.models.transformers.transformer_qwenimage": "QwenDoubleStreamAttnProcessor2_0",
        "diffusers.models.transformers.transformer_z_image": "ZSingleStreamAttnProcessor",
    },
    "octavo's quantizer for diffusers": {
        "diffusers.ModelMixin": "_keys_to_ignore_on_load_unexpected",
        "diffusers.quantizers.auto": "AUTO_QUANTIZATION_CONFIG_MAPPING AUTO_QUANTIZER_MAPPING",
        "diffusers.DiffusersQuantizer": "_process_model_after_weight_loading "
        "_process_model_before_weight_loading",
    },
    "octavo's check of picture sizes": {
        "diffusers.FluxPipeline": "_pack_latents",
        "diffusers.Flux2Pipeline": "_patchify_latents",
    },
}
# Full name -> the part of octavo that needs it.
INTERNALS = {
    f"{owner}.{member}": user
    for user, owners in _USED.items()
    for owner, members in owners.items()
    for member in members.split()
}


@contextmanager
def internals(library: str) -> Iterator[None]:
    """Import a library's internal names inside; a missing one raises UnsupportedError."""
    _warn_of_version(library)
    try:
        yield
    except ImportError as error:
        # A library that is not installed at all, or one that it needs, is another story.
        attribute = re.match(r"cannot import name '(\w+)'", str(error))
        name = f"{error.name}.{attribute[1]}" if attribute else error.name or ""
        if not name.startswith(f"{library}."):
            raise
        raise UnsupportedError(_sentence(name)) from error


@cache
def require(*names: str) -> None:
    """Raise UnsupportedError unless all these names of INTERNALS exist: "owner.member" or "owner".

    "owner" stands for every member that is listed. Members may be attributes that only instances
    have.
    """
    for name in names:
        if not (listed := _listed(name)):
            raise KeyError(f"{name} is not in octavo.internals.INTERNALS")
        _warn_of_version(name.split(".")[0])
        for full_name in listed:
            if not exists(full_name):
                raise UnsupportedError(_sentence(full_name))


def _listed(name: str) -> list[str]:
    """The full names that a name stands for: itself, or the members of an owner."""
    return [listed for listed in INTERNALS if name in (listed, listed.rpartition(".")[0])]


def exists(name: str) -> bool:
    """Whether the installed libraries have a name: a member of a module, class or function."""
    owner_name, _, members = name.rpartition(".")
    try:
        owner = _resolve(owner_name)
    except (AttributeError, ModuleNotFoundError):
        return False
    return any(hasattr(owner, name) or _is_mentioned(owner, name) for name in members.split("|"))


def version_warning(library: str, version: str) -> str | None:
    """What to say of a version that octavo was not made for; None if it was."""
    first, end = SUPPORTED[library]
    if _release(first) <= _release(version) < _release(end):
        return None
    wanted = f"{library}>={first},<{end}"
    return (
        f"octavo is tested with {wanted}, and {library} {version} is installed: if anything fails, "
        f"run: pip install '{wanted}'"
    )


@cache
def _warn_of_version(library: str) -> None:
    """Warn once about a version that octavo was not made for."""
    if warning := version_warning(library, import_module(library).__version__):
        warnings.warn(warning, stacklevel=2)


def _sentence(name: str) -> str:
    library = name.split(".")[0]
    version, (first, end) = import_module(library).__version__, SUPPORTED[library]
    user = next((INTERNALS[listed] for listed in _listed(name)), "octavo")
    gone = f"{library} {version} has no {name}, needed for {user}"
    if version_warning(library, version) is None:
        return f"{gone}, although octavo supports that version: reinstall {library}"
    wanted = f"{library}>={first},<{end}"
    return f"{gone}: octavo supports {wanted}; run: pip install '{wanted}'"


def _release(version: str) -> tuple[int, ...]:
    """(2, 13) of "2.13.0+cpu": the bounds are minor versions."""
    return tuple(int(number) for number in re.findall(r"\d+", version)[:2])


def _resolve(name: str) -> Any:
    """The object behind a dotted name, importing modules on the way."""
    parent, _, last = name.rpartition(".")
    if not parent:
        return import_module(name)
    owner = _resolve(parent)
    return getattr(owner, last) if hasattr(owner, last) else import_module(name)


def _is_mentioned(owner: Any, name: str) -> bool:
    """Whether the code of a class or function names an attribute that only instances have."""
    values = [owner]
    for cls in getattr(owner, "__mro__", ()):
        values += [cls, *vars(cls).values()]
    if any(name in getattr(value, "__annotations__", ()) for value in values):
        return True
    functions = [inspect.unwrap(getattr(value, "__func__", value)) for value in values]
    codes = [function.__code__ for function in functions if inspect.isfunction(function)]
    return any(name in (*c.co_names, *c.co_varnames, *c.co_consts) for c in codes)
