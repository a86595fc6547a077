"""OpenVINO without its telemetry, which would report every import over the network."""

from __future__ import annotations

import sys

# OpenVINO works without this package, which now looks as if it were not installed.
sys.modules.setdefault("openvino_telemetry", None)  # type: ignore[arg-type]

import openvino  # noqa: E402

__all__ = ["openvino"]
