"""``parley key`` and the key file that it writes."""

from __future__ import annotations

import asyncio
import stat
import threading
from datetime import UTC, datetime
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from parley.cli.main import main
from parley.settings.file_changes import file_changes
from parley.settings.key_file import (
    HashedKey,
    add_key,
    make_key,
    parse_keys,
    read_key_table,
    remove_key,
    split_key,
)
from parley.settings.options import ConfigError

NAMES = st.text("abcXYZ019._@-", min_size=1, max_size=12)
COUNTS = st.none() | st.integers(1, 10**15)
LISTS = st.lists(st.text(min_size=1, max_size=5).filter(lambda name: name not in ("users", "admins")), max_size=3)


def test_a_key_is_shown_once_and_its_hash_is_kept(tmp_path: Path, capsys) -> None:
    file = tmp_path / "keys.toml"
    assert main(["key", "add", "alice", "--file", str(file), "--tokens-per-day", "500", "--models", "a,b"]) == 0
    shown = capsys.readouterr()
    key_id, secret = split_key(shown.out.strip())
    assert secret not in file.read_text() + shown.err and stat.S_IMODE(file.stat().st_mode) == 0o600
    (key,) = read_key_table(file, "--file")
    assert (key.name, key.id, key.models, key.tokens_per_day) == ("alice", key_id, ("a", "b"), 500)
    assert key.matches(secret) and not key.matches(secret[:-1]) and not key.matches("")
    assert main(["key", "list", "--file", str(file)]) == 0
    listed = capsys.readouterr().out
    assert "tokens per day 500; models a,b" in listed and key.hash not in listed
    assert main(["key", "remove", "alice", "--file", str(file)]) == 0
    assert read_key_table(file, "--file") == ()


def test_comments_and_other_keys_stay(tmp_path: Path) -> None:
    file = tmp_path / "keys.toml"
    file.write_text("# of the team\n")
    for name in ("a", "b", "c"):
        add_key(file, make_key(name)[1])
    text = file.read_text()
    file.write_text(text.replace('[[keys]]\nname = "c"', '[[ keys ]]  # the third\nname = "c"'))
    remove_key(file, "b")
    assert [key.name for key in read_key_table(file, "--file")] == ["a", "c"]
    assert file.read_text().startswith("# of the team\n") and "# the third" in file.read_text()
    with pytest.raises(ConfigError, match="there is a key a already"):
        add_key(file, make_key("a")[1])
    with pytest.raises(ConfigError, match=r"there is no key b\. Known: a, c"):
        remove_key(file, "b")


