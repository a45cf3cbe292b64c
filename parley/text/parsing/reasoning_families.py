"""Families of models by how they mark reasoning, and how the chat template of each is recognized. Data only.

A model has one row, chosen as in ``call_families.py``.
"""

from __future__ import annotations

from dataclasses import dataclass

from parley.text.parsing.call_forms import TemplateSigns


@dataclass(frozen=True)
class ReasoningFamily:
    """A way of marking reasoning.

    * ``answer_wrapper``: marks that some models put around the text after the reasoning.
    * ``may_reopen``: reasoning may start again after content.
    * ``always_reasons``: an answer starts with reasoning even without the opening mark, which may still follow.
    * ``dropped_marks``: marks that are never part of content.
    * ``lead_marks``: the marks allowed before calls, and those allowed before content, at the start of an answer or
      after its reasoning (used in grammars).
    """

    name: str
    marks: tuple[str, str]
    signs: TemplateSigns
    aliases: tuple[str, ...] = ()
    answer_wrapper: tuple[str, str] | None = None
    may_reopen: bool = False
    always_reasons: bool = False
    dropped_marks: tuple[str, ...] = ()
    lead_marks: tuple[tuple[str, ...], tuple[str, ...]] = ((), ())


KIMI_RESPONSE = ("<|open|>response<|sep|>", "<|close|>response<|sep|>")
THINK_MARKS = ("<think>", "</think>")

THOUGHTS = (
    ReasoningFamily(
        "openai_gptoss",
        ("<|channel|>analysis<|message|>", "<|end|>"),
        (("<|channel|>", "<|message|>"),),
        aliases=("gpt-oss", "gptoss", "harmony"),
    ),
    ReasoningFamily("mistral", ("[THINK]", "[/THINK]"), (("[THINK]",),), may_reopen=True),
    ReasoningFamily("seed_oss", ("<seed:think>", "</seed:think>"), (("<seed:think>",),)),
    ReasoningFamily(
        "gemma4",
        ("<|channel>thought", "<channel|>"),
        (("<|channel>",),),
        may_reopen=True,
        dropped_marks=("<channel|>",),
    ),
    ReasoningFamily(
        "cohere_command3",
        ("<|START_THINKING|>", "<|END_THINKING|>"),
        (("<|START_THINKING|>",),),
        aliases=("cohere", "cohere_command4"),
        dropped_marks=("<|START_RESPONSE|>", "<|END_RESPONSE|>", "<|START_TEXT|>", "<|END_TEXT|>"),
        lead_marks=((), ("<|START_RESPONSE|>", "<|START_TEXT|>")),
    ),
    ReasoningFamily(
        "granite", ("Here is my thought process:", "Here is my response:"), (("Here is my thought process",),)
    ),
    ReasoningFamily(
        "apertus",
        ("<|inner_prefix|>", "<|inner_suffix|>"),
        (("<|inner_prefix|>",),),
        aliases=("apertus2509",),
        may_reopen=True,
    ),
    ReasoningFamily(
        "kimi_k3",
        ("<|open|>think<|sep|>", "<|close|>think<|sep|>"),
        (("<|open|>", "<|close|>", "<|sep|>"),),
        dropped_marks=(KIMI_RESPONSE[0], KIMI_RESPONSE[1], "<|close|>message<|sep|>", "<|end_of_msg|>"),
        lead_marks=(("".join(KIMI_RESPONSE), KIMI_RESPONSE[1]), (KIMI_RESPONSE[0],)),
    ),
    ReasoningFamily(
        "solar_open",
        ("<|think|>", "<|end|>"),
        (("<|think|>", "<|begin|>assistant"),),
        dropped_marks=("<|content|>", "<|end|>", "<|begin|>assistant", "<|calls|>"),
        lead_marks=(("<|begin|>assistant",), ("<|begin|>assistant<|content|>", "<|content|>")),
    ),
    ReasoningFamily("kimi_vl", ("◁think▷", "◁/think▷"), (("◁think▷",),), aliases=("kimi",)),
    ReasoningFamily("solar_open2", ("<|think:start|>", "<|think:end|>"), (("<|think:start|>",),)),
    ReasoningFamily(
        "hy_v3_opensource",
        ("<think:opensource>", "</think:opensource>"),
        (("<think:opensource>",), ("<think{}>", ":opensource")),
    ),
    ReasoningFamily("minimax_m3", ("<mm:think>", "</mm:think>"), (("<mm:think>",), ("</mm:think>",))),
    ReasoningFamily("deepseek_r1", THINK_MARKS, (), aliases=("gigachat35", "step5"), always_reasons=True),
    ReasoningFamily(
        "apriel", ("Here are my reasoning steps:", "[BEGIN FINAL RESPONSE]"), (("[BEGIN FINAL RESPONSE]",),)
    ),
    ReasoningFamily("k2_horizon", ("<ifm|think>", "</ifm|think>"), (("<ifm|think>",),)),
    ReasoningFamily(
        "plamo3",
        ("<|plamo:begin_think:plamo|>", "<|plamo:end_think:plamo|>"),
        (("<|plamo:begin_think:plamo|>",), ("begin_think", "plamo")),
    ),
    ReasoningFamily("exaone_deep", ("<thought>", "</thought>"), (("<thought>",),)),
    ReasoningFamily("hunyuan_a13b", THINK_MARKS, (("<think>", "<answer>"),), answer_wrapper=("<answer>", "</answer>")),
    ReasoningFamily(
        "ernie45",
        THINK_MARKS,
        (("<think>", "<response>\\n"), ("<think>", "<response></response>")),
        aliases=("granite33",),
        answer_wrapper=("<response>", "</response>"),
    ),
    ReasoningFamily(
        "qwen3",
        THINK_MARKS,
        (("<think>",), ("</think>",)),
        aliases=(
            "deepseek_v3",
            "deepseek_v31",
            "deepseek_v4",
            "deepseek_v41",
            "dots",
            "glm45",
            "glm47",
            "granite_thinking_parser",
            "holo2",
            "hy_v3",
            "hy_v4",
            "interns1",
            "iquest_q1",
            "kimi_k2",
            "ling3",
            "mimo",
            "minicpm5",
            "minicpmv",
            "minimax",
            "minimax_m2",
            "nanbeige",
            "nemotron_3",
            "nemotron_v3",
            "olmo3",
            "poolside_v1",
            "qwen3_thinking",
            "step3",
            "step3p5",
            "think",
        ),
    ),
)
