"""Ollama's ``template``: Go's templates to the byte, their errors, their limits, and the prompts that they write."""

import dataclasses
import json
from typing import Any

import pytest
from hypothesis import given, settings
from support.odd_bodies import go_templates

from parley.dialects.ollama import generate
from parley.dialects.ollama.api_rules import LENIENT_OLLAMA_RULES, STRICT_OLLAMA_RULES, OllamaRules
from parley.dialects.ollama.go_template.execution import execute_template
from parley.dialects.ollama.go_template.functions import FUNCTION_NAMES
from parley.dialects.ollama.go_template.parser import parse_template
from parley.dialects.ollama.template import TemplateInput, render_prompt
from parley.dialects.request_context import RequestContext
from parley.errors import InvalidValue, ParleyError
from parley.types import ChatPrompt, EncodedMedia, Media, Message, PlacedMedia

DATA = {
    "System": "sys",
    "Prompt": "hé<llo>",
    "List": [1, 2, 3],
    "Map": {"b": 2, "a": "x"},
    "Float": 1.5,
    "True": True,
    "Zero": 0,
    "Empty": "",
    "Nest": [[1], ["a", "b"]],
}
# The results are Go's. They were compared with another implementation of Go's templates, apart from nil as an argument.
GOLDEN = {
    # trim markers and comments
    "a {{- .System -}} b": "asysb",
    "a \n\t{{- /* c }} */ -}}\r\n b": "ab",
    "{{- .System }} {{- `x` }} {{ -3 }} {{3 -}} z": "sysx -3 3z",
    "{{-3}}": "-3",
    '{{ "}}" }}': "}}",
    # branches
    "{{if .True}}y{{else}}n{{end}}{{if .Zero}}y{{else if .Empty}}m{{else}}n{{end}}": "yn",
    "{{with .System}}{{.}}{{else}}no{{end}}{{with .Empty}}a{{else with .True}}b{{.}}{{end}}": "sysbtrue",
    "{{if $x := .Zero}}{{$x}}{{else}}{{$x}}!{{end}}": "0!",
    # loops
    "{{range .List}}{{.}},{{end}}{{range .Empty2}}x{{else}}none{{end}}": "1,2,3,none",
    "{{range $i,$e := .List}}{{$i}}={{$e}} {{end}}{{range $e := .List}}{{$e}}{{end}}": "0=1 1=2 2=3 123",
    "{{range $k,$v := .Map}}{{$k}}={{$v}} {{end}}{{range 3}}{{.}}{{end}}": "a=x b=2 012",
    "{{range .List}}{{if eq . 2}}{{continue}}{{end}}{{.}}{{end}}": "13",
    "{{range .List}}{{if eq . 2}}{{break}}{{end}}{{.}}{{end}}": "1",
    "{{range .Nest}}[{{range .}}{{.}}{{$.System}}{{end}}]{{end}}": "[1sys][asysbsys]",
    # variables
    "{{$x := 1}}{{if true}}{{$x = 2}}{{end}}{{$x}}{{if true}}{{$x := 3}}{{$x}}{{end}}{{$x}}": "232",
    "{{$x := 1}}{{range .List}}{{$x = .}}{{end}}{{$x}}": "3",
    "{{with .Map}}{{.a}}{{$.System}}{{end}}": "xsys",
    # templates within a template
    '{{define "t"}}[{{.}}]{{end}}{{template "t" .System}}{{template "t"}}': "[sys][<no value>]",
    '{{block "b" .List}}{{len .}}{{end}}': "3",
    # pipelines and functions
    '{{.System | printf "%s-%s" "a"}} {{.List | len}} {{(index .Nest 1 | len)}}': "a-sys 3 2",
    "{{len .Prompt}} {{index .Prompt 0}} {{slice .Prompt 0 1}} {{slice .List 1 2}}": "8 104 h [2]",
    '{{index .Map "a"}} {{index .Map "z"}} {{index .Nest 1 0}} {{slice .List 1}}': "x <no value> a [2 3]",
    "{{.Missing}} {{.Map.z}}": "<no value> <no value>",
    '{{eq 1 2 1}} {{ne "a" "b"}} {{lt 1 2}} {{le 2 2}} {{gt "b" "a"}} {{ge 1.5 1.5}}': "true true true true true true",
    '{{and 1 0}} {{and 1 2}} {{or 0 "" "x"}} {{not 0}} {{or .True (index .List 99)}}': "0 2 x true true",
    "{{eq .Missing nil}} {{eq .System .Missing}} {{print .Missing}}": "true false <nil>",
    '{{print 1 2 "a" "b" 3 4}}|{{println 1 "a"}}|': "1 2ab3 4|1 a\n|",
    "{{json .Map}} {{json .Prompt}} {{json .List}}": '{"a":"x","b":2} "hé\\u003cllo\\u003e" [1,2,3]',
    # values
    "{{.List}} {{.Map}} {{.Float}} {{.True}} {{.Nest}}": "[1 2 3] map[a:x b:2] 1.5 true [[1] [a b]]",
    "{{1e3}} {{0x10}} {{'a'}} {{1e6}} {{123456789.0}} {{1e-7}} {{0.1}} {{1_000}} {{010}}": (
        "1000 16 97 1e+06 1.23456789e+08 1e-07 0.1 1000 8"
    ),
    '{{"a\\tb\\u00e9\\x41\\n"}}{{`raw\\n`}}': "a\tbéA\nraw\\n",
    '{{printf "%d %5d|%-5d|%05d %x %q %v %t %c %% %+d" 1 2 3 4 255 "é\\"" .List true 65 3}}': (
        '1     2|3    |00004 ff "é\\"" [1 2 3] true A % +3'
    ),
    '{{printf "%s" 3}} {{printf "%d" "x"}} {{printf "%d"}} {{printf "a" 1}}': (
        "%!s(int=3) %!d(string=x) %!d(MISSING) a%!(EXTRA int=1)"
    ),
    '{{printf "%f %g %e %.2f" 1.5 1.5 1.5 1.5}}': "1.500000 1.5 1.500000e+00 1.50",
    '{{printf "%5s|%.2s|%T" "ab" "abcd" 1}}': "   ab|ab|int",
}
FAULTS = {
    "a\n{{ foo }}": 'template: :2: function "foo" not defined',
    "{{ .A": "template: :1: unclosed action",
    "{{ if .A }}": "template: :1: unexpected EOF",
    "{{ end }}": "template: :1: unexpected {{end}}",
    "{{ if }}{{ end }}": "template: :1: missing value for if",
    "{{ $x }}": 'template: :1: undefined variable "$x"',
    "{{ $x = 1 }}": 'template: :1: undefined variable "$x"',
    "{{ 1 | 2 }}": "template: :1: non executable command in pipeline stage 2",
    '{{ "a }}': "template: :1: unterminated quoted string",
    "{{ 'ab' }}": "template: :1: bad constant 'ab'",
    "{{/* a": "template: :1: unclosed comment",
    "{{/* a */ b}}": "template: :1: comment ends before closing delimiter",
    "{{break}}": "template: :1: {{break}} outside {{range}}",
    '{{if 1}}{{define "x"}}{{end}}{{end}}': "template: :1: unexpected {{define}}",
    '{{.A"b"}}': 'template: :1: unexpected ""b"" in operand',
    "\n\n{{ .System.X }}": 'template: :3: executing "": can\'t evaluate field X in type string',
    "{{ .No.X }}": 'template: :1: executing "": nil pointer evaluating interface {}.X',
    '{{ template "x" }}': 'template: :1: executing "": template "x" not defined',
    "{{ index .List 5 }}": 'template: :1: executing "": error calling index: index out of range: 5',
    "{{ len 3 }}": 'template: :1: executing "": error calling len: len of type int',
    '{{ eq 1 "a" }}': 'template: :1: executing "": error calling eq: incompatible types for comparison',
    "{{ not }}": 'template: :1: executing "": wrong number of args for not: want 1 got 0',
    "{{ .System 1 }}": 'template: :1: executing "": can\'t give argument to a value that is not a function',
    "{{ nil }}": 'template: :1: executing "": nil is not a command',
    "{{range .System}}{{end}}": 'template: :1: executing "": range can\'t iterate over string',
}
HOSTILE = {
    "{{range 10000000}}{{end}}": "more than 20000 steps",
    "{{range 1000}}{{range 1000}}x{{end}}{{end}}": "more than 20000 steps",
    "{{$x := .Prompt}}{{range 100}}{{$x = print $x $x}}{{end}}": "more text than is allowed",
    "{{range 10000}}{{$.Prompt}}{{end}}": "more text than is allowed",
    "{{range 10000}}{{if len (json $.Messages)}}{{end}}{{end}}": "more text than is allowed",
    '{{define "a"}}{{template "a"}}{{end}}{{template "a"}}': "exceeded maximum template depth",
    "{{" + "(" * 5000 + "1" + ")" * 5000 + "}}": "at most 60 within each other",
    "{{if 1}}" * 4000 + "{{end}}" * 4000: "at most 60 within each other",
    "{{$a := 1}}" * 5000: "at most 100 variables",
    "x" * 70_000: "at most 65536 characters",
    "{{printf `" + "%256d" * 6000 + "`" + " 1" * 6000 + "}}": "more text than is allowed",
}
CONTEXT = RequestContext("0f", 1795331521, "fp", context_length=100, model_names=("m",), media_limits={"image": 2})
QWEN = "{{ if .System }}<|im_start|>system\n{{ .System }}<|im_end|>\n{{ end }}{{ if .Prompt }}<|im_start|>user\n"
QWEN += "{{ .Prompt }}<|im_end|>\n{{ end }}<|im_start|>assistant\n{{ .Response }}<|im_end|>\n"
MESSAGES = (
    "{{- range $i, $m := .Messages }}<{{ .Role }}>{{ .Content }}{{ if eq $i 1 }}!{{ end }}\n{{- end }}<assistant>"
)


