"""GBNF: what a grammar lets through is what it says, where the parts of it run into one another as well."""

from __future__ import annotations

import llguidance
import pytest
import tiny_tokenizers

from parley.errors import Invalid
from parley.text.grammar import Compiler
from parley.types import Grammar

BYTES = llguidance.LLTokenizer("byte")
LINES = r"""
root  ::= (sum "=" gap part "\n")+
sum   ::= part ([-+*/] part)*
part  ::= word | digits | "(" gap sum ")" gap
word  ::= [a-z] [a-z0-9_]* gap
digits ::= [0-9]+ gap
gap   ::= [ \t\n]*  # takes line breaks, one of which has to follow
"""
OBJECT = r"""
root ::= value
value ::= "{" (text ":" value ("," text ":" value)*)? "}" | "[" (value ("," value)*)? "]" | text | "true"
text ::= "\"" ([^"\\\x00-\x1F] | "\\" (["\\bfnrt] | "u" [0-9a-fA-F]{4}))* "\""
"""
SELECT = """root ::=
  "SELECT " names " FROM " table (" WHERE " name " = " [0-9]+)?
names ::= name (", " name)*
name ::= "a" | "ab" | "b"
table ::=
  "t1"
  | "t10"
"""


@pytest.fixture(scope="module")
def compiler():
    return Compiler(tiny_tokenizers.byte_level())


@pytest.mark.parametrize(
    ("grammar", "good", "bad"),
    [
        (LINES, ["a=1\n", "a +1*(b)=3\n", "a1 = b\nc=2\n", "a=1 \n\t\n"], ["a=1", "=1\n", "a+=1\n"]),
        (OBJECT, ['{"a":["\\u00e9","b\\n"],"é":{}}', '"🐲"', "[]"], ["{", '"\n"', '"\\x"', '{"a"}']),
        (SELECT, ["SELECT a, ab FROM t10", "SELECT ab FROM t1 WHERE b = 12"], ["SELECT a,b FROM t1", "SELECT c"]),
        ("root ::= word word\nword ::= [a-z]+", ["ab", "abc"], ["a", ""]),
        ('root ::= pair{2,3}\npair ::= "a" | [bc]{4,}', ["aa", "abcbc", "bcbcbcbcbc"], ["a", "aaaa", "bcb"]),
        ('root ::= [a-z]* "z"', ["z", "az", "zz", "abzz"], ["a", ""]),
        ('root ::= "a" root "b" | ""', ["", "ab", "aaabbb"], ["aab", "ba"]),
        ('root ::= root "a" | "b"', ["b", "baa"], ["a", ""]),
        ('root ::= "a" | "ab" | [a-c] "d"', ["a", "ab", "ad", "cd"], ["b", "abd"]),
        ('root ::= ("a" | "ab") root? "c"', ["ac", "abc", "aabcc", "abacc"], ["a", "abcc"]),
        ("root ::= [^a-c]", ["d", "\n", "🐲"], ["a", "dd"]),
        ("root ::= .", ["a", "\n", "é"], ["", "ab"]),
        (r"root ::= [a&&b] [+--] [a~~b] [\]\[^/-] [\-]", ["&,~^-", "a-b]-", "b+a/-"], ["c+a/-", "a*a/-"]),
        (r'root ::= [\u0041-\u0043] "\u00e9\x42\U0001F402\t\"\\/"', ['Aé' 'B\U0001F402\t"\\/'], ["A"]),
        ('root ::= "a"{2} "b"{,2} "c"{1,} "d"{0}', ["aac", "aabbcc"], ["ac", "aabbb", "aacd"]),
        ('root ::= "" | x-Y # either\nx-Y ::= x_y\nx_y ::= "a"\nX-y ::= "b"\nstart ::= "c"', ["", "a"], ["b", "c"]),
        ('root ::= ("a"\n | "b")\n\n', ["a", "b"], ["ab"]),
    ],
)  # fmt: skip
def test_what_is_let_through(compiler, grammar, good, bad):
    beginning = llguidance.LLMatcher(BYTES, compiler.compile(Grammar("ebnf", grammar)), log_level=0)

    def fits(text: str) -> bool:
        matcher, read = beginning.deep_copy(), list(text.encode())
        return matcher.try_consume_tokens(read) == len(read) and matcher.is_accepting()

    assert [text for text in good if not fits(text)] == []
    assert [text for text in bad if fits(text)] == []


@pytest.mark.parametrize(
    ("grammar", "told"),
    [
        ('other ::= "a"', "no rule root"), ("root ::= other", "no rule other"), ("root = 3", "name ::="),
        ('root ::= "a', '" is missing in line 1'), ("root ::= [a", "] is missing"), (r"root ::= [\d]", "escape"),
        ('root ::=\n("a"', ") is missing in line 2"), ('root ::= "a" )', "before ')'"), (r'root ::= "\q"', "escape"),
        ("root ::= *", "before '*'"), ("root ::= [b-a]", "range"), ("root ::= []", "class"), ("root ::= <5>", "'<5>'"),
        ('root ::= "a"{2,1}', "count"), ('root ::= "a"{}', "count"), ('root ::= "a"{99999999999}', "too large"),
        (r'root ::= "\ud800"', "character"), ("root ::= root", "no text"), ("root ::= " + "(" * 5000, "nested"),
        ("root ::= r0\n" + "".join(f"r{n} ::= r{n + 1}\n" for n in range(1800)) + 'r1800 ::= "a"', "too long"),
    ],
)  # fmt: skip
def test_what_is_refused_is_told_with_its_place(compiler, grammar, told):
    with pytest.raises(Invalid) as caught:
        compiler.compile(Grammar("ebnf", grammar, field="guided_grammar"))
    assert told in caught.value.message and caught.value.field == "guided_grammar"
