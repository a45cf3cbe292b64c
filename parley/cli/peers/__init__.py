"""Flags of other inference servers, and their counterparts here: a TOML file for each server, read by name.

``tables`` reads the files, ``translate`` turns a command line of another server into one of ``parley serve``, and
``foreign`` explains a flag that belongs to another server. No file of Python here knows a server by its name.

The keys of a file: ``title``; ``rank``, 1 for the server that is asked about first; ``command``, as its documentation
writes it; ``programs``, regular expressions of the word that starts it; ``subcommands``; ``positional``, the flag that
its argument without a flag stands for; ``environment``, the prefix of its variables ("*": the flags' names in capitals;
"": it has none); ``engine``, the name of the engine that takes its flags here; ``defaults``, our flags that it sets
where nothing else does; ``example``.

A row of ``[flags]``: ``also``, its other names; ``args``, the number of its values (0, 1, "?" or "*"; 1 by default);
``to``, our flag, MODEL or a variable; ``how``, how values change (a function of ``translate``; a copy by default);
``values``, our value for each of its values; ``needless``, why nothing is needed here, for all values or those of
``unless``; ``lacks``, why there is no counterpart; ``otherwise``, the same for values that ``values`` does not list;
``note``, the difference; ``passes``, whether ``engine`` takes it as it is. A table of ``[[groups]]`` has ``flags``
(with a value) and ``switches`` (without) that share ``needless``, ``lacks`` and ``passes``; a list there is a flag with
its other names.
"""
