"""vLLM's CPU platform as Ray sees one with GPUs, for tests: these are there in name only.

vLLM's Ray executor needs a resource of Ray's to place its workers by, which the CPU platform lacks.
"""

from __future__ import annotations

from pathlib import Path

from vllm.platforms.cpu import CpuPlatform


class RayCpuPlatform(CpuPlatform):
    ray_device_key = "GPU"


def plugin() -> str:
    """For vLLM's entry points: where the platform is."""
    return f"{__name__}.RayCpuPlatform"


def install(folder: Path) -> None:
    """Make the folder one of which, in PYTHONPATH, vLLM takes the platform."""
    metadata = folder / "ray_platform-0.dist-info"
    metadata.mkdir()
    (metadata / "METADATA").write_text("Metadata-Version: 2.1\nName: ray-platform\nVersion: 0\n")
    (metadata / "entry_points.txt").write_text(
        f"[vllm.platform_plugins]\nray_cpu = {__name__}:plugin\n"
    )
