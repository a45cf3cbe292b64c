"""Builds message classes from a ``.proto`` file at run time, without generated code or a compiler.

Reads the subset of the language that this package's files use. The classes live in a descriptor pool of their own, so
that they do not collide with a client library in the same process that has its own copy of the protocol. Knows nothing
of any protocol.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from google.protobuf.descriptor_pb2 import (
    DescriptorProto,
    EnumDescriptorProto,
    FieldDescriptorProto,
    FileDescriptorProto,
    ServiceDescriptorProto,
)
from google.protobuf.descriptor_pool import DescriptorPool
from google.protobuf.message_factory import GetMessageClass

TOKEN = re.compile(r"//[^\n]*|\"[^\"]*\"|[\w.]+|\S")
SCALARS = {
    name: FieldDescriptorProto.Type.Value(f"TYPE_{name.upper()}")
    for name in ("bool", "bytes", "double", "float", "int32", "int64", "string", "uint32", "uint64")
}


class Schema:
    """The definitions of one file; a call returns a message's class."""

    def __init__(self, name: str):
        pool = DescriptorPool()
        text = Path(__file__).with_name(name).read_text("utf-8")
        self._file = pool.AddSerializedFile(_Reader(text).file(name).SerializeToString())

    def __call__(self, message: str) -> Any:
        """Return the class of the named message."""
        return GetMessageClass(self._file.message_types_by_name[message])

    @property
    def messages(self) -> list[str]:
        """The names of all messages."""
        return list(self._file.message_types_by_name)

    def service(self, name: str) -> tuple[str, list[Any]]:
        """Return a service's full name and the descriptors of its methods."""
        service = self._file.services_by_name[name]
        return service.full_name, list(service.methods)


class _Reader:
    """Parses the tokens of a file. Types that are not scalars are left for the pool to resolve."""

    def __init__(self, text: str):
        self._tokens = iter([token for token in TOKEN.findall(text) if not token.startswith("//")])

    def file(self, name: str) -> FileDescriptorProto:
        """Parse the whole file."""
        made = FileDescriptorProto(name=name, syntax="proto3")
        for word in self._tokens:
            match word:
                case "package":
                    made.package = self._next()
                case "service":
                    self._service(made.service.add())
                case "message":
                    self._message(made.message_type.add())
                case "enum":
                    self._enum(made.enum_type.add())
        return made

    def _service(self, made: ServiceDescriptorProto) -> None:
        made.name = self._next()
        for word in self._block():
            if word == "rpc":
                method = made.method.add(name=self._next())
                method.input_type, method.client_streaming = self._side()
                self._next()  # returns
                method.output_type, method.server_streaming = self._side()

    def _side(self) -> tuple[str, bool]:
        """Parse ``( [stream] Type )``; return the type and whether it is a stream."""
        words = []
        while (word := self._next()) != ")":
            words.append(word)
        return words[-1], "stream" in words

    def _message(self, made: DescriptorProto) -> None:
        made.name = self._next()
        for word in self._block():
            match word:
                case "message":
                    self._message(made.nested_type.add())
                case "enum":
                    self._enum(made.enum_type.add())
                case "oneof":
                    made.oneof_decl.add(name=self._next())
                    for kind in self._block():
                        self._field(made, kind).oneof_index = len(made.oneof_decl) - 1
                case "map":
                    self._map(made)
                case "repeated":
                    self._field(made, self._next()).label = FieldDescriptorProto.LABEL_REPEATED
                case _:
                    self._field(made, word)

    def _field(self, made: DescriptorProto, kind: str) -> FieldDescriptorProto:
        """Parse ``name = number ;``, which follows the type."""
        field = made.field.add(name=self._next(), label=FieldDescriptorProto.LABEL_OPTIONAL)
        _type(field, kind)
        field.number = self._number()
        return field

    def _map(self, made: DescriptorProto) -> None:
        """Parse ``< key , value > name = number ;``, a list of pairs on the wire."""
        _, key, _, value, _ = (self._next() for _ in range(5))
        name = self._next()
        pair = made.nested_type.add(name=f"{name.title().replace('_', '')}Entry")
        pair.options.map_entry = True
        for number, (part, kind) in enumerate((("key", key), ("value", value)), 1):
            _type(pair.field.add(name=part, number=number, label=FieldDescriptorProto.LABEL_OPTIONAL), kind)
        field = made.field.add(name=name, label=FieldDescriptorProto.LABEL_REPEATED, type_name=pair.name)
        field.number = self._number()

    def _enum(self, made: EnumDescriptorProto) -> None:
        made.name = self._next()
        for name in self._block():
            made.value.add(name=name, number=self._number())

    def _number(self) -> int:
        """Parse ``= number ;``."""
        _, number, _ = (self._next() for _ in range(3))
        return int(number)

    def _block(self) -> Iterator[str]:
        """Yield the first word of each entry between braces."""
        self._next()
        while (word := self._next()) != "}":
            if word != ";":
                yield word

    def _next(self) -> str:
        return next(self._tokens)


def _type(field: FieldDescriptorProto, kind: str) -> None:
    if kind in SCALARS:
        field.type = SCALARS[kind]
    else:
        field.type_name = kind
