"""The ctypes signatures agree with the C++ definitions: a swapped argument would be memory corruption."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from parley.native import build
from parley.native.compiled_forms import compiled_kernels, compiled_layers

SOURCES = Path(build.__file__).parent / "source"
POINTER, INTEGER, FLOAT = compiled_kernels.P, compiled_kernels.N, compiled_kernels.R
# A definition in an extern "C" block: return type, name, parameters.
FUNCTION = re.compile(r"^(void|int64_t|int) (\w+)\(([^)]*)\)\s*\{", re.MULTILINE)


def exported_functions() -> dict[str, tuple[str, list[str]]]:
    """Return the return type and parameter types of each exported function, by name."""
    functions: dict[str, tuple[str, list[str]]] = {}
    for source in sorted(SOURCES.rglob("*.cpp")):
        text = re.sub(r"//[^\n]*|/\*.*?\*/", "", source.read_text("utf-8"), flags=re.DOTALL)
        _, _, exported = text.partition('extern "C" {')  # the block ends the file
        for result, name, parameters in FUNCTION.findall(exported):
            types = [parameter.strip() for parameter in parameters.replace("\n", " ").split(",") if parameter.strip()]
            functions[name] = (result, types)
    return functions


def ctypes_kind(parameter: str) -> object:
    """Return the ctypes type of a C parameter such as ``const bf16* x``."""
    if "*" in parameter:
        return POINTER
    kind = re.sub(r"\bconst\b", "", parameter).split()[0]
    return {"int64_t": INTEGER, "float": FLOAT}[kind]


def test_finds_the_exported_functions():
    assert set(compiled_kernels.SIGNATURES) <= set(exported_functions())


@pytest.mark.parametrize("name", sorted(compiled_kernels.SIGNATURES | compiled_layers.LAYER_SIGNATURES))
def test_signature_agrees_with_its_definition(name: str):
    signatures = compiled_kernels.SIGNATURES | compiled_layers.LAYER_SIGNATURES
    result, parameters = exported_functions()[name]
    assert list(map(ctypes_kind, parameters)) == signatures[name]
    returns_integer = name in (*compiled_kernels.RETURN_INT64, *compiled_layers.LAYER_SIGNATURES)
    assert (result == "int64_t") == returns_integer
