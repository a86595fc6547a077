"""Models of transformers as graphs of OpenVINO, with each weight mapped or converted by itself.

A model's weights stay in the files of its checkpoint; a graph refers to them there, and they are
written one after the other in the format that is asked for. So it takes the memory of one weight.

    from llmserve.graphs import StoredWeights, load, write

Names are loaded on first use: those of OpenVINO and torch only where they are needed.
"""

from llmserve.lazy import lazy

__getattr__, __dir__ = lazy(__name__)
