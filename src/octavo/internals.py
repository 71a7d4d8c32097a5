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
from dataclasses import dataclass
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


@dataclass(frozen=True)
class Internal:
    """Members of a module or class that octavo uses, and the part of octavo that needs them.

    "new|old" is a member that has one of two names, depending on the version.
    """

    owner: str
    members: tuple[str, ...]
    user: str


def _row(owner: str, members: str, user: str) -> Internal:
    return Internal(owner, tuple(members.split()), user)


INTERNALS = (
    _row("torch", "_scaled_mm", "octavo's FP8 matrix product (impl='torch')"),
    _row("torch", "_addmm_activation", "octavo's linear_gelu"),
    _row("torch", "_assert_async", "octavo's check of values on the GPU"),
    _row(
        "torch._C",
        "DispatchKey DispatchKeySet _AutoDispatchBelowAutograd _DisableAutocast",
        "octavo.ops",
    ),
    _row(
        "torch._C.DispatchKey",
        "Conjugate FuncTorchDynamicLayerBackMode Functionalize Negative Python ZeroTensor",
        "octavo.ops",
    ),
    _row("torch._dynamo", "mark_static_address", "octavo's compiled steps over a paged cache"),
    _row(
        "torch._dynamo.decorators.assume_constant_result", "_dynamo_marked_constant", "octavo.ops"
    ),
    _row("torch._dynamo.eval_frame.OptimizedModule", "_orig_mod", "octavo's step caches"),
    _row("torch._ops.OpOverload", "_schema", "octavo advise"),
    _row(
        "torch.nn.Module",
        "_apply _backward_hooks _backward_pre_hooks _buffers _compiled_call_impl _forward_hooks "
        "_forward_pre_hooks _load_from_state_dict _save_to_state_dict",
        "octavo's layers",
    ),
    _row("torch.nn.modules.conv", "_ConvNd", "octavo's FP8 linear layers"),
    _row("torch.overrides", "_get_current_function_mode_stack", "FP8 attention in diffusers"),
    _row("torch.utils._python_dispatch", "TorchDispatchMode", "octavo advise"),
    _row(
        "torch.utils._pytree",
        "tree_flatten tree_leaves tree_map tree_map_only tree_unflatten",
        "octavo's CUDA graphs and octavo advise",
    ),
    _row("triton.compiler.CompiledKernel", "__getitem__", "octavo's kernels"),
    _row("triton.experimental.gluon", "constexpr_function jit language", "octavo's Gluon kernels"),
    _row(
        "triton.experimental.gluon.language",
        "BlockedLayout DistributedLinearLayout DotOperandLayout NVMMADistributedLayout "
        "NVMMASharedLayout SliceLayout abs allocate_shared_memory arange atomic_add "
        "barrier|thread_barrier constexpr convert_layout exp2 expand_dims float16 float32 "
        "float8e4nv float8e5 full inline_asm_elementwise int16 int32 int64 int8 join load log2 max "
        "maximum minimum num_programs num_warps program_id shared_memory_descriptor static_range "
        "store sum tensor warp_specialize where zeros",
        "octavo's Gluon kernels",
    ),
    _row("triton.experimental.gluon.language.nvidia.ampere", "mma_v2", "octavo's decode attention"),
    _row(
        "triton.experimental.gluon.language.nvidia.hopper",
        "fence_async_shared mbarrier tma warpgroup_mma warpgroup_mma_wait",
        "octavo's Hopper attention",
    ),
    _row(
        "triton.experimental.gluon.language.nvidia.hopper.mbarrier",
        "MBarrierLayout arrive expect init wait",
        "octavo's Hopper attention",
    ),
    _row(
        "triton.experimental.gluon.language.nvidia.hopper.tma",
        "async_load|async_copy_global_to_shared",
        "octavo's Hopper attention",
    ),
    _row("triton.experimental.gluon.nvidia.hopper", "TensorDescriptor", "octavo's kernels"),
    _row(
        "triton.experimental.gluon.nvidia.hopper.TensorDescriptor",
        "__post_init__ base block_shape layout shape strides",
        "octavo's kernels",
    ),
    _row("triton.language.core", "_aggregate", "octavo's Gluon kernels"),
    _row("triton.language.extra.cuda", "gdc_launch_dependents gdc_wait", "octavo's kernels"),
    _row("triton.runtime.jit", "JITFunction", "octavo's kernels"),
    _row("triton.runtime.jit.JITFunction", "arg_names", "octavo's kernels"),
    _row("triton.tools.tensor_descriptor", "TensorDescriptor", "octavo's FP8 matrix product"),
    _row("transformers.PreTrainedConfig", "_attn_implementation", "FP8 attention in transformers"),
    _row(
        "transformers.PreTrainedModel",
        "_keep_in_fp32_modules _keep_in_fp32_modules_strict _keys_to_ignore_on_load_unexpected",
        "loading of FP8 checkpoints",
    ),
    _row("transformers.conversion_mapping", "get_model_conversion_mapping", "octavo's quantizer"),
    _row(
        "transformers.core_model_loading",
        "ConversionOps WeightConverter WeightRenaming rename_source_key",
        "octavo's quantizer",
    ),
    _row(
        "transformers.integrations.sdpa_attention",
        "sdpa_attention_forward",
        "octavo's comparison of caches",
    ),
    _row(
        "transformers.masking_utils",
        "ALL_MASK_ATTENTION_FUNCTIONS flash_attention_mask",
        "FP8 attention in transformers",
    ),
    _row(
        "transformers.models.auto.tokenization_auto",
        "get_tokenizer_config",
        "octavo's check of BOS tokens",
    ),
    _row(
        "transformers.Qwen3VLTextModel",
        "_deepstack_process",
        "training of the chart reader",
    ),
    _row(
        "transformers.quantizers.base.HfQuantizer",
        "_process_model_after_weight_loading _process_model_before_weight_loading",
        "octavo's quantizer",
    ),
    _row(
        "transformers.utils.hub.cached_files",
        "_raise_exceptions_for_missing_entries",
        "loading of FP8 checkpoints",
    ),
    _row(
        "transformers.vision_utils",
        "get_vision_interpolation_indices_and_weights get_vision_position_ids",
        "CUDA graphs of vision towers",
    ),
    _row("diffusers.ModelMixin", "_parallel_config _repeated_blocks", "FP8 in diffusers"),
    _row("diffusers.HookRegistry", "_diffusers_hook _hook_order", "octavo's step caches"),
    _row("diffusers.hooks._common", "_ALL_TRANSFORMER_BLOCK_IDENTIFIERS", "first_block_cache"),
    _row("diffusers.hooks._helpers", "TransformerBlockRegistry", "first_block_cache"),
    _row(
        "diffusers.hooks._helpers", "AttentionProcessorRegistry", "fused FP8 attention in diffusers"
    ),
    _row("diffusers.hooks.first_block_cache", "_FBC_LEADER_BLOCK_HOOK", "first_block_cache"),
    _row("diffusers.hooks.group_offloading", "_GROUP_OFFLOADING", "octavo's step caches"),
    _row(
        "diffusers.hooks.hooks",
        "BaseState CacheContext ModelHook StateManager",
        "octavo's step caches",
    ),
    _row("diffusers.hooks.hooks.ModelHook", "_is_stateful", "octavo's step caches"),
    _row("diffusers.hooks.hooks.StateManager", "_context", "octavo's step caches"),
    _row(
        "diffusers.hooks.layer_skip", "AttentionScoreSkipFunctionMode", "FP8 attention in diffusers"
    ),
    _row(
        "diffusers.models.attention.AttentionModuleMixin",
        "_attention_backend",
        "FP8 attention in diffusers",
    ),
    _row(
        "diffusers.models.attention_dispatch",
        "_AttentionBackendRegistry dispatch_attention_fn",
        "FP8 attention in diffusers",
    ),
    _row(
        "diffusers.models.attention_dispatch._AttentionBackendRegistry",
        "_backends _supported_arg_names register",
        "FP8 attention in diffusers",
    ),
    _row(
        "diffusers.models.transformers.transformer_flux",
        "FluxAttnProcessor",
        "fused FP8 attention in diffusers",
    ),
    _row(
        "diffusers.models.transformers.transformer_flux2",
        "Flux2AttnProcessor Flux2ParallelSelfAttnProcessor",
        "fused FP8 attention in diffusers",
    ),
    _row(
        "diffusers.models.transformers.transformer_qwenimage",
        "QwenDoubleStreamAttnProcessor2_0",
        "fused FP8 attention in diffusers",
    ),
    _row(
        "diffusers.models.transformers.transformer_z_image",
        "ZSingleStreamAttnProcessor",
        "fused FP8 attention in diffusers",
    ),
    _row(
        "diffusers.quantizers.auto",
        "AUTO_QUANTIZATION_CONFIG_MAPPING AUTO_QUANTIZER_MAPPING",
        "octavo's quantizer for diffusers",
    ),
    _row(
        "diffusers.DiffusersQuantizer",
        "_process_model_after_weight_loading _process_model_before_weight_loading",
        "octavo's quantizer for diffusers",
    ),
    _row("diffusers.FluxPipeline", "_pack_latents", "octavo's check of picture sizes"),
    _row("diffusers.Flux2Pipeline", "_patchify_latents", "octavo's check of picture sizes"),
)


