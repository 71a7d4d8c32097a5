"""vLLM's own engine as a peer of ours: the same weights, prompts, clock and check.

vLLM runs in a process of its own, in its own Python if it has one, with its default settings apart
from what the load says (requests at once, longest context) and prefix caching, which is off in our
engine as well. Its plug-ins are not loaded, apart from octavo's own in the rows that are about it.
"""

import json
import os
import shutil
import subprocess
import sys
import tarfile
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from octavo import env
from octavo.atomic import temporary_path
from octavo.errors import ConfigError, OctavoError, UnsupportedError
from octavo.measure.bench import vllm_worker
from octavo.measure.bench.engine import Answer, Subject, check_prompts, judge
from octavo.measure.bench.requests import Prompt, RequestTimes
from octavo.measure.records import Scalar
from octavo.measure.rows import Row
from octavo.serving.engine.request import MAX_LOGPROBS, Completion, TokenLogprobs, Usage
from octavo.serving.engine.settings import EngineSettings
from octavo.version import __version__

BUNDLE = "vllm.tar.xz"
LAST_LINES = 12  # of vLLM's log, in an error
PLUG_IN = "octavo"  # in the name of a row: by octavo's plug-in
_ENVIRONMENT = {
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_PLUGINS": "",
    "VLLM_NO_USAGE_STATS": "1",
    "PYTHONUNBUFFERED": "1",
}
# A bundle has neither FlashInfer nor DeepGEMM, and its machine need not have a network.
_BUNDLE_ENVIRONMENT = {
    "VLLM_USE_FLASHINFER_SAMPLER": "0",
    "VLLM_USE_DEEP_GEMM": "0",
    "VLLM_HOST_IP": "127.0.0.1",
    "GLOO_SOCKET_IFNAME": "lo",
    "NCCL_SOCKET_IFNAME": "lo",
    "HF_HUB_OFFLINE": "1",
}
_CPU_ENVIRONMENT = {"VLLM_CPU_KVCACHE_SPACE": "1"}  # GiB


@dataclass(frozen=True)
class Installation:
    """Where vLLM is: the Python that runs it, and folders before and after what that Python has.

    has_plug_in: whether octavo runs in it, too, in rows of its own.
    """

    python: Path
    first: Path | None = None
    last: Path | None = None
    has_plug_in: bool = False

    @staticmethod
    def find(folder: Path) -> "Installation | None":
        """vLLM in this folder or one right below it.

        That is a virtual environment with vLLM, or a bundle for this Python: vllm.tar.xz, or its
        two folders, site and extra.
        """
        below = sorted(path for path in folder.iterdir() if path.is_dir())
        for place in (folder, *below):
            if list(place.glob("lib/python*/site-packages/vllm/__init__.py")):
                return Installation(place / "bin" / "python")
            if (place / "site" / "vllm" / "__init__.py").exists():
                return _of_bundle(place)
            if (place / BUNDLE).exists():
                return _of_bundle(_unpacked(place / BUNDLE))
        return None

    def environment(self, row: Row, *, is_cuda: bool, folder: Path) -> dict[str, str]:
        """The environment of vLLM's process; folder: takes what comes first on Python's path."""
        found = {} if is_cuda else dict(_CPU_ENVIRONMENT)
        found |= {**env.of_child(), **_ENVIRONMENT}
        found.pop("PYTHONPATH", None)  # octavo's own packages are not vLLM's
        if is_by_plug_in(row):
            _link_octavo(folder)
            found["VLLM_PLUGINS"] = PLUG_IN
            found["PYTHONPATH"] = str(folder)
        if self.first is not None:
            found |= _BUNDLE_ENVIRONMENT
            # Processes that vLLM starts need the same packages in the same order.
            end = f"import sys\nsys.path.append({str(self.last)!r})\n"
            (folder / "sitecustomize.py").write_text(end)
            found["PYTHONPATH"] = os.pathsep.join([str(folder), str(self.first)])
        return found


def _of_bundle(folder: Path) -> Installation:
    return Installation(Path(sys.executable), folder / "site", folder / "extra")


def _unpacked(bundle: Path) -> Path:
    """The folder of a bundle's files, which are unpacked once."""
    status, parent = bundle.stat(), Path(tempfile.gettempdir())
    target = parent / f"octavo-vllm-{status.st_size}-{status.st_mtime_ns}"
    if not target.exists():
        with temporary_path(parent, is_folder=True) as temporary, tarfile.open(bundle) as archive:
            archive.extractall(temporary, filter="data")
            temporary.rename(target)
    return target