def test_keys_that_are_added_at_the_same_time_are_all_kept(tmp_path: Path) -> None:
    file = tmp_path / "keys.toml"
    threads = [threading.Thread(target=add_key, args=(file, make_key(f"k{number}")[1])) for number in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert {key.name for key in read_key_table(file, "--file")} == {f"k{number}" for number in range(8)}
    assert [path.name for path in tmp_path.iterdir()] == ["keys.toml"]


@given(
    name=NAMES,
    counts=st.tuples(COUNTS, COUNTS),
    lists=st.tuples(LISTS, LISTS),
    expires=st.none() | st.datetimes(datetime(2000, 1, 1), datetime(9000, 1, 1), timezones=st.just(UTC)),
    admin=st.booleans(),
    priority=st.integers(-9, 9),
)
def test_what_is_written_reads_back(tmp_path_factory, name, counts, lists, expires, admin, priority) -> None:
    members = {"requests_per_minute": counts[0], "concurrent_requests": counts[1], "expires": expires}
    members = {member: value for member, value in members.items() if value is not None}
    lists_by_name = {"models": tuple(lists[0]), "groups": tuple(lists[1])}
    _, key = make_key(name, admin=admin, priority=priority, **lists_by_name, **members)
    file = tmp_path_factory.mktemp("keys") / "keys.toml"
    add_key(file, key)
    assert read_key_table(file, "--file") == (key,)


async def test_replaced_and_rewritten_files_are_noticed_once_each(tmp_path: Path) -> None:
    file, missing = tmp_path / "keys.toml", tmp_path / "missing"
    add_key(file, make_key("a")[1])
    changes = file_changes((file, missing), poll_seconds=0.01)
    for change in (
        lambda: add_key(file, make_key("b")[1]),
        lambda: file.write_text("[[keys"),
        lambda: missing.write_text("x"),
        lambda: file.unlink(),
    ):
        noticed = asyncio.ensure_future(anext(changes))
        await asyncio.sleep(0.05)
        assert not noticed.done()
        change()
        await asyncio.wait_for(noticed, 30)
    assert [_ async for _ in file_changes(())] == []


GOOD = '[[keys]]\nname = "a"\nid = "00"\nsalt = "00"\nhash = "' + "0" * 64 + '"\n'


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("[[keys]]\n", "name is not 1 to 64 characters"),
        (GOOD.replace("id", "no"), "unknown member no"),
        (GOOD.replace('id = "00"\n', ""), "id is missing"),
        (GOOD + "tokens_per_minute = 0\n", "tokens_per_minute is not a whole number from 1"),
        (GOOD + "tokens_per_day = true\n", "tokens_per_day is not a whole number"),
        (GOOD + "admin = 1\n", "admin is not true or false"),
        (GOOD + 'models = "a"\n', "models is not a list"),
        (GOOD + 'groups = ["admins"]\n', "no group is called"),
        (GOOD + 'expires = "soon"\n', "expires is not a date"),
        (GOOD.replace("0" * 64, "0" * 62), "hash has 62 digits"),
        (GOOD.replace('"00"', '"0g"'), "id is not an even number of hexadecimal digits"),
        (GOOD + GOOD, "two keys have the name a"),
        (GOOD + GOOD.replace('"a"', '"b"'), "two keys have the id 00"),
        ("keys = 1\n", "keys is not a list of tables"),
        ("port = 1\n", "unknown key port"),
        ("[[keys]\n", "not valid TOML"),
    ],
)
def test_a_wrong_file_is_refused_by_key_and_member(text: str, reason: str) -> None:
    with pytest.raises(ConfigError, match=reason):
        parse_keys(text, "keys.toml")


def test_times_without_an_offset_are_in_utc() -> None:
    for text in ("2030-01-31", '"2030-01-31"', "2030-01-31T00:00:00", "2030-01-31T01:00:00+01:00"):
        (key,) = parse_keys(f"{GOOD}expires = {text}\n", "keys.toml")
        assert isinstance(key, HashedKey) and key.expires == datetime(2030, 1, 31, tzinfo=UTC)


@pytest.mark.parametrize(
    ("words", "reason"),
    [
        (["add"], "The name is missing"),
        (["add", "a", "--file", "keys.txt"], "does not end in .toml"),
        (["add", "a b"], "name is not"),
        (["add", "a", "--apis", "opnai"], "Did you mean openai"),
        (["add", "a", "--expires", "2020-01-31"], "--expires: 2020-01-31T00:00:00+00:00 has passed"),
        (["list", "--file", "missing.toml"], "missing.toml cannot be read: No such file or directory."),
    ],
)
def test_the_command_says_what_is_wrong(words: list[str], reason: str, capsys, tmp_path, monkeypatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(["key", *words]) == 2
    assert reason in capsys.readouterr().err
    assert not any(tmp_path.iterdir())


def test_the_list_marks_expired_keys(tmp_path: Path, capsys) -> None:
    file = tmp_path / "keys.toml"
    for name, expires in (("past", "2020-01-31"), ("future", "2999-01-31")):
        add_key(file, make_key(name, expires=expires)[1])
    assert main(["key", "list", "--file", str(file)]) == 0
    lines = capsys.readouterr().out
    assert "expired 2020-01-31T" in lines and "until 2999-01-31T" in lines
