"""Traces, as they are given to what sends them to a collector of OpenTelemetry."""

from __future__ import annotations

from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from vllm import SamplingParams
from vllm.tracing import otel

from tests.integration.engines import GROWN, engine, read_prompts
from vllm_recycle.integration.requests.tracing import COUNTS

DRAFTED, ACCEPTED, STEPS = COUNTS


def test_the_trace_of_a_request_says_what_was_drafted_and_accepted(monkeypatch):
    exporter, counted = InMemorySpanExporter(), {}
    monkeypatch.setattr(otel, "get_span_exporter", lambda _: exporter)
    monkeypatch.setattr(otel, "BatchSpanProcessor", SimpleSpanProcessor)
    # vLLM sets it for the processes of its workers.
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_TRACES_ENDPOINT", "")
    params = SamplingParams(temperature=0, max_tokens=24)
    for level in ("summary", "none"):
        settings = {"otlp_traces_endpoint": "http://localhost"}
        with engine(GROWN, per_request_spec_decode_metrics=level, **settings) as llm:
            results = llm.generate(read_prompts(3), params, use_tqdm=False)
        counted[level] = [result.outputs[0].spec_decode_metrics for result in results]
    found = exporter.get_finished_spans()
    spans = [span.attributes for span in found if span.name == "llm_request"]
    assert [DRAFTED in span for span in spans] == [True] * 3 + [False] * 3
    assert sorted((span[DRAFTED], span[ACCEPTED], span[STEPS]) for span in spans[:3]) == sorted(
        (
            metrics.num_draft_tokens,
            sum(accepted * steps for accepted, steps in enumerate(metrics.histogram)),
            sum(metrics.histogram),
        )
        for metrics in counted["summary"]
    )
    assert sum(span[ACCEPTED] for span in spans[:3]) > 0
    assert all(span["gen_ai.usage.completion_tokens"] == 24 for span in spans)
    assert counted["none"] == [None] * 3