def _link_octavo(folder: Path) -> None:
    """Make this octavo, and no other package of this Python, one that vLLM finds in a folder."""
    (folder / "octavo").symlink_to(Path(env.__file__).parent)
    about = folder / f"octavo-{__version__}.dist-info"
    about.mkdir()
    (about / "METADATA").write_text(
        f"Metadata-Version: 2.1\nName: octavo\nVersion: {__version__}\n"
    )
    (about / "entry_points.txt").write_text(
        "[vllm.general_plugins]\noctavo = octavo.integrations.vllm.plugin:register\n"
    )


def twin_rows(rows: Sequence[Row], *, has_plug_in: bool = False) -> list[Row]:
    """What vLLM runs beside these rows: BF16, FP8 pages, FP8 linear layers, or both of them.

    FP8 pages have the checkpoint's scales, or 1; linear layers are those of --quantization fp8. A
    row of FP8 weights alone has no twin. has_plug_in: then the same with octavo's attention, and
    linear layers those of --quantization octavo.
    """
    kinds = [
        (row.kv_cache is not None, row.linear is not None)
        for row in rows
        if row.linear is None or row.linear.activation is not None
    ]
    ways = (False, True) if has_plug_in else (False,)
    return [_twin(way, *kind) for way in ways for kind in dict.fromkeys(kinds)]


def is_by_plug_in(row: Row) -> bool:
    """Whether a row of `twin_rows` is octavo's inside vLLM."""
    return PLUG_IN in row.name.split("+")


def _twin(by_plug_in: bool, has_fp8_cache: bool, has_fp8_linear: bool) -> Row:
    words = [
        "vllm",
        *[PLUG_IN] * by_plug_in,
        *["fp8"] * has_fp8_cache,
        *["linear"] * has_fp8_linear,
    ]
    fields: dict[str, Any] = {}
    if has_fp8_cache:
        fields["kv_cache"] = {"format": "e4m3", "scaling": "checkpoint"}
    if has_fp8_linear:
        fields["linear"] = {} if by_plug_in else {"weight": "tensor", "activation": "tensor"}
    return Row("+".join(words), fields)


class VllmEngine:
    """An engine of vLLM in another process; made by `open_vllm`.

    about: what records say of it.
    """

    def __init__(self, process: subprocess.Popen[str], log: Path) -> None:
        self.process, self.log = process, log
        self.about: Mapping[str, Scalar] = {}

    def start(self, settings: Mapping[str, Any], memory_fraction: float) -> None:
        """Load the model, compile and capture."""
        asked = {"settings": settings, "memory_fraction": memory_fraction}
        self.about = self._ask(asked)["about"]

    def serve(
        self,
        prompts: Sequence[Prompt],
        *,
        max_concurrency: int | None = None,
        on_token: Callable[[], None] = lambda: None,
    ) -> tuple[list[RequestTimes], float]:
        """As `serve_prompts` of our engine: the times of requests, and the seconds of them all."""
        served = self._serve(prompts, max_concurrency, None, on_token)
        times = [
            RequestTimes(
                input_len=len(prompt.tokens),
                output_len=len(result["tokens"]),
                start_s=result["start_s"],
                parts_s=tuple(result["parts_s"]),
                error=None if result["end"] == "length" else f"ended by {result['end']}",
            )
            for prompt, result in zip(prompts, served["results"], strict=True)
        ]
        return times, served["duration_s"]

    def answer(self, prompts: Sequence[Prompt], num_top: int) -> list[Answer]:
        """Answers to short prompts with so many of the likeliest tokens, for the check."""
        served = self._serve(prompts, None, num_top, lambda: None)
        return [
            _as_answer(prompt, result, num_top)
            for prompt, result in zip(prompts, served["results"], strict=True)
        ]

    def _serve(
        self,
        prompts: Sequence[Prompt],
        max_concurrency: int | None,
        logprobs: int | None,
        on_token: Callable[[], None],
    ) -> Mapping[str, Any]:
        asked = {
            "prompts": [prompt.tokens for prompt in prompts],
            "output_lens": [prompt.output_len for prompt in prompts],
            "max_concurrency": max_concurrency,
            "logprobs": logprobs,
        }
        found: Mapping[str, Any] = self._ask(asked, on_token)["served"]
        return found

    def _ask(
        self, asked: Mapping[str, Any], on_token: Callable[[], None] = lambda: None
    ) -> Mapping[str, Any]:
        """Send a line and read what comes until it is answered."""
        num_told = 0
        assert self.process.stdin is not None and self.process.stdout is not None
        try:
            self.process.stdin.write(json.dumps(asked) + "\n")
            self.process.stdin.flush()
        except BrokenPipeError:
            pass  # it has ended: below
        for line in self.process.stdout:
            answer: Mapping[str, Any] = json.loads(line)
            if "error" in answer:
                raise UnsupportedError(f"vLLM: {answer['error']}\n{self._last_lines()}")
            if "num_tokens" not in answer:
                return answer
            for _ in range(answer["num_tokens"] - num_told):
                on_token()
            num_told = answer["num_tokens"]
        code = self.process.wait()
        raise OctavoError(f"vLLM's process ended with {code}:\n{self._last_lines()}")

    def _last_lines(self) -> str:
        return "\n".join(self.log.read_text(errors="replace").splitlines()[-LAST_LINES:])