@contextmanager
def internals(library: str) -> Iterator[None]:
    """Import a library's internal names inside; a missing one raises UnsupportedError."""
    _warn_of_version(library)
    try:
        yield
    except ImportError as error:
        # A library that is not installed at all, or one that it needs, is another story.
        name = _missing_name(error)
        if not name.startswith(f"{library}."):
            raise
        raise UnsupportedError(_sentence(name)) from error


@cache
def require(*names: str) -> None:
    """Raise UnsupportedError unless all these names of INTERNALS exist: "owner.member" or "owner".

    "owner" stands for every member of its rows. Members may be attributes that only instances have.
    """
    for name in names:
        rows = [row for row in INTERNALS if name == row.owner or name in _full_names(row)]
        if not rows:
            raise KeyError(f"{name} is not in octavo.internals.INTERNALS")
        _warn_of_version(name.split(".")[0])
        for row in rows:
            for full_name in _full_names(row):
                if name in (row.owner, full_name) and not exists(full_name):
                    raise UnsupportedError(_sentence(full_name))


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
    first, end = (_release(bound) for bound in SUPPORTED[library])
    if first <= _release(version) < end:
        return None
    return (
        f"octavo is tested with {_requirement(library)}, and {library} {version} is installed: if "
        f"anything fails, {_install(library)}"
    )