@pytest.mark.parametrize(("source", "expected"), GOLDEN.items())
def test_go_template_writes_as_go_does(source, expected):
    assert execute_template(parse_template(source, FUNCTION_NAMES), DATA, 100) == expected


@pytest.mark.parametrize(("source", "message"), FAULTS.items())
def test_go_template_errors_name_the_line(source, message):
    with pytest.raises(InvalidValue) as caught:
        execute_template(parse_template(source, FUNCTION_NAMES), DATA, 100)
    assert (caught.value.message, caught.value.field) == (message, "template")


@pytest.mark.parametrize(("source", "reason"), HOSTILE.items(), ids=range(len(HOSTILE)))
def test_go_template_cannot_hang_or_fill_the_server(source, reason):
    with pytest.raises(InvalidValue, match=reason):
        render_prompt(source, TemplateInput("p" * 1000))


@settings(max_examples=200, deadline=None)
@given(go_templates)
def test_any_template_is_rendered_or_refused(source):
    try:
        assert isinstance(render_prompt(source, TemplateInput("p", "s"))[0], str)
    except InvalidValue as error:
        assert error.field == "template" and error.message.startswith("template: ")


# -- the prompts of requests


@pytest.mark.parametrize(
    ("source", "members", "expected"),
    [
        (
            QWEN,
            {"system": "S"},
            "<|im_start|>system\nS<|im_end|>\n<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n",
        ),
        ("{{ .Prompt }} A:", {}, "Hi A:"),  # the answer's place is the end
        ("{{ .Prompt }}{{ if .X }}{{ else }}[{{ .Response }}x]{{ end }}y", {}, "Hi["),
        ("{{ if .X }}{{ .Response }}a{{ else }}b{{ end }}c", {}, ""),
        (MESSAGES, {"system": "S"}, "<system>S<user>Hi!<assistant>"),
        ("{{ .System }}|{{ len .Messages }}", {"system": "S"}, "S|2"),
        ("{{ json (index .Messages 0) }}", {}, '{"role":"user","content":"Hi"}'),
        ("{{ .Prompt }}<FILL>{{ .Suffix }}{{ .Response }}!", {"suffix": "end"}, "Hi<FILL>end!"),
        ("{{ .Think }}{{ .IsThinkSet }}{{ .ThinkLevel }}{{ .Prompt }}", {}, "falsefalseHi"),
        ("{{ .Think }}{{ .IsThinkSet }}{{ .ThinkLevel }}", {"think": True, "think_level": "high"}, "truetruehigh"),
        ("{{ if .Tools }}{{ .Tools }}{{ end }}{{ .Prompt }}", {}, "Hi"),
    ],
)
def test_ollama_template_writes_the_prompt(source, members, expected):
    assert render_prompt(source, TemplateInput("Hi", **members)) == (expected, [])


