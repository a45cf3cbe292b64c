"""What answers where: the shared port, the prefixes, and the manner in which each API is there."""

import dataclasses

from parley.dialects.mounts import (
    API_MOUNTS,
    DEDICATED_APIS,
    dedicated_mounts,
    is_api,
    known_spelling,
    mount_table,
    universal_mounts,
)


def answering(surfaces, method, path):
    return [(surface.dialect, route) for route, surface in mount_table(surfaces)[method, path]]


def without_errors(dialect):
    return dataclasses.replace(dialect, render_error=None)


def test_strict_root_behaves_as_below_the_prefix():
    """Every route at the root is then the API's own route below its prefix."""
    for (method, path), mounted_routes in mount_table(universal_mounts(strict=True)).items():
        for route, surface in mounted_routes:
            if is_api(surface) and not surface.prefix:
                dialect = DEDICATED_APIS[surface.dialect.name]
                assert without_errors(surface.dialect) == without_errors(dialect)
                assert surface.dialect.render_error == (route.render_error or dialect.render_error)
                assert route in surface.dialect.routes, (method, path)
    lenient_only = {("GET", "/v2/"), ("GET", "/v2/models")}  # Triton knows no path with a trailing slash, and no list
    lenient_only.add(("POST", "/v1/fim/completions"))  # OpenAI has no such route
    assert mount_table(universal_mounts(strict=True)).keys() >= mount_table(universal_mounts()).keys() - lenient_only


def test_root_is_lenient_without_strict():
    for name in ("tgi", "triton"):
        root = next(surface.dialect for surface in API_MOUNTS if not surface.prefix and surface.dialect.name == name)
        assert root is not DEDICATED_APIS[name]
        assert root in {surface.dialect for surface in universal_mounts()}


def test_list_of_models_has_openais_form_unless_a_header_claims_it():
    for names in (("anthropic", "openai"), ("openai", "anthropic"), ("anthropic", "ollama", "openai")):
        for path in ("/v1/models", "/v1/models/{model:path}"):
            (first, _), (second, route) = answering(dedicated_mounts(*names), "GET", path)
            assert (first.name, second.name) == ("openai", "anthropic") and route.claiming_header
    ((alone, _),) = answering(dedicated_mounts("anthropic"), "GET", "/v1/models")
    assert alone.name == "anthropic"


def test_api_on_its_own_port_has_every_path_of_its_prefix():
    for name, dialect in DEDICATED_APIS.items():
        here = mount_table(dedicated_mounts(name))
        for route in dialect.routes:
            (mount,) = [mount for answering, mount in here[route.method, route.path] if answering is route]
            assert without_errors(mount.dialect) == without_errors(dialect)
            assert mount.dialect.render_error == (route.render_error or dialect.render_error)


def test_strict_apis_keep_their_own_paths():
    """vLLM has routes of OpenAI and Anthropic as well."""
    for strict in (False, True):
        table = mount_table(universal_mounts(strict=strict))
        for path, name in (("/v1/messages", "anthropic"), ("/v1/responses", "openai"), ("/v1/embeddings", "openai")):
            assert [mount.dialect.name for _, mount in table["POST", path]] == [name]


def test_model_is_found_by_other_spellings_of_its_name():
    assert known_spelling("M", {"m"}) == known_spelling("library/m:latest", {"m", "n"}) == "m"
    assert known_spelling("M", {"m", "M"}) == "M"
    assert known_spelling("hf.co/a/M", {"a/m", "m"}) == "a/m"


def test_model_names_match_with_and_without_the_default_tag():
    assert known_spelling("m:latest", {"m"}) == known_spelling("m", {"m", "m:latest"}) == "m"
    assert known_spelling("m", {"m:latest"}) == known_spelling("m:latest", {"m:latest"}) == "m:latest"
    assert known_spelling("m:7b", {"m", "m:latest"}) is known_spelling("", {"", ":latest"} - {""}) is None


async def test_strict_server_refuses_what_the_original_refuses(serve):
    for strict, status in ((False, 200), (True, 422)):
        server = await serve(strict=strict)
        body = {"inputs": "a", "parameters": {"temperature": 0}}
        assert (await server.post("/generate", body)).status == status
        assert (await server.post("/tgi/generate", body)).status == 422


async def test_older_version_of_tgi_can_replace_it_at_the_root(serve):
    server = await serve(tgi_compat="0.9.4")
    body = {"inputs": "a", "parameters": {"max_new_tokens": 2}}
    here, there = [await server.post(path, body) for path in ("/generate_stream", "/tgi-0.9.4/generate_stream")]
    assert here.status == 200 and here.body == there.body
    assert here.body != (await server.post("/tgi/generate_stream", body)).body
    assert (await server.post("/v1/completions", {"prompt": "a"})).status == 200  # the others are where they were
