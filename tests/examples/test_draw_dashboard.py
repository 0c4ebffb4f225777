"""The picture of the dashboard has every panel, with what Prometheus answers to its queries."""

from __future__ import annotations

import json
import re
import subprocess
import sys
import threading
import urllib.parse
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"


class Prometheus(BaseHTTPRequestHandler):
    """Answers each query with a line of two positions, in the form of its HTTP API."""

    queries: list[str] = []  # noqa: RUF012

    def do_GET(self) -> None:
        url = urllib.parse.urlparse(self.path)
        asked = {name: values[0] for name, values in urllib.parse.parse_qs(url.query).items()}
        assert url.path == "/api/v1/query_range"
        self.queries.append(asked["query"])
        times = [float(asked["start"]), float(asked["end"])]
        lines = [
            {"metric": {"position": str(i)}, "values": [[time, "0.5"] for time in times]}
            for i in range(2)
        ]
        self.send_response(200)
        self.end_headers()
        self.wfile.write(json.dumps({"status": "success", "data": {"result": lines}}).encode())

    def log_message(self, *_: object) -> None:
        pass


@pytest.fixture
def address() -> Iterator[str]:
    with ThreadingHTTPServer(("127.0.0.1", 0), Prometheus) as server:
        threading.Thread(target=server.serve_forever).start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()


def test_every_panel_is_drawn(address, tmp_path):
    picture = tmp_path / "dashboard.svg"
    command = [sys.executable, str(EXAMPLES / "benchmarks/draw_dashboard.py"), "--model=target"]
    command += [f"--prometheus={address}", f"--output={picture}"]
    subprocess.run(command, check=True, timeout=120)
    drawn = picture.read_text()
    panels = json.loads((EXAMPLES / "grafana.json").read_text())["panels"]
    targets = [target for panel in panels for target in panel["targets"]]
    for text in [*(panel["title"] for panel in panels), "position 1"]:
        assert f">{text}<" in drawn
    assert len(Prometheus.queries) == len(targets)
    for query in Prometheus.queries:
        assert "$" not in query
        assert set(re.findall('model_name=~"(.*?)"', query)) == {"target"}
