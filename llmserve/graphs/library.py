"""OpenVINO without its telemetry, which would report every import over the network."""

from __future__ import annotations

import sys

# OpenVINO works without this package, which now looks as if it were not installed.
sys.modules.setdefault("openvino_telemetry", None)  # type: ignore[arg-type]

import openvino as openvino  # noqa: E402
import openvino.passes as _  # noqa: E402, F401
