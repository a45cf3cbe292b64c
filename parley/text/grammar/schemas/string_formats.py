"""Regular expressions for the values of JSON Schema's ``format``, after the standards that define them."""

from __future__ import annotations

from parley.text.grammar.regex import RustRegex

NATIVE_FORMATS = frozenset({"duration", "email", "hostname", "ipv4", "ipv6", "unknown", "uri"})
"""Formats that llguidance enforces itself, exactly or more strictly."""

# RFC 3339, section 5.6, without the year 0, leap seconds and fractions finer than nanoseconds: few readers accept the
# first two, and whether a leap second is valid depends on the offset.
FULL_YEAR = "(?:[1-9][0-9]{3}|0[1-9][0-9]{2}|00[1-9][0-9]|000[1-9])"
LEAP_YEAR_ENDING = "(?:0[48]|[2468][048]|[13579][26])"
LONG_MONTH_DAY = "(?:0[13578]|1[02])-(?:0[1-9]|[12][0-9]|3[01])"
SHORT_MONTH_DAY = "(?:0[469]|11)-(?:0[1-9]|[12][0-9]|30)"
MONTH_DAY = f"(?:{LONG_MONTH_DAY}|{SHORT_MONTH_DAY}|02-(?:0[1-9]|1[0-9]|2[0-8]))"
FULL_DATE = f"(?:{FULL_YEAR}-{MONTH_DAY}|(?:[0-9]{{2}}{LEAP_YEAR_ENDING}|{LEAP_YEAR_ENDING}00)-02-29)"
HOUR_MINUTE = "(?:[01][0-9]|2[0-3]):[0-5][0-9]"
FULL_TIME = rf"{HOUR_MINUTE}:[0-5][0-9](?:\.[0-9]{{1,9}})?(?:[zZ]|[+-]{HOUR_MINUTE})"

# RFC 3986, appendix A, and RFC 3987, section 2.2, without addresses in brackets.
NON_ASCII = r"\u{A0}-\u{D7FF}\u{F900}-\u{FDCF}\u{FDF0}-\u{FFEF}"


def _uri_pattern(extra_letters: str, relative: bool) -> str:
    """Return the pattern of a URI (``relative``: or relative reference) that may also contain ``extra_letters``."""
    unescaped = rf"A-Za-z0-9._~!$&'()*+,;={extra_letters}\-"
    escaped = "%[0-9A-Fa-f]{2}"
    path_letter, first_letter = f"(?:[{unescaped}:@]|{escaped})", f"(?:[{unescaped}@]|{escaped})"
    host = f"//(?:(?:[{unescaped}:]|{escaped})*@)?(?:[{unescaped}]|{escaped})*(?::[0-9]*)?(?:/{path_letter}*)*"
    absolute_path = f"/(?:{path_letter}+(?:/{path_letter}*)*)?"
    end = rf"(?:\?(?:{path_letter}|[/?])*)?(?:#(?:{path_letter}|[/?])*)?"
    absolute = f"[A-Za-z][A-Za-z0-9+.\\-]*:(?:{host}|{absolute_path}|{path_letter}+(?:/{path_letter}*)*)?"
    return (
        f"(?:{absolute}|{host}|{absolute_path}|(?:{first_letter}+(?:/{path_letter}*)*)?){end}"
        if relative
        else f"{absolute}{end}"
    )


# RFC 6901 and the draft for relative pointers; RFC 6570, section 2; RFC 6531, with letters and digits of every script.
JSON_POINTER = "(?:/(?:[^~/]|~[01])*)*"
TEMPLATE_VARIABLE = r"(?:[A-Za-z0-9_]|%[0-9A-Fa-f]{2})(?:\.?(?:[A-Za-z0-9_]|%[0-9A-Fa-f]{2}))*(?::[1-9][0-9]{0,3}|\*)?"
TEMPLATE_EXPRESSION = rf"\{{[+#./;?&=,!@|]?{TEMPLATE_VARIABLE}(?:,{TEMPLATE_VARIABLE})*\}}"
URI_TEMPLATE = rf"(?:[!#$&()*+,\-./0-9:;=?@A-Z\[\]_a-z~]|%[0-9A-Fa-f]{{2}}|{TEMPLATE_EXPRESSION})*"
HOST_LABEL = r"[\p{L}\p{Nd}](?:[\p{L}\p{Nd}\-]*[\p{L}\p{Nd}])?"
EMAIL_ATOM = r"[\p{L}\p{Nd}!#$%&'*+/=?^_`{|}~\-]+"

FORMAT_PATTERNS = {
    name: RustRegex(f"^(?:{pattern})$")
    for name, pattern in {
        "date": FULL_DATE,
        "date-time": f"{FULL_DATE}[tT]{FULL_TIME}",
        "idn-email": rf"{EMAIL_ATOM}(?:\.{EMAIL_ATOM})*@{HOST_LABEL}(?:\.{HOST_LABEL})*",
        "iri": _uri_pattern(NON_ASCII, False),
        "iri-reference": _uri_pattern(NON_ASCII, True),
        "json-pointer": JSON_POINTER,
        "relative-json-pointer": f"(?:0|[1-9][0-9]*)(?:#|{JSON_POINTER})",
        "time": FULL_TIME,
        "uri-reference": _uri_pattern("", True),
        "uri-template": URI_TEMPLATE,
        "uuid": "[0-9A-Fa-f]{8}-(?:[0-9A-Fa-f]{4}-){3}[0-9A-Fa-f]{12}",
    }.items()
}
"""Formats enforced by a pattern."""

KNOWN_FORMATS = NATIVE_FORMATS | FORMAT_PATTERNS.keys()
