from llmserve.runtime.model import TritonPythonModel as TritonPythonModel
