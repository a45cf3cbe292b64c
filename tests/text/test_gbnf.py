"""GBNF grammars allow exactly the texts they describe, even where their parts overlap."""

from __future__ import annotations

import llguidance
import pytest
from support import tiny_tokenizers

from parley.errors import InvalidValue
from parley.text.grammar.compiler import GrammarCompiler
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
CHESS = r"""
root  ::= ([1-9] [0-9]? ". " move " " move "\n")+
move  ::= (pawn | piece | "O-O" "-O"?) [+#]?
piece ::= [NBKQR] [a-h]? [1-8]? "x"? [a-h] [1-8]
pawn  ::= ([a-h] "x")? [a-h] [1-8] ("=" [NBRQ])?
"""
LIST = r"""
root ::= ("- " [^\r\n\x0b\u2028]+ "\n")+
"""
CODE = r"""
root  ::= ("int" | "float") gap name "(" (name ("," gap? name)*)? "){" line* "}"
line  ::= name gap "=" gap sum ";" | "return" gap sum ";" | "if(" sum ")" body ("else" body)? | note
body  ::= "{" line* "}"
sum   ::= value ([-+] value)*
value ::= name | [0-9]+ | name "(" (sum ("," gap sum)*)? ")" | "(" sum ")"
name  ::= [a-zA-Z_] [a-zA-Z_0-9]*
note  ::= "//" [^\n]* "\n" | "/*" ([^*] | "*" [^/])* "*/"
gap   ::= [ \n]+
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
    return GrammarCompiler(tiny_tokenizers.byte_level())


@pytest.mark.parametrize(
    ("grammar", "good", "bad"),
    [
        (LINES, ["a=1\n", "a +1*(b)=3\n", "a1 = b\nc=2\n", "a=1 \n\t\n"], ["a=1", "=1\n", "a+=1\n"]),
        (OBJECT, ['{"a":["\\u00e9","b\\n"],"é":{}}', '"🐲"', "[]"], ["{", '"\n"', '"\\x"', '{"a"}']),
        (CHESS, ["1. e4 e5\n2. Nf3 O-O\n", "9. R1a2 exd8=Q+\n"], ["1. e4\n", "1. e4 e9\n"]),
        (LIST, ["- a\n- b, c\n"], ["- a", "a\n", "- \n"]),
        (CODE, ["int f(a, b){if(a){return f(a-1, b);}else{}}", "int f(){// x\n/* y */ifs = 1+(2);}"],
         ["int f(){", "intf(){}", "int f(){/* x }"]),
        (SELECT, ["SELECT a, ab FROM t10", "SELECT ab FROM t1 WHERE b = 12"], ["SELECT a,b FROM t1", "SELECT c"]),
        ("root ::= word word\nword ::= [a-z]+", ["ab", "abc"], ["a", ""]),
        ('root ::= pair{2,3}\npair ::= "a" | [bc]{4,}', ["aa", "abcbc", "bcbcbcbcbc"], ["a", "aaaa", "bcb"]),
        ('root ::= [a-z]* "z"', ["z", "az", "zz", "abzz"], ["a", ""]),
        ('root ::= "a" root "b" | ""', ["", "ab", "aaabbb"], ["aab", "ba"]),
        ('root ::= root "a" | "b"', ["b", "baa"], ["a", ""]),
        ('root ::= "a" | "ab" | [a-c] "d"', ["a", "ab", "ad", "cd"], ["b", "abd"]),
        ('root ::= ("a" | "ab") root? "c"', ["ac", "abc", "aabcc", "abacc"], ["a", "abcc"]),
        ('root ::= ("ab" root)? "abab"', ["abab", "ab" * 5], ["ab", "ab" * 4]),
        ('root ::= "a" "é" root | "añ" root | "."', [".", "aéañ."], ["añaé", "a."]),
        ('root ::= [é-ñ] | [é-ñ] ("" | "")', ["é"], ["éé"]),
        ("root ::= [^a-c]", ["d", "\n", "🐲"], ["a", "dd"]),
        ("root ::= .", ["a", "\n", "é"], ["", "ab"]),
        (r"root ::= [a&&b] [+--] [a~~b] [\]\[^/-] [\-]", ["&,~^-", "a-b]-", "b+a/-"], ["c+a/-", "a*a/-"]),
        (r'root ::= [\u0041-\u0043] "\u00e9\x42\U0001F402\t\"\\/"', ['Aé' 'B\U0001F402\t"\\/'], ["A"]),
        ('root ::= "a"{2} "b"{,2} "c"{1,} "d"{0}', ["aac", "aabbcc"], ["ac", "aabbb", "aacd"]),
        ('root ::= "" | x-Y # either\nx-Y ::= x_y\nx_y ::= "a"\nX-y ::= "b"\nstart ::= "c"', ["", "a"], ["b", "c"]),
        ('root ::= ("a"\n | "b")\n\n', ["a", "b"], ["ab"]),
        ("root ::= r0\n" + "".join(f"r{n} ::= r{n + 1}\n" for n in range(1800)) + 'r1800 ::= "a"', ["a"], ["b"]),
    ],
)  # fmt: skip
def test_gbnf_allows_exactly_its_texts(compiler, grammar, good, bad):
    initial_matcher = llguidance.LLMatcher(BYTES, compiler.compile_grammar(Grammar("ebnf", grammar)), log_level=0)

    def fits(text: str) -> bool:
        matcher, read = initial_matcher.deep_copy(), list(text.encode())
        return matcher.try_consume_tokens(read) == len(read) and matcher.is_accepting()

    assert [text for text in good if not fits(text)] == []
    assert [text for text in bad if fits(text)] == []


@pytest.mark.parametrize(
    ("grammar", "sentence"),
    [
        ('other ::= "a"', "no rule root"), ("root ::= other", "no rule other"), ("root = 3", "name ::="),
        ('root ::= "a', '" is missing in line 1'), ("root ::= [a", "] is missing"), (r"root ::= [\d]", "escape"),
        ('root ::=\n("a"', ") is missing in line 2"), ('root ::= "a" )', "before ')'"), (r'root ::= "\q"', "escape"),
        ("root ::= *", "before '*'"), ("root ::= [b-a]", "range"), ("root ::= []", "class"), ("root ::= <5>", "'<5>'"),
        ('root ::= "a"{2,1}', "count"), ('root ::= "a"{}', "count"), ('root ::= "a"{%s}' % ("9" * 5000), "too large"),
        (r'root ::= "\ud800"', "character"), ("root ::= root", "no text"), ("root ::= " + "(" * 5000, "nested"),
    ],
)  # fmt: skip
def test_invalid_gbnf_is_refused_with_its_place(compiler, grammar, sentence):
    with pytest.raises(InvalidValue) as caught:
        compiler.compile_grammar(Grammar("ebnf", grammar, field="guided_grammar"))
    assert sentence in caught.value.message and caught.value.field == "guided_grammar"


@pytest.mark.parametrize(
    "grammar",
    [
        "root ::= " + " | ".join(f'"{n}"' for n in range(100_000)), "root ::= " + "(" * 400 + '"a"' + ")" * 400,
        "root ::= " + '("a" ' * 60 + "root?" + ")" * 60,
        "".join(f"r{n} ::= r{n + 1} r{n + 1}\n" for n in range(40)) + 'r40 ::= "a"\nroot ::= r0',
        'root ::= "x" root | ' + " | ".join(f"[{chr(97 + n % 26)}-{chr(0x4E00 + n)}] root?" for n in range(1500)),
    ],
)  # fmt: skip
def test_hostile_gbnf_is_refused(compiler, grammar):
    with pytest.raises(InvalidValue, match=r"nested too deeply|takes too long|too large|at most 32768") as caught:
        compiler.compile_grammar(Grammar("ebnf", grammar))
    assert len(caught.value.message) < 200


@pytest.mark.parametrize(
    "grammar",
    [
        'root ::= ("")* "a"*', 'root ::= (("")* "a"?)* ("")+', 'root ::= (root* "a"?)*', 'root ::= root "a" | ""',
        'root ::= one "a"* | ""\none ::= two\ntwo ::= one | ""', 'root ::= "a"{,1000000}',
        "root ::= " + "(" * 5 + '""' + "){16}" * 5 + ' "a" root | "a"',  # a million empty repetitions
    ],
)  # fmt: skip
def test_gbnf_empty_loops_and_large_counts_do_not_block(compiler, grammar):
    matcher = llguidance.LLMatcher(BYTES, compiler.compile_grammar(Grammar("ebnf", grammar)), log_level=0)
    assert matcher.try_consume_tokens(list(b"aaaa")) == 4 and matcher.is_accepting()
