"""OpenVINO, which the package has kept from reporting over the network."""

from __future__ import annotations

import openvino as openvino
import openvino.passes as _  # noqa: F401
