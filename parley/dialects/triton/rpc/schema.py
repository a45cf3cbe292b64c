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

PROTO_TOKEN = re.compile(r"//[^\n]*|\"[^\"]*\"|[\w.]+|\S")
SCALAR_TYPES = {
    name: FieldDescriptorProto.Type.Value(f"TYPE_{name.upper()}")
    for name in ("bool", "bytes", "double", "float", "int32", "int64", "string", "uint32", "uint64")
}


class ProtoSchema:
    """The definitions of one file; a call returns a message's class."""

    def __init__(self, name: str):
        pool = DescriptorPool()
        text = Path(__file__).with_name(name).read_text("utf-8")
        self._file = pool.AddSerializedFile(_ProtoParser(text).parse_file(name).SerializeToString())

    def __call__(self, message: str) -> Any:
        """Return the class of the named message."""
        return GetMessageClass(self._file.message_types_by_name[message])

    @property
    def message_names(self) -> list[str]:
        """The names of all messages."""
        return list(self._file.message_types_by_name)

    def find_service(self, name: str) -> tuple[str, list[Any]]:
        """Return a service's full name and the descriptors of its methods."""
        service = self._file.services_by_name[name]
        return service.full_name, list(service.methods)


class _ProtoParser:
    """Parses the tokens of a file. Types that are not scalars are left for the pool to resolve."""

    def __init__(self, text: str):
        self._tokens = iter([token for token in PROTO_TOKEN.findall(text) if not token.startswith("//")])

    def parse_file(self, name: str) -> FileDescriptorProto:
        """Parse the whole file."""
        file = FileDescriptorProto(name=name, syntax="proto3")
        for word in self._tokens:
            match word:
                case "package":
                    file.package = self._next_token()
                case "service":
                    self._parse_service(file.service.add())
                case "message":
                    self._parse_message_type(file.message_type.add())
                case "enum":
                    self._parse_enum(file.enum_type.add())
        return file

    def _parse_service(self, service: ServiceDescriptorProto) -> None:
        service.name = self._next_token()
        for word in self._block_words():
            if word == "rpc":
                method = service.method.add(name=self._next_token())
                method.input_type, method.client_streaming = self._parse_side()
                self._next_token()  # returns
                method.output_type, method.server_streaming = self._parse_side()

    def _parse_side(self) -> tuple[str, bool]:
        """Parse ``( [stream] Type )``; return the type and whether it is a stream."""
        words = []
        while (word := self._next_token()) != ")":
            words.append(word)
        return words[-1], "stream" in words

    def _parse_message_type(self, message: DescriptorProto) -> None:
        message.name = self._next_token()
        for word in self._block_words():
            match word:
                case "message":
                    self._parse_message_type(message.nested_type.add())
                case "enum":
                    self._parse_enum(message.enum_type.add())
                case "oneof":
                    message.oneof_decl.add(name=self._next_token())
                    for kind in self._block_words():
                        self._parse_field(message, kind).oneof_index = len(message.oneof_decl) - 1
                case "map":
                    self._parse_map(message)
                case "repeated":
                    self._parse_field(message, self._next_token()).label = FieldDescriptorProto.LABEL_REPEATED
                case _:
                    self._parse_field(message, word)

    def _parse_field(self, message: DescriptorProto, kind: str) -> FieldDescriptorProto:
        """Parse ``name = number ;``, which follows the type."""
        field = message.field.add(name=self._next_token(), label=FieldDescriptorProto.LABEL_OPTIONAL)
        _set_type(field, kind)
        field.number = self._parse_number()
        return field

    def _parse_map(self, message: DescriptorProto) -> None:
        """Parse ``< key , value > name = number ;``, a list of pairs on the wire."""
        _, key, _, value, _ = (self._next_token() for _ in range(5))
        name = self._next_token()
        pair = message.nested_type.add(name=f"{name.title().replace('_', '')}Entry")
        pair.options.map_entry = True
        for number, (part, kind) in enumerate((("key", key), ("value", value)), 1):
            _set_type(pair.field.add(name=part, number=number, label=FieldDescriptorProto.LABEL_OPTIONAL), kind)
        field = message.field.add(name=name, label=FieldDescriptorProto.LABEL_REPEATED, type_name=pair.name)
        field.number = self._parse_number()

    def _parse_enum(self, enum: EnumDescriptorProto) -> None:
        enum.name = self._next_token()
        for name in self._block_words():
            enum.value.add(name=name, number=self._parse_number())

    def _parse_number(self) -> int:
        """Parse ``= number ;``."""
        _, number, _ = (self._next_token() for _ in range(3))
        return int(number)

    def _block_words(self) -> Iterator[str]:
        """Yield the first word of each entry between braces."""
        self._next_token()
        while (word := self._next_token()) != "}":
            if word != ";":
                yield word

    def _next_token(self) -> str:
        result: str = next(self._tokens)
        return result


def _set_type(field: FieldDescriptorProto, kind: str) -> None:
    if kind in SCALAR_TYPES:
        field.type = SCALAR_TYPES[kind]
    else:
        field.type_name = kind
