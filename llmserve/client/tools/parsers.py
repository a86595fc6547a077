"""The built-in parsers: which reader suits which family of models, by its chat template.

A parser finds calls, or a model's thinking, or both. ``generic`` reads the calls of models that no
other parser suits.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

from llmserve.client.tools.json_calls import (
    DEEPSEEK,
    DeepSeek,
    Gemma,
    Json,
    Llama,
    MarkedCalls,
    Mistral,
    NamedCalls,
    NamedForm,
)
from llmserve.client.tools.markup_calls import Markup, MarkupCalls
from llmserve.client.tools.python_calls import PythonCalls
from llmserve.client.tools.thinking import Command, Harmony, MarkedThinking, ThinkingForm
from llmserve.plugins.roles import ToolParser

_FINAL = "<|channel|>final<|message|>"
_FUNCTION = ("<parameter=", ">", "</parameter>")

_MARKED = {
    "<tool_call>": ("</tool_call>",),
    "<|tool_call|>": ("<|/tool_call|>",),
    "functools": (),
    "<tool_calls>": ("</tool_calls>",),
    "<TOOLCALL>": ("</TOOLCALL>",),
}
_QWEN_CODER = Markup("<tool_call>", ("<function=", ">"), _FUNCTION, "</function>", "</tool_call>")
_SEED = Markup(
    "<seed:tool_call>", ("<function=", ">"), _FUNCTION, "</function>", "</seed:tool_call>"
)
_MINIMAX = Markup(
    "<minimax:tool_call>", ('<invoke name="', '">'), ('<parameter name="', '">', "</parameter>"),
    "</invoke>", "</minimax:tool_call>",
)  # fmt: skip
_GLM = Markup(
    "<tool_call>", ("", ""), ("<arg_key>", "</arg_key>", "</arg_value>"), "</tool_call>", "",
    between="<arg_value>",
)  # fmt: skip
_KIMI = NamedForm(
    "<|tool_call_begin|>", "<|tool_call_argument_begin|>",
    ("<|tool_call_end|>", "<|tool_calls_section_end|>"),
    before="<|tool_calls_section_begin|>", prefix="functions.",
)  # fmt: skip
_FUNCTIONARY = NamedForm("<function=", ">", ("</function>",))


def _having(rank: int, *marks: str, without: tuple[str, ...] = ("\0",)) -> Callable[[str], int]:
    """Return the rating of templates that have one of the marks, and none of the others."""

    def suits(template: str) -> int:
        found = any(mark in template for mark in marks)
        return rank if found and not any(mark in template for mark in without) else 0

    return suits


def _marked(name: str, summary: str, rank: int, mark: str, *, without: tuple[str, ...] = ("\0",)
            ) -> ToolParser:  # fmt: skip
    return ToolParser(
        name=name,
        summary=summary,
        reader=partial(MarkedCalls, {mark: _MARKED[mark]}),
        suits=_having(rank, mark, without=without),
        opens=(mark,),
        json_calls=True,
    )


def _markup(name: str, summary: str, rank: int, form: Markup, mark: str) -> ToolParser:
    return ToolParser(
        name=name,
        summary=summary,
        reader=partial(MarkupCalls, form),
        suits=_having(rank, mark),
        opens=(form.begin,),
    )


def _thinking(
    name: str, summary: str, rank: int, form: ThinkingForm, *others: str, without: str = "\0"
) -> ToolParser:
    """Return a parser for templates that have the last mark of a form, or one of ``others``."""
    marks = form.answer or (form.end,)
    return ToolParser(
        name=name,
        summary=summary,
        reader=partial(MarkedThinking, form),
        suits=_having(rank, marks[-1], *others, without=(without,)),
        calls=False,
        thinking=(form.begin, form.end),
    )


PARSERS = [
    # Qwen3-Coder and GLM use the same mark around markup.
    _marked("hermes", "Hermes, Qwen 2.5 and 3, Granite 4: JSON in <tool_call>", 10, "<tool_call>",
            without=("<function=", "<arg_key>")),
    _marked("granite", "Granite 3, Phi-4 mini: JSON after <|tool_call|>", 15, "<|tool_call|>"),
    _marked("functools", "Phi-4 mini in vLLM's template: a list after functools", 15, "functools"),
    _marked("nemotron", "Nemotron Nano 2 and Super 1.5: a list in <TOOLCALL>", 15, "<TOOLCALL>"),
    _marked("tool_calls", "Apriel, Hunyuan, Jamba: a list in <tool_calls>", 12, "<tool_calls>"),
    ToolParser(
        name="llama3",
        summary="Llama 3.1 to 4: JSON with parameters, or Python in brackets",
        reader=Llama,
        suits=_having(10, "<|python_tag|>", "<|python_start|>", '"parameters": ', "[func_name1("),
    ),
    ToolParser(
        name="mistral",
        summary="Mistral: [TOOL_CALLS]",
        reader=Mistral,
        suits=_having(20, "[TOOL_CALLS]"),
        opens=("[TOOL_CALLS]",),
    ),
    ToolParser(
        name="deepseek",
        summary="DeepSeek R1, V3 and V3.1: special marks",
        reader=DeepSeek,
        suits=_having(20, DEEPSEEK.format("call▁begin")),
        opens=(DEEPSEEK.format("calls▁begin"),),
    ),
    ToolParser(
        name="kimi_k2",
        summary="Kimi K2: special marks",
        reader=partial(NamedCalls, _KIMI),
        suits=_having(20, _KIMI.begin),
        opens=(_KIMI.before,),
    ),
    ToolParser(
        name="functionary",
        summary="Functionary 3.1: JSON in <function=NAME>",
        reader=partial(NamedCalls, _FUNCTIONARY),
        suits=_having(12, _FUNCTIONARY.begin, without=("<parameter=",)),
        opens=(_FUNCTIONARY.begin,),
    ),
    _markup("qwen3_coder", "Qwen3-Coder, Qwen 3.5: <function=…> and <parameter=…>", 20,
            _QWEN_CODER, "<parameter="),
    _markup("seed_oss", "Seed-OSS: the same in <seed:tool_call>", 25, _SEED, "<seed:tool_call>"),
    _markup("minimax_m2", "MiniMax M2: <invoke> and <parameter>", 20, _MINIMAX,
            "<minimax:tool_call>"),
    _markup("glm", "GLM 4.5 to 4.7: <arg_key> and <arg_value>", 20, _GLM, "<arg_key>"),
    ToolParser(
        name="pythonic",
        summary="LFM2, Olmo 3: calls in Python",
        reader=partial(
            PythonCalls,
            {"<|tool_call_start|>": ("<|tool_call_end|>",),
             "<function_calls>": ("</function_calls>",)},
        ),
        suits=_having(
            15, "<|tool_call_start|>", "<function_calls>", "<|tool_list_start|>",
            # LFM2.5's template has no marks: it lists the tools, and shows no calls.
            '"List of tools: ["',
        ),
        opens=("<|tool_call_start|>", "<function_calls>"),
    ),
    ToolParser(
        name="gemma",
        summary="Gemma 4: <|tool_call>call:NAME{…}",
        reader=Gemma,
        suits=_having(20, "<|tool_call>call:"),
        opens=("<|tool_call>",),
    ),
    ToolParser(
        name="command_r",
        summary="Command R and R+: a list after Action:",
        reader=partial(
            MarkedCalls, {f"Action:{space}```json": ("```",) for space in (" ", "", "\n", " \n")}
        ),
        suits=_having(15, "Action:"),
    ),
    ToolParser(
        name="command_a",
        summary="Command R7B and A: thinking, calls and answer between special marks",
        reader=Command,
        suits=_having(30, "<|START_ACTION|>"),
        thinking=("<|START_THINKING|>", "<|END_THINKING|>"),
        opens=("<|START_ACTION|>",),
        json_calls=True,
    ),
    ToolParser(
        name="harmony",
        summary="gpt-oss: thinking, calls and answer in channels",
        reader=Harmony,
        suits=_having(30, "<|channel|>"),
        # Every answer begins with a header, so what it may be begins only after that of the answer.
        thinking=("", _FINAL, f"<|end|><|start|>assistant{_FINAL}"),
    ),
    ToolParser(
        name="generic",
        summary="Any other model: JSON alone, in a fence or in <tool_call>",
        reader=Json,
        suits=_having(1, ""),
        opens=("<tool_call>",),
        json_calls=True,
    ),
    _thinking("think", "DeepSeek R1, Qwen 3, GLM, Kimi and most others: <think>", 10,
              ThinkingForm("<think>", "</think>")),
    _thinking("think_response", "Granite 3.2 and 3.3: <think> and <response>", 20,
              ThinkingForm("<think>", "</think>", ("<response>", "</response>")),
              # MiniMax has these marks around the results of calls.
              without="<minimax:tool_call>"),
    _thinking("think_answer", "Hunyuan: <think> and <answer>", 20,
              ThinkingForm("<think>", "</think>", ("<answer>", "</answer>"), "\u52a9\u624b\uff1a"),
              # The template of Hunyuan A13B does not say that answers have marks.
              "<|extra_0|>"),
    _thinking("final_response", "Apriel: steps, then [BEGIN FINAL RESPONSE]", 20,
              ThinkingForm("Here are my reasoning steps:", "[BEGIN FINAL RESPONSE]",
                           ("", "[END FINAL RESPONSE]")),
              "[BEGIN FINAL RESPONSE]"),
    _thinking("mistral_think", "Magistral: [THINK]", 20, ThinkingForm("[THINK]", "[/THINK]")),
    _thinking("seed_think", "Seed-OSS: <seed:think>", 20,
              ThinkingForm("<seed:think>", "</seed:think>")),
    _thinking("gemma_think", "Gemma 4: a channel for thoughts", 20,
              ThinkingForm("<|channel>thought", "<channel|>")),
    _thinking("thought", "EXAONE Deep: <thought>", 5, ThinkingForm("<thought>", "</thought>")),
    _thinking("thinking", "<thinking>", 5, ThinkingForm("<thinking>", "</thinking>")),
    _thinking("reasoning", "<reasoning>", 5, ThinkingForm("<reasoning>", "</reasoning>")),
]  # fmt: skip
"""The built-in parsers."""
