"""Lark grammars of custom tools: which texts they accept, inside JSON and outside, and what is refused."""

from __future__ import annotations

import functools
import json

import pytest
from llguidance import LLMatcher, LLTokenizer

from parley.demo import model_folder
from parley.text.grammar.custom_lark import write_custom_lark
from parley.text.grammar.grammar_refused import GrammarRefused
from parley.text.tokens.tokenizer import Tokenizer

PATCH = r"""
start: begin_patch hunk+ end_patch
begin_patch: "*** Begin Patch" LF
end_patch: "*** End Patch" LF?

hunk: add_hunk | delete_hunk | update_hunk
add_hunk: "*** Add File: " filename LF add_line+
delete_hunk: "*** Delete File: " filename LF
update_hunk: "*** Update File: " filename LF change_move? change?

filename: /(.+)/
add_line: "+" /(.*)/ LF -> line

change_move: "*** Move to: " filename LF
change: (change_context | change_line)+ eof_line?
change_context: ("@@" | "@@ " /(.+)/) LF
change_line: ("+" | "-" | " ") /(.*)/ LF
eof_line: "*** End of File" LF

%import common.LF
"""  # of a coding agent
SUM = """
?start: sum
sum.2: item (("+" | "-") item)*
!item: INT -> number
     | "(" sum ")" | WORD | 'x'
WORD: "if"i | /\\w{2,3}(?i:b)/ | "0".."1" "end"
%import common (INT, WS)
%ignore WS
""".replace("| 'x'", '| /[^\\W\\d"]\\S/s')


@functools.cache
def demo_vocabulary() -> tuple[Tokenizer, LLTokenizer]:
    tokenizer = Tokenizer.from_folder(model_folder())
    return tokenizer, LLTokenizer(tokenizer.backend.to_str(), eos_token=sorted(tokenizer.eos_ids))


@functools.cache
def write_once(definition: str, end: str, *, in_json: bool) -> str:
    return f"start: text\ntext: {write_custom_lark(definition, end, in_json=in_json)}"


def accepts(definition: str, text: str, *, in_json: bool) -> bool:
    end = '"}' if in_json else "</call>"
    tokenizer, vocabulary = demo_vocabulary()
    matcher = LLMatcher(vocabulary, write_once(definition, end, in_json=in_json))
    assert not matcher.is_error(), matcher.get_error()
    written = (json.dumps(text, ensure_ascii=False)[1:-1] if in_json else text) + end
    return matcher.consume_tokens(tokenizer.encode(written, add_special_tokens=False)) and matcher.is_accepting()


@pytest.mark.parametrize("in_json", [True, False])
def test_text_follows_the_grammar(in_json: bool) -> None:
    patch = '*** Begin Patch\n*** Add File: a "b".txt\n+tab\t\\ and é\n+\n*** End Patch\n'
    for definition, text, is_accepted in (
        (PATCH, patch, True),
        (PATCH, patch.replace("+\n", "*** Delete File: /x\n*** Update File: y\n@@ z\n-old\n+new\n"), True),
        (PATCH, patch.replace("Begin", "Start"), False),
        (PATCH, patch.replace("+tab", "tab"), False),
        (PATCH, patch + "more", False),
        (SUM, "1+(20 -\n IF)- 0end+ééB", True),
        (SUM, "1+", False),
        (SUM, "(1", False),
        (SUM, "1x", False),
    ):
        assert accepts(definition, text, in_json=in_json) == is_accepted, text


@pytest.mark.parametrize(
    ("definition", "reason"),
    [
        ("first: /a/", "no rule start"),
        ("start: other", "no rule other"),
        ("start: <token>", "'<token>' in line 1"),
        ("start: %json {}", "'%json' in line 1"),
        ("start: A\n%import python.A", "'%import' in line 2"),
        ("start: A\n%import common.A", r"common\.A is not supported"),
        ("start: /a(?=b)/", "assertions"),
        ("start: /(a)\\1/", "backreferences"),
        ("start: /[/", "unterminated character set"),
        ('start: "\\x"', "escape that JSON does not know"),
        ('start: "\\u0001"', "control characters"),
        ('start: "a" ~ 3..1', "maximum of a count"),
        ('start: "a" ~ 9999999', "too large"),
        ('start: ("a"', "ends too early"),
        ('start: "b".."a"', "line 1"),
        ("start: " + '"a" ' * 9000, "characters"),
    ],
)
def test_refuses_what_cannot_be_followed(definition: str, reason: str) -> None:
    with pytest.raises(GrammarRefused, match=reason):
        write_custom_lark(definition, "", in_json=True)
