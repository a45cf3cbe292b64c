"""Prepares a request's prompt for the engine: its token ids, and how the answer will be marked up.

Knows the tokenizer, the chat template and the neutral prompt, but no engine and no API.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from functools import cached_property, partial
from pathlib import Path
from typing import NamedTuple

import msgspec

from parley.errors import BadRequest, InvalidValue, Unsupported
from parley.text.fill_in_middle import find_fill_layout, write_gap
from parley.text.grammar import answer_grammar
from parley.text.grammar.answer_compiler import AnswerGrammarCache, AnswerGrammarCompiler
from parley.text.grammar.answer_question import CompilerSetup
from parley.text.media_family import MediaMarks, read_media_family
from parley.text.media_prompt import (
    begin_after_marks,
    find_media_items,
    has_own_bos,
    insert_replacements,
    place_leading_items,
    replace_marks,
    template_marks,
)
from parley.text.model_defaults import EmbeddingPrompts, read_sampling_defaults
from parley.text.parsing.calls import RequestTools
from parley.text.parsing.chat_template import ChatTemplate
from parley.text.parsing.client_special_tokens import ClientSpecialTokens
from parley.text.parsing.markup import (
    AUTO_FAMILY,
    Markup,
    detect_markup,
    reasoning_options,
    starts_in_reasoning,
)
from parley.text.prepared_prompt import PreparedPrompt
from parley.text.tokens import text_pair, truncation
from parley.text.tokens.json_files import read_json_object
from parley.text.tokens.prediction import PredictedTokens
from parley.text.tokens.template_encoder import TemplateEncoder
from parley.text.tokens.text_encoder import TextEncoder
from parley.text.tokens.tokenizer import Tokenizer
from parley.types import (
    ChatPrompt,
    Grammar,
    JoinedPrompt,
    KeptSide,
    MediaItem,
    MediaKind,
    Message,
    ModelAbility,
    PoolingOptions,
    ProcessedMedia,
    Prompt,
    ReasoningLimit,
    TextPair,
    TextPrompt,
    TokensPrompt,
)
from parley.types.media import KIND_NAMES

TAIL_TOKENS = 16  # tokens at the end of a prompt that are searched for a mark of reasoning
PAIR_ROLES = [re.compile(f"""["']{role}["']""") for role in ("query", "document")]  # in templates of rerankers
EncodeText = Callable[[TextEncoder, str, bool], list[int]]  # with limits; True: add special tokens around the text


class RenderedChat(NamedTuple):
    """A conversation as the model reads it.

    * ``text``: the prompt as text.
    * ``template_text``: the same, with placeholders for special tokens that clients wrote.
    * ``encoder``: encodes ``encodable``, which is as long as ``text``: the spans of tokens are the same in both.
    * ``media``: the conversation's items, in the order of their places in the text.
    """

    text: str
    template_text: str
    encodable: str
    encoder: TextEncoder
    media: Sequence[ProcessedMedia] = ()


class TextPipeline:
    """Reads the prompts of one model: its tokenizer, its chat template and the markup of its family.

    * ``generation_defaults``: the sampling values that the model's makers recommend, if any.
    * ``embedding_prompts``: the prompts that they put before texts to embed.
    * ``trust_marks``: special tokens that clients write in a conversation are special, as the template's are.
    * ``media_marks``: the marks of media in prompts.
    * ``media_family``: the model type of a model that reads media, "" for others.
    * ``keeps_kinds_apart``: as in ``MediaFamily``.
    * ``answer_grammars``: the compiled grammars of recent requests.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        template: ChatTemplate,
        generation_defaults: dict[str, float] | None = None,
        embedding_prompts: EmbeddingPrompts | None = None,
        markup: Markup | None = None,
        trust_marks: bool = False,
        media_marks: Mapping[MediaKind, MediaMarks] | None = None,
        media_family: str = "",
        keeps_kinds_apart: bool = False,
    ):
        self.media_marks = media_marks or {}
        self.media_family = media_family
        self.keeps_kinds_apart = keeps_kinds_apart
        self.tokenizer = tokenizer
        self.generation_defaults = generation_defaults or {}
        self.embedding_prompts = embedding_prompts or EmbeddingPrompts()
        self.template = template
        self.template_encoder = None if trust_marks else tokenizer.template_encoder
        self.markup = detect_markup(template.all_sources) if markup is None else markup
        self.answer_compiler = AnswerGrammarCompiler(tokenizer, self.markup)
        self.grammar_compiler = self.answer_compiler.grammar_compiler
        self.answer_grammars = AnswerGrammarCache()

    @property
    def may_be_slow(self) -> bool:
        """Whether even a short prompt may take long, so that it should be prepared in a thread."""
        return not self.tokenizer.has_linear_time or self.template.is_slow

    @classmethod
    def from_folder(
        cls, folder: str | Path, tools: str = AUTO_FAMILY, reasoning: str = AUTO_FAMILY, trust_marks: bool = False
    ) -> TextPipeline:
        """Load from a model folder in Hugging Face format. Raises BadTokenizer.

        ``tools`` and ``reasoning``: names of families to use if the template does not identify them (ValueError for an
        unknown name).
        """
        tokenizer = Tokenizer.from_folder(folder)
        media_family = read_media_family(read_json_object(Path(folder) / "config.json"))
        media_marks = media_family.read_marks(tokenizer) if media_family is not None else {}
        template = ChatTemplate.from_folder(folder, tokenizer, template_marks(media_marks))
        markup = detect_markup(template.all_sources, tools, reasoning)
        return cls(
            tokenizer,
            template,
            read_sampling_defaults(Path(folder)),
            EmbeddingPrompts.from_folder(Path(folder)),
            markup,
            trust_marks,
            media_marks,
            media_family.model_type if media_family is not None else "",
            media_family is not None and media_family.keeps_kinds_apart,
        )

    def prepare_prompt(
        self,
        prompt: Prompt,
        context_length: int | None = None,
        max_prompt_tokens: int | None = None,
        kept_side: KeptSide = "tail",
        *,
        counted_tokens: int = 0,
        pooling: PoolingOptions | None = None,
        media: Sequence[ProcessedMedia] = (),
    ) -> PreparedPrompt:
        """Render and encode a prompt. Slow for a long prompt, so run it in a thread. Raises BadRequest.

        ``context_length``, in tokens: a text that is far too long is refused before all of it is encoded
        (ContextLength). A prompt that is only somewhat too long is returned as it is. So is one of at most
        ``counted_tokens``, because its refusal names their number. ``max_prompt_tokens``: return at most this many
        tokens, those at ``kept_side``; of a far longer text only a part is encoded. The special tokens around a prompt
        are among them if its head is kept or it is embedded (``pooling``). ``media``: the items of the prompt, in its
        order; a prompt with media is never cut.
        """
        max_tokens = None if media else max_prompt_tokens
        encode = partial(
            truncation.encode_within_limit,
            context_length=context_length,
            counted_tokens=counted_tokens,
            max_tokens=max_tokens,
            kept_side=kept_side,
            counts_special=kept_side == "head" or pooling is not None,
        )
        if isinstance(prompt, ChatPrompt) and not prompt.rendered_ids:
            loses_end = kept_side == "head" and max_tokens is not None
            return self._prepare_chat(prompt, encode, pooling, media, loses_end=loses_end)
        if isinstance(prompt, TextPair) and self.has_pair_template:
            return self._render_pair(prompt, partial(encode, max_tokens=None), max_tokens)
        if isinstance(prompt, TextPair):
            return self._prepare_pair(prompt, partial(encode, self.tokenizer), max_tokens, kept_side)
        if isinstance(prompt, JoinedPrompt):
            return PreparedPrompt(_cut_ids(self._encode_parts(prompt, encode), max_tokens, kept_side))
        if isinstance(prompt, TokensPrompt):
            return self._prepare_tokens(_cut_ids(prompt.ids, max_tokens, kept_side), prompt.reasoning_ended)
        if isinstance(prompt, TextPrompt):
            return self._prepare_text(prompt, encode, pooling, media)
        return self._prepare_rendered_chat(prompt, _cut_ids(prompt.rendered_ids, max_tokens, kept_side))

    def _prepare_text(
        self, prompt: TextPrompt, encode: EncodeText, pooling: PoolingOptions | None, media: Sequence[ProcessedMedia]
    ) -> PreparedPrompt:
        """Encode a plain text: as it is, around a gap, with an embedding prompt before it, or as a user's turn."""
        if prompt.max_tokens is not None:
            prompt = msgspec.structs.replace(prompt, text=self._limit_text(prompt))
        if prompt.suffix:
            return PreparedPrompt(encode(self.tokenizer, self._write_gap(prompt), prompt.add_special_tokens))
        if pooling is not None and pooling.task not in ("classify", "token_classify"):
            prompt = self.apply_embedding_prompt(prompt, pooling)
        if prompt.as_user_turn and self.template:
            rendered = self.render_chat(_as_user_turn(prompt), media)
            ids, media = encode(rendered.encoder, rendered.encodable, False), rendered.media
        else:
            text, media = insert_replacements(prompt.text, prompt.media, media, self.media_marks)
            ids = encode(self.tokenizer, text, prompt.add_special_tokens and not has_own_bos(media))
            ids = self._begin_after_marks(ids, media)
        ids, placed = self._place_media(ids, media)
        return PreparedPrompt(ids, media=placed)

    def _encode_parts(self, prompt: JoinedPrompt, encode: EncodeText) -> list[int]:
        """Return the tokens of all parts, one after the other."""
        pieces = (
            part.ids if isinstance(part, TokensPrompt) else encode(self.tokenizer, part.text, part.add_special_tokens)
            for part in prompt.parts
        )
        return [token_id for piece in pieces for token_id in piece]

    def _prepare_tokens(self, ids: list[int], reasoning_ended: bool | None) -> PreparedPrompt:
        """Find how the answer to tokens begins. ``reasoning_ended``: as in ``TokensPrompt``."""
        if reasoning_ended:
            return PreparedPrompt(ids)
        markup = self.markup.without_calls
        in_reasoning = markup.reasoning_marks is not None and (
            reasoning_ended is False or starts_in_reasoning(markup, self._decode_end(ids), False)
        )
        return PreparedPrompt(ids, markup, in_reasoning)

    def find_reasoning_ended(self, prompt: Prompt, prepared: PreparedPrompt) -> bool | None:
        """Return the ``reasoning_ended`` of ``TokensPrompt`` that are answered as the prompt is."""
        if not isinstance(prompt, ChatPrompt):
            return prompt.reasoning_ended if isinstance(prompt, TokensPrompt) else True
        if prepared.starts_in_reasoning:
            return False
        # A turn that the answer continues can look like one whose answer would start in reasoning.
        return True if self._prepare_tokens(prepared.token_ids, None).starts_in_reasoning else None

    def _prepare_chat(
        self,
        prompt: ChatPrompt,
        encode: EncodeText,
        pooling: PoolingOptions | None,
        media: Sequence[ProcessedMedia],
        *,
        loses_end: bool,
    ) -> PreparedPrompt:
        """Render and encode a conversation, and find how its answer begins. ``loses_end``: the end may be cut off."""
        if pooling is not None and (instruction := self.embedding_prompts.find_instruction(pooling)):
            # vLLM's form: the prompt that stands before a text is the system message of a conversation
            prompt = msgspec.structs.replace(prompt, messages=[Message("system", instruction), *prompt.messages])
        rendered = self.render_chat(prompt, media)
        special = prompt.add_special_tokens and not has_own_bos(rendered.media)
        ids = prompt.preceding_ids + encode(rendered.encoder, rendered.encodable, special)
        ids, placed = self._place_media(ids, rendered.media)
        if pooling is not None:
            return PreparedPrompt(ids, media=placed)
        # The start of the answer depends on the end of the text that the model reads.
        text = self.tokenizer.decode(ids, skip_special=False) if loses_end else rendered.template_text
        return self._with_answer_form(prompt, ids, text, placed)

    def _prepare_rendered_chat(self, prompt: ChatPrompt, ids: list[int]) -> PreparedPrompt:
        """Find how the answer to a conversation begins that has been rendered elsewhere."""
        return self._with_answer_form(prompt, ids, self._decode_end(ids), [])

    def _with_answer_form(
        self, prompt: ChatPrompt, ids: list[int], text: str, media: list[MediaItem]
    ) -> PreparedPrompt:
        """Return the prompt with the form of its answer. ``text``: that the model reads, or its end."""
        markup = answer_grammar.answer_markup(self.markup, prompt)
        thinking = starts_in_reasoning(markup, text, prompt.continue_final)
        tools = RequestTools(answer_grammar.callable_tools(prompt))
        single_call = not prompt.parallel_calls or prompt.forced_tool is not None
        return PreparedPrompt(ids, markup, thinking, tools, single_call, media=media)

    def apply_embedding_prompt(self, prompt: TextPrompt, pooling: PoolingOptions) -> TextPrompt:
        """Return a text to embed with the model's own prompt before it and its media. Raises UnknownPromptName."""

        def add_prompt(text: str) -> str:
            return self.embedding_prompts.apply_prompt(text, pooling)

        media = [
            msgspec.structs.replace(placed, position=len(add_prompt(prompt.text[: placed.position])))
            for placed in prompt.media
        ]
        return msgspec.structs.replace(prompt, text=add_prompt(prompt.text), media=media)

    def _prepare_pair(
        self, pair: TextPair, encode: Callable[[str, bool], list[int]], max_tokens: int | None, kept_side: KeptSide
    ) -> PreparedPrompt:
        """Encode two texts as the model reads them together. Special tokens count towards ``max_tokens``."""
        first, second = (encode(self._limit_text(text), False) for text in (pair.first, pair.second))
        frame = self.pair_frames[pair.first.add_special_tokens]
        if max_tokens is not None:
            first, second = text_pair.cut_pair(first, second, max(0, max_tokens - frame.size), kept_side)
        ids, second_text_start = frame.join_texts(first, second)
        return PreparedPrompt(ids, second_text_start=second_text_start)

    def _render_pair(self, pair: TextPair, encode: EncodeText, max_tokens: int | None) -> PreparedPrompt:
        """Render two texts by the chat template. Beyond ``max_tokens`` in all, the second one loses its end."""
        first, second = self._limit_text(pair.first), self._limit_text(pair.second)
        ids = self._encode_rendered_pair(first, second, encode)
        if max_tokens is not None and len(ids) > max_tokens:
            kept_count = len(self.tokenizer.encode(second, add_special_tokens=False)) - (len(ids) - max_tokens)
            second = self._first_tokens(second, kept_count) if kept_count > 0 else ""
            ids = self._encode_rendered_pair(first, second, encode)[-max_tokens:]
        return PreparedPrompt(ids)

    def _encode_rendered_pair(self, first: str, second: str, encode: EncodeText) -> list[int]:
        rendered = self.render_chat(ChatPrompt([Message("query", first), Message("document", second)]))
        return encode(rendered.encoder, rendered.encodable, False)

    @cached_property
    def has_pair_template(self) -> bool:
        """Whether the chat template writes the two texts of a pair, as messages of the roles query and document."""
        source = self.template.sources.get("default", "")
        return all(role.search(source) for role in PAIR_ROLES)

    @cached_property
    def pair_frames(self) -> dict[bool, text_pair.PairFrame]:
        """How the tokenizer joins two texts, with (True) and without its special tokens."""
        return {special: text_pair.read_pair_frame(self.tokenizer.backend, special) for special in (True, False)}

    @cached_property
    def fill_layout(self) -> Sequence[str] | None:
        """How the model reads a text with a gap, None if it was not trained for that."""
        return find_fill_layout(self.tokenizer.marks)

    @cached_property
    def abilities(self) -> frozenset[ModelAbility]:
        """The abilities that follow from the chat template and the tokenizer."""
        abilities: set[ModelAbility] = set()
        if self.template:
            abilities.add("chat")
        if self.markup.call_forms or "tools" in self.template.all_sources:
            abilities.add("tools")
        if self.markup.reasoning_marks is not None:
            abilities.add("thinking")
        if self.fill_layout is not None:
            abilities.add("insert")
        if "documents" in self.template.variables:
            abilities.add("documents")
        if "safety_mode" in self.template.variables:
            abilities.add("safety_mode")
        return frozenset(abilities)

    @cached_property
    def placeholder_ids(self) -> frozenset[int]:
        """The tokens that stand for embeddings of media."""
        token_ids = (self.tokenizer.find_token(marks.placeholder) for marks in self.media_marks.values())
        return frozenset(token_id for token_id in token_ids if token_id is not None)

    def _begin_after_marks(self, token_ids: list[int], media: Sequence[ProcessedMedia]) -> list[int]:
        return begin_after_marks(token_ids, media, self.tokenizer.find_token, self.tokenizer.names.get("bos_token", ""))

    def _place_media(self, token_ids: list[int], media: Sequence[ProcessedMedia]) -> tuple[list[int], list[MediaItem]]:
        """Return the tokens with those that lead the prompt, and where the items' embeddings belong. Raises
        InvalidValue if the prompt has other placeholders than theirs, or kinds of media that the model does not read
        together.

        A prompt without media may have placeholder tokens if a client wrote them: they are read as plain tokens.
        """
        kinds = list(dict.fromkeys(item.kind for item in media))
        if self.keeps_kinds_apart and len(kinds) > 1:
            names = " and ".join(KIND_NAMES[kind] for kind in kinds)
            raise InvalidValue(
                f"The prompt has {names}, but this model reads one kind of media at a time.", field="prompt"
            )
        if any(item.leads_prompt for item in media):
            return place_leading_items(token_ids, media, self.tokenizer.find_token)
        return token_ids, find_media_items(token_ids, media, self.tokenizer.find_token) if media else []

    def _lead_with_media(
        self, token_ids: list[int], spans: list[tuple[int, int]], media: Sequence[ProcessedMedia], *, is_plain: bool
    ) -> tuple[list[int], list[tuple[int, int]]]:
        """Return the tokens of a prompt with those of the items that lead it, and their spans, if there are any.

        ``is_plain``: the prompt is a plain text. Raises InvalidValue as ``_place_media`` does.
        """
        if is_plain:
            begun = self._begin_after_marks(token_ids, media)
            if begun != token_ids and spans:
                place = begun.index(token_ids[0])
                spans = [*spans[1 : place + 1], spans[0], *spans[place + 1 :]]
            token_ids = begun
        placed_ids, _ = self._place_media(token_ids, media)
        lead = len(placed_ids) - len(token_ids)
        return placed_ids, [(0, 0)] * lead + spans if spans else []

    def _write_gap(self, prompt: TextPrompt) -> str:
        """Return the text of a prompt with a suffix. Raises Unsupported."""
        if self.fill_layout is None:
            raise Unsupported("The model has no marks for text between two others.", field="suffix")
        return write_gap(self.fill_layout, prompt.text, prompt.suffix)

    def _limit_text(self, text: TextPrompt) -> str:
        """Return a text, or its beginning if it has more than its own ``max_tokens``."""
        return text.text if text.max_tokens is None else self._first_tokens(text.text, text.max_tokens)

    def _first_tokens(self, text: str, count: int) -> str:
        """Return the start of a text that has at most ``count`` tokens."""
        while True:
            _, spans = self.tokenizer.encode_with_offsets(text, add_special_tokens=False, stop_after=count)
            if len(spans) <= count:
                return text
            # The shorter text may be divided into more tokens, so it is read again.
            text = text[: min(spans[count - 1][1], spans[count][0], len(text) - 1)]

    def prepare_prediction(self, text: str, limit: int) -> PredictedTokens | None:
        """Encode a predicted output, at most ``limit`` tokens of it. None for an empty text."""
        if not text:
            return None
        return PredictedTokens(self.tokenizer.encode(text, add_special_tokens=False, stop_after=limit)[:limit])

    def render_chat(self, chat: ChatPrompt, media: Sequence[ProcessedMedia] = ()) -> RenderedChat:
        """Render a conversation as the model reads it. ``media``: its items, in order. Raises BadRequest."""
        if chat.rendered:
            return self._read_rendered(chat, media)
        if _must_call(chat) and chat.tools and not self.markup.call_forms and "tools" not in self.template.all_sources:
            chat = answer_grammar.describe_tools(chat)
        thinking = chat.options.get("enable_thinking") if chat.thinking is None else chat.thinking
        options = reasoning_options(self.template.variables, chat.options, thinking, chat.reasoning_effort)
        chat = msgspec.structs.replace(chat, options=options)
        if self.template_encoder is not None:
            return self._render_for_encoder(chat, self.template_encoder, media)
        text, media = replace_marks(self.template.render_conversation(chat), media, template_marks(self.media_marks))
        return RenderedChat(text, text, text, self.tokenizer, media)

    def _read_rendered(self, chat: ChatPrompt, media: Sequence[ProcessedMedia]) -> RenderedChat:
        """Return a conversation that is rendered already, with its media."""
        (message,) = chat.messages
        text, media = insert_replacements(message.content or "", message.media, media, self.media_marks)
        return RenderedChat(text, text, text, self.tokenizer, media)

    def _render_for_encoder(
        self, chat: ChatPrompt, encoder: TemplateEncoder, media: Sequence[ProcessedMedia]
    ) -> RenderedChat:
        """Render, and let only the template's special tokens, and those of replacements, be special."""
        client_tokens = ClientSpecialTokens(encoder, self.template.sources.values())
        try:
            hidden_text = self.template.render_conversation(chat, client_tokens.hide_tokens)
        except BadRequest as error:
            error.message = client_tokens.reveal_tokens(error.message)
            raise
        hidden_text, media = replace_marks(hidden_text, media, template_marks(self.media_marks))
        text = client_tokens.reveal_tokens(hidden_text)
        if not client_tokens.appear_in(text, hidden_text):
            return RenderedChat(text, hidden_text, text, self.tokenizer, media)
        encodable = client_tokens.reveal_tokens(encoder.write_aliases(hidden_text))
        return RenderedChat(text, hidden_text, encodable, encoder, media)

    def compile_answer_grammar(self, prompt: Prompt, grammar: Grammar | None) -> str:
        """Compile the requested format and the tools to the grammar that the engine reads; "" if the answer is free.

        Takes up to seconds, and interferes with other threads: servers have grammar workers do this
        (``serving/workers/grammar_workers.py``). Raises InvalidValue.
        """
        return self.answer_compiler.compile_answer(prompt, grammar)

    @cached_property
    def compiler_setup(self) -> bytes:
        """Everything that a grammar worker must know of the model, encoded."""
        tokenizer = self.tokenizer
        setup = CompilerSetup(tokenizer.marks, tokenizer.vocab_size, tokenizer.decodes_by_token, self.markup)
        return msgspec.msgpack.encode(setup)

    def word_token_ids(self, words: Sequence[str]) -> list[list[int]]:
        """Return the token ids of each word at the start of a text and after a blank, if these differ."""
        spellings: list[list[int]] = []
        for word in words:
            text = word.lstrip()
            for spelling in (text, f" {text}"):
                ids = self.tokenizer.encode(spelling, add_special_tokens=False)
                if ids and ids not in spellings[-1:]:
                    spellings.append(ids)
        return spellings

    def reasoning_limit(self, prepared: PreparedPrompt, budget: int) -> ReasoningLimit | None:
        """Return a limit of ``budget`` tokens for the reasoning, or None if the model has no reasoning marks."""
        reasoning_marks = prepared.markup.reasoning_marks
        if reasoning_marks is None:
            return None
        close, bare = (
            self.tokenizer.encode(f"{line}{reasoning_marks[1]}\n\n", add_special_tokens=False) for line in ("\n", "")
        )
        line = len(close) - len(bare)  # tokens of the line break before the mark; they count as reasoning
        if line > budget:
            return ReasoningLimit(*reasoning_marks, prepared.starts_in_reasoning, budget, bare)
        return ReasoningLimit(*reasoning_marks, prepared.starts_in_reasoning, budget - line, close)

    def wrap_with_reasoning(self, grammar: str, prepared: PreparedPrompt, is_plain: bool) -> str:
        """Return a compiled grammar for the whole answer, with reasoning before it if the answer may have some.

        With ``is_plain`` the answer is not parsed into parts, so only reasoning that the prompt has opened is allowed.
        """
        reasoning_marks = prepared.markup.reasoning_marks
        if (
            not grammar
            or reasoning_marks is None
            or not (prepared.starts_in_reasoning or (not is_plain and self._may_reason(prepared, reasoning_marks)))
        ):
            return grammar
        return self.grammar_compiler.allow_reasoning_before(grammar, reasoning_marks, prepared.starts_in_reasoning)

    def _may_reason(self, prepared: PreparedPrompt, reasoning_marks: tuple[str, str]) -> bool:
        """Whether the answer may begin with reasoning: it may not if the prompt has closed it already."""
        return not self._decode_end(prepared.token_ids).rstrip().endswith(reasoning_marks[1])

    def _decode_end(self, token_ids: list[int]) -> str:
        return self.tokenizer.decode(token_ids[-TAIL_TOKENS:], skip_special=False)

    def tokenize_prompt(
        self,
        prompt: Prompt,
        with_spans: bool = True,
        max_tokens: int | None = None,
        media: Sequence[ProcessedMedia] = (),
    ) -> tuple[str, list[int], list[tuple[int, int]]]:
        """Return a prompt's text (rendered, for a conversation), its token ids, and each token's character span.

        ``with_spans``: otherwise the spans are left out. Tokens of images that lead the prompt have empty ones.
        ``media``: the items of the prompt. Raises InvalidValue if there are more than ``max_tokens`` tokens.
        """
        if isinstance(prompt, TextPair | JoinedPrompt):
            ids = self.prepare_prompt(prompt).token_ids
            return "", ids, [(0, 0)] * len(ids)
        if isinstance(prompt, TokensPrompt):
            return "", prompt.ids, [(0, 0)] * len(prompt.ids)
        encoder: TextEncoder = self.tokenizer
        text = encodable = ""
        if isinstance(prompt, ChatPrompt):
            rendered = self.render_chat(prompt, media)
            text, encodable, encoder, media = rendered.text, rendered.encodable, rendered.encoder, rendered.media
        else:
            text, media = insert_replacements(prompt.text, prompt.media, media, self.media_marks)
            encodable = text
        special = prompt.add_special_tokens and not has_own_bos(media)
        if with_spans:
            ids, spans = encoder.encode_with_offsets(encodable, special, max_tokens)
        else:
            ids, spans = encoder.encode(encodable, special, max_tokens), []
        if max_tokens is not None and len(ids) > max_tokens:
            raise InvalidValue(f"The text has over {max_tokens} tokens, more than are counted at once.", field="prompt")
        if any(item.leads_prompt for item in media):
            ids, spans = self._lead_with_media(ids, spans, media, is_plain=not isinstance(prompt, ChatPrompt))
        return text, ids, spans


def _must_call(prompt: Prompt) -> bool:
    """Whether the answer must consist of calls, for any requested format."""
    return isinstance(prompt, ChatPrompt) and prompt.tool_choice == "required"


def _cut_ids(ids: list[int], max_tokens: int | None, kept_side: KeptSide) -> list[int]:
    """Return at most ``max_tokens`` token ids, those at ``kept_side``."""
    if max_tokens is None:
        return ids
    return ids[:max_tokens] if kept_side == "head" else ids[-max_tokens:]


def _as_user_turn(prompt: TextPrompt) -> ChatPrompt:
    return ChatPrompt([Message("user", prompt.text, media=prompt.media)])
