"""Flags of other inference servers, and their counterparts here: a TOML file for each server, read by name.

``tables`` reads the files, ``translate`` turns a command line of another server into one of ``parley serve``, and
``foreign_flags`` explains a flag that belongs to another server. No file of Python here knows a server by its name.

The keys of a file: ``title``; ``rank``, 1 for the server that is asked about first; ``command``, as its documentation
writes it; ``programs``, regular expressions of the word that starts it; ``subcommands``; ``positional``, the flag that
its argument without a flag stands for; ``environment``, the prefix of its variables ("*": the flags' names in capitals;
"": it has none); ``engine``, the name of the engine that takes its flags here; ``defaults``, parley's flags for those
of its defaults that differ from parley's; ``example``.

A row of ``[flags]``: ``aliases``, its other names; ``args``, the number of its values (0, 1, "?" or "*"; 1 by default);
``counterpart``, parley's flag, MODEL or a variable; ``conversion``, how values change (a function of ``translate``; a
copy by default); ``value_map``, parley's value for each of its values; ``needless_reason``, why nothing is needed here,
for all values or for ``needless_values``; ``missing_reason``, why there is no counterpart; ``unlisted_reason``, the
same for values that ``value_map`` does not list; ``note``, the difference; ``passed_to_engine``, whether ``engine``
takes the flag unchanged. A table of ``[[groups]]`` has ``flags`` (with a value) and ``switches`` (without) that share
``needless_reason``, ``missing_reason`` and ``passed_to_engine``; a list there is a flag with its aliases.
"""