def image(name: str) -> PlacedMedia:
    return PlacedMedia(0, Media("image", EncodedMedia("aGk="), name))


def test_marks_of_images_occur_in_no_text_of_the_request():
    """The texts may have so many brackets that trying them one by one would take too long."""
    brackets = "[" * 200_000
    text, placed = render_prompt("{{ .Prompt }}", TemplateInput(f"{brackets}img-0]", images=[image("images[0]")]))
    assert text == f"{brackets}img-0]" and placed == [placed_at(0, image("images[0]"))]


def test_ollama_template_places_images_before_the_prompt():
    images = [image("images[0]"), image("images[1]")]
    members = TemplateInput("[img-0]Hi", images=images)
    text, placed = render_prompt("<{{ .Prompt }}>{{ .Prompt }}", members)
    assert text == "<[img-0]Hi>[img-0]Hi"
    assert placed == [placed_at(1, images[0]), placed_at(1, images[1])]
    assert render_prompt("no prompt {{ .Response }}", members) == ("no prompt ", [])


def placed_at(position: int, placed: PlacedMedia) -> PlacedMedia:
    return PlacedMedia(position, placed.media)


def read(rules: OllamaRules = LENIENT_OLLAMA_RULES, context: RequestContext = CONTEXT, **members: Any) -> Any:
    body = {"model": "m", "prompt": "Hi", **members}
    return generate.read_ollama_generate(rules, json.dumps(body).encode(), context)


