"""Models of transformers as graphs of OpenVINO, with each weight mapped or converted by itself.

A model's weights stay in the files of its checkpoint; a graph refers to them there, and they are
written one after the other in the format that is asked for. So it takes the memory of one weight.

    from llmserve.graphs import StoredWeights, load, write

Names are loaded on first use: those of OpenVINO and torch only where they are needed.
"""

import sys

from llmserve.lazy import lazy

# Its telemetry would report over the network what is imported and converted, in a process of its
# own each time. OpenVINO works without that package, which now looks as if it were not installed.
# A package is imported before its modules, so this comes before any of them imports OpenVINO.
sys.modules.setdefault("openvino_telemetry", None)  # type: ignore[arg-type]

__getattr__, __dir__ = lazy(__name__)
