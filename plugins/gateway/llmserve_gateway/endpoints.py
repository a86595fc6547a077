"""The endpoints of the gateway, each said once: routes, the document and batches come from them."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Generic, Literal, TypeVar

from starlette.requests import Request
from starlette.responses import Response

from llmserve.runtime.contract import CLASSIFY, EMBED, GENERATE, RERANK
from llmserve_gateway import anthropic, decisions, llama_cpp, ollama, ollama_requests, responses
from llmserve_gateway.adapter_changes import ADDITION, REMOVAL
from llmserve_gateway.batches.routes import NEW_BATCH, BatchRoutes
from llmserve_gateway.batches.uploads import UPLOAD
from llmserve_gateway.conversation_routes import (
    DESCRIPTION,
    NEW_CONVERSATION,
    NEW_ITEMS,
    ConversationRoutes,
)
from llmserve_gateway.dialects import Dialect
from llmserve_gateway.errors import ApiError
from llmserve_gateway.fields import Body
from llmserve_gateway.keys import Key
from llmserve_gateway.ollama_routes import OllamaRoutes
from llmserve_gateway.openai_answers import ChatWriter, CompletionWriter
from llmserve_gateway.openai_requests import read_chat, read_completion
from llmserve_gateway.releases.routes import ABORTION, PROMOTION, ReleaseRoutes
from llmserve_gateway.reply import EVENTS
from llmserve_gateway.response_routes import ResponseRoutes
from llmserve_gateway.routes import DETOKENIZED, ONE_MODEL, ORDER, TOKENIZED, Routes
from llmserve_gateway.text_dialect import TextDialect
from llmserve_gateway.value_dialect import ValueDialect
from llmserve_gateway.value_requests import (
    read_classify,
    read_cohere_rerank,
    read_embeddings,
    read_rerank,
    read_score,
    read_tei_embed,
)
from llmserve_gateway.values import EmbeddingsWriter, LabelWriter, RankingWriter, ScoreWriter

T = TypeVar("T")
T_co = TypeVar("T_co", covariant=True)
Answer = Callable[[T, Request, "Key | None"], Awaitable[Response]]
"""A method that answers a request which the dialects have no part in."""

JSON, TEXT_PLAIN = "application/json", "text/plain"


@dataclass(frozen=True, eq=False)
class Endpoint(Generic[T_co]):
    """A row: one path, and one method of HTTP there."""

    path: str
    """As routes have it; a parameter is in braces."""
    summary: str
    answer: T_co
    """The dialect, or the method of :class:`Routes` or of :class:`BatchRoutes`, that answers."""
    method: Literal["GET", "POST", "DELETE"] = "GET"
    bodies: Sequence[Body] = ()
    """What may be sent, in the shape of one API or another."""
    query: Body | None = None
    sends: Sequence[str] = (JSON,)
    """The types of what it answers with."""
    accepts: str = JSON
    access: Literal["key", "key or open", "anyone"] = "key"
    """Who may ask: who has a key, if the gateway has any; ``open`` are metrics that need none."""
    error_body: Callable[[ApiError], bytes] = ApiError.json
    of: str = ""
    """The task that models are asked for here before all other places."""

    @property
    def name(self) -> str:
        """The path as the document has it."""
        return self.path.replace(":path", "")


def _asked(path: str, summary: str, dialect: Dialect[Any], of: str = "") -> Endpoint[Dialect[Any]]:
    bodies = dialect.read.bodies
    streams = any("stream" in body.fields for body in bodies)
    sends = (JSON, dialect.streams_as.media_type) if streams else (JSON,)
    return Endpoint(path, summary, dialect, "POST", bodies, sends=sends, of=of,
                    error_body=dialect.error_body)  # fmt: skip


def _posted(
    path: str, summary: str, answer: Answer[T], *bodies: Body, **more: Any
) -> Endpoint[Answer[T]]:
    return Endpoint(path, summary, answer, "POST", bodies, **more)


CHAT = TextDialect(read=read_chat, new_writer=ChatWriter, shows_images=True)
COMPLETION = TextDialect(
    read=read_completion, new_writer=CompletionWriter, operation="text_completion"
)
RESPONSE = responses.ResponseDialect(
    read=responses.read_response_request, new_writer=responses.ResponsesWriter,
    shows_images=True,
)  # fmt: skip
MESSAGE = TextDialect(
    read=anthropic.read_messages_request, new_writer=anthropic.MessagesWriter,
    error_body=anthropic.error_body, shows_images=True,
)  # fmt: skip
_EMBEDDINGS = ValueDialect(
    read=read_embeddings, new_writer=EmbeddingsWriter, operation="embeddings"
)
_TEI_EMBEDDINGS = replace(_EMBEDDINGS, read=read_tei_embed)
_RERANKING = ValueDialect(
    read=read_rerank, new_writer=RankingWriter, operation="rerank", error_body=ApiError.jina_json
)
_COHERE_RERANKING = replace(_RERANKING, read=read_cohere_rerank, error_body=ApiError.cohere_json)
_SCORING = ValueDialect(read=read_score, new_writer=ScoreWriter, operation="score")
_CLASSIFYING = ValueDialect(read=read_classify, new_writer=LabelWriter, operation="classify")

_OLLAMA_CHAT = ollama.TurnDialect(
    read=ollama_requests.read_chat, new_writer=ollama.ChatWriter, shows_images=True
)
_OLLAMA_TEXT = ollama.TurnDialect(
    read=ollama_requests.read_text, new_writer=ollama.TextWriter, operation="text_completion",
    is_of_one_prompt=True, shows_images=True,
)  # fmt: skip
_OLLAMA_EMBED = ollama.VectorDialect(
    read=ollama_requests.read_embed, new_writer=ollama.VectorsWriter
)
_OLLAMA_EMBEDDING = replace(
    _OLLAMA_EMBED, read=ollama_requests.read_embedding, new_writer=ollama.VectorWriter
)

_INFILL = TextDialect(
    read=llama_cpp.read_infill, new_writer=llama_cpp.InfillWriter, operation="text_completion"
)

_DECIDING = decisions.DecisionDialect(
    read=decisions.read_decision, new_writer=decisions.DecisionWriter, shows_images=True
)

# By all names that these have in the APIs of OpenAI, Jina, Cohere, vLLM, Hugging Face, Ollama and
# llama.cpp.
ASKED: Sequence[Endpoint[Dialect[Any]]] = (
    _asked("/v1/chat/completions", "Answer a conversation", CHAT, of=GENERATE),
    _asked("/v1/completions", "Continue a text", COMPLETION),
    _asked("/v1/responses", "Answer a conversation, in OpenAI's newer format", RESPONSE),
    _asked("/v1/messages", "Answer a conversation, in Anthropic's format", MESSAGE),
    _asked("/v1/embeddings", "The embeddings of texts", _EMBEDDINGS, of=EMBED),
    _asked("/embed", "The embeddings of texts, as Hugging Face's text-embeddings-inference does",
           _TEI_EMBEDDINGS),
    _asked("/v1/rerank", "Documents ranked by a query, as Jina's API does", _RERANKING, of=RERANK),
    _asked("/v2/rerank", "Documents ranked by a query, as Cohere's API does", _COHERE_RERANKING),
    _asked("/rerank", "Same as /v1/rerank", _RERANKING),
    _asked("/v1/score", "How well texts answer others, as in vLLM", _SCORING),
    _asked("/score", "Same as /v1/score", _SCORING),
    _asked("/classify", "The labels of texts, as in vLLM", _CLASSIFYING, of=CLASSIFY),
    _asked("/api/chat", "Answer a conversation, in Ollama's format", _OLLAMA_CHAT),
    _asked("/api/generate", "Answer a prompt, in Ollama's format", _OLLAMA_TEXT),
    _asked("/api/embed", "The embeddings of texts, in Ollama's format", _OLLAMA_EMBED),
    _asked("/api/embeddings", "The same of one text, as older clients ask", _OLLAMA_EMBEDDING),
    _asked("/v1/systemone", "How likely each answer to questions about a state is", _DECIDING),
    _asked("/infill", "Fill in what is between two texts, as llama.cpp's server does", _INFILL),
)  # fmt: skip
"""Those that ask a model for an answer."""

OWN: Sequence[Endpoint[Answer[Routes]]] = (
    _posted("/v1/messages/count_tokens", "Count the tokens of a conversation", Routes.count_tokens,
            anthropic.COUNTED, error_body=anthropic.error_body),
    _posted("/v1/responses/input_tokens", "Count the tokens of a conversation, in that format",
            Routes.count_input, responses.RESPONSE),
    _posted("/tokenize", "The tokens of a text", Routes.tokenize, TOKENIZED),
    _posted("/detokenize", "The text of tokens", Routes.detokenize, DETOKENIZED),
    Endpoint("/tokenizer_info", "The special tokens and the chat template of a model",
             Routes.tokenizer_info, query=ONE_MODEL),
    _posted("/models/load", "Load a model now, if models are loaded on demand", Routes.load, ORDER),
    _posted("/models/unload", "Unload a model until it is needed, if models are loaded on demand",
            Routes.unload, ORDER),
    _posted("/v1/load_lora_adapter", "Add an adapter to a model, as in vLLM", Routes.load_adapter,
            ADDITION, sends=(TEXT_PLAIN,)),
    _posted("/v1/unload_lora_adapter", "Remove an adapter of a model, as in vLLM",
            Routes.unload_adapter, REMOVAL, sends=(TEXT_PLAIN,)),
    Endpoint("/v1/models", "The available models", Routes.models),
    Endpoint("/v1/models/{name:path}", "One model", Routes.model),
    Endpoint("/usage", "What this key has used on each of the last days", Routes.usage),
    Endpoint("/inspect", "The last requests and what their models have read, for operators",
             Routes.inspect),
    Endpoint("/livez", "Whether the gateway is running", Routes.live, sends=(), access="anyone"),
    Endpoint("/readyz", "Whether the models answer", Routes.ready, access="anyone"),
    Endpoint("/readyz/{name:path}", "Whether one model answers", Routes.ready, access="anyone"),
    Endpoint("/health", "Same as /readyz", Routes.ready, access="anyone"),
    Endpoint("/openapi.json", "This document", Routes.document),
    Endpoint("/metrics", "Metrics for Prometheus", Routes.metrics, sends=(TEXT_PLAIN,),
             access="key or open"),
    Endpoint("/metrics/triton", "Triton's own metrics", Routes.triton_metrics, sends=(TEXT_PLAIN,),
             access="key or open"),
)  # fmt: skip
"""Those that the gateway answers itself."""

OF_BATCHES: Sequence[Endpoint[Answer[BatchRoutes]]] = (
    Endpoint("/v1/files", "The files of this key", BatchRoutes.files),
    _posted("/v1/files", "Upload a file of requests", BatchRoutes.files, UPLOAD,
            accepts="multipart/form-data"),
    Endpoint("/v1/files/{id}", "One file", BatchRoutes.file),
    Endpoint("/v1/files/{id}", "Delete a file", BatchRoutes.file, "DELETE"),
    Endpoint("/v1/files/{id}/content", "What a file says", BatchRoutes.content,
             sends=("application/octet-stream",)),
    Endpoint("/v1/batches", "The batches of this key", BatchRoutes.batches),
    _posted("/v1/batches", "Answer a file of requests", BatchRoutes.batches, NEW_BATCH),
    Endpoint("/v1/batches/{id}", "One batch", BatchRoutes.batch),
    _posted("/v1/batches/{id}/cancel", "Cancel a batch", BatchRoutes.cancel),
)  # fmt: skip
"""Those of files and batches, which a gateway may not keep."""

_OLLAMAS: Mapping[str, Any] = {"error_body": ollama.error_body}
OF_OLLAMA: Sequence[Endpoint[Answer[OllamaRoutes]]] = (
    Endpoint("/api/version", "The version of Ollama whose API this is", OllamaRoutes.version,
             **_OLLAMAS),
    Endpoint("/api/tags", "The available models, in Ollama's format", OllamaRoutes.tags,
             **_OLLAMAS),
    Endpoint("/api/ps", "The models that are loaded, in Ollama's format", OllamaRoutes.running,
             **_OLLAMAS),
    _posted("/api/show", "What a model can do, in Ollama's format", OllamaRoutes.show,
            ollama_requests.SHOWN, **_OLLAMAS),
    _posted("/api/pull", "Whether a model is here; none is downloaded", OllamaRoutes.pull,
            ollama_requests.PULLED, **_OLLAMAS),
)  # fmt: skip
"""Those of Ollama that ask no model for an answer."""

OF_RESPONSES: Sequence[Endpoint[Answer[ResponseRoutes]]] = (
    Endpoint("/v1/responses/{id}", "A response that was kept, or its stream from an event on",
             ResponseRoutes.get, sends=(JSON, EVENTS.media_type)),
    Endpoint("/v1/responses/{id}", "Delete a response that was kept", ResponseRoutes.remove,
             "DELETE"),
    _posted("/v1/responses/{id}/cancel", "Cancel a response that is answered in the background",
            ResponseRoutes.cancel),
    Endpoint("/v1/responses/{id}/input_items", "What a response that was kept is to",
             ResponseRoutes.items),
)  # fmt: skip
"""Those of responses, which a gateway may not keep."""

OF_CONVERSATIONS: Sequence[Endpoint[Answer[ConversationRoutes]]] = (
    _posted("/v1/conversations", "Begin a conversation that is kept", ConversationRoutes.create,
            NEW_CONVERSATION),
    Endpoint("/v1/conversations/{id}", "A conversation", ConversationRoutes.get),
    _posted("/v1/conversations/{id}", "Change what is said of a conversation",
            ConversationRoutes.update, DESCRIPTION),
    Endpoint("/v1/conversations/{id}", "Delete a conversation", ConversationRoutes.remove,
             "DELETE"),
    Endpoint("/v1/conversations/{id}/items", "What is said in a conversation",
             ConversationRoutes.items),
    _posted("/v1/conversations/{id}/items", "Add to what is said in a conversation",
            ConversationRoutes.append, NEW_ITEMS),
    Endpoint("/v1/conversations/{id}/items/{item}", "One item of a conversation",
             ConversationRoutes.item),
    Endpoint("/v1/conversations/{id}/items/{item}", "Delete an item of a conversation",
             ConversationRoutes.remove_item, "DELETE"),
)  # fmt: skip
"""Those of conversations, which are kept with the responses."""

OF_RELEASES: Sequence[Endpoint[Answer[ReleaseRoutes]]] = (
    Endpoint("/releases", "The new builds of models that are tried, and what is known of them",
             ReleaseRoutes.status),
    _posted("/releases/promote", "Have a new build answer all users, or more of them",
            ReleaseRoutes.promote, PROMOTION),
    _posted("/releases/abort", "Have the old build answer all users again", ReleaseRoutes.abort,
            ABORTION),
)  # fmt: skip
"""Those of releases, which only an operator may ask."""

ENDPOINTS: Sequence[Endpoint[Any]] = (
    *ASKED,
    *OWN,
    *OF_OLLAMA,
    *OF_BATCHES,
    *OF_RESPONSES,
    *OF_CONVERSATIONS,
    *OF_RELEASES,
)
PLACES: Mapping[str, str] = {row.of: row.path for row in ASKED if row.of}
"""Where a model is asked for what it is for."""
