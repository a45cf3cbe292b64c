"""Regular expressions for the values of JSON Schema's ``format``, after the standards that define them."""

from __future__ import annotations

from parley.text.grammar.regex import Rust

FOLLOWED = frozenset({"duration", "email", "hostname", "ipv4", "ipv6", "unknown", "uri"})
"""Formats that llguidance enforces itself, exactly or more strictly."""

# RFC 3339, section 5.6, without the year 0, leap seconds and fractions finer than nanoseconds: few readers accept the
# first two, and whether a leap second is valid depends on the offset.
YEAR = "(?:[1-9][0-9]{3}|0[1-9][0-9]{2}|00[1-9][0-9]|000[1-9])"
FOURTH = "(?:0[48]|[2468][048]|[13579][26])"
LONG, SHORT = "(?:0[13578]|1[02])-(?:0[1-9]|[12][0-9]|3[01])", "(?:0[469]|11)-(?:0[1-9]|[12][0-9]|30)"
DAY = f"(?:{LONG}|{SHORT}|02-(?:0[1-9]|1[0-9]|2[0-8]))"
DATE = f"(?:{YEAR}-{DAY}|(?:[0-9]{{2}}{FOURTH}|{FOURTH}00)-02-29)"
HOUR = "(?:[01][0-9]|2[0-3]):[0-5][0-9]"
TIME = rf"{HOUR}:[0-5][0-9](?:\.[0-9]{{1,9}})?(?:[zZ]|[+-]{HOUR})"

# RFC 3986, appendix A, and RFC 3987, section 2.2, without addresses in brackets.
BEYOND = r"\u{A0}-\u{D7FF}\u{F900}-\u{FDCF}\u{FDF0}-\u{FFEF}"


def _reference(letters: str, relative: bool) -> str:
    """Return the pattern of a URI (``relative``: or relative reference) that may also contain ``extra_letters``."""
    plain = rf"A-Za-z0-9._~!$&'()*+,;={letters}\-"
    coded = "%[0-9A-Fa-f]{2}"
    part, first = f"(?:[{plain}:@]|{coded})", f"(?:[{plain}@]|{coded})"
    host = f"//(?:(?:[{plain}:]|{coded})*@)?(?:[{plain}]|{coded})*(?::[0-9]*)?(?:/{part}*)*"
    rooted = f"/(?:{part}+(?:/{part}*)*)?"
    end = rf"(?:\?(?:{part}|[/?])*)?(?:#(?:{part}|[/?])*)?"
    whole = f"[A-Za-z][A-Za-z0-9+.\\-]*:(?:{host}|{rooted}|{part}+(?:/{part}*)*)?"
    return f"(?:{whole}|{host}|{rooted}|(?:{first}+(?:/{part}*)*)?){end}" if relative else f"{whole}{end}"


# RFC 6901 and the draft for relative pointers; RFC 6570, section 2; RFC 6531, with letters and digits of every script.
POINTER = "(?:/(?:[^~/]|~[01])*)*"
VARIABLE = r"(?:[A-Za-z0-9_]|%[0-9A-Fa-f]{2})(?:\.?(?:[A-Za-z0-9_]|%[0-9A-Fa-f]{2}))*(?::[1-9][0-9]{0,3}|\*)?"
TEMPLATE = (
    rf"(?:[!#$&()*+,\-./0-9:;=?@A-Z\[\]_a-z~]|%[0-9A-Fa-f]{{2}}|\{{[+#./;?&=,!@|]?{VARIABLE}(?:,{VARIABLE})*\}})*"
)
LABEL = r"[\p{L}\p{Nd}](?:[\p{L}\p{Nd}\-]*[\p{L}\p{Nd}])?"
ATOM = r"[\p{L}\p{Nd}!#$%&'*+/=?^_`{|}~\-]+"

PATTERNS = {
    name: Rust(f"^(?:{pattern})$")
    for name, pattern in {
        "date": DATE,
        "date-time": f"{DATE}[tT]{TIME}",
        "idn-email": rf"{ATOM}(?:\.{ATOM})*@{LABEL}(?:\.{LABEL})*",
        "iri": _reference(BEYOND, False),
        "iri-reference": _reference(BEYOND, True),
        "json-pointer": POINTER,
        "relative-json-pointer": f"(?:0|[1-9][0-9]*)(?:#|{POINTER})",
        "time": TIME,
        "uri-reference": _reference("", True),
        "uri-template": TEMPLATE,
        "uuid": "[0-9A-Fa-f]{8}-(?:[0-9A-Fa-f]{4}-){3}[0-9A-Fa-f]{12}",
    }.items()
}
"""Formats enforced by a pattern."""

FORMATS = FOLLOWED | PATTERNS.keys()