@cache
def _warn_of_version(library: str) -> None:
    """Warn once about a version that octavo was not made for."""
    if warning := version_warning(library, import_module(library).__version__):
        warnings.warn(warning, stacklevel=2)


def _sentence(name: str) -> str:
    library = name.split(".")[0]
    version = import_module(library).__version__
    users = [row.user for row in INTERNALS if name in (row.owner, *_full_names(row))]
    gone = f"{library} {version} has no {name}, needed for {users[0] if users else 'octavo'}"
    if version_warning(library, version) is None:
        return f"{gone}, although octavo supports that version: reinstall {library}"
    return f"{gone}: octavo supports {_requirement(library)}; {_install(library)}"


def _requirement(library: str) -> str:
    first, end = SUPPORTED[library]
    return f"{library}>={first},<{end}"


def _install(library: str) -> str:
    return f"run: pip install '{_requirement(library)}'"


def _release(version: str) -> tuple[int, ...]:
    """(2, 13) of "2.13.0+cpu": the bounds are minor versions."""
    return tuple(int(number) for number in re.findall(r"\d+", version)[:2])


def _missing_name(error: ImportError) -> str:
    """The dotted name that an import did not find."""
    attribute = re.match(r"cannot import name '(\w+)'", str(error))
    return f"{error.name}.{attribute[1]}" if attribute else error.name or ""


def _full_names(row: Internal) -> list[str]:
    return [f"{row.owner}.{member}" for member in row.members]


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
