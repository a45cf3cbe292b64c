"""The plan file of a cluster: its meaning, and an error message for every mistake in it."""

import tomllib

import pytest
from hypothesis import given
from hypothesis import strategies as st

from parley.cluster.plan import ResourceNeeds, format_toml, read_plan
from parley.settings.options import ConfigError


def plan_from_text(folder, text):
    path = folder / "two.toml"
    path.write_text(text, "utf-8")
    return read_plan(str(path))


def test_cluster_plan_reads_groups_and_their_resources(tmp_path):
    cluster_plan = plan_from_text(
        tmp_path,
        """
        [coordinator]
        predict_port = 9000
        cpus = 0.5
        [[instances]]
        role = "prefill"
        count = 3
        gpus = 1
        memory = "2GiB"
        resources = { fast = 2 }
        model = "./models/mine"
        max-batch = 8
        [[instances]]
        name = "small"
        role = "decode"
        """,
    )
    assert cluster_plan.name == "two" and cluster_plan.address == ""
    assert cluster_plan.coordinator == {"predict_port": 9000} and cluster_plan.needs == ResourceNeeds(cpus=0.5)
    first, second = cluster_plan.groups
    assert (first.name, first.role, first.count) == ("prefill", "prefill", 3)
    assert first.needs == ResourceNeeds(1.0, 1.0, 2 << 30, {"fast": 2.0})
    assert first.options == {"model": str(tmp_path / "models/mine"), "max-batch": 8}  # relative to the file
    assert (second.name, second.role, second.count, second.options) == ("small", "decode", 1, {})


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "instances must be tables"),
        ("instances = 3", "instances must be tables"),
        ("instance = []", "unknown key instance. Did you mean instances?"),
        ('[[instances]]\nrole = "prefil"', "role is 'prefil', not one of mixed, prefill, decode, flex"),
        ("[[instances]]\ncount = -1", "count is -1, not a whole number from 0 to 1000"),
        ("[[instances]]\ncount = true", "count is True"),
        ("[[instances]]\ncpus = nan", "cpus is nan"),
        ("[[instances]]\ngpus = '1'", "gpus is '1', not a number of at least 0"),
        (
            "[[instances]]\nengine = 'vllm'\ngpus = 1\nengine-args = ['--distributed-executor-backend', 'ray']",
            "gpus cannot be set: vLLM's workers",
        ),
        ("[[instances]]\nmemory = 'much'", "memory is 'much', not a size"),
        ("[[instances]]\nresources = {fast = 0}", "resources.fast is 0, not a number above 0"),
        ("[[instances]]\nport = 8000", "port is chosen where the instance is placed"),
        ("[[instances]]\ncluster_secret = 'x'", "cluster-secret is chosen"),
        ("[[instances]]\n[[instances]]", "two kinds of instances have the name mixed"),
        ("[[instances]]\nname = 'a b'", "name is 'a b'"),
        ("[coordinator]\nsecret-file = 'x'\n[[instances]]", "secret_file cannot be set"),
        ("[coordinator.tls]\nca = 'x'\n[[instances]]", "tls cannot be set"),
        ("[coordinator]\npredict-port = 1\npredict_port = 1\n[[instances]]", "predict_port is given twice"),
        ("coordinator = 1\n[[instances]]", "coordinator is 1, not a table"),
        ("[[instances", "is not valid TOML"),
    ],
)
def test_cluster_plan_errors_name_the_mistake(tmp_path, text, message):
    with pytest.raises(ConfigError) as error:
        plan_from_text(tmp_path, text)
    assert message in str(error.value) and "two.toml" in str(error.value)


def test_missing_cluster_plan_is_reported(tmp_path):
    with pytest.raises(ConfigError, match="cannot be read"):
        read_plan(str(tmp_path / "none.toml"))


TEXTS = st.text(st.characters(exclude_categories=["Cs"]))
TOML_VALUES = st.recursive(
    st.one_of(st.booleans(), st.integers(-(2**60), 2**60), st.floats(allow_nan=False, allow_infinity=False), TEXTS),
    lambda inner: st.one_of(st.lists(inner, max_size=3), st.dictionaries(TEXTS.filter(bool), inner, max_size=3)),
    max_leaves=8,
)


@given(st.dictionaries(TEXTS.filter(bool), TOML_VALUES, max_size=4))
def test_written_plan_options_parse_back_unchanged(table):
    assert tomllib.loads(format_toml(table)) == table