def test_ollama_generate_renders_by_the_clients_template():
    (prompt,) = read(template="{{ .System }}>{{ .Prompt }}", system="S").request.prompts
    assert prompt == ChatPrompt([Message("user", "S>Hi")], thinking=True, rendered=True, add_special_tokens=True)
    (prompt,) = read(template=MESSAGES, think=False, images=["aGk="]).request.prompts
    assert prompt.messages == [Message("user", "<user>Hi<assistant>", media=[placed_at(6, image("images[0]"))])]
    assert prompt.thinking is False
    no_chat = dataclasses.replace(CONTEXT, abilities=frozenset())
    assert read(context=no_chat, template="{{ .Prompt }}").request.prompts[0].messages == [Message("user", "Hi")]


def test_ollama_template_follows_the_context_of_an_earlier_answer():
    body = {"model": "m", "prompt": "Hi", "template": "{{ .Prompt }}:", "context": [5, 6]}
    (prompt,) = generate.read_ollama_generate(LENIENT_OLLAMA_RULES, json.dumps(body).encode(), CONTEXT).request.prompts
    assert prompt == ChatPrompt([Message("user", "Hi:")], thinking=True, rendered=True, preceding_ids=[5, 6])


@pytest.mark.parametrize(
    ("rules", "members", "status", "text"),
    [
        (LENIENT_OLLAMA_RULES, {"template": "{{ .X"}, 400, "template: :1: unclosed action"),
        (STRICT_OLLAMA_RULES, {"template": "{{ .X"}, 500, "template: :1: unclosed action"),
        (
            LENIENT_OLLAMA_RULES,
            {"template": "x", "raw": True},
            400,
            "raw mode does not support template, system, or context",
        ),
        (LENIENT_OLLAMA_RULES, {"template": "x", "suffix": "y"}, 400, '"m" does not support insert'),
    ],
)
def test_ollama_refuses_templates_in_its_form(rules, members, status, text):
    plain = dataclasses.replace(CONTEXT, abilities=frozenset({"chat"}))
    with pytest.raises(ParleyError) as caught:
        read(rules, plain, **members)
    assert (caught.value.status, caught.value.message) == (status, text)


@pytest.mark.parametrize("constant", [r'"\ud800"', r'"\Uffffffff"', r'"\777"', "1e400", "-1e400"])
def test_invalid_escapes_are_refused(constant):
    with pytest.raises(InvalidValue, match="bad constant"):
        render_prompt(f"{{{{ {constant} }}}}", TemplateInput("Hi"))


def test_invalid_characters_and_empty_precisions_are_written_as_in_go():
    assert render_prompt('{{ printf "%c%.0f" 55296 3.7 }}', TemplateInput("Hi"))[0] == "\ufffd4"
