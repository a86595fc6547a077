from llmserve.builder.build import BuildResult as BuildResult
from llmserve.builder.fitted import build as build
from llmserve.client import connect as connect
from llmserve.client import connect_async as connect_async
from llmserve.errors import LLMServeError as LLMServeError
from llmserve.plugins.hookspecs import hookimpl as hookimpl
from llmserve.version import __version__ as __version__
