"""What a search has measured so far, in a JSON file that a later run goes on from."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from vllm_recycle.cli import RunError, UsageError
from vllm_recycle.core.state_file import StateFileError, write_file

FORMAT = "vllm_recycle.tune/1"


class State:
    """Measurements, each written to their file as it is made; read where the file exists.

    Raises UsageError if it is no such file, or of other conditions, which are JSON values.
    """

    def __init__(self, path: Path, conditions: dict[str, Any]) -> None:
        self.path = path
        self.conditions = conditions
        self.measurements: list[dict[str, Any]] = self._read() if path.exists() else []

    def of(self, **key: Any) -> list[dict[str, Any]]:
        """The measurements with these values, in the order in which they were made."""
        return [
            one
            for one in self.measurements
            if all(one.get(name) == value for name, value in key.items())
        ]

    def add(self, **measurement: Any) -> None:
        """Keep one more measurement, in the file too; raises RunError if it cannot be written."""
        self.measurements.append(measurement)
        content = {"format": FORMAT, "conditions": self.conditions}
        content |= {"measurements": self.measurements}
        try:
            write_file(self.path, f"{json.dumps(content)}\n".encode(), kind="--state")
        except StateFileError as error:
            raise RunError(str(error)) from error

    def _read(self) -> list[dict[str, Any]]:
        another = "name another with --state, or remove it"
        try:
            content = json.loads(self.path.read_text(encoding="utf-8"))
        except (OSError, UnicodeDecodeError, json.JSONDecodeError) as error:
            raise UsageError(f"--state {self.path} cannot be read ({error}): {another}") from error
        if not isinstance(content, dict) or content.get("format") != FORMAT:
            raise UsageError(f"--state {self.path} is no state of vllm-recycle tune: {another}")
        for key, expected in self.conditions.items():
            got = content["conditions"].get(key)
            if got != expected:
                raise UsageError(
                    f"--state {self.path} is of another run, {key} {got}, not {expected}: {another}"
                )
        return content["measurements"]