def _as_answer(prompt: Prompt, result: Mapping[str, Any], num_top: int) -> Answer:
    tokens: list[int] = result["tokens"]
    logprobs = []
    for token, place in zip(tokens, result["logprobs"], strict=True):
        best = sorted(map(tuple, place), key=lambda pair: -pair[1])[:num_top]
        logprobs.append(TokenLogprobs(token, dict(best)[token], tuple(best)))
    completion = Completion(
        request_id="",
        tokens=tuple(tokens),
        text="",
        finish_reason=result["end"],
        usage=Usage(prompt_tokens=len(prompt.tokens), completion_tokens=len(tokens)),
        logprobs=tuple(logprobs),
    )
    return Answer(prompt.tokens, completion)


@contextmanager
def open_vllm(
    installation: Installation, subject: Subject, folder: str, row: Row, settings: EngineSettings
) -> Iterator[VllmEngine]:
    """vLLM's engine for a row of `twin_rows`; ends with its process.

    folder: of the subject's weights, or its hub name. settings: of our engine under the same load.
    """
    by_plug_in = is_by_plug_in(row)
    asked = {
        "model": folder,
        "dtype": str(subject.model.dtype).removeprefix("torch."),
        "skip_tokenizer_init": True,
        "max_model_len": settings.max_context,
        "max_num_seqs": settings.max_num_seqs,
        "kv_cache_dtype": "auto" if row.kv_cache is None else "fp8",
        "quantization": None if row.linear is None else PLUG_IN if by_plug_in else "fp8",
        "attention_backend": "OCTAVO" if by_plug_in else None,
        "enforce_eager": settings.cuda_graphs is False,
        "enable_prefix_caching": settings.enable_prefix_caching,
        "disable_log_stats": True,
    }
    with tempfile.TemporaryDirectory(prefix="octavo-vllm-") as name:
        log = Path(name) / "log"
        # -P: the files beside the worker are no modules of its own.
        command = [str(installation.python), "-P", vllm_worker.__file__]
        is_cuda = subject.device.type == "cuda"
        environment = installation.environment(row, is_cuda=is_cuda, folder=Path(name))
        with (
            log.open("w") as written,
            subprocess.Popen(
                command,
                env=environment,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=written,
                text=True,
            ) as process,
        ):
            try:
                engine = VllmEngine(process, log)
                engine.start(asked, settings.memory_fraction)
                yield engine
            finally:
                process.kill()


@contextmanager
def weights_for_vllm(subject: Subject) -> Iterator[str]:
    """The model as vLLM takes it: its folder or hub name; random weights are written to a folder.

    Raises ConfigError where the disk has no room for them.
    """
    if not subject.is_random:
        yield str(subject.model.name_or_path)
        return
    parent = tempfile.gettempdir()
    num_bytes = sum(one.nbytes for one in subject.model.parameters())
    if (free := shutil.disk_usage(parent).free) < 1.05 * num_bytes:
        raise ConfigError(
            f"vLLM reads the random weights from a file: expected {num_bytes / 1e9:.1f} GB free in "
            f"{parent}, got {free / 1e9:.1f}; set TMPDIR to a larger disk"
        )
    with tempfile.TemporaryDirectory(prefix="octavo-weights-") as folder:
        subject.model.save_pretrained(folder)
        yield folder


def check_vllm(
    subject: Subject,
    row: Row,
    engine: VllmEngine,
    settings: EngineSettings,
    *,
    plain_error: float | None,
    linear_rounding: float,
) -> dict[str, float]:
    """The error of vLLM's engine by the check of our own rows; raises if it is wrong.

    linear_rounding: what FP8 linear layers cost the logits in our engine.
    """
    prompts = check_prompts(subject.vocab_size, settings.max_num_seqs)
    answers = engine.answer(prompts, min(MAX_LOGPROBS, subject.vocab_size))
    rounding = 0.0 if row.linear is None else linear_rounding
    return {"relative_rms": judge(subject, row, answers, plain_error, rounding)}
