"""A served load as vLLM's JSON document, and as a record."""

import math
from collections.abc import Mapping, Sequence
from datetime import datetime
from typing import Any

from octavo.measure.bench.request_times import Workload
from octavo.measure.bench.serving import Served, ServingCase
from octavo.measure.bench.serving_data import DataSet
from octavo.measure.records import Machine, Measurement, Scalar

# Fields of vLLM's file that are whole numbers; all other numbers have a point.
COUNTS = frozenset(
    {
        *("completed", "failed", "total_input_tokens", "total_output_tokens", "total_parts"),
        "max_concurrent_requests",
    }
)


def vllm_result(
    case: ServingCase, served: Served, *, metadata: Mapping[str, str], is_detailed: bool
) -> dict[str, Any]:
    """The JSON document that vLLM's `bench serve` writes, of this run.

    is_detailed: with the times and errors of every request.
    """
    metrics = {name: _typed(name, value) for name, value in served.metrics.items()}
    result: dict[str, Any] = {
        "date": datetime.now().strftime("%Y%m%d-%H%M%S"),
        "endpoint_type": case.backend,
        "backend": case.backend,
        "label": None,
        "model_id": served.model,
        "tokenizer_id": served.model,
        "num_prompts": case.workload.num_prompts,
        **metadata,
        "request_rate": "inf" if math.isinf(case.request_rate) else case.request_rate,
        "burstiness": case.burstiness,
        "max_concurrency": case.max_concurrency,
        **metrics,
        "request_goodput": metrics.get("request_goodput"),
        "rtfx": 0.0,  # of speech: none is sent
        "latencies": [0.0 if one.error else one.latency_s for one in served.times],
        "queue_times": [one.queue_s for one in served.times],
    }
    if case.ramp is not None:
        result["ramp_up_strategy"] = case.ramp.strategy
        result["ramp_up_start_rps"] = case.ramp.start_rps
        result["ramp_up_end_rps"] = case.ramp.end_rps
    if is_detailed:
        done = [one for one in served.times if one.error is None]
        result |= {
            "input_lens": [one.input_len for one in done],
            "output_lens": [one.output_len for one in done],
            "start_times": [one.start_s for one in done],
            "ttfts": [one.ttft_s for one in done],
            "itls": [one.itls_s for one in done],
            "generated_texts": [one.text for one in done],
            "errors": [one.error or "" for one in served.times],
        }
    return result


def _typed(name: str, value: float) -> float | int | None:
    """A number of the type that vLLM's file has: counts are whole; NaN is null."""
    if math.isnan(value):
        return None
    return int(value) if name in COUNTS else float(value)


def make_record(
    case: ServingCase, served: Served, *, command: str, has_own_server: bool, options: Sequence[str]
) -> Measurement:
    """The run as a record. The GPU is known if the server is our own: it is this machine's."""
    about: dict[str, Scalar] = {
        "model": served.model,
        **_about(case.workload),
        "request_rate": "inf" if math.isinf(case.request_rate) else case.request_rate,
        "burstiness": case.burstiness,
    }
    if case.backend != "openai":
        about["backend"] = case.backend
    if case.ramp is not None:
        ramp = case.ramp
        about["ramp_up"] = f"{ramp.strategy} {ramp.start_rps:g} to {ramp.end_rps:g} per second"
    if case.goodput_ms:
        about["goodput"] = " ".join(f"{name}:{ms:g}" for name, ms in case.goodput_ms.items())
    if case.max_concurrency is not None:
        about["max_concurrency"] = case.max_concurrency
    if options:
        about["server_options"] = " ".join(options)
    machine = Machine.current()
    if has_own_server:
        from octavo.kernels.device import default_device

        device = default_device()
        machine = Machine.current(gpu=device.gpu, capability=device.capability)
    return Measurement(
        op="serve",
        impl="octavo" if has_own_server else "http",
        case=about,
        values=dict(served.metrics),
        machine=machine,
        command=command,
    )


def _about(workload: Workload | DataSet) -> dict[str, Scalar]:
    """What records say of the prompts."""
    about: dict[str, Scalar] = {"num_prompts": workload.num_prompts, "seed": workload.seed}
    if not isinstance(workload, Workload):
        return {**about, **workload.about}
    return {
        **about,
        "input_len": workload.input_len,
        "output_len": workload.output_len,
        "range_ratio": workload.range_ratio,
    }
