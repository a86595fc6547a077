"""OpenVINO without its reports: it would tell its maker over the network of every import."""

from __future__ import annotations

import sys

# OpenVINO goes without this package where it is not installed.
sys.modules.setdefault("openvino_telemetry", None)  # type: ignore[arg-type]

import openvino  # noqa: E402
import openvino.passes as _  # noqa: E402, F401
import openvino_genai  # noqa: E402

__all__ = ["openvino", "openvino_genai"]
