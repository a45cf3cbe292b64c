"""Limits on the use of endpoints: windows of a minute, for each client or for all."""

import pytest

from parley.dialects.facts import Endpoint, EndpointLimit
from parley.errors import Overloaded
from parley.serving.endpoints.rate_limits import EndpointUsage


def test_refuses_requests_until_the_window_ends():
    now = 100.0
    usage = EndpointUsage(lambda: now)
    endpoint = Endpoint("e", [], limits=[EndpointLimit(calls=2)])
    usage.admit_request(endpoint, "a")
    now = 130.0
    usage.admit_request(endpoint, "b")
    for tenant in ("a", "b"):
        with pytest.raises(Overloaded, match="2 requests per minute for all clients") as refused:
            usage.admit_request(endpoint, tenant)
        assert refused.value.retry_after == 30
    now = 160.0
    usage.admit_request(endpoint, "a")


def test_counts_each_client_and_each_endpoint_by_itself():
    usage = EndpointUsage(lambda: 0.0)
    limits = [EndpointLimit(calls=1, per_client=True)]
    for name in ("e", "f"):
        for tenant in ("a", "b"):
            usage.admit_request(Endpoint(name, [], limits=limits), tenant)
    with pytest.raises(Overloaded, match="for each client"):
        usage.admit_request(Endpoint("e", [], limits=limits), "a")


def test_counts_tokens_of_requests_that_have_ended():
    usage = EndpointUsage(lambda: 0.0)
    endpoint = Endpoint("e", [], limits=[EndpointLimit(calls=9), EndpointLimit(tokens=10)])
    usage.admit_request(endpoint, "a")
    usage.admit_request(endpoint, "a")
    usage.add_tokens(endpoint, "a", 10)
    with pytest.raises(Overloaded, match="10 tokens per minute"):
        usage.admit_request(endpoint, "a")


def test_a_limit_of_zero_refuses_all():
    with pytest.raises(Overloaded):
        EndpointUsage(lambda: 0.0).admit_request(Endpoint("e", [], limits=[EndpointLimit(calls=0)]), "a")
