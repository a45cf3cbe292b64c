"""Options of ``parley serve`` about clusters: the role of an instance, and its connections to others."""

from __future__ import annotations

from parley.settings.option_kinds import (
    choice_kind,
    duration_kind,
    integer_kind,
    network_kind,
    switch_kind,
    text_kind,
)
from parley.settings.options import Option

CLUSTER_OPTIONS: list[Option] = [
    Option(
        "role",
        choice_kind("mixed", "prefill", "decode", "flex"),
        "Role in a cluster. mixed answers any client; the others serve a coordinator: prefill begins requests, decode "
        "continues them, flex does both. The role API can change the role.",
        "mixed",
        section="cluster",
        configurable=True,
    ),
    Option(
        "peer-port",
        integer_kind(0, 65_535, "PORT"),
        "Port for handovers from other instances, for roles other than mixed; 0 takes a free one. If it is not given, "
        "the first free one from 1121 on is taken.",
        1121,
        section="cluster",
        configurable=True,
    ),
    Option(
        "peer-lease",
        duration_kind(1, 3600),
        "How long an instance that sends or receives pages may be silent before it counts as dead. Of the values of "
        "the two sides, the shorter one applies.",
        30.0,
        section="cluster",
        configurable=True,
    ),
    Option(
        "peer-checksum",
        switch_kind(),
        "Verify checksums of handed-over pages; active if one of the two sides asks for it.",
        False,
        section="cluster",
        configurable=True,
    ),
    Option(
        "p-percentage",
        integer_kind(0, 100),
        "Share of a flex instance for prefill, in percent: of its engine's time during decode, and of its slots.",
        50,
        section="cluster",
        configurable=True,
    ),
    Option(
        "cluster-secret",
        text_kind("SECRET"),
        "Secret by which the instances and coordinators of a cluster recognize each other. Roles other than mixed need "
        "it, unless they listen on this machine only, without API keys.",
        section="cluster",
        unset_text="none",
        configurable=True,
        secret=True,
    ),
    Option(
        "cluster-secret-file",
        text_kind("FILE"),
        "File whose first line is the cluster secret.",
        section="cluster",
        configurable=True,
    ),
    Option(
        "cluster-network",
        network_kind(),
        "Network whose hosts are trusted as members of the cluster without the secret, for coordinators that know "
        "none, such as MindIE's; handovers may go there, too.",
        section="cluster",
        unset_text="none is trusted",
        repeatable=True,
        configurable=True,
    ),
    Option(
        "cluster-cert",
        text_kind("FILE"),
        "Certificate (PEM) that an instance presents to others; handovers are then encrypted.",
        section="cluster",
        unset_text="no encryption",
        configurable=True,
    ),
    Option(
        "cluster-key", text_kind("FILE"), "Key of the certificate, unencrypted.", section="cluster", configurable=True
    ),
    Option(
        "cluster-ca",
        text_kind("FILE"),
        "CA certificate that must have signed the certificates of others.",
        section="cluster",
        configurable=True,
    ),
]
