"""Traces, as a collector of OpenTelemetry receives them."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

from opentelemetry import trace
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest
from vllm import SamplingParams

from tests.integration.engines import GROWN, engine, read_prompts
from vllm_recycle.integration.tracing import ACCEPTED, DRAFTED, STEPS


@contextmanager
def collector() -> Iterator[tuple[str, list[dict[str, Any]]]]:
    """Where to send traces, and the attributes of the spans of requests that came."""
    spans: list[dict[str, Any]] = []

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = self.rfile.read(int(self.headers["Content-Length"]))
            request = ExportTraceServiceRequest.FromString(body)
            for resource in request.resource_spans:
                for scope in resource.scope_spans:
                    spans.extend(
                        {one.key: value_of(one.value) for one in span.attributes}
                        for span in scope.spans
                        if span.name == "llm_request"
                    )
            self.send_response(200)
            self.end_headers()

        def log_message(self, *args: Any) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    try:
        yield f"http://127.0.0.1:{server.server_port}/v1/traces", spans
    finally:
        trace.get_tracer_provider().shutdown()  # which all engines of this process share
        server.shutdown()
        server.server_close()


def value_of(value: Any) -> Any:
    return getattr(value, value.WhichOneof("value"))


def test_the_trace_of_a_request_says_what_was_drafted_and_accepted(monkeypatch):
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_TRACES_PROTOCOL", "http/protobuf")
    # vLLM sets it for the processes of its workers.
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_TRACES_ENDPOINT", "")
    params = SamplingParams(temperature=0, max_tokens=24)
    with collector() as (url, spans):
        expected = {}
        for level in ("summary", "none"):
            settings = {"otlp_traces_endpoint": url, "per_request_spec_decode_metrics": level}
            with engine(GROWN, **settings) as llm:
                results = llm.generate(read_prompts(3), params, use_tqdm=False)
            trace.get_tracer_provider().force_flush()
            expected[level] = [result.outputs[0].spec_decode_metrics for result in results]
        assert [DRAFTED in span for span in spans] == [True] * 3 + [False] * 3
    of_summary = spans[:3]
    assert sorted((span[DRAFTED], span[ACCEPTED], span[STEPS]) for span in of_summary) == sorted(
        (
            metrics.num_draft_tokens,
            sum(accepted * steps for accepted, steps in enumerate(metrics.histogram)),
            sum(metrics.histogram),
        )
        for metrics in expected["summary"]
    )
    assert sum(span[ACCEPTED] for span in of_summary) > 0
    assert all(span["gen_ai.usage.completion_tokens"] == 24 for span in spans)
    assert expected["none"] == [None] * 3
